"""`xckpt doctor` says what it finds, and a save meets what it says."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import xckpt
from xckpt.cli.commands import commands
from xckpt.cli.doctor.command import PACKAGES, this_machine
from xckpt.cli.doctor.findings import Machine, of_bucket, of_local, of_machine
from xckpt.core.commit import FileSystem
from xckpt.errors import StorageError
from xckpt.storage.abilities.bucket import BucketAbilities
from xckpt.storage.abilities.local import LocalAbilities, local_abilities
from xckpt.storage.commit.file_system import look_into

ROOT = Path(__file__).parents[2]
GOOD = LocalAbilities(
    "/data", FileSystem(True, True, True, 255), True, True, True, True, 1e-4, 1 << 40, 1 << 30
)


def doctor(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["doctor", *map(str, arguments)])


def test_every_package_that_users_install_with_xckpt_is_looked_for() -> None:
    """Those of the extras too; what tests, demo and benchmarks need is not a user's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    users = [extras[name] for name in extras if name not in ("test", "docs", "demo", "bench")]
    needed = {re.split(r"[<>=]", each)[0] for each in chain(project["dependencies"], *users)}
    assert needed <= {*PACKAGES}


def test_a_folder_is_tried_and_nothing_stays_there(tmp_path: Path) -> None:
    result = doctor(tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    facts = result.stdout.partition("\n\n")[0].splitlines()
    [start] = {line.index(line.split(maxsplit=1)[1]) for line in facts if "=" not in line}
    assert f"{'xckpt':<{start}}{xckpt.__version__}" in facts
    assert f"tried in     {tmp_path}" in result.stdout
    assert {*PACKAGES} <= {line.split()[0] for line in facts}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_tried_above_and_not_made(tmp_path: Path) -> None:
    found = local_abilities(tmp_path / "a" / "b")
    assert found.folder == str(tmp_path) and found.able == look_into(tmp_path)
    assert not (tmp_path / "a").exists() and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "run/7"])
def test_a_file_in_the_way_is_a_fault(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    result = doctor(tmp_path / "file" / below)
    assert result.exit_code == 1
    assert f"{tmp_path / 'file'} is not a folder" in result.stderr


def test_what_may_not_be_written_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    result = doctor(tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path} cannot be written: Permission denied" in result.stderr
    with pytest.raises(StorageError, match="choose another folder"):
        local_abilities(tmp_path)


def test_a_full_disk_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(StorageError) as raised:
        local_abilities(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: No space left on device; the disk is full")
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_that_is_not_known_is_a_fault() -> None:
    result = doctor("hf://a/b")
    assert result.exit_code == 1 and "scheme 'hf' is not supported" in result.stderr


def test_a_store_that_permits_all_is_asked_and_stays_empty() -> None:
    result = doctor("memory://doctor-store")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "permitted: read, list, delete, write, write on a condition" in result.stdout
    assert xckpt.gc("memory://doctor-store") == []


def test_the_variables_that_count_are_shown_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCKPT_RETRIES", "3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    result = doctor("memory://doctor-variables")
    assert "XCKPT_RETRIES=3" in result.stdout and "hidden" not in result.stdout


def test_what_is_good_has_no_remark() -> None:
    assert [*of_local(GOOD), *of_bucket(BucketAbilities("s3://b", (), 0.01))] == []
    machine = Machine("Linux", "3.12", 8, None, None)
    assert [*of_machine(machine, {"torch": "2.9"})] == []
    assert this_machine().processors >= 1


@pytest.mark.parametrize(
    "change, kind, words",
    [
        ({"able": FileSystem(False, True, True, 255)}, "note", "no file locks"),
        ({"able": FileSystem(True, False, True, 255)}, "note", "not forced to disk"),
        ({"able": FileSystem(True, True, False, 255)}, "note", "differ in case alone"),
        ({"exchanges_folders": False}, "note", ".generations"),
        ({"links_files": False}, "slow", "write all bytes again"),
        ({"sync_seconds": 0.02}, "slow", "20 ms; many small files of one save"),
        ({"sync_seconds": 0.02, "syncs_at_once": False}, "slow", "20 ms: store small leaves"),
        ({"is_local": False}, "slow", "network file system"),
        ({"free_bytes": 1 << 20}, "note", "1.0 MiB are free"),
        ({"free_files": 10}, "note", "10 files may still be made"),
    ],
)
def test_what_lacks_is_said(change: dict[str, object], kind: str, words: str) -> None:
    [remark] = of_local(replace(GOOD, **change))  # pyright: ignore[reportArgumentType]
    assert remark.kind == kind and words in remark.text


def test_a_slow_bucket_is_said() -> None:
    [remark] = of_bucket(BucketAbilities("s3://b", (), 0.25))
    assert remark.kind == "slow" and "250 ms" in remark.text


@pytest.mark.skipif(os.name != "posix", reason="limits of open files")
def test_a_low_limit_of_open_files_is_said() -> None:
    machine = Machine("Linux", "3.12", 8, None, 256)
    [remark] = of_machine(machine, {"jax": "0.8"})
    assert remark.kind == "note" and "ulimit -n 4096" in remark.text


def test_a_working_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that the answer could not be written."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = doctor(".")
    assert result.exit_code == 1
    assert "  - .: the working folder was deleted; give an absolute path" in result.stderr
