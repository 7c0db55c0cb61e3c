"""The steps of a run in its root: listed, described by their manifests, removed.

1. A step is a folder of the root with a step's name (`xckpt.core.run.names`) and a manifest, or a
   checkpoint that another library has committed (`xckpt.core.run.foreign`). In a bucket one listing
   finds them, in a local root one look at each folder of such a name. Where Orbax's manager holds
   a checkpoint of xckpt, as the one item of a step, that is the step.
2. `described` reads the manifests, many at a time, and takes from each what a record needs. A step
   whose manifest cannot be read, or takes more than the memory, stays one, among the unreadable
   ones: a load says why.
3. `Remover` deletes in threads of its own (`xckpt.storage.commit.remove`): one hides the steps, the
   other deletes their files, no faster than allowed. Faults are logged, and remaining files are
   tried again. At the interpreter's exit, when threads take no more tasks, the caller does both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import tensorstore as ts

from xckpt.core.manifest.codec import MAX_BYTES
from xckpt.core.manifest.decode import decoded_bytes
from xckpt.core.manifest.memory import COPIES, LEAST_LIMIT, check_memory
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.run.foreign import foreign_format, items_held
from xckpt.core.run.names import step_number, steps_in
from xckpt.core.run.record import StepRecord, is_of, outlined, place_of, read_record, sealed
from xckpt.core.struct_types import prepare_structs
from xckpt.engine.last_tasks import begin_task
from xckpt.errors import CheckpointReplacedError, ManifestError, NotACheckpointError
from xckpt.storage.array import digest_bytes
from xckpt.storage.buckets.listing import listed
from xckpt.storage.chunks.file_checks import content_of, lengths
from xckpt.storage.commit.remove import Hidden, Pace, hide_checkpoint
from xckpt.storage.location import Location, check_process, open_store, storage_errors

logger: Final = logging.getLogger("xckpt")

AT_ONCE: Final = 256
"""Manifests that are asked for at a time: a run may have thousands of steps."""


class Steps(msgspec.Struct, frozen=True, array_like=True):
    """The result of listing roots; it is sent to all ranks."""

    records: list[StepRecord] = []
    """In order."""
    unreadable: list[StepRecord] = []
    """Steps whose manifest cannot be read, or not in the memory that there is."""


prepare_structs(Steps)


class _Committed(NamedTuple):
    own: dict[str, int]
    """Folder name -> number."""
    foreign: dict[str, str]
    """Name -> format, of steps that another library has written."""
    items: dict[str, str]
    """Name -> where its one item is, of a step of Orbax that holds a checkpoint of xckpt."""


def committed_steps(root: Location) -> dict[str, int]:
    """The committed steps of a root: folder name -> number, by number.

    Of several with one number the last counts, and another where that is damaged. Those of other
    libraries come first.

    Raises:
        StorageError: the storage refused.
    """
    own, foreign, items = _committed(root)
    others = {items.get(name, name): number for name, number in steps_in(foreign).items()}
    return dict(sorted({**others, **own}.items(), key=lambda step: step[1]))  # it is stable


def _committed(root: Location) -> _Committed:
    with storage_errors(root):
        below = _below(root)
    named = {name: paths for name, paths in below.items() if step_number(name) is not None}
    own = steps_in(name for name, paths in named.items() if MANIFEST in paths)
    renamed = root.folder is not None
    found = {
        name: foreign_format(name, paths, renamed=renamed)
        for name, paths in named.items()
        if MANIFEST not in paths
    }
    foreign = {name: format for name, format in found.items() if format}
    held = {name: items_held(named[name]) for name, format in foreign.items() if format == "orbax"}
    items = {name: f"{name}/{each[0]}" for name, each in held.items() if len(each) == 1}
    return _Committed(own, foreign, items)


def _below(root: Location) -> dict[str, Collection[str]]:
    """What lies in a root: name -> what is known of what lies below it."""
    folder = root.folder
    found: dict[str, list[str]] = {}
    if folder is None:
        for key in listed(open_store(root), root):
            name, _, below = key.decode("utf-8", "replace").partition("/")
            found.setdefault(name, []).extend([below] if below else ())
        return dict(found)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if step_number(entry.name) is not None and not _is_alias(folder, entry):
                found[entry.name] = _in_folder(folder / entry.name)
    return dict(found)


def _is_alias(root: Path, entry: os.DirEntry[str]) -> bool:
    """Whether a name is another one of a step of this root; a link elsewhere is a step."""
    there = entry.is_symlink() and os.path.dirname(os.path.realpath(entry))
    return there == os.path.realpath(root)


def _in_folder(step: Path) -> list[str]:
    """The manifest of a folder, or else all that lies in it, two levels deep."""
    try:
        if (step / MANIFEST).is_file():
            return [MANIFEST]
    except PermissionError:
        return [MANIFEST]  # it may be there: a step that cannot be read, and not none
    with contextlib.suppress(OSError):
        found = [entry for entry in os.scandir(step) if entry.name != MANIFEST]
        names = [entry.name + "/" * entry.is_dir() for entry in found]
        folders = [name for name in names if name.endswith("/")]
        trees = [f"{name}{file}" for name in folders for file in ("_METADATA", MANIFEST)]
        return [".", *names, *(path for path in trees if (step / path).is_file())]
    return []


def described(root: Location, steps: Mapping[str, int], memory_bytes: int) -> Steps:
    """The records of steps, from their manifests; steps that are gone by now are left out.

    Args:
        root: where they are.
        steps: folder name -> number.
        memory_bytes: what the manifests may take in memory, as `LoadOptions` says.

    Raises:
        StorageError: the storage refused.
    """
    if not steps:
        return Steps()
    records: list[StepRecord] = []
    unreadable: list[StepRecord] = []
    lacking: list[str] = []
    for name, manifest in _manifests(root, steps, memory_bytes):
        if manifest is None:
            lacking.append(name)
            continue
        try:
            record = _record(steps[name], name, manifest, memory_bytes)
        except (ManifestError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            unreadable.append(StepRecord(steps[name], name=name))
        else:
            with storage_errors(root):
                linked = root.folder is not None and (root.folder / record.name).is_symlink()
            if "/" in record.name:  # an item of Orbax, which no policy deletes
                record = replace(record, format="orbax", time=None)
            records.append(replace(record, linked=linked))
        del manifest  # before the next is read
    formats = _committed(root).foreign if lacking else {}
    records += [
        StepRecord(steps[name], name=name, format=formats[name])
        for name in lacking
        if name in formats
    ]
    return Steps(sorted(records, key=place_of), unreadable)


def _manifests(
    root: Location, steps: Iterable[str], memory_bytes: int
) -> Iterator[tuple[str, bytes | None]]:
    """The manifests of steps, some at a time; None of a step that has none any more.

    What by its length or kind is not to be read is given as no bytes.
    """
    most = min(MAX_BYTES, max(memory_bytes, LEAST_LIMIT) // COPIES)
    keys = {f"{name}/{MANIFEST}": name for name in steps}
    with storage_errors(root):
        store = open_store(root)
        asked: dict[str, ts.Future[ts.KvStore.ReadResult] | None] = {}
        waiting = 0
        for key, size in lengths(root, keys, most):
            if waiting + (size or 0) > most or len(asked) >= AT_ONCE:
                yield from _answered(root, asked)
                asked, waiting = {}, 0
            asked[keys[key]] = None if size is None else store.read(key)
            waiting += size or 0
        yield from _answered(root, asked)


def _answered(
    root: Location, asked: dict[str, ts.Future[ts.KvStore.ReadResult] | None]
) -> Iterator[tuple[str, bytes | None]]:
    for name in list(asked):
        yield name, content_of(asked.pop(name), root.within(name))


def _record(number: int, name: str, manifest: bytes, memory_bytes: int) -> StepRecord:
    stored = sealed(manifest)
    if digest_bytes(memoryview(stored.checkpoint)).hex() != stored.digest:
        raise msgspec.DecodeError("the manifest was altered")
    check_memory(decoded_bytes(memoryview(stored.checkpoint)), "the manifest", memory_bytes)
    size, user = outlined(stored.checkpoint)
    return read_record(number, name, user, size)


class Remover:
    """Deletes steps of a root in the background, one after the other.

    Each is hidden at once, however long those before it take. Calls from several threads are fine.

    Args:
        root: where they are.
        rate: most files a second; None for as many as go.
    """

    def __init__(self, root: Location, rate: float | None = None) -> None:
        self._root = root
        self._pace = Pace(rate)
        self._hiding = ThreadPoolExecutor(1, thread_name_prefix="xckpt-hide")
        self._threads = ThreadPoolExecutor(1, "xckpt-delete", initializer=self._hurry_at_exit)
        self._tasks: dict[Future[None], str] = {}
        self._left: list[Hidden] = []
        """What could not be deleted yet."""
        self._lock = threading.RLock()
        """Held while `_tasks` or `_left` is looked at or changed."""
        self.gone: set[str] = set()
        """Folder names of the steps that were deleted or hidden."""

    @property
    def names(self) -> set[str]:
        """Folder names of the steps that are still to be deleted."""
        with self._lock:
            return {name for task, name in self._tasks.items() if not task.done()}

    def _hurry_at_exit(self) -> None:
        """As the thread begins, for which the interpreter's exit waits."""
        with contextlib.suppress(RuntimeError):  # that has begun
            threading._register_atexit(self._pace.hurry)  # type: ignore[attr-defined]

    def remove(self, record: StepRecord) -> Future[None]:
        """Delete a step, unless it was saved again; faults are logged and raised by the future."""
        check_process()
        with self._lock:
            left, self._left = self._left, []
        for hidden in left:
            self.run(partial(self._sweep, hidden))
        self.gone.discard(record.name)
        hiding = begin_task(self._hiding, partial(self._hide, record))
        return self.run(lambda: self._sweep(hiding.result()), record.name)

    def run(self, task: Callable[[], object], name: str = "") -> Future[None]:
        """Run any other task in that thread."""
        check_process()  # the threads are not in a forked child
        with self._lock:
            self._tasks = {task: name for task, name in self._tasks.items() if not task.done()}
            future = begin_task(self._threads, partial(_done, task))
            self._tasks[future] = name
        return future

    def finish(self, name: str) -> None:
        """Return when the step of a folder name is no longer being deleted."""
        self._wait(lambda each: each == name)

    def wait(self) -> None:
        """Return when all is deleted, or could not be; the rate is lifted meanwhile."""
        self._wait(lambda each: True)

    def _wait(self, concerns: Callable[[str], bool]) -> None:
        """Wait for the deletions of some names."""
        with self._lock:
            tasks = [task for task, name in self._tasks.items() if concerns(name)]
        if not (waiting := [task for task in tasks if not task.done()]):
            return
        check_process()  # in a forked child none of them ends
        self._pace.hurry()
        try:
            for task in waiting:
                task.exception()
        finally:
            self._pace.calm()

    def _hide(self, record: StepRecord) -> Hidden | None:
        """Hide a step; None if another process has deleted it, or saved it again."""
        place, hidden = self._root.within(record.name).anew(), None
        try:
            with contextlib.suppress(NotACheckpointError, CheckpointReplacedError):
                hidden = hide_checkpoint(place, partial(is_of, record))
        except Exception as error:
            logger.error(
                "%s could not be deleted: %s; it is tried again after the next save", place, error
            )
            raise
        self.gone.add(record.name)
        return hidden

    def _sweep(self, hidden: Hidden | None) -> None:
        """Delete the files of a hidden step."""
        if hidden is None:
            return
        hidden.target = hidden.target.anew()
        try:
            hidden.sweep(self._pace)
        except Exception as error:
            with self._lock:
                self._left.append(hidden)
            logger.error(
                "%s; it is tried again with the next deletion, or by: xckpt gc %s",
                error,
                self._root,
            )
            raise


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
    return Steps(
        [record for record in steps.records if record.name not in gone],
        [record for record in steps.unreadable if record.name not in gone],
    )
