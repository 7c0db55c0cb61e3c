"""File systems that lack something, and calls that fail: a save works, or is refused at once."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import odd_files
from tests.support.odd_files import Attempt, OddFiles
from xckpt.core.commit import FileSystem
from xckpt.storage.commit import file_system
from xckpt.storage.commit.file_system import look_into

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="odd file systems are made by a C library that LD_PRELOAD loads",
)

WHOLE = FileSystem(locks=True, syncs_folders=True, tells_case=True, longest_name=255)
FEW = ("a/w", "b")
MANY = ("a/w", "a/v", "b", "c", "d")


assert len(FEW) + 1 < odd_files.MANY <= len(MANY) + 1


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OddFiles]:
    folder = tmp_path_factory.mktemp("odd")
    with OddFiles(folder, folder.parent) as process:
        yield process


@pytest.mark.parametrize("lacks", ["", "dirsync", "dirsync local", "locks", "exchange", "case"])
@pytest.mark.parametrize("leaves", [FEW, MANY], ids=["few", "many"])
def test_a_save_and_an_overwrite(
    odd: OddFiles, tmp_path: Path, lacks: str, leaves: tuple[str, ...]
) -> None:
    for step in (1, 2, 3):
        done = odd.run(Attempt(str(tmp_path / "ckpt"), step, leaves, lacks=lacks))
        assert (done.error, done.text, done.there, done.left) == ("", "", step, ["ckpt"])


@pytest.mark.parametrize("lacks", ["locks", "dirsync"])
def test_an_overwrite_that_cannot_be_safe_is_refused(
    odd: OddFiles, tmp_path: Path, lacks: str
) -> None:
    """Without exchange it needs conditional writes, which need both."""
    path = str(tmp_path / "ckpt")
    assert odd.run(Attempt(path, 1, lacks=f"exchange {lacks}")).error == ""
    done = odd.run(Attempt(path, 2, lacks=f"exchange {lacks}"))
    assert (done.error, done.there, done.left) == ("StorageError", 1, ["ckpt"])
    assert "it neither exchanges folders nor" in done.text and "new path" in done.text


@pytest.mark.parametrize("leaves", [("m/A", "m/a"), ("M/x", "m/y"), ("w", "W")])
def test_names_that_differ_in_case(odd: OddFiles, tmp_path: Path, leaves: tuple[str, ...]) -> None:
    for _ in range(3):
        done = odd.run(Attempt(str(tmp_path / "ckpt"), leaves=leaves, lacks="case"))
        assert (done.error, done.there, done.left) == ("StorageError", 0, [])
        assert f"{leaves[0]} and {leaves[1]} differ in case alone" in done.text
    assert odd.run(Attempt(str(tmp_path / "ckpt"), leaves=leaves)).error == ""


def test_long_names(odd: OddFiles, tmp_path: Path) -> None:
    """A path of a checkpoint that the file system takes, and leaves that it does not."""
    name = "n" * 143
    path = str(tmp_path / name)
    for step in (1, 2):
        done = odd.run(Attempt(path, step, names=143))
        assert (done.error, done.text, done.left) == ("", "", [name])
    done = odd.run(Attempt(path, 3, (f"m/{'w' * 150}", "b"), names=143))
    assert (done.error, done.there, done.left) == ("StorageError", 2, [name])
    assert f"m/{'w' * 150}: its name takes 150 bytes" in done.text


CALLS = {
    "write": ("EIO", "ENOSPC", "EDQUOT"),
    "fsync": ("EIO", "ENOSPC"),
    "rename": ("EIO", "ENOSPC", "ESTALE", "EACCES"),
    "create": ("EMFILE", "ENOSPC", "EACCES"),
    "mkdir": ("ENOSPC", "EACCES"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("lacks", ["", "exchange", "dirsync local"])
@pytest.mark.parametrize("call, code", [(call, code) for call in CALLS for code in CALLS[call]])
def test_calls_that_fail(odd: OddFiles, tmp_path: Path, lacks: str, call: str, code: str) -> None:
    """From the first on, from the second, and so on until none is reached: old, or new."""
    number = getattr(errno, code)
    for leaves in (FEW, MANY):
        start = 1
        while True:
            path = str(tmp_path / f"{len(leaves)}-{start}" / "ckpt")
            assert odd.run(Attempt(path, 1, leaves, lacks=lacks)).error == ""
            overwrites = "exchange" not in lacks or "dirsync" not in lacks
            fails = f"{call}:{number}:{start}"
            done = odd.run(Attempt(path, 2, leaves, lacks=lacks, fails=fails))
            assert overwrites and done.there == (1 if done.error else 2), done
            assert done.error in ("", "StorageError"), done
            kept = [name for name in done.left if not name.endswith((".new", ".claim"))]
            assert kept == ["ckpt"], done
            again = odd.run(Attempt(path, 3, leaves, lacks=lacks))
            assert (again.error, again.there, again.left) == ("", 3, ["ckpt"])
            shutil.rmtree(Path(path).parent)
            if not done.error:
                break
            start = max(start + 1, start * 3 // 2)
        assert start > 1


OTHERS = {
    "write": "EDQUOT",
    "fsync": "EIO",
    "close": "EDQUOT",
    "mkdir": "ENOSPC",
    "rename": "EDQUOT",
    "create": "ENOSPC",
    "link": "EDQUOT",
    "unlink": "EIO",
}


def by_default(*cases: str) -> list[object]:
    """All cases of `OTHERS`, the named ones in the default tier too."""
    thorough = pytest.mark.thorough
    return [pytest.param(each, marks=() if each in cases else thorough) for each in OTHERS]


@pytest.mark.parametrize(
    "what", ["convert", *(pytest.param(w, marks=pytest.mark.thorough) for w in ("base", "copy"))]
)
@pytest.mark.parametrize("call", by_default("create"))
def test_other_calls_that_fail(odd: OddFiles, tmp_path: Path, what: str, call: str) -> None:
    """A save with a base, a copy, a conversion: old, or new; then the next one leaves nothing."""
    number, start = getattr(errno, OTHERS[call]), 1
    while True:
        path, base = str(tmp_path / str(start) / "ckpt"), str(tmp_path / str(start) / "base")
        for at, step in ((base, 2), (path, 1)):
            assert odd.run(Attempt(at, step, MANY)).error == ""
        named = "save" if what == "base" else what
        made = Attempt(path, 2, MANY, base=base, call=named, fails=f"{call}:{number}:{start}")
        done = odd.run(made)
        assert done.error in ("", "StorageError"), done
        assert done.there == (1 if done.error else 2), done
        if done.error:
            assert path in done.text, done
            assert OTHERS[call] == "EIO" or "free space" in done.text, done
        made.fails = ""
        again = odd.run(made)
        assert (again.error, again.there, again.left) == ("", 2, ["base", "ckpt"]), again
        shutil.rmtree(tmp_path / str(start))
        if not done.error:
            return
        start = max(start + 1, start * 3 // 2)


@pytest.mark.parametrize("call", by_default("fsync", "create"))
def test_calls_of_a_manager_that_fail(odd: OddFiles, tmp_path: Path, call: str) -> None:
    """A step is saved and the one before it deleted: one of them loads, whatever fails."""
    number, start = getattr(errno, OTHERS[call]), 1
    while True:
        run = tmp_path / str(start)
        old, new = str(run / "step-00000001"), str(run / "step-00000002")
        assert odd.run(Attempt(old, 1, MANY, call="manager")).error == ""
        done = odd.run(Attempt(new, 2, MANY, call="manager", fails=f"{call}:{number}:{start}"))
        assert done.error in ("", "StorageError"), done
        if done.there != 2:
            assert done.error
            assert "step-00000001" in done.left
        third = odd.run(Attempt(str(run / "step-00000003"), 3, MANY, call="manager"))
        assert (third.error, third.there) == ("", 3)
        assert third.left == ["step-00000003"], (start, done, third)
        shutil.rmtree(run)
        if not done.error:
            return
        start = max(start + 1, start * 3 // 2)


@pytest.mark.parametrize("leaves", [FEW, MANY], ids=["few", "many"])
def test_what_fails_to_be_synced_is_not_there(
    odd: OddFiles, tmp_path: Path, leaves: tuple[str, ...]
) -> None:
    """Neither is its name, whose sync comes last."""
    path = str(tmp_path / "ckpt")
    for step, left in (1, []), (2, ["ckpt"]):
        start = 1
        while True:
            done = odd.run(Attempt(path, step, leaves, fails=f"fsync:{errno.EIO}:{start}"))
            if not done.error:
                break
            assert (done.error, done.there, done.left) == ("StorageError", step - 1, left), start
            start += 1
        assert done.there == step and start > 2


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir"])
def test_a_full_disk_names_what_could_be_removed(odd: OddFiles, tmp_path: Path, call: str) -> None:
    left = tmp_path / ".other.saving-0123456789abcdef"
    left.mkdir()
    (left / "data").write_bytes(b"x" * 5000)
    fails = f"{call}:{errno.ENOSPC}:3"
    done = odd.run(Attempt(str(tmp_path / "ckpt"), leaves=MANY, fails=fails))
    assert done.error == "StorageError" and "the disk is full" in done.text
    assert f"4.9 KiB there were left by saves that were cut off (xckpt gc {tmp_path})" in done.text
    assert f"{left}: 4.9 KiB in 1 file, " in done.text
    assert done.left == [left.name]


@pytest.mark.thorough
def test_what_cannot_be_removed(odd: OddFiles, tmp_path: Path) -> None:
    """The old one's files stay until the next overwrite."""
    path = str(tmp_path / "ckpt")
    assert odd.run(Attempt(path, 1)).error == ""
    done = odd.run(Attempt(path, 2, fails=f"unlink:{errno.EIO}:1"))
    assert (done.error, done.there) == ("", 2)
    done = odd.run(Attempt(path, 3))
    assert (done.error, done.there, done.left) == ("", 3, ["ckpt"])


def test_what_is_said_of_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_into(tmp_path) == WHOLE
    monkeypatch.setattr(file_system, "longest_name", lambda folder: 12)
    assert look_into(tmp_path).longest_name == 12


def test_the_root_of_all_folders_has_no_name() -> None:
    """A save there said "PosixPath('/') has an empty name", and not that / is taken."""
    assert look_into(Path("/")).longest_name > 0


def test_a_copy_over_a_checkpoint_where_folders_cannot_be_exchanged(
    odd: OddFiles, tmp_path: Path
) -> None:
    path, base = str(tmp_path / "ckpt"), str(tmp_path / "base")
    for at, step in ((base, 2), (path, 1)):
        assert odd.run(Attempt(at, step, lacks="exchange")).error == ""
    done = odd.run(Attempt(path, 2, base=base, call="copy", lacks="exchange"))
    assert (done.error, done.text, done.there, done.left) == ("", "", 2, ["base", "ckpt"])
