"""The JAX group between real processes: bytes, order, size, clean-up, silence."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import xckpt
from tests.support.jax_jobs import run
from tests.support.signs import await_sign
from tests.support.time_limit import ALLOWANCE
from xckpt.engine.ranks.group import Group
from xckpt.engine.steps import all_reduce, broadcast, reduce_scatter
from xckpt.errors import RanksFailedError
from xckpt.jax.group import JaxGroup, current_group
from xckpt.jax.service import PART_BYTES

# Around the end of the first part, whose head is the length.
SIZES = [0, 1, 1000, PART_BYTES - 8, PART_BYTES - 7, PART_BYTES + 5, 3 * PART_BYTES]


def noise(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@functools.cache
def noise_digest(size: int, seed: int) -> str | None:
    return digest(noise(size, seed))


def digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def exchange(coordinator: int) -> dict[str, object]:
    """Every collective with every size, and what is left in the store."""
    from jax._src import distributed, xla_bridge

    found = current_group(coordinator)
    assert found is not None and found.coordinator == coordinator
    group = JaxGroup(coordinator_rank=coordinator, timeout=60)
    assert isinstance(group, Group)
    mine = group.rank == coordinator
    gathered: list[object] = []
    scattered: list[object] = []
    sent: list[object] = []
    for size in SIZES:
        parts = group.gather(noise(size, group.rank))
        gathered.append(None if parts is None else [digest(part) for part in parts])
        entries = [noise(size, 10 + rank) for rank in range(group.size)]
        scattered.append(digest(group.scatter(entries if mine else None)))
        sent.append(digest(group.broadcast(noise(size, 99) if mine else None)))
    client = distributed.global_state.client
    assert client is not None
    client.wait_at_barrier("all is deleted", 60_000)
    left = client.key_value_dir_get_bytes("xckpt")
    client.wait_at_barrier("all have looked", 60_000)
    return {
        "rank": group.rank,
        "size": group.size,
        "gathered": gathered,
        "scattered": scattered,
        "sent": sent,
        "left": [key for key, _ in left],
        "backend": xla_bridge.backends_are_initialized(),
    }


@pytest.mark.parametrize(
    "processes, coordinator", [pytest.param(2, 0, marks=pytest.mark.thorough), (3, 2)]
)
def test_bytes_arrive_in_rank_order_and_nothing_stays(processes: int, coordinator: int) -> None:
    answers = run(exchange, processes, coordinator)
    for rank, answer in enumerate(answers):
        assert isinstance(answer, dict)
        assert (answer["rank"], answer["size"]) == (rank, processes)
        assert answer["scattered"] == [noise_digest(size, 10 + rank) for size in SIZES]
        assert answer["sent"] == [noise_digest(size, 99) for size in SIZES]
        everyone = [[noise_digest(size, other) for other in range(processes)] for size in SIZES]
        nothing = [None] * len(SIZES)
        assert answer["gathered"] == (everyone if rank == coordinator else nothing)
        assert answer["left"] == []
        assert answer["backend"] is False


def meeting() -> Callable[[], object]:
    """What waits for all processes, whatever they call in between; all make it together."""
    group = JaxGroup(timeout=60).in_background()
    return lambda: group.broadcast(b"" if group.rank == 0 else None)


def without_end() -> str:
    """A timeout that never comes; the service counts milliseconds."""
    group = JaxGroup(timeout=float("inf"))
    return group.broadcast(b"all" if group.rank == 0 else None).decode()


def test_a_timeout_may_be_endless() -> None:
    assert run(without_end, 2) == ["all", "all"]


def interleaved() -> list[str]:
    """Two groups of one process used in different orders, as a save in the background does."""
    from concurrent.futures import ThreadPoolExecutor

    groups = [JaxGroup(timeout=60).in_background() for _ in range(2)]
    rank = groups[0].rank

    def talk(number: int) -> str:
        group = groups[number]
        parts = group.gather(f"{number}:{rank}".encode())
        answer = b" ".join(parts) if parts is not None else None
        return group.broadcast(answer).decode()

    with ThreadPoolExecutor(2) as pool:
        order = [0, 1] if rank == 0 else [1, 0]
        answers = dict(zip(order, pool.map(talk, order), strict=True))
    return [answers[0], answers[1]]


def test_groups_do_not_mix() -> None:
    assert run(interleaved, 2) == [["0:0 0:1", "1:0 1:1"]] * 2


def failing() -> list[str]:
    """The engine's steps over this group, with a failure on one rank and on the coordinator."""
    group = JaxGroup(timeout=60)

    def local() -> bytes:
        if group.rank == 1:
            raise ValueError("no room")
        return b""

    def decide(parts: Sequence[bytes]) -> bytes:
        raise ValueError("bad plan")

    messages: list[str] = []
    for step in (
        lambda: reduce_scatter(group, "plan", local, lambda parts: parts),
        lambda: all_reduce(group, "write", lambda: b"", decide),
        lambda: broadcast(group, "read", lambda: decide([])),
    ):
        with pytest.raises(ValueError, match="1 rank failed to") as caught:
            step()
        messages.append(str(caught.value))
    messages.append(all_reduce(group, "end", lambda: b"x", lambda parts: b"".join(parts)).decode())
    return messages


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    first, *others = run(failing, 3)
    assert isinstance(first, list)
    assert "rank 1: ValueError: no room" in first[0]
    assert "rank 0: ValueError: bad plan" in first[1]
    assert "rank 0: ValueError: bad plan" in first[2]
    assert first[3] == "xxx"
    assert others == [first, first]


def silent(cases: list[list[int]]) -> list[object]:
    """In each case some ranks don't take part; the others say what they raised and when."""
    messages: list[object] = []
    meet = meeting()
    for quiet in cases:
        group = JaxGroup(timeout=2).in_background()
        start = time.monotonic()
        messages.append(None)
        if group.rank not in quiet:
            with pytest.raises(RanksFailedError, match="lost contact") as caught:
                reduce_scatter(group, "plan", lambda: b"", lambda parts: parts)
            ranks = [failure.rank for failure in caught.value.failures]
            messages[-1] = [str(caught.value), ranks, time.monotonic() - start]
        meet()
    last = JaxGroup(timeout=1).in_background()
    if last.rank == 0:
        with pytest.raises(RanksFailedError, match="not every rank came within 1 s"):
            last.broadcast(b"")
    meet()
    return messages


@pytest.mark.thorough
def test_silent_ranks_are_named_on_the_others() -> None:
    cases = [[1, 2], [1], [0]]
    for rank, answers in enumerate(run(silent, 3, cases)):
        assert isinstance(answers, list)
        for quiet, answer in zip(cases, answers, strict=True):
            if rank in quiet:
                assert answer is None
                continue
            message, ranks, seconds = answer
            assert ranks == quiet
            assert "sent nothing for 2 s" in message
            assert seconds < 2 + 6 * ALLOWANCE


def suspecting() -> list[object]:
    """Rank 1 takes no part; rank 2 has waited for it elsewhere, and the coordinator for rank 2."""
    group, meet = JaxGroup(timeout=20), meeting()
    meet()
    ranks: list[int] = []
    start = time.monotonic()
    if group.rank != 1:
        group.begin()
        group.suspect([2] if group.rank == 0 else [1])
        with pytest.raises(RanksFailedError, match="lost contact") as caught:
            reduce_scatter(group, "read", lambda: b"", lambda parts: parts)
        ranks = [failure.rank for failure in caught.value.failures]
    seconds = time.monotonic() - start
    meet()
    return [ranks, seconds]


def test_the_coordinator_takes_the_word_of_a_rank_that_others_are_silent() -> None:
    first, _, last = cast(list[Any], run(suspecting, 3))
    for ranks, seconds in (first, last):
        assert ranks == [1]
        assert seconds < 2 * ALLOWANCE


def killed() -> str:
    """One process is killed within a step."""
    group = JaxGroup(timeout=3)
    meeting()()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RanksFailedError, match="lost contact") as caught:
        group.gather(b"")
    return str(caught.value)


def test_a_killed_process_is_named() -> None:
    answers = run(killed, 2, killed=(1,))
    assert "rank 1 sent nothing for 3 s" in str(answers[0])


def test_one_process_has_no_group_and_starts_no_backend() -> None:
    code = (
        "from xckpt.jax.group import current_group\n"
        "from jax._src import xla_bridge\n"
        "assert current_group() is None\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "import jax; jax.devices()\n"
        "assert current_group() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_group_needs_the_coordination_service() -> None:
    with pytest.raises(RuntimeError, match=r"jax\.distributed\.initialize"):
        JaxGroup()


def wrong_coordinator() -> str:
    with pytest.raises(ValueError, match=r"coordinator_rank 1 is not in \[0, 1\)") as caught:
        JaxGroup(coordinator_rank=1)
    assert current_group() is None
    return str(caught.value)


def test_a_coordinator_must_exist() -> None:
    assert "coordinator_rank" in str(run(wrong_coordinator, 1)[0])


PATIENT = min(2.5, ALLOWANCE)
"""A timeout, longer where other jobs share the machine: there JAX's service may take a second."""


def late(warned: float, folder: str) -> list[object]:
    """Ranks 1 and 2 come after two warnings: what each says, and how a timeout ends a save."""
    heard: list[str] = []
    twice = Path(folder, "heard twice")

    def note(record: logging.LogRecord) -> None:
        heard.append(f"{record.levelname}: {record.getMessage()}")
        if len(heard) == 2:
            twice.touch()

    handler = logging.Handler()
    handler.emit = note
    logging.getLogger("xckpt").addHandler(handler)
    group, meet = JaxGroup(warn_after=warned), meeting()
    meet()
    if group.rank:
        await_sign(twice)
    group.gather(b"")
    meet()
    end = JaxGroup(timeout=60).in_background()  # on all ranks, before one of them saves
    if group.rank:
        end.broadcast(None)
        return [heard, "", []]
    with pytest.raises(RanksFailedError) as caught:
        xckpt.save("memory://late", {"n": 1}, timeout=PATIENT)
    end.broadcast(b"")
    return [heard, str(caught.value), [failure.rank for failure in caught.value.failures]]


def test_a_rank_that_waits_says_for_whom_and_a_timeout_ends_it(tmp_path: Path) -> None:
    answers = cast(list[list[Any]], run(late, 3, 0.5, str(tmp_path)))
    (heard, text, ranks), *others = answers
    assert len(heard) == 2  # after 0.5 s, and 1 s later; the next would be 2 s later
    for warning in heard:
        assert warning.startswith("WARNING: rank 0 has waited")
        assert "s for ranks 1, 2: is it alive" in warning and "timeout=" in warning
    assert ranks == [1, 2], text
    silence = f"ranks 1, 2 sent nothing for {PATIENT:g} s"
    assert f"{silence}; is it alive, and did it call the same save" in text
    assert [heard for heard, *_ in others] == [[], []]
