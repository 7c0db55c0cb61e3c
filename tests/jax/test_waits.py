"""How a JAX process waits, over a service in memory: whom it names, excuses and gives up."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable

import pytest

from xckpt.errors import RankFailure, RanksFailedError
from xckpt.jax.notes import Notes
from xckpt.jax.service import InTime
from xckpt.jax.waits import Waits

SHORT, TIMEOUT, LONG = 0.05, 60.0, 1000.0
"""Seconds."""


class Service:
    """Stands in for JAX's coordination service: keys, and barriers that end as a test says."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.barrier: Callable[[], None] = lambda: None
        self.fault = ""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.keys
        self.keys[key] = value

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        if self.fault:
            raise RuntimeError(self.fault)
        if key not in self.keys:
            time.sleep(min(timeout_in_ms, 10) / 1000)
            raise RuntimeError("DEADLINE_EXCEEDED: no such key")
        return self.keys[key]

    def key_value_delete(self, key: str) -> None:
        self.keys = {name: value for name, value in self.keys.items() if not name.startswith(key)}

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        if self.fault:
            raise RuntimeError(self.fault)
        return [(name, value) for name, value in self.keys.items() if name.startswith(f"{key}/")]

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        self.barrier()


def rank(service: Service, number: int) -> Waits:
    """One of three ranks, of which rank 0 coordinates."""
    client = InTime(service)
    notes = Notes(client, number, 0, TIMEOUT)
    waits = Waits(client, notes, (number, 3, 0), TIMEOUT, math.inf)
    begin(waits)
    return waits


def begin(waits: Waits) -> None:
    """The next save begins."""
    waits._notes.begin(f"{int(waits._notes.operation or 0) + 1}")
    waits.begin()
    waits.next_step()


def failure(call: Callable[[], object]) -> RanksFailedError:
    with pytest.raises(RanksFailedError) as caught:
        call()
    return caught.value


def lost(call: Callable[[], object]) -> list[int]:
    return [each.rank for each in failure(call).failures]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    for module in ("notes", "waits"):  # however busy the machine is
        monkeypatch.setattr(f"xckpt.jax.{module}.GRACE_SECONDS", TIMEOUT)
    return Service()


def waited(waits: Waits, key: str = "key") -> bytes | None:
    return waits.wait(1, SHORT, waits.saying(lambda: [1]), key, 0.0)


def test_what_is_set_comes_and_what_is_not_does_not(service: Service) -> None:
    service.keys["key"] = b"value"
    assert waited(rank(service, 0)) == b"value"
    assert waited(rank(service, 0), "other") is None


def test_a_service_that_fails_is_no_silence(service: Service) -> None:
    waits = rank(service, 2)
    service.fault = "UNAVAILABLE: gone"
    assert "the coordination service failed" in str(failure(lambda: waited(waits)))


def test_who_waits_hears_of_a_rank_that_gave_up(service: Service) -> None:
    assert lost(lambda: rank(service, 2).give_up([1])) == [1]
    assert lost(lambda: waited(rank(service, 0))) == [1]


def test_a_coordinator_at_work_names_those_who_are_late(service: Service) -> None:
    """A rank whose part lies there is not; the save has failed for good, until the next begins."""
    waits, began = rank(service, 0), time.monotonic() - LONG
    service.keys["parts/2/0"] = b"its part"
    waits.heed("parts", time.monotonic() + LONG, 0.0)  # nobody is late yet
    assert lost(lambda: waits.heed("parts", began, 0.0)) == [1]
    assert lost(waits.next_step) == [1]
    begin(waits)
    service.keys["parts/1/0"] = b"its part"
    waits.heed("parts", began, 0.0)


def test_a_coordinator_at_work_leaves_a_failing_service_to_the_next_step(service: Service) -> None:
    waits = rank(service, 0)
    service.fault = "UNAVAILABLE: gone"
    waits.heed("parts", time.monotonic() + LONG, 0.0)


def test_a_barrier_names_those_who_did_not_come(service: Service) -> None:
    def ends() -> None:
        service.keys["barrier/1"] = b"."
        raise RuntimeError("DEADLINE_EXCEEDED: timed out. RPC: /BarrierRequest")

    waits = rank(service, 0)
    waits.meet("barrier")
    service.barrier = ends
    error = failure(lambda: waits.meet("barrier"))
    assert [each.rank for each in error.failures] == [2]
    assert "rank 2: DEADLINE_EXCEEDED: timed out." in str(error) and "RPC" not in str(error)
    service.fault = "UNAVAILABLE: gone"
    assert lost(lambda: rank(service, 1).meet("barrier")) == [0]


def test_a_process_that_came_too_late_names_itself(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have come by now, but the barrier had ended: the service counts from the first on."""
    monkeypatch.setattr("xckpt.jax.waits.GRACE_SECONDS", 1.0)

    def over() -> None:
        service.keys |= {"barrier/1": b".", "barrier/2": b"."}
        raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out. RPC: /BarrierRequest")

    service.barrier = over
    error = failure(lambda: rank(service, 0).meet("barrier"))
    assert [each.rank for each in error.failures] == [0]
    assert "rank 0: this process came " in str(error)
    assert "s after the first one, or later" in str(error)


def test_who_waits_at_a_barrier_hears_of_others(service: Service) -> None:
    """Of a rank that has left, and of one that makes another call, which hears it in its turn."""
    waits, service.barrier = rank(service, 0), lambda: time.sleep(2)
    waits._notes.call(1)
    other = rank(service, 1)
    other._notes.call(3)
    assert "rank 1: RuntimeError: it calls load, and rank 0 save;" in str(
        failure(lambda: waits.meet("barrier"))
    )
    assert "rank 1: RuntimeError: it calls load" in str(failure(lambda: waited(other)))


def test_ranks_meet_again_after_a_time_in_which_this_one_did_not_run(service: Service) -> None:
    """The service counts that time as its silence; at the next barrier all are there."""
    waits = rank(service, 0)
    attempts: list[int] = []

    def suspended() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            waits._client.away += LONG
            raise RuntimeError("DEADLINE_EXCEEDED: timed out")

    service.barrier = suspended
    waits.meet("barrier")
    assert len(attempts) == 2


def test_a_rank_that_did_not_run_excuses_the_others(service: Service) -> None:
    """What is heard then is heard, however long ago the wait began."""
    waits = rank(service, 0)
    get = service.blocking_key_value_get_bytes
    calls: list[str] = []

    def away(key: str, timeout_in_ms: int) -> bytes:
        calls.append(key)
        if len(calls) == 1:
            waits._client.away += LONG
        elif len(calls) == 2:
            service.keys["key"] = b"value"
        return get(key, timeout_in_ms)

    service.blocking_key_value_get_bytes = away  # type: ignore[method-assign]
    assert waited(waits) == b"value" and len(calls) == 2


def test_a_failure_that_is_heard_is_that_of_the_save(service: Service) -> None:
    """A rank that left says why; the coordinator at work raises that, and so does its next step."""
    failures = [RankFailure(1, "StorageError", "the disk is full", "StorageError")]
    other, waits = rank(service, 1), rank(service, 0)
    other._notes.leave(failures)
    for call in (lambda: waits.heed("parts", time.monotonic() + LONG, 0.0), waits.next_step):
        assert "the disk is full" in str(failure(call))


def test_only_the_coordinator_reads_how_all_ranks_are(service: Service) -> None:
    """Each of 10,240 ranks would else read 10,240 notes, every 0.7 s."""
    coordinator, *others = (rank(service, number) for number in range(3))
    for waits in (coordinator, *others):
        waits._notes.say_alive(0.0)
    read: list[int] = []
    get = service.key_value_dir_get_bytes

    def counted(key: str) -> list[tuple[str, bytes]]:
        found = get(key)
        read.append(len(found))
        return found

    service.key_value_dir_get_bytes = counted  # type: ignore[method-assign]
    for waits in (coordinator, *others):
        waits._notes.look()
    assert read == [3, 1, 1]
    assert [sorted(waits._notes._heard) for waits in (coordinator, *others)] == [
        [0, 1, 2],
        [0],
        [0],
    ]
    others[0]._notes.suspect([2])
    others[1]._notes.look()
    assert others[1]._notes.suspects_some


def seconds_in(error: RanksFailedError) -> float:
    """How long rank 0 was silent, as the error has it."""
    said = re.search(r"rank 0 sent nothing for ([0-9.]+) s", str(error))
    assert said, error
    return float(said[1])


def test_a_silent_service_has_sent_nothing_since_the_first_call(service: Service) -> None:
    """The error named what was left for the last call: 0.1 s where several had waited before."""
    stopped = threading.Event()
    service.key_value_set_bytes = lambda *_: stopped.wait() and None  # type: ignore[method-assign]
    service.key_value_dir_get_bytes = lambda _: stopped.wait() and []  # type: ignore[method-assign]
    service.fault = "DEADLINE_EXCEEDED: said by the client"
    client, began = InTime(service), time.monotonic()
    assert client.value_of("key") is None
    for seconds in (0.5, 0.2, 0.0):
        client.until = time.monotonic() + seconds
        error = failure(lambda: client.put("key", b"value"))
    assert 0.75 <= seconds_in(error) <= time.monotonic() - began + 0.01
    stopped.set()
    client.until = math.inf
    client.put("key", b"value")
    stopped.clear()
    client.until = began = time.monotonic()
    error = failure(lambda: client.numbers_below("key"))
    assert seconds_in(error) <= time.monotonic() - began + 0.01
    stopped.set()
