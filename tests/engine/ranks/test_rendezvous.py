"""A coordinator's connections are open files: their limit is raised, or named on all ranks."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent import futures

import pytest
from msgspec.structs import replace

from xckpt.engine.ranks import rendezvous
from xckpt.engine.ranks.connection import Connection, Frame, Kind
from xckpt.engine.ranks.patience import Patience
from xckpt.engine.ranks.rendezvous import SPARE_FILES, allow_open_files, connect, invite

NOFILE = resource.RLIMIT_NOFILE


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The soft and the hard limit of open files, which a test may change."""
    before = resource.getrlimit(NOFILE)
    yield before
    resource.setrlimit(NOFILE, before)


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_soft_limit_is_raised_as_far_as_needed(limits: tuple[int, int]) -> None:
    opened, hard = open_files(), limits[1]
    resource.setrlimit(NOFILE, (opened + 50, hard))
    allow_open_files(400)
    soft = resource.getrlimit(NOFILE)[0]
    assert opened + 400 + SPARE_FILES <= soft <= opened + 410 + SPARE_FILES
    allow_open_files(20)
    assert resource.getrlimit(NOFILE) == (soft, hard)


def test_a_hard_limit_is_named_with_what_to_do(
    limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(
        OSError, match=r"10,240 ranks .* hard limit is 4,096. .*`ulimit -n 10\d\d\d`"
    ):
        invite(10_240)
    monkeypatch.undo()
    assert resource.getrlimit(NOFILE) == limits


def test_where_it_is_just_enough_ranks_connect(limits: tuple[int, int]) -> None:
    """A small group still saves in a process that must not open many files."""
    soft, hard = limits
    allow_open_files(hard - open_files() - 1)
    assert resource.getrlimit(NOFILE) == (hard, hard)
    resource.setrlimit(NOFILE, (soft, hard))


def test_ranks_that_cannot_be_accepted_are_named_at_once(limits: tuple[int, int]) -> None:
    """Files that were opened since the invitation took the place of connections."""
    links, invitation = invite(5)
    callers: list[Connection] = []
    for rank in range(1, 5):
        callers.append(Connection(connect(invitation)))
        callers[-1].send(Frame(Kind.HELLO, 0, rank, links.first))
    free = os.dup(0)  # the lowest number of a file that is free: the only one, within the limit
    os.close(free)
    resource.setrlimit(NOFILE, (free + 1, limits[1]))
    patience, now = Patience(0, 0, links, lambda rank: ""), time.monotonic()
    for _ in range(20):
        links.turn(0.01)
    waited = {rank: None for rank in range(1, 5) if rank not in links.to}
    lost = patience.lost_of(waited, now, 1800.0)
    resource.setrlimit(NOFILE, limits)
    assert len(lost) == 3 and [failure.rank for failure in lost] == list(waited)
    for failure in lost:
        assert "rank 0 could not accept its connection: Too many open files" in failure.message
    links.close()
    for caller in callers:
        caller.close()


@pytest.mark.thorough
def test_ranks_that_call_a_busy_coordinator_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than its system queues: the others get no answer for seconds."""
    monkeypatch.setattr(rendezvous, "BACKLOG", 2)
    links, invitation = invite(9)
    invitation = replace(invitation, host="another", addresses=["127.0.0.1"])
    with futures.ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(connect, invitation, 60.0) for _ in range(8)]
        futures.wait(calls, timeout=2 * rendezvous.CONNECT_SECONDS)
        assert not all(call.done() for call in calls)
        until = time.monotonic() + 30
        while not all(call.done() for call in calls) and time.monotonic() < until:
            links.turn(0.05)
        for call in calls:
            call.result(0).close()
    links.close()


def test_a_caller_that_has_hung_up_again_is_no_reason_to_stop() -> None:
    links, invitation = invite(2)
    connect(invitation).close()
    caller = Connection(connect(invitation))
    caller.send(Frame(Kind.HELLO, 0, 1, links.first))
    until = time.monotonic() + 10
    while 1 not in links.to and time.monotonic() < until:
        links.turn(0.05)
    assert list(links.to) == [1] and not links.refused
    links.close()
    caller.close()
    assert isinstance(caller.peer, socket.socket)
