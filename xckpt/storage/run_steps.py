"""The steps of a run in its root: listed, described by their manifests, removed.

1. A step is a folder of the root with a step's name (`xckpt.core.run.names`) and a manifest. In a
   bucket one listing finds them, in a local root one look at each folder of such a name.
2. `described` reads the manifests, all at once, and takes from each what a record needs. A manifest
   that cannot be read stays a step, among the unreadable ones.
3. `Remover` deletes in a thread of its own, one step after the other, manifest first
   (`xckpt.storage.commit.remove`). Faults are logged, with what is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec

from xckpt.core.manifest.codec import MAX_BYTES
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.run.names import step_number, steps_in
from xckpt.core.run.record import StepRecord, read_record, tensor_bytes
from xckpt.errors import NotACheckpointError
from xckpt.storage.array import digest_bytes
from xckpt.storage.commit.remove import remove_checkpoint
from xckpt.storage.location import Location, answer, open_store, storage_errors

logger = logging.getLogger("xckpt")


class Steps(msgspec.Struct, frozen=True, array_like=True):
    """What a listing of a root has found; it travels to all ranks."""

    records: list[StepRecord] = []
    """By number."""
    unreadable: dict[int, str] = {}
    """Number -> folder name, of steps whose manifest says nothing."""


class _Tensor(msgspec.Struct):
    dtype: str = ""
    shape: tuple[int, ...] = ()


class _Outline(msgspec.Struct):
    """What a record needs of a manifest, which a load checks as a whole."""

    leaves: list[_Tensor]
    user: Any = None


class _Sealed(msgspec.Struct):
    """A manifest as it is stored."""

    digest: str
    checkpoint: msgspec.Raw


_sealed: Final = msgspec.json.Decoder(_Sealed).decode
_outline: Final = msgspec.json.Decoder(_Outline).decode


def committed_steps(root: Location) -> dict[int, str]:
    """The committed steps of a root: number -> folder name, by number.

    Raises:
        StorageError: the storage refused.
    """
    folder = root.folder
    with storage_errors(root):
        if folder is None:
            keys = [key.decode() for key in answer(open_store(root).list(), root)]
            found = (key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(MANIFEST))
            return steps_in(name for name in found if "/" not in name)
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return {}
        named = [name for name in names if step_number(name) is not None]
        return steps_in(name for name in named if (folder / name / MANIFEST).is_file())


def described(root: Location, steps: Mapping[int, str]) -> Steps:
    """The records of steps, from their manifests; steps that are gone by now are left out.

    Raises:
        StorageError: the storage refused.
    """
    if not steps:
        return Steps()
    records: list[StepRecord] = []
    unreadable: dict[int, str] = {}
    with storage_errors(root):
        store = open_store(root)
        asked = {number: store.read(f"{name}/{MANIFEST}") for number, name in steps.items()}
        for number, reading in asked.items():
            read = answer(reading, root)
            if read.state != "value":
                continue
            try:
                records.append(_record(number, steps[number], read.value))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                unreadable[number] = steps[number]
    return Steps(records, unreadable)


def _record(number: int, name: str, manifest: bytes) -> StepRecord:
    if len(manifest) > MAX_BYTES:
        raise msgspec.DecodeError("the manifest is absurdly long")
    sealed = _sealed(manifest)
    if digest_bytes(bytes(sealed.checkpoint)).hex() != sealed.digest:
        raise msgspec.DecodeError("the manifest was altered")
    outline = _outline(sealed.checkpoint)
    size = tensor_bytes((leaf.dtype, leaf.shape) for leaf in outline.leaves)
    return read_record(number, name, outline.user, size)


class Remover:
    """Deletes steps of a root in the background, one after the other."""

    def __init__(self, root: Location) -> None:
        self._root = root
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="xckpt-delete")
        self._tasks: dict[Future[None], str] = {}
        self.gone: set[str] = set()
        """Folder names of the steps that were deleted."""

    @property
    def names(self) -> set[str]:
        """Folder names of the steps that are still to be deleted."""
        return {name for task, name in self._tasks.items() if not task.done()}

    def remove(self, name: str) -> Future[None]:
        """Delete the step of a folder name; faults are logged and raised by the future."""
        return self.run(lambda: self._remove(name), name)

    def run(self, task: Callable[[], object], name: str = "") -> Future[None]:
        """Do anything else there."""
        self._tasks = {task: name for task, name in self._tasks.items() if not task.done()}
        self.gone.discard(name)
        future = self._threads.submit(_done, task)
        self._tasks[future] = name
        return future

    def wait(self) -> None:
        """Return when all is deleted, or could not be."""
        for task in list(self._tasks):
            task.exception()

    def _remove(self, name: str) -> None:
        place = self._root.within(name)
        try:
            with contextlib.suppress(NotACheckpointError):  # someone else has deleted it
                remove_checkpoint(place)
        except Exception as error:
            logger.error(
                "%s could not be deleted, and what is left of it stays: %s; it is tried again "
                "after the next save, or by: xckpt gc --older-than 1d %s",
                place,
                error,
                self._root,
            )
            raise
        self.gone.add(name)


def _done(task: Callable[[], object]) -> None:
    task()


def without(steps: Steps, names: Iterable[str]) -> Steps:
    """The steps, less those of some folder names.

    Example:
        >>> steps = Steps([StepRecord(1, name="a"), StepRecord(2, name="b")])
        >>> [record.number for record in without(steps, ["a"]).records]
        [2]
    """
    gone = set(names)
    records = [record for record in steps.records if record.name not in gone]
    unreadable = {n: name for n, name in steps.unreadable.items() if name not in gone}
    return Steps(records, unreadable)
