"""Ranks on two hosts whose network is cut, loses packets or takes its time.

Where the network comes to nothing, each rank names the other in time, and nothing is committed but
by a cut that comes after the commit. Where it is only bad, the call succeeds. Hosts are namespaces,
which only root can make: without them these tests fail, for nothing else holds this law.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xckpt
from tests.support.network import Network, Weather
from tests.support.time_limit import ALLOWANCE

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

TIMEOUT = 4.0
"""Seconds that a rank waits for another."""
SLACK = 2.0 * ALLOWANCE

CUT = Weather(loss=1.0)
ONE_WAY = {"from a": Weather(loss=1.0, lost_from="a"), "from b": Weather(loss=1.0, lost_from="b")}

ON_RANK = """
import datetime, json, logging, os, sys, time
from pathlib import Path
import torch.distributed as dist
import xckpt
from tests.attacks.test_ranks import called, state
from tests.support.network import Weather
from tests.support.signs import act_before
from xckpt.engine.ranks.star import Star
rank, call, path, store, timeout, number, weather, at = int(sys.argv[1]), *sys.argv[2:]
logging.getLogger("xckpt").setLevel(logging.CRITICAL)
dist.init_process_group("gloo", init_method=f"tcp://{store}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
group = dist.new_group(timeout=datetime.timedelta(seconds=float(timeout)))
dist.barrier()
began, changes = time.monotonic(), Weather(**json.loads(weather))
def change(*_):
    global began
    changes.write(Path(at))
    time.sleep(0.3)  # until the packets have it
    began = time.monotonic()
if rank == 1 and number.isdigit():
    act_before(Star, int(number), change)
if number == "first":
    if rank == 1:
        change()
    else:
        time.sleep(0.6)
struck = []
def progress(*_):
    if rank == 1 and number == "middle" and not struck:
        struck.append(1)
        change()
try:
    called(call, path, progress, group)
    answer = ["done", "", []]
except xckpt.XckptError as error:
    answer = [type(error).__name__, str(error), [each.rank for each in error.failures]]
print(json.dumps([*answer, time.monotonic() - began]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    try:
        network = Network(tmp_path_factory.mktemp("network"))
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"") or error
        pytest.fail(f"these tests need root and network namespaces (`ip netns add`): {why!r}")
    yield network
    network.close()


PORTS = iter(range(29600, 29700))


def answers(
    network: Network, folder: Path, call: str, number: str, weather: Weather, timeout: float
) -> list[Any]:
    """What the rank of each host says of a call in which the weather changes."""
    Weather().write(network.weather)
    path = folder / "ckpt"
    xckpt.save(path, state(1), options=xckpt.SaveOptions(chunk_bytes=1 << 14), no_dist=True)
    store = f"{network.addresses['a']}:{next(PORTS)}"
    arguments = (call, str(path), store, str(timeout), number)
    changes = json.dumps(weather.__dict__), str(network.weather)
    processes = [
        network.run(side, ON_RANK, str(rank), *arguments, *changes)
        for rank, side in enumerate("ab")
    ]
    try:
        return [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def state(number: int) -> dict[str, Any]:
    from tests.attacks.test_ranks import state

    return state(number)


def is_whole(path: Path, number: int) -> bool:
    """Whether a checkpoint of one save is there, verified."""
    opened = xckpt.open(path)
    return opened.verify() == [] and opened["step"] == number


@pytest.mark.parametrize(
    "call, number, weather",
    [
        ("save", "first", "cut"),
        ("save", "middle", "cut"),
        ("save_async", "middle", "from b"),
        ("load", "2", "cut"),
        ("load", "middle", "from a"),
    ],
)
def test_hosts_that_hear_nothing_of_each_other(
    network: Network, tmp_path: Path, call: str, number: str, weather: str
) -> None:
    """Before the ranks meet, before a collective of that number, and while they write or read.

    A load is done on a rank that needs nothing more of the other, as of one that is lost then. A
    rank that is heard no more may still hear that it is given up.
    """
    said = answers(network, tmp_path, call, number, ONE_WAY.get(weather, CUT), TIMEOUT)
    for rank, (kind, text, named, seconds) in enumerate(said):
        if (call, number, kind) == ("load", "middle", "done"):
            continue
        assert kind == "RanksFailedError" and f"rank {named[0]}: " in text, said
        assert named == [1 - rank] or (weather, named) in (("from a", [0]), ("from b", [1])), said
        assert seconds < TIMEOUT + SLACK, said
    assert any(kind == "RanksFailedError" for kind, *_ in said)
    assert is_whole(tmp_path / "ckpt", 1)


@pytest.mark.parametrize("weather", [Weather(delay=0.3), Weather(loss=0.1)])
def test_a_bad_network_is_no_fault(network: Network, tmp_path: Path, weather: Weather) -> None:
    said = answers(network, tmp_path, "save", "first", weather, 60.0)
    assert [kind for kind, *_ in said] == ["done", "done"], said
    assert is_whole(tmp_path / "ckpt", 2)
