"""Saves that go on while training does, one after the other.

`begin` is what ``save_async`` does once it has a writer and a planner:

1. Wait for the save in flight (`settle`). If a save has failed since the last one and nobody asked
   for its result, this one fails with that error, on every rank.
2. Give the group connections of its own (`Group` with an ``in_background`` method): from now on the
   caller's thread may use its process group for training.
3. Stage the state in the caller's thread. A failure there is the save's: it travels with the
   ranks' plans, so that every rank raises and nothing is committed.
4. Run the engine in a thread. `SaveFuture` tells what became of it.

The interpreter's exit waits for the save in flight, and a failure that nobody asked for is logged.
Threads that play the ranks of one group in one process do not wait for each other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import thread as _executors  # noqa: F401  # its exit comes after ours
from typing import Any, Protocol

from xckpt.core.metadata import Metadata
from xckpt.engine.group import Group
from xckpt.engine.stager import AsyncStager, BlockingAsyncStager

__all__ = ["SaveFuture", "begin", "settle"]

logger = logging.getLogger("xckpt")

State = Any
"""Any tree that a save takes."""


class Save(Protocol):
    """The save itself, but for the state and the group."""

    def __call__(self, state: Callable[[], State], group: Group) -> Metadata:
        """Save what ``state`` returns; what it raises is this rank's failure."""
        ...


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

    def __init__(self, where: str, rank: int, size: int) -> None:
        self.where = where
        """The path or URL that is saved to."""
        self._rank, self._size = rank, size
        self._staged: Future[None] = Future()
        self._saved: Future[Metadata] = Future()
        self._seen = False

    def staged(self, timeout: float | None = None) -> None:
        """Return when the state that was given may be changed.

        That is so already when ``save_async`` returns, unless its stager goes on copying.

        Raises:
            TimeoutError: that takes more than ``timeout`` seconds.
            Exception: what the stager raised; `result` raises it too.
        """
        error = self._staged.exception(timeout)
        if error is not None:
            self._seen = True
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
        return self._saved.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the save failed, or None if it is committed; waits until that is known.

        Raises:
            TimeoutError: that takes more than ``timeout`` seconds.
        """
        error = self._saved.exception(timeout)
        self._seen = True
        return error

    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._saved.done()

    def __repr__(self) -> str:
        state = "in flight"
        if self.done():
            state = "committed" if self._saved.exception() is None else "failed"
        return f"<SaveFuture {self.where}: {state}>"


_lock = threading.Lock()
_saves: list[SaveFuture] = []
"""In flight, or failed and not asked for."""
_spare: list[BlockingAsyncStager] = []
"""The stager of saves that name none, while it is free; its memory is the system's to take back."""


def begin(
    where: str, state: State, stager: AsyncStager | None, group: Group, save: Save
) -> SaveFuture:
    """Stage a state and save it in a thread; collective the first time that a group does so.

    Raises:
        XckptError: an earlier save failed, and nobody has asked for its result.
    """
    failure = settle(group)
    own: Callable[[], Group] | None = getattr(group, "in_background", None)
    background = group if own is None else own()
    future = SaveFuture(where, group.rank, group.size)
    chosen = _take_spare() if stager is None else stager
    copying: Future[State] = Future()

    def ready() -> State:
        future._staged.result()
        return copying.result()

    # Begun before the copying and let go at the very end, so that the caller does not wait for the
    # interpreter's lock while the save plans.
    go_on = _start(future, chosen if stager is None else None, background, save, ready)
    try:
        if failure is not None:
            # The other ranks may know of no failure: they are to hear of it, and not to wait.
            future._seen = True
            future._staged.set_exception(failure)
            raise failure
        copying = _stage(future, chosen, state)
        _synchronise(future, chosen, copying)
    except BaseException as error:
        if not future._staged.done():
            future._staged.set_exception(error)
        raise
    finally:
        go_on()
    return future


def settle(group: Group) -> BaseException | None:
    """Wait for the saves in flight; the failure that nobody has asked for, if there is one.

    Whoever gets it has to raise it: it is not kept any longer.
    """
    with _lock:
        concerned = [s for s in _saves if s._size != group.size or s._rank == group.rank]
    failures: list[tuple[SaveFuture, BaseException]] = []
    for save in concerned:
        error = save._saved.exception()
        if error is not None and not save._seen:
            failures.append((save, error))
            save._seen = True
    with _lock:
        _saves[:] = [save for save in _saves if save not in concerned]
    if not failures:
        return None
    for save, error in failures[1:]:
        _report(save, error)
    save, error = failures[0]
    error.add_note(
        f"This is the failure of the asynchronous save to {save.where}, for whose result nobody "
        f"has asked; the save that was called now was not begun."
    )
    return error


def _stage(future: SaveFuture, stager: AsyncStager, state: State) -> Future[State]:
    """The staged state, the stager's failure, or whatever of both the stager has yet to tell."""
    copying: Future[State] = Future()
    try:
        staged = stager.stage(state)
    except Exception as error:
        copying.set_exception(error)
        return copying
    lend = getattr(stager, "lend", None)
    if lend is not None:
        lend(future._saved)
    if isinstance(staged, Future):
        return staged
    copying.set_result(staged)
    return copying


def _synchronise(future: SaveFuture, stager: AsyncStager, copying: Future[State]) -> None:
    """Let the save have the state when it is copied; wait for that here if the stager wants it."""

    def end(copied: Future[State]) -> None:
        error = CancelledError() if copied.cancelled() else copied.exception()
        _end_staging(future, error)

    failed = copying.done() and (copying.cancelled() or copying.exception() is not None)
    try:
        if not failed and stager.should_synchronize_after_execute:
            stager.synchronize_staging()
    except BaseException as error:
        _end_staging(future, error)
        if not isinstance(error, Exception):
            raise
    else:
        copying.add_done_callback(end)


def _end_staging(future: SaveFuture, error: BaseException | None) -> None:
    if error is None:
        future._staged.set_result(None)
    else:
        future._staged.set_exception(error)


def _start(
    future: SaveFuture,
    spare: AsyncStager | None,
    group: Group,
    save: Save,
    ready: Callable[[], State],
) -> Callable[[], None]:
    """Run the save in a thread, once what is returned is called.

    A spare stager goes back when it is over.
    """
    go = threading.Event()

    def work() -> None:
        nonlocal ready, save
        go.wait()
        metadata, failure = None, None
        try:
            metadata = save(ready, group)
        except BaseException as error:
            failure = error
        # What the state and the planner hold is to be free when the waiting go on.
        ready = save = None  # type: ignore[assignment]
        if isinstance(spare, BlockingAsyncStager):
            _give_back(spare)
        if failure is not None:
            future._saved.set_exception(failure)
        elif metadata is not None:
            future._saved.set_result(metadata)

    _register_exit()
    with _lock:
        _saves.append(future)
    # A daemon: were it joined like others, its own thread pools would be shut before it has ended.
    threading.Thread(target=work, name="xckpt-save", daemon=True).start()
    return go.set


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
    """At exit: wait for what is in flight, and log failures that nobody asked for."""
    for save in list(_saves):
        error = save._saved.exception()
        if error is not None and not save._seen:
            _report(save, error)


def _report(save: SaveFuture, error: BaseException) -> None:
    logger.error(
        "the asynchronous save to %s failed, and nobody asked for its result: %s: %s",
        save.where,
        type(error).__name__,
        error,
    )


def _forget_all() -> None:
    """In a forked child: the saves are the parent's, and their threads are not here."""
    global _lock
    _lock = threading.Lock()
    _saves.clear()
    _spare.clear()
