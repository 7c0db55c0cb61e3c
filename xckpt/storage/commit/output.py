"""An output in another library's format, which gets its name only when it is complete.

1. `OutputPath.begin` looks at the path, claims a staging folder beside it as a save does
   (`xckpt.storage.commit.folder`), and makes a folder for the output in it.
2. `StagedOutput.note` keeps a digest of the output's layout beside it. `OutputPath.begin` continues
   an output of the same identity and layout; another process that knows the token and has the same
   layout takes part with `OutputPath.attach`.
3. `StagedOutput.publish` syncs every file and folder, looks at the path again, removes the note of
   the layout, because an exchange puts the old output in the staging folder, and takes the step
   that the rules of `xckpt.core.commit` give.

Only files that the format itself would write are ever replaced: a folder with other files in it is
refused, and so is a file of another name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xckpt.core.commit import Found, Place, Step, decide
from xckpt.errors import CheckpointExistsError, NotACheckpointError
from xckpt.storage.abilities.local import can_exchange
from xckpt.storage.commit.file_system import share_mode
from xckpt.storage.commit.folder import claim_folder, journal_of, staging_folder, sync_tree
from xckpt.storage.commit.leftovers import reclaim
from xckpt.storage.commit.staging import StagedFolder, taken_meanwhile
from xckpt.storage.location import storage_errors

_OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class OutputPath:
    """The final path of an output."""

    path: Path
    """Symbolic links followed."""
    foreign: Callable[[Path], str]
    """Returns why what is at the path is not an output of the format; empty if it is one."""
    overwrite: bool = False
    """Whether an output of the same format may be replaced."""
    single: bool = False
    """Whether the output is one file and no folder."""

    def begin(self, layout: bytes = b"", identity: str = "") -> StagedOutput:
        """Make a staging folder for an output, or take over what a killed process has left.

        Args:
            layout: a digest of the output's layout.
            identity: name of a resumable output; staging of the same layout left under it is
                reused.

        Raises:
            CheckpointExistsError: something is there that may not be replaced, or another process
                uses the staging of this identity.
            StorageError: the folder cannot be made.
        """
        with storage_errors(self.path), contextlib.ExitStack() as undo:
            step = self.step()
            claim, resumed = claim_folder(self.path, identity)
            staged = StagedOutput(self.path, claim.folder, claim, self)
            undo.callback(staged.abort)
            if not (resumed and staged.noted() == layout):
                if resumed:
                    staged.clear()
                if step is Step.EXCHANGE and not can_exchange(staged.staging):
                    self.step(Place.PLAIN_OUTPUT)
                staged.folder.mkdir()
                share_mode(staged.staging, staged.folder)
            undo.pop_all()
            return staged

    def attach(self, token: str, layout: bytes) -> StagedOutput:
        """The staging folder that another process has begun; claimed if its claim is free.

        Raises:
            NotACheckpointError: it is not there, or was begun for another layout.
        """
        staged = StagedOutput(self.path, staging_folder(self.path, token), None, self)
        with storage_errors(staged.staging):
            noted = staged.noted() if token.isalnum() else None
            if noted is None:
                raise NotACheckpointError(
                    f"{staged.staging}: what was written of {self.path} is gone; start again"
                )
            if noted != layout:
                raise NotACheckpointError(
                    f"{staged.staging} was begun for other tensors than this process is to write: "
                    f"give all processes the same source, mapping and options"
                )
            with contextlib.suppress(CheckpointExistsError):  # the process that began it is alive
                staged.claim = reclaim(self.path, token)
        return staged

    def step(self, place: Place | None = None) -> Step:
        """The step that gives an output this path as it is now.

        Raises:
            CheckpointExistsError: what is there may not be replaced.
        """
        found, reason = self._look()
        place = place or (Place.FILE if self.single else Place.OUTPUT)
        return decide(self.path, found, place, overwrite=self.overwrite, reason=reason)

    def _look(self) -> tuple[Found, str]:
        """What is at the path, and why it is foreign if it is."""
        if not self.path.exists():
            return Found.NOTHING, ""
        if self.single and self.path.is_dir():
            return Found.FOREIGN, "is a folder, and a file was to be written there"
        if self.path.is_dir() and not any(self.path.iterdir()):
            return Found.NOTHING, ""
        reason = self.foreign(self.path)
        return (Found.FOREIGN, f"is not replaced: {reason}") if reason else (Found.CHECKPOINT, "")


@dataclass(slots=True)
class StagedOutput(StagedFolder):
    """A staged output, before it has its name."""

    output: OutputPath

    @property
    def token(self) -> str:
        """The token with which another process attaches."""
        return self.staging.name.rpartition("-")[2]

    @property
    def folder(self) -> Path:
        """The folder that the output's files are written to."""
        return self.staging / _OUTPUT

    @property
    def named(self) -> Path:
        """The output's folder, or its only file."""
        if not self.output.single:
            return self.folder
        [file] = self.folder.iterdir()
        return file

    def note(self, layout: bytes) -> None:
        """Let other processes attach, if they have the same layout."""
        with storage_errors(self.staging):
            self._note.write_bytes(layout)

    def noted(self) -> bytes | None:
        """The layout that was noted; None if none was."""
        return self._note.read_bytes() if self._note.is_file() else None

    @property
    def _note(self) -> Path:
        return journal_of(self.staging, "layout")

    def publish(self) -> None:
        """Make everything durable, and give the output its name.

        Raises:
            CheckpointExistsError: another writer has taken the name meanwhile.
            StorageError: the system refused.
        """
        with storage_errors(self.target):
            sync_tree(self.folder, files=True)
            try:
                step = self.output.step()
            except CheckpointExistsError as error:
                raise taken_meanwhile(self.target) from error
            self._note.unlink(missing_ok=True)
            self.take_name(step)
