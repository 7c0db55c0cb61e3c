"""What docs/orbax.md shows is so: its code runs, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.formats.orbax_writers import quietly

PAGE = (Path(__file__).parents[2] / "docs" / "orbax.md").read_text(encoding="utf-8")


def test_the_page_runs_and_orbax_restores_what_went_through_xckpt() -> None:
    names: dict[str, Any] = {}
    with quietly():
        for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(code, "docs/orbax.md", "exec"), names)
    for tree in (names["resumed"], names["restored"]):
        assert jax.tree.structure(tree) == jax.tree.structure(names["state"])
        assert jax.tree.all(jax.tree.map(np.array_equal, tree, names["state"]))
