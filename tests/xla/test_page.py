"""What docs/torch/xla.md shows is so."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from tests.support.snippets import BLOCK
from tests.xla import meshes

PAGE = Path(__file__).parents[2] / "docs" / "torch" / "xla.md"


@pytest.mark.filterwarnings("ignore:XLA_USE_SPMD")  # the page turns SPMD on once more
def test_the_page_runs(tmp_path: Path) -> None:
    assert meshes.DEVICES == 8
    names: dict[str, Any] = {"__name__": "page"}
    with chdir(tmp_path):
        for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
            exec(compile(found[1], "docs/torch/xla.md", "exec"), names)
