"""What docs/deltas.md shows is so: its code runs, and its commands say what it says."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from benchmarks import readme
from tests.support.counted_bucket import CountedBucket
from tests.support.servers import bucket
from xckpt.cli.commands import commands
from xckpt.core.run.bases import FULL_EVERY
from xckpt.storage.base import chunks

__all__ = ["bucket"]

PAGE = (Path(__file__).parents[2] / "docs" / "deltas.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(tmp_path: Path, bucket: CountedBucket) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    said = ""
    with chdir(tmp_path):
        for language, code in blocks:
            if code.startswith("xckpt "):
                said = CliRunner().invoke(commands, shlex.split(code)[1:]).stdout
            elif language == "python":
                exec(compile(code, "docs/deltas.md", "exec"), names)
    assert "4.0 MiB shared" in said and "says `4.0 MiB shared`" in PAGE
    copied = [request.key for request in bucket.taken() if request.copy]
    assert copied == ["adapter/2/model/w/c/0/0"]


def test_the_figures_are_those_that_were_measured() -> None:
    results = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    assert readme.updated_deltas(PAGE, results) == PAGE
    assert PAGE.count("| LoRA") == 1
    changed = [{**each, "written_bytes": 0} for each in results["deltas"]]
    assert readme.updated_deltas(PAGE, results | {"deltas": changed}) != PAGE


def test_the_numbers_of_the_page() -> None:
    assert f"with every {FULL_EVERY}th save" in PAGE
    assert f"at most {chunks.MOST_NAMES:,} checkpoints" in PAGE
