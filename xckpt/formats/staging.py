"""An output that gets its name only when it is whole.

1. `Staging.begin` looks at the path and makes a folder beside it, ``.NAME.converting-TOKEN``, with
   a folder for the output in it.
2. `Staging.note` keeps there what the output is to be. Whoever knows the token and means just that
   output, another process or a resumed conversion, finds it with `Staging.attach`.
3. `Staging.publish` syncs every file and folder of the output, upward, and renames its folder, or
   the one file in it, to the path. Where something may be replaced, that is exchanged in one step
   and removed after.

Only what the format itself would write is ever replaced: a folder with other files in it is
refused, and so is a file of another name.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xckpt.errors import CheckpointExistsError, NotACheckpointError
from xckpt.storage.commit.folder import exchange, make_folder, sync_folder
from xckpt.storage.errors import storage_errors

__all__ = ["Staging", "foreign_files"]


@dataclass(frozen=True, slots=True)
class Staging:
    """Where an output is written before it has its name."""

    target: Path
    token: str
    single: bool = False
    """Whether the output is one file and no folder."""

    @property
    def folder(self) -> Path:
        """The staging folder, in the target's parent."""
        name = self.target.name.encode()[:150].decode("utf-8", "ignore")
        return self.target.parent / f".{name}.converting-{self.token}"

    @property
    def output(self) -> Path:
        """The folder that the output's files are written to."""
        return self.folder / "output"

    @property
    def _layout(self) -> Path:
        return self.folder / "layout"

    @classmethod
    def begin(
        cls, target: Path, replaceable: Callable[[Path], str] | None, *, single: bool = False
    ) -> Staging:
        """Make a staging folder for an output.

        Args:
            target: the path that the output is to have.
            replaceable: says why what is there may not be replaced, empty if it may; None to
                replace nothing.
            single: the output is one file.

        Raises:
            CheckpointExistsError: something is there that may not be replaced.
            StorageError: the folder cannot be made.
        """
        with storage_errors(target):
            target = Path(os.path.realpath(target))
            _check_free(target, replaceable, single=single)
            staging = cls(target, uuid.uuid4().hex[:12], single)
            make_folder(target.parent)
            staging.folder.mkdir()
            staging.output.mkdir()
        return staging

    def note(self, layout: bytes) -> None:
        """Let others attach, if they mean the same layout."""
        with storage_errors(self._layout):
            self._layout.write_bytes(layout)

    @classmethod
    def attach(cls, target: Path, token: str, layout: bytes, *, single: bool = False) -> Staging:
        """The staging folder that somebody else has begun.

        Raises:
            NotACheckpointError: it is not there, or was begun for another layout.
        """
        target = Path(os.path.realpath(target))
        staging = cls(target, token, single)
        if not token.isalnum() or not staging._layout.is_file():
            raise NotACheckpointError(
                f"{staging.folder}: what was written of {target} is gone; begin anew"
            )
        with storage_errors(staging._layout):
            if staging._layout.read_bytes() != layout:
                raise NotACheckpointError(f"{staging.folder} was begun for other tensors")
        return staging

    def publish(self, *, replace: bool = False) -> None:
        """Make everything durable, and give the output its name.

        Args:
            replace: what has the name now may be replaced.

        Raises:
            CheckpointExistsError: somebody else has taken the name meanwhile.
            StorageError: the system refused.
        """
        with storage_errors(self.target):
            _sync_tree(self.output)
            there = self.target.exists()
            if there and not replace and (self.single or any(self.target.iterdir())):
                raise CheckpointExistsError(f"{self.target} was taken by somebody else meanwhile")
            if self.single:
                [file] = self.output.iterdir()
                os.rename(file, self.target)
            elif there:
                exchange(self.output, self.target)
            else:
                os.rename(self.output, self.target)
            sync_folder(self.target.parent)
        shutil.rmtree(self.folder, ignore_errors=True)

    def abort(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _check_free(target: Path, replaceable: Callable[[Path], str] | None, *, single: bool) -> None:
    if not target.exists():
        return
    if single and target.is_dir():
        raise CheckpointExistsError(f"{target} is a folder; a file was to be written there")
    if target.is_dir() and not any(target.iterdir()):
        return
    if replaceable is None:
        raise CheckpointExistsError(f"{target} exists already; pass overwrite=True to replace it")
    problem = replaceable(target)
    if problem:
        raise CheckpointExistsError(f"{target} is not replaced: {problem}")


def foreign_files(folder: Path, is_ours: Callable[[str], bool]) -> str:
    """Why a folder may not be replaced, if files of other kinds lie in it; empty if none do."""
    foreign = sorted(each.name for each in folder.iterdir() if not is_ours(each.name))
    return f"it holds other files too: {', '.join(foreign[:5])}" if foreign else ""


def _sync_tree(folder: Path) -> None:
    """fsync every file in a folder, and every folder after what is in it."""
    for each, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync_file(os.path.join(each, name))
        sync_folder(each)


def _sync_file(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
