"""Saves that go on while training does, one after the other.

`begin` is what ``save_async`` does once it knows how to save:

1. Wait for the save in flight (`settle`). An unseen error of an earlier save fails every rank.
2. Give the group connections of its own (`BackgroundGroup`): from now on the caller's thread may
   use its process group for training.
3. Start a thread that will save (`_Work`) and stage the state in the caller's. A failure of the
   stager travels with the ranks' plans: every rank raises, and nothing is committed.
4. Let the thread go on. `SaveFuture` says how the save ended.

The interpreter's exit waits for the save in flight, and logs a failure that was never asked for.
Threads that play the ranks of one group in one process do not wait for each other.
"""

from __future__ import annotations

# Its exit handler must run after ours.
import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol, cast, runtime_checkable

from xckpt.core.metadata import Metadata
from xckpt.engine.group import Group
from xckpt.engine.stager import AsyncStager, BlockingAsyncStager

logger = logging.getLogger("xckpt")

State = Any
"""Any tree that a save takes."""

Save = Callable[[State, BaseException | None, Group], Metadata]
"""Saves a state on a group; with an exception this rank has failed already and has no state."""


@runtime_checkable
class BackgroundGroup(Group, Protocol):
    """A group that training uses too, so that a save in the background needs other connections."""

    def in_background(self) -> Group:
        """The same ranks over connections of their own; collective the first time."""
        ...


class _Status:
    """What is known of a save, to its thread and to those who wait."""

    def __init__(self, where: str, group: Group) -> None:
        self.where = where
        self.rank, self.size = group.rank, group.size
        self.staged: Future[None] = Future()
        """Done when the caller may change the state."""
        self.saved: Future[Metadata] = Future()
        self.seen = False
        """Whether a caller has received the outcome."""

    def concerns(self, group: Group) -> bool:
        """Whether a save by this rank of ``group`` has to wait for this one."""
        return self.size != group.size or self.rank == group.rank

    def take_failure(self) -> BaseException | None:
        """The failure if it was never asked for; waits for the end, and answers once."""
        error = self.saved.exception()
        if self.seen:
            return None
        self.seen = error is not None
        return error

    def log(self, error: BaseException) -> None:
        """Log a failure that was never asked for."""
        logger.error(
            "the asynchronous save to %s failed, and its result was never asked for: %s: %s",
            self.where,
            type(error).__name__,
            error,
        )


class SaveFuture:
    """An asynchronous save: when its state may change, when it is committed, how it failed.

    Example:
        >>> import numpy as np, xckpt
        >>> weights = np.ones(3)
        >>> saving = xckpt.save_async("memory://example-future", {"w": weights})
        >>> saving.staged()
        >>> weights[:] = 0
        >>> saving.result().state_dict_metadata["w"].size
        (3,)
        >>> saving.done(), saving.exception()
        (True, None)
        >>> xckpt.load("memory://example-future")
        {'w': array([1., 1., 1.])}
    """

    def __init__(self, status: _Status) -> None:
        self.where = status.where
        """The path or URL that is saved to."""
        self._status = status

    def staged(self, timeout: float | None = None) -> None:
        """Return when the state that was given may be changed.

        That is so already when ``save_async`` returns, unless its stager goes on copying.

        Raises:
            TimeoutError: that takes more than ``timeout`` seconds.
            Exception: what the stager raised; `result` raises it too.
        """
        error = self._status.staged.exception(timeout)
        if error is not None:
            self._status.seen = True
            raise error

    def result(self, timeout: float | None = None) -> Metadata:
        """The metadata of the committed checkpoint; waits for the commit.

        Raises:
            TimeoutError: that takes more than ``timeout`` seconds.
            XckptError: why the save failed, as ``save`` would have raised it; nothing is committed.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._status.saved.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the save failed, or None if it is committed; waits until that is known.

        Raises:
            TimeoutError: that takes more than ``timeout`` seconds.
        """
        error = self._status.saved.exception(timeout)
        self._status.seen = True
        return error

    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._status.saved.done()

    def __repr__(self) -> str:
        state = "in flight"
        if self.done():
            state = "committed" if self._status.saved.exception() is None else "failed"
        return f"<SaveFuture {self.where}: {state}>"


class _Work:
    """What the thread of a save does.

    It drops the state before it wakes those who wait for the save: they may need the memory.
    """

    def __init__(
        self, status: _Status, group: Group, save: Save, spare: BlockingAsyncStager | None
    ) -> None:
        self.go_on = threading.Event()
        self.copied: Future[State] = Future()
        """The staged state, or why there is none."""
        self._status = status
        self._group = group
        self._save = save
        self._spare = spare

    def run(self) -> None:
        """Save once `go_on` is set; give a spare stager back, then say how it ended."""
        self.go_on.wait()
        outcome = self._outcome(self.copied)
        del self.copied, self._save
        if self._spare is not None:
            _give_back(self._spare)
        if isinstance(outcome, Metadata):
            self._status.saved.set_result(outcome)
        else:
            self._status.saved.set_exception(outcome)

    def _outcome(self, copied: Future[State]) -> Metadata | BaseException:
        state, failure = None, None
        try:
            state = copied.result()
        except BaseException as error:
            failure = error
        try:
            return self._save(state, failure, self._group)
        except BaseException as error:
            return error


_lock = threading.Lock()
_saves: list[_Status] = []
"""In flight, or failed and not asked for."""
_spare: list[BlockingAsyncStager] = []
"""The stager of saves that name none, while it is free; the system may take its memory back."""


def begin(
    where: str, state: State, stager: AsyncStager | None, group: Group, save: Save
) -> SaveFuture:
    """Stage a state and save it in a thread; collective the first time that a group does so.

    Raises:
        XckptError: an earlier save failed, and its result was never asked for.
    """
    failure = settle(group)
    background = group.in_background() if isinstance(group, BackgroundGroup) else group
    status = _Status(where, group)
    spare = None
    if stager is None:
        stager = spare = _take_spare()
    work = _Work(status, background, save, spare)
    copied = work.copied
    copied.add_done_callback(lambda future: _end(status.staged, None, future.exception()))
    # Started before the copying, but released after it: else the caller would wait for the
    # interpreter's lock while the save plans.
    _start(work, status)
    try:
        if failure is not None:
            # The other ranks may know of no failure: the save tells them, and this rank raises.
            status.seen = True
            raise failure
        _stage(stager, state, copied, until=status.saved)
    except BaseException as error:
        if not copied.done():
            copied.set_exception(error)
        raise
    finally:
        work.go_on.set()
    return SaveFuture(status)


def settle(group: Group) -> BaseException | None:
    """Wait for the saves in flight; the failure of one that was never asked for, if there is one.

    The caller must raise it; it is not stored.
    """
    with _lock:
        concerned = [save for save in _saves if save.concerns(group)]
    failures = [(save, error) for save in concerned if (error := save.take_failure()) is not None]
    with _lock:
        _saves[:] = [save for save in _saves if save not in concerned]
    if not failures:
        return None
    for save, error in failures[1:]:
        save.log(error)
    save, error = failures[0]
    error.add_note(
        f"This is the failure of the asynchronous save to {save.where}, whose result was never "
        f"asked for; the save that was called now was not begun."
    )
    return error


def _stage(
    stager: AsyncStager, state: State, copied: Future[State], until: Future[Metadata]
) -> None:
    """Have a stager copy a state; ``copied`` ends with the copy or with the stager's failure.

    A stager that lends its memory lends it ``until`` the save has ended.
    """
    try:
        staged = stager.stage(state)
        if isinstance(stager, BlockingAsyncStager):
            stager.lend(until)
        copying = cast("Future[State]", staged) if isinstance(staged, Future) else None
        has_failed = copying is not None and copying.done() and _failure(copying) is not None
        if not has_failed and stager.should_synchronize_after_execute:
            stager.synchronize_staging()
    except Exception as error:
        copied.set_exception(error)
        return
    if copying is None:
        copied.set_result(staged)
        return

    def pass_on(copying: Future[State]) -> None:
        error = _failure(copying)
        _end(copied, None if error else copying.result(), error)

    copying.add_done_callback(pass_on)


def _failure(future: Future[Any]) -> BaseException | None:
    """Why a future that is done has no result."""
    return CancelledError() if future.cancelled() else future.exception()


def _end(future: Future[Any], result: object, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _start(work: _Work, status: _Status) -> None:
    _register_exit()
    with _lock:
        _saves.append(status)
    # A daemon: were it joined like others, its own thread pools would be shut before it has ended.
    threading.Thread(target=work.run, name="xckpt-save", daemon=True).start()


def _take_spare() -> BlockingAsyncStager:
    with _lock:
        if _spare:
            return _spare.pop()
    return BlockingAsyncStager(cache_staged_state_dict=True)


def _give_back(stager: BlockingAsyncStager) -> None:
    """Keep one stager for the next save; its memory is there unless the system has needed it."""
    stager.rest()
    with _lock:
        if not _spare:
            _spare.append(stager)


_registered = False


def _register_exit() -> None:
    global _registered
    with _lock:
        if not _registered:
            # The standard library has no public name for what runs before thread pools are shut;
            # `atexit` runs after that, when a save can no longer go on.
            threading._register_atexit(_finish)  # type: ignore[attr-defined]
            os.register_at_fork(after_in_child=_forget_all)
            _registered = True


def _finish() -> None:
    """At exit: wait for what is in flight, and log failures that were never asked for."""
    for save in list(_saves):
        error = save.take_failure()
        if error is not None:
            save.log(error)


def _forget_all() -> None:
    """In a forked child: the saves are the parent's, and their threads are not here."""
    global _lock
    _lock = threading.Lock()
    _saves.clear()
    _spare.clear()
