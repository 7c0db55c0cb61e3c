"""JAX's preemption notice: one count for all who ask in a job, and a new one in the next job."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import jax
import pytest
from jax._src import distributed

from tests.support.jax_jobs import run
from xckpt.engine.run.preemption import Preemption
from xckpt.jax.preemption import current_notice


class Manager:
    """Stands in for that of JAX: from the third call on, all stop."""

    def reached_sync_point(self, step: int) -> bool:
        return step == 3


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed.global_state, "client", object())
    distributed.global_state.preemption_sync_manager = Manager()
    yield
    distributed.global_state.preemption_sync_manager = None


def test_all_who_ask_count_together(job: None) -> None:
    notice = current_notice()
    assert notice is not None and current_notice() is notice
    assert [notice.reached() for _ in range(5)] == [False, False, True, True, True]


def test_the_next_job_counts_anew(job: None) -> None:
    """Its other processes may have made no call yet; its manager may lie where the last one did."""
    for _ in range(5):
        notice = current_notice()
        assert notice is not None
        assert [notice.reached() for _ in range(4)] == [False, False, True, True]
        distributed.global_state.preemption_sync_manager = None
        assert current_notice() is None
        distributed.global_state.preemption_sync_manager = Manager()


def test_the_signal_is_left_to_the_service(job: None) -> None:
    before, preemption = (
        signal.getsignal(signal.SIGTERM),
        Preemption((signal.SIGTERM, signal.SIGUSR1)),
    )
    preemption.watch()
    mine = signal.getsignal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGTERM) is before and callable(mine)
    assert [preemption.asked() for _ in range(3)] == [False, False, True]
    preemption.rest()


def signalled() -> list[object]:
    answers: list[object] = []
    with socket.socket() as held:
        held.bind(("localhost", 0))
        port = held.getsockname()[1]
    for job in range(2):
        if job:
            jax.distributed.shutdown()
            jax.distributed.initialize(f"localhost:{port}", 1, 0)
        notice = current_notice()
        assert notice is not None
        answers.append(notice.reached())
        if not job:
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 60
            while not notice.reached() and time.monotonic() < until:
                time.sleep(0.05)
            answers.append(notice.reached())
    return answers


@pytest.mark.thorough
def test_a_process_that_was_signalled_in_one_job_may_join_another() -> None:
    assert run(signalled, 1) == [[False, True, False]]
