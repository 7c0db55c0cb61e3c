"""Each failure of a save in the background is raised once, whatever threads ask and save."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.schedules import at_once, fuzzed
from xckpt import LocalGroup, Metadata
from xckpt.engine.in_flight import IN_FLIGHT, SaveInFlight, settle

GROUP = LocalGroup()


def listed() -> SaveInFlight:
    status = SaveInFlight("there", 0, 1)
    IN_FLIGHT[status] = None
    return status


@examples(25)
@given(
    st.integers(0, 1 << 20),
    st.integers(1, 3),
    st.lists(st.sampled_from([None, 0.0, 0.002]), max_size=3),
)
def test_a_failure_is_raised_once(seed: int, saves: int, askers: list[float | None]) -> None:
    """By those that ask, each time; else by one later save; never by two, never by none."""
    status, failure = listed(), OSError("the disk is full")
    asked: list[BaseException | None] = []
    raised: list[BaseException | None] = []

    def ask(seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            asked.append(status.ask(seconds))

    calls = [lambda seconds=seconds: ask(seconds) for seconds in askers]
    with fuzzed(seed, "engine/in_flight.py"):
        at_once(
            *calls,
            *(lambda: raised.append(settle(GROUP)),) * saves,
            lambda: status.saved.set_exception(failure),
        )
    raised.append(settle(GROUP))
    assert status not in IN_FLIGHT
    assert set(asked) <= {failure} and askers.count(None) <= len(asked)
    assert raised.count(failure) <= 1
    assert raised.count(failure) == 1 or asked
    assert raised.count(failure) == 0 or len(failure.__notes__) == 1


class Late(Future[Metadata]):
    """A thread that asks with much patience comes back from its wait when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.go_on = threading.Event(), threading.Event()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        if timeout is not None:
            self.ended.set()
            self.go_on.wait(20)
        return error


def test_a_failure_that_a_thread_waits_for_is_no_later_saves() -> None:
    status, failure, late = listed(), OSError("the disk is full"), Late()
    status.saved = late
    asked: list[BaseException | None] = []
    waiting = threading.Thread(target=lambda: asked.append(status.ask(20)))
    waiting.start()
    late.set_exception(failure)
    assert late.ended.wait(20)
    assert settle(GROUP) is None and status in IN_FLIGHT
    late.go_on.set()
    waiting.join(20)
    assert (asked, settle(GROUP)) == ([failure], None)
    assert status not in IN_FLIGHT
