"""Saves that run while training goes on, one after the other.

`begin` is what ``save_async`` does once it knows how to save:

1. Give the group connections of its own (`BackgroundGroup`): from now on the caller's thread may
   use its process group for training.
2. Wait for the save in flight (`settle`). An unseen error of an earlier save fails every rank.
3. Start a thread that will save (`_SaveThread`) and stage the state in the caller's. A failure of
   the stager travels with the ranks' plans: every rank raises, and nothing is committed.
4. Let the thread go on. `SaveFuture` says how the save ended.

The interpreter's exit waits for the save in flight, and logs a failure that was never asked for. A
save that begins later, in a function of `atexit` or in a thread that outlives the main one, is
waited for by `begin`.
Threads that play the ranks of one group in one process do not wait for each other.
"""

from __future__ import annotations

# Its exit handler must run after ours.
import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]
import contextlib
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Protocol, cast, runtime_checkable

from xckpt.core.metadata import Metadata
from xckpt.core.text.arguments import seconds_of
from xckpt.engine.in_flight import IN_FLIGHT, SaveInFlight, settle
from xckpt.engine.limits import check_loaded, naming_limit, not_compiled
from xckpt.engine.ranks.group import Group
from xckpt.engine.stager import AsyncStager, BlockingAsyncStager
from xckpt.errors import XckptError

State = Any
"""Any tree that a save takes."""

Save = Callable[[State, BaseException | None, Group], Metadata]
"""Saves a state on a group. Given an exception, this rank has failed already and has no state."""


@runtime_checkable
class BackgroundGroup(Group, Protocol):
    """A group that training uses too: a save in the background needs separate connections."""

    def in_background(self) -> Group:
        """The same ranks over connections of their own; collective the first time."""
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

    def __init__(self, status: SaveInFlight, staged: Future[None]) -> None:
        self.where: Final = status.where
        """The path or URL that is saved to."""
        self._process = os.getpid()
        self._status = status
        self._staged = staged

    @not_compiled
    def staged(self, timeout: float | None = None) -> None:
        """Return when the state that was given may be changed.

        That is the case when ``save_async`` returns, unless its stager is still copying.

        Raises:
            TimeoutError: that takes more than ``timeout`` seconds.
            XckptError: this process was forked from the one that saves.
            Exception: what the stager raised; `result` raises it too.
        """
        self._check_process(self._staged)
        with self._naming_timeout("copied", timeout) as seconds:
            error = self._staged.exception(seconds)
        if error is not None:
            self._status.seen = True
            raise error

    @not_compiled
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

    @not_compiled
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the save failed, or None if it is committed; waits until that is known.

        Raises:
            TimeoutError: that takes more than ``timeout`` seconds.
            XckptError: this process was forked from the one that saves.
        """
        self._check_process(self._status.saved)
        with self._naming_timeout("saved", timeout) as seconds:
            return self._status.ask(seconds)

    @contextlib.contextmanager
    def _naming_timeout(self, what: str, timeout: float | None) -> Generator[float | None]:
        """The seconds to wait; the error of a wait that ends says what was not done."""
        seconds = None if timeout is None else min(seconds_of(timeout), threading.TIMEOUT_MAX)
        try:
            yield seconds
        except TimeoutError as error:
            if seconds is None or error.args:
                raise  # by a signal handler
            text = f"{self.where}: the state was not {what} within {seconds:g} s"
            raise TimeoutError(f"{text}; the save goes on: wait longer, or ask again") from None

    def _check_process(self, future: Future[Any]) -> None:
        """Refuse to wait for a save that runs in another process.

        Raises:
            XckptError: this process was forked while the save ran.
        """
        if os.getpid() != self._process and not future.done():
            raise XckptError(
                f"{self.where}: this save goes on in the process that this one was forked from, "
                f"which alone can wait for it (process {self._process})"
            )

    @not_compiled
    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._status.saved.done()

    def __repr__(self) -> str:
        state = "in flight"
        if self.done():
            state = "committed" if self._status.saved.exception() is None else "failed"
        return f"<SaveFuture {self.where}: {state}>"


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True)
class _SaveThread:
    """What the thread of a save does.

    It drops the state before it wakes those who wait for the save: they may need the memory.
    """

    status: SaveInFlight
    group: Group
    save: Save
    spare: BlockingAsyncStager | None
    copied: Future[State] = field(init=False)
    """The staged state, or why there is none; set before `go_on` is released."""
    go_on: threading.Lock = field(default_factory=_locked)
    """Released when the thread may save: in one call of C, which no interrupt divides."""
    has_started: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """Taken once: by the thread, or by the caller that could not start it."""

    def start(self) -> None:
        """Start the thread.

        A daemon: if it were joined like others, its own pools would be shut down before it ends.
        """
        check_loaded()  # a thread that is to load TensorStore may not even start
        threading.Thread(target=self.run, name="xckpt-save", daemon=True).start()
        self.has_started = True

    def fail(self, error: BaseException) -> None:
        """The save ends here if its thread has not started; else the thread ends it."""
        self.copied = _failed(error)
        if not self.has_started and self._turn.acquire(blocking=False):
            self.status.saved.set_exception(error)

    def run(self) -> None:
        """Save once `go_on` is released; give a spare stager back, then say how it ended."""
        if not self._turn.acquire(blocking=False):
            return
        self.go_on.acquire()
        outcome = self._outcome()
        del self.copied, self.save
        if self.spare is not None:
            # Kept for the next save; the system may take its memory in between.
            self.spare.rest()
            _spare[:] = [self.spare]
        if isinstance(outcome, Metadata):
            self.status.saved.set_result(outcome)
        else:
            self.status.saved.set_exception(outcome)

    def _outcome(self) -> Metadata | BaseException:
        state, failure = None, None
        try:
            state = self.copied.result()
        except BaseException as error:
            failure = error
        try:
            return self.save(state, failure, self.group)
        except BaseException as error:
            return naming_limit(error)


_spare: list[BlockingAsyncStager] = []
"""The stager of saves that name none, while it is free; the system may take its memory back."""


def begin(
    where: str, state: State, stager: AsyncStager | None, group: Group, save: Save
) -> SaveFuture:
    """Stage a state and save it in a thread; collective on a group's first call.

    Raises:
        XckptError: an earlier save failed, and its result was never asked for; or this one did,
            and the interpreter is ending.
    """
    background = group.in_background() if isinstance(group, BackgroundGroup) else group
    failure = settle(group)
    status = SaveInFlight(where, group.rank, group.size, beginner=threading.get_ident())
    staged: Future[None] = Future()
    spare = None
    if stager is None:
        stager = spare = _take_spare()
    work = _SaveThread(status, background, save, spare)
    _register_exit()
    try:
        IN_FLIGHT[status] = None
        # Started before the copying, but released after it: else the caller would wait for the
        # interpreter's lock while the save plans.
        work.start()
        if failure is not None:
            # The other ranks may know of no failure: the save tells them, and this rank raises.
            raise failure
        work.copied = _stage(stager, state, until=status.saved)
    except BaseException as error:
        status.seen = True
        work.fail(error)
        raise
    finally:
        copied = work.copied
        status.beginner = None
        work.go_on.release()  # nothing that an interrupt may leave out stands before this
        copied.add_done_callback(lambda copied: _end(staged, _failure(copied)))
    saving = SaveFuture(status, staged)
    if _exit_began.is_set():
        saving.result()
    return saving


def _stage(stager: AsyncStager, state: State, until: Future[Metadata]) -> Future[State]:
    """Have a stager copy a state; the result is the copy, or the stager's failure.

    A stager that lends its memory does so ``until`` the save has ended.
    """
    copied: Future[State] = Future()
    try:
        if isinstance(stager, BlockingAsyncStager):
            with stager.turn:
                staged = stager.stage(state)
                stager.lend(until)
        else:
            staged = stager.stage(state)
        if isinstance(staged, Future):
            copied = cast("Future[State]", staged)
        else:
            copied.set_result(staged)
        has_failed = copied.done() and _failure(copied) is not None
        if not has_failed and getattr(stager, "should_synchronize_after_execute", False):
            stager.synchronize_staging()
    except Exception as error:
        return _failed(error)
    return copied


def _failed(error: BaseException) -> Future[State]:
    future: Future[State] = Future()
    future.set_exception(error)
    return future


def _failure(future: Future[Any]) -> BaseException | None:
    """Why a finished future has no result."""
    return CancelledError() if future.cancelled() else future.exception()


def _end(staged: Future[None], error: BaseException | None) -> None:
    if error is None:
        staged.set_result(None)
    else:
        staged.set_exception(error)


def _take_spare() -> BlockingAsyncStager:
    try:
        return _spare.pop()
    except IndexError:
        return BlockingAsyncStager(cache_staged_state_dict=True)


_exit_began: Final = threading.Event()
"""Set before `_finish` looks for the last time at what is in flight."""


@cache
def _register_exit() -> None:
    # The standard library has no public name for what runs before thread pools are shut;
    # `atexit` runs after that, when nobody waits for a save any more.
    try:
        threading._register_atexit(_finish)  # type: ignore[attr-defined]
    except RuntimeError:  # too late: this is the first save, in a function of `atexit`
        _exit_began.set()
    os.register_at_fork(after_in_child=_forget_all)


def _finish() -> None:
    """At exit: wait for what is in flight, and log failures that were never asked for."""
    _exit_began.set()
    for save in list(IN_FLIGHT):
        error = save.take_failure()
        if error is not None:
            save.log(error)


def _forget_all() -> None:
    """In a forked child: the saves are the parent's, and their threads are not here."""
    IN_FLIGHT.clear()
    _spare.clear()
