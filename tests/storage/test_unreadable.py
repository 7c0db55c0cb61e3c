"""What cannot be read is not called damaged, and is passed over by name where the rest answers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from tests.support.unprivileged import permissions_hold
from xckpt.cli.commands import commands
from xckpt.convert import convert
from xckpt.core.manifest.codec import encode
from xckpt.core.manifest.entries import TensorEntry, documents
from xckpt.integrations.newest import check_whole, newest_good
from xckpt.storage.array import digest_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    xckpt.save(tmp_path / "a", {"v": np.zeros((64, 64)), "w": np.ones((64, 64))})
    xckpt.save(
        tmp_path / "b", {"v": np.zeros((64, 64)), "w": np.ones((64, 64))}, base=tmp_path / "a"
    )
    return tmp_path / "b"


@pytest.mark.parametrize("name", ["w/c/0/0", "w/zarr.json", "w"])
def test_what_cannot_be_read_is_no_damage(saved: Path, name: str) -> None:
    os.chmod(saved / name, 0)
    with permissions_hold():
        problems = xckpt.open(saved).verify()
        result = CliRunner().invoke(commands, ["verify", str(saved)])
    os.chmod(saved / name, 0o755)
    assert {problem.kind for problem in problems} == {"unreadable"}
    # The place ends with the path, which the system's answer does not repeat.
    assert all("Permission denied; check its permissions" in str(each) for each in problems)
    assert result.exit_code == 2 and f"{saved} cannot be read whole" in result.stderr
    assert "Permission denied" in result.stderr


def test_a_trainer_passes_over_what_is_damaged_and_nothing_else(saved: Path) -> None:
    """As `CheckpointManager.restore` does."""
    paths = [str(saved), str(saved.with_name("a"))]
    looped(saved / "w" / "c" / "0" / "0")
    with pytest.raises(xckpt.StorageError, match="cannot be read whole; nothing that was read is"):
        newest_good(paths, check_whole)
    (saved / "v" / "c" / "0" / "0").unlink()
    with pytest.raises(xckpt.CorruptCheckpointError, match="damaged") as raised:
        check_whole(str(saved))
    assert sorted(each.kind for each in raised.value.problems) == ["chunk", "unreadable"]
    with pytest.warns(UserWarning, match="newer ones are damaged"):
        assert newest_good(paths, check_whole) == paths[1]


def test_nor_is_what_takes_more_memory_than_there_is(tmp_path: Path) -> None:
    """A chunk that is decoded as one, beside one that is sound."""
    xckpt.save(tmp_path, {"w": np.zeros(2)}, options=xckpt.SaveOptions(crc32c=True))
    manifest = xckpt.open(tmp_path).manifest
    large = TensorEntry("large", "uint8", (1 << 32,), (1 << 32,))
    side = bytes(16) + (tmp_path / "xckpt.digests").read_bytes()
    (tmp_path / "xckpt.digests").write_bytes(side)
    changes = {"leaves": (large, *manifest.leaves), "digests": digest_bytes(side).hex()}
    manifest = msgspec.structs.replace(manifest, **changes)
    (tmp_path / "xckpt.json").write_bytes(encode(manifest, digest_bytes))
    (tmp_path / "large").mkdir()
    for key, document in documents(manifest):
        (tmp_path / key).write_bytes(document)
    verified = run("verify", tmp_path, before=LITTLE_MEMORY)
    assert verified.returncode == 2 and "large: no memory for" in verified.stderr
    assert "LeafTooLargeError" in run(before=LITTLE_MEMORY + CHECKED.format(tmp_path)).stderr


def looped(path: Path) -> None:
    """Replace a file by one that cannot be opened: TensorStore's threads may pass permissions."""
    path.unlink()
    path.symlink_to(path.name)


def test_nor_are_digests_that_cannot_be_read(saved: Path) -> None:
    looped(saved / "xckpt.digests")
    (problem,) = xckpt.open(saved).verify()
    assert problem.kind == "unreadable" and "without it no chunk can be verified" in problem


def test_damage_beside_it_is_damage(saved: Path) -> None:
    (saved / "w" / "c" / "0" / "0").unlink()
    os.chmod(saved / "v" / "c" / "0" / "0", 0)
    with permissions_hold():
        problems = xckpt.open(saved).verify()
        result = CliRunner().invoke(commands, ["verify", str(saved)])
    os.chmod(saved / "v" / "c" / "0" / "0", 0o644)
    assert sorted(problem.kind for problem in problems) == ["chunk", "unreadable"]
    assert result.exit_code == 1 and f"{saved} is damaged: 2 problems" in result.stderr


def test_a_file_in_place_of_a_folder_is_damage(tmp_path: Path) -> None:
    """What was saved is not there: a run falls back to an older step."""
    xckpt.save(tmp_path / "c", {"w": np.ones((64, 64))})
    os.rename(tmp_path / "c" / "w", tmp_path / "w")
    (tmp_path / "c" / "w").write_text("")
    problems = xckpt.open(tmp_path / "c").verify()
    assert sorted(problem.kind for problem in problems) == ["chunk", "document"]
    with pytest.raises(xckpt.CorruptCheckpointError):
        xckpt.load(tmp_path / "c")


def test_nor_is_it_in_another_format(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "theirs", format="orbax")
    chunks = [each for each in (tmp_path / "theirs" / "w" / "c").rglob("*") if each.is_file()]
    looped(chunks[0])
    (problem,) = xckpt.open(tmp_path / "theirs").verify()
    assert (problem.leaf, problem.kind) == ("w", "unreadable")


LITTLE_MEMORY = """
import resource, xckpt.storage
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30), resource.RLIM_INFINITY))
"""
CHECKED = """
from xckpt.integrations.newest import check_whole
check_whole("{}")
"""


def run(*arguments: str | Path, before: str = "") -> subprocess.CompletedProcess[str]:
    script = (
        f"{before}\n"
        "from tests.support.unprivileged import permissions_hold\n"
        "from xckpt.cli import main\n"
        "with permissions_hold(): main()"
    )
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_info_counts_what_it_can(saved: Path) -> None:
    os.chmod(saved / "w" / "c", 0)
    tree, leaf = run("info", saved), run("info", saved, "v")
    os.chmod(saved / "w" / "c", 0o755)
    assert (tree.returncode, leaf.returncode) == (0, 0)
    assert "32.0 KiB shared" in tree.stdout and "float64" in leaf.stdout
    line = (
        f"{saved}: what it shares with other checkpoints is not counted in w/c: Permission denied"
    )
    assert tree.stderr == leaf.stderr == f"xckpt: warning: {line}\n"


def test_gc_names_what_it_passes_over(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / "runs" / ".step.saving-0123456789abcdef"
    left.mkdir(parents=True)
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0)
    with permissions_hold(), caplog.at_level(logging.WARNING, "xckpt"):
        found = xckpt.gc(tmp_path, dry_run=True)
    result = run("gc", tmp_path, "--dry-run", "--json")
    hidden.chmod(0o755)
    assert [each.path for each in found] == [str(left)]
    line = f"passed over, because they cannot be read: {hidden} (Permission denied)"
    assert caplog.messages == [line]
    assert (result.returncode, result.stderr) == (0, f"xckpt: warning: {line}\n")
    assert str(left) in result.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("suffix", [".claim", ".new"])
def test_gc_names_what_another_user_has_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    """It said that nothing is left, however much there was."""
    left = tmp_path / ".step.saving-0123456789abcdef"
    if suffix == ".claim":
        left.mkdir()
    claim = left.with_name(left.name + suffix)
    claim.write_text("{}")
    claim.chmod(0o600)
    os.chown(claim, 12345, 12345)
    with permissions_hold(), caplog.at_level(logging.WARNING, "xckpt"):
        assert xckpt.gc(tmp_path, older_than=0) == []
    line = f"passed over, because they cannot be read: {left} (Permission denied)"
    assert caplog.messages == [line] and claim.exists()


def test_a_folder_whose_only_checkpoint_is_closed_says_so(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": np.ones(1)})
    os.chmod(tmp_path / "a", 0)
    words = "may not be read: a; check their perm"
    with permissions_hold(), pytest.raises(xckpt.NotACheckpointError, match=words):
        xckpt.load(tmp_path)
    os.chmod(tmp_path / "a", 0o755)
