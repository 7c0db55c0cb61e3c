"""Where hard links are refused: files that share their blocks, or else are written again."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.odd_files import Attempt, OddFiles

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="odd file systems are made by a C library that LD_PRELOAD loads",
)

BYTES = 2 * 64 * 64 * 4
"""Of the leaves of a state."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OddFiles]:
    folder = tmp_path_factory.mktemp("odd")
    with OddFiles(folder, folder.parent) as process:
        yield process


@pytest.mark.parametrize(
    "lacks, shared, linked",
    [
        ("", BYTES, True),
        ("clones", BYTES, True),
        ("links", BYTES, False),
        ("links clones", 0, False),
    ],
)
def test_what_is_linked_cloned_or_written(
    odd: OddFiles, tmp_path: Path, lacks: str, shared: int, linked: bool
) -> None:
    base = odd.run(Attempt(str(tmp_path / "a"), 7, lacks=lacks))
    assert (base.error, base.shared) == ("", 0)
    done = odd.run(Attempt(str(tmp_path / "b"), 7, base=str(tmp_path / "a"), lacks=lacks))
    assert (done.error, done.text, done.there, done.shared) == ("", "", 7, shared)
    for key in ("a/w/c/0/0", "b/c/0/0"):
        one, other = (tmp_path / name / key for name in "ab")
        assert one.samefile(other) == linked and one.read_bytes() == other.read_bytes()


def test_a_clone_that_fails_leaves_nothing(odd: OddFiles, tmp_path: Path) -> None:
    """The disk is full in the middle of the copies: the save fails as any other one."""
    assert odd.run(Attempt(str(tmp_path / "a"), 7)).error == ""
    fails = "fsync:28:1"
    attempt = Attempt(str(tmp_path / "b"), 7, base=str(tmp_path / "a"), lacks="links", fails=fails)
    done = odd.run(attempt)
    assert (done.error, done.there, done.left) == ("StorageError", 0, ["a"])
