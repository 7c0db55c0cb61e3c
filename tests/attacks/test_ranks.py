"""Ranks that die, stop, raise, leave or come late: the others raise in time, and name them.

A rank strikes in the progress callback of its call: its plan is sent then, and some of its chunks
are written or read. One that stops goes on some seconds later, as a debugged process would.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import xckpt
from tests.support.jax_jobs import run
from tests.support.ranks import Ranks
from tests.support.time_limit import ALLOWANCE
from xckpt.planner import DefaultLoadPlanner, DefaultSavePlanner

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

TIMEOUT = 4.0
"""Seconds that a rank waits for another."""
SLACK = 2.0 * ALLOWANCE
LATE = 12.0
"""Seconds after which a stopped rank goes on."""
VICTIM = 1

WAYS = ("killed", "stopped", "raises", "sys.exit", "SIGTERM", "SIGINT", "late", "never calls")
CALLS = ("save", "save_async", "load", "load alone", "load_into")


class Struck(RuntimeError):
    """What the victim raises."""


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def state(number: int) -> dict[str, Any]:
    """Several chunks for each rank, and a value that is stored as bytes."""
    leaves = {f"w{n}": np.full((256, 64), number, np.int32) for n in range(6)}
    return {**leaves, "step": number, "text": "x" * 5000}


def strike(way: str) -> None:
    """What happens to the victim."""
    own = os.getpid()
    if way == "killed":
        os.kill(own, signal.SIGKILL)
    elif way == "stopped":
        subprocess.Popen(["sh", "-c", f"sleep {LATE}; kill -CONT {own}"])
        os.kill(own, signal.SIGSTOP)
    elif way == "raises":
        raise Struck("a callback")
    elif way == "sys.exit":
        sys.exit(3)
    elif way == "SIGTERM":
        os.kill(own, signal.SIGTERM)
        time.sleep(5)
    elif way == "SIGINT":
        signal.raise_signal(signal.SIGINT)


def called(call: str, path: str, progress: Any, group: Any = None) -> None:
    """One of the calls."""
    saving = xckpt.SaveOptions(chunk_bytes=1 << 14, threads=1, progress=progress)
    share = call != "load alone"
    loading = xckpt.LoadOptions(threads=1, share_reads=share, progress=progress)
    if call == "save":
        xckpt.save(path, state(2), overwrite=True, options=saving, group=group)
    elif call == "save_async":
        xckpt.save_async(path, state(2), overwrite=True, options=saving, group=group).result()
    elif call == "load_into":
        xckpt.load_into(path, state(0), options=loading, group=group)
    else:
        xckpt.load(path, state(0), options=loading, group=group)


def on_rank(rank: int, call: str, way: str, path: str, group: Any = None) -> Any:
    """A call of which one rank is struck: the error's class, its text, and the seconds it took."""
    logging.getLogger("xckpt").setLevel(logging.CRITICAL)
    if group is None:
        group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    if rank == VICTIM and way == "late":
        time.sleep(TIMEOUT / 2)
    if rank == VICTIM and way == "never calls":
        return "away", "", 0.0
    began = time.monotonic()
    struck = False

    def progress(seen: object) -> None:
        nonlocal struck
        if rank == VICTIM and not struck:
            struck = True
            strike(way)

    try:
        called(call, path, progress, group)
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        ours = "XckptError" in kinds or isinstance(error, RuntimeError)
        if rank != VICTIM and not ours:
            raise
        return kinds[0], str(error), time.monotonic() - began
    return "done", "", time.monotonic() - began


SAVE_HOOKS = (
    *("set_up_planner", "replicas", "create_local_plan", "create_global_plan", "finish_plan"),
    "resolve_data",
)
LOAD_HOOKS = (
    *("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "check_plan"),
    *("resolve_tensor", "commit_tensor", "load_bytes"),
)
RAISED = (KeyboardInterrupt, SystemExit, GeneratorExit, Struck)


def in_a_hook(kind: Any, hook: str, error: type[BaseException]) -> Any:
    """A planner of which one hook raises."""

    def raising(*_: object) -> None:
        raise error(f"in {hook}")

    return type("Raising", (kind,), {hook: raising})()


def on_rank_of_hooks(
    rank: int, call: str, hook: str, error: type[BaseException], victim: int, path: str
) -> Any:
    """A call in which a planner of one rank raises; then all save and load together."""
    logging.getLogger("xckpt").setLevel(logging.CRITICAL)
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    kind: Any = DefaultSavePlanner if call == "save" else DefaultLoadPlanner
    planner = in_a_hook(kind, hook, error) if rank == victim else kind()
    began, answer = time.monotonic(), "done"
    try:
        if call == "save":
            xckpt.save(path, state(2), overwrite=True, planner=planner, group=group)
        else:
            xckpt.load(path, state(0), planner=planner, group=group)
    except BaseException as caught:
        answer = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - began
    dist.barrier()
    committed = xckpt.open(path)["step"]
    xckpt.save(f"{path}-again", state(3), overwrite=True, group=group)
    again = xckpt.load(f"{path}-again", state(0), group=group)
    return answer, seconds, committed, again["step"]


@pytest.mark.parametrize(
    "call, hook",
    [*[("save", hook) for hook in SAVE_HOOKS], *[("load", hook) for hook in LOAD_HOOKS]],
)
def test_a_hook_raises(three_ranks: Ranks, tmp_path: Path, call: str, hook: str) -> None:
    """Also what is no Exception, and in the first step of a group, where ranks just meet."""
    path, victims = tmp_path / "ckpt", (0,) if hook == "create_global_plan" else (0, VICTIM)
    xckpt.save(path, state(1), no_dist=True)
    for victim, error in itertools.product(victims, RAISED):
        attack = call, hook, error, victim, str(path)
        for rank, (answer, seconds, committed, again) in enumerate(
            three_ranks.run(on_rank_of_hooks, *attack)
        ):
            assert (error.__name__ if rank == victim else f"rank {victim}") in answer, attack
            assert seconds < SLACK * ALLOWANCE, (attack, seconds)
            assert (committed, again) == (1, 3)
    assert is_whole(path, (1,))


def is_whole(path: Path, numbers: tuple[int, ...]) -> bool:
    """Whether a checkpoint is there, one of those, verified."""
    opened = xckpt.open(path)
    return opened.verify() == [] and opened["step"] in numbers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_is_struck(tmp_path: Path, call: str, way: str) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1), options=xckpt.SaveOptions(chunk_bytes=1 << 14), no_dist=True)
    with Ranks(3) as ranks:
        answers = ranks.attempt(on_rank, call, way, str(path))
    assert is_whole(path, (1, 2))
    others = [answer for rank, (_, answer) in enumerate(answers) if rank != VICTIM]
    assert all(ok for rank, (ok, _) in enumerate(answers) if rank != VICTIM), answers
    for kind, text, seconds in others:
        if way == "late":
            assert kind == "done", text
        else:
            assert kind != "done" or way in ("SIGINT", "sys.exit"), answers
            assert f"rank {VICTIM}" in text or kind == "done", text
        assert seconds < TIMEOUT + SLACK, (seconds, text)
    if way not in ("late",) and call.startswith("save") and others[0][0] != "done":
        assert is_whole(path, (1,))


def test_nothing_stays_of_killed_ranks(tmp_path: Path) -> None:
    """Neither sockets nor folders in /tmp or in the folder of the checkpoint."""
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1), options=xckpt.SaveOptions(chunk_bytes=1 << 14), no_dist=True)
    place = Path(tempfile.gettempdir())
    before = {entry.name for entry in place.glob("xckpt-*")}
    for call in ("load", "save"):
        with Ranks(3) as ranks:
            ranks.attempt(on_rank, call, "killed", str(path))
    xckpt.save(tmp_path / "another", state(3), no_dist=True)
    assert sorted(os.listdir(tmp_path)) == ["another", "ckpt"]
    assert {entry.name for entry in place.glob("xckpt-*")} <= before


JAX_WAYS = ("raises", "killed", "stopped", "late", "never calls")


def on_jax_rank(call: str, way: str, path: str) -> Any:
    """The same over JAX's coordination service."""
    from xckpt.jax.group import JaxGroup

    meeting = JaxGroup(timeout=60)
    group = JaxGroup(timeout=TIMEOUT)
    meeting.broadcast(b"" if meeting.rank == 0 else None)
    answer = on_rank(group.rank, call, way, path, group)
    time.sleep(LATE if way in ("killed", "stopped", "never calls") else 0)
    return answer


@pytest.mark.parametrize(
    "call, way",
    [
        (call, way)
        for call in ("save", "save_async", "load")
        for way in JAX_WAYS
        if (call, way) != ("load", "stopped")
    ],
)
def test_a_rank_of_jax_is_struck(tmp_path: Path, call: str, way: str) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1), options=xckpt.SaveOptions(chunk_bytes=1 << 14), no_dist=True)
    killed = (VICTIM,) if way == "killed" else ()
    answers: list[Any] = run(on_jax_rank, 2, call, way, str(path), killed=killed)
    kind, text, seconds = answers[0]
    assert is_whole(path, (1, 2))
    if way == "late":
        assert kind == "done", text
    else:
        assert kind != "done" and f"rank {VICTIM}" in text
    assert seconds < TIMEOUT + SLACK


CUT = """
import datetime, json, logging, subprocess, sys, time
import torch.distributed as dist
import xckpt
from tests.attacks.test_ranks import TIMEOUT, called
rank, call, path, store, link = int(sys.argv[1]), *sys.argv[2:]
logging.getLogger("xckpt").setLevel(logging.CRITICAL)
dist.init_process_group("gloo", init_method=f"tcp://{store}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=TIMEOUT))
dist.barrier()
began, cut = time.monotonic(), False
def progress(seen):
    global cut
    if rank == 1 and not cut:
        cut = True
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
try:
    called(call, path, progress)
    answer = ["done", ""]
except xckpt.XckptError as error:
    answer = [type(error).__name__, str(error)]
print(json.dumps([*answer, time.monotonic() - began]), flush=True)
import os
os._exit(0)
"""


def namespaces() -> list[str] | None:
    """Two network namespaces that one cable joins, if the system allows it."""
    names = [f"xckpt{os.getpid()}{side}" for side in "ab"]
    links = [f"v{os.getpid()}{side}" for side in "ab"]
    commands = [["ip", "netns", "add", name] for name in names]
    commands += [["ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1]]]
    for number, (name, link) in enumerate(zip(names, links, strict=True)):
        inside = ["ip", "-n", name]
        commands += [["ip", "link", "set", link, "netns", name]]
        commands += [[*inside, "addr", "add", f"10.99.7.{number + 1}/24", "dev", link]]
        commands += [[*inside, "link", "set", link, "up"], [*inside, "link", "set", "lo", "up"]]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        return None
    return names


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_network_is_cut_between_ranks(tmp_path: Path, call: str) -> None:
    names = namespaces() if os.geteuid() == 0 else None
    if names is None:
        pytest.fail("this test needs root and network namespaces (`ip netns add`)")
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1), options=xckpt.SaveOptions(chunk_bytes=1 << 14), no_dist=True)
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, name in enumerate(names):
            link = f"v{os.getpid()}{'ab'[rank]}"
            command = ["ip", "netns", "exec", name, sys.executable, "-W", "ignore", "-c", CUT]
            arguments = [str(rank), call, str(path), "10.99.7.1:29555", link]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": link}
            processes.append(
                subprocess.Popen(
                    [*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment
                )
            )
        answers = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
    import json

    for rank, answer in enumerate(answers):
        kind, text, seconds = json.loads(answer)
        assert kind == "RanksFailedError", answers
        assert f"rank {1 - rank}" in text
        assert seconds < TIMEOUT + SLACK + 2, answers
    assert is_whole(path, (1,))
