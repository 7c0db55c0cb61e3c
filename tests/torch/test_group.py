"""The torch group on real processes: subgroups, coordinators, failing and killed ranks."""

from __future__ import annotations

import datetime
import gc
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import xckpt
from tests.support.ranks import Ranks, die
from tests.support.signs import await_sign
from tests.support.time_limit import ALLOWANCE
from xckpt.engine.groups import find_group
from xckpt.engine.ranks.group import Group
from xckpt.engine.ranks.links import Links
from xckpt.engine.steps import all_reduce, broadcast, reduce_scatter
from xckpt.errors import RanksFailedError
from xckpt.torch import meeting
from xckpt.torch.group import TorchGroup, current_group


def message(rank: int) -> bytes:
    """Of another length for each rank, rank 1's empty, rank 3's a megabyte."""
    return bytes([rank]) * [7, 0, 300, 1 << 20][rank]


def exchange(group: Group) -> tuple[list[bytes] | None, bytes, bytes]:
    """All that a group does, once."""
    assert isinstance(group, Group)
    gathered = group.gather(message(group.rank))
    is_coordinator = group.rank == group.coordinator
    scattered = group.scatter([message(r) for r in range(group.size)] if is_coordinator else None)
    announced = group.broadcast(b"done" if is_coordinator else None)
    return gathered, scattered, announced


def on_rank_exchange(rank: int, coordinator: int) -> tuple[list[bytes] | None, bytes, bytes]:
    group = TorchGroup(coordinator_rank=coordinator)
    assert (group.rank, group.size, group.coordinator) == (rank, 4, coordinator)
    return exchange(group)


@pytest.mark.parametrize("coordinator", range(4))
def test_every_rank_can_coordinate(four_ranks: Ranks, coordinator: int) -> None:
    answers = four_ranks.run(on_rank_exchange, coordinator)
    for rank, (gathered, scattered, announced) in enumerate(answers):
        assert gathered == ([message(r) for r in range(4)] if rank == coordinator else None)
        assert scattered == message(rank)
        assert announced == b"done"


def on_rank_subgroup(rank: int, backend: str) -> tuple[int, list[bytes] | None, bytes, bytes]:
    """Two groups at once, {3, 1} and {2, 0}; the coordinator is the second of each."""
    pairs = [dist.new_group([3, 1], backend=backend), dist.new_group([2, 0], backend=backend)]
    mine, other = (pairs[0], pairs[1]) if rank % 2 else (pairs[1], pairs[0])
    assert isinstance(mine, dist.ProcessGroup)
    with pytest.raises(ValueError, match="not part of"):
        TorchGroup(other)  # pyright: ignore[reportArgumentType]  # it is torch's NON_GROUP_MEMBER
    group = TorchGroup(mine, coordinator_rank=1)
    assert group.rank == rank // 2
    again = TorchGroup(mine)
    assert exchange(again)[2] == b"done"
    return group.rank, *exchange(group)


# The second cannot send host memory, like nccl: a gloo group is made beside it.
@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_subgroups_count_ranks_for_themselves(four_ranks: Ranks, backend: str) -> None:
    for rank, gathered, scattered, announced in four_ranks.run(on_rank_subgroup, backend):
        assert gathered == ([message(0), message(1)] if rank == 1 else None)
        assert scattered == message(rank)
        assert announced == b"done"


def on_rank_sees_its_own(rank: int) -> bool:
    found = current_group()
    return found is not None and found.rank == rank


def test_the_current_group(four_ranks: Ranks) -> None:
    assert current_group() is None
    assert all(four_ranks.run(on_rank_sees_its_own))


def test_no_group_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        TorchGroup()


def on_rank_wrong_coordinator(rank: int) -> str:
    with pytest.raises(ValueError, match="coordinator_rank") as caught:
        TorchGroup(coordinator_rank=4)
    return str(caught.value)


def test_a_coordinator_that_is_not_there(four_ranks: Ranks) -> None:
    for text in four_ranks.run(on_rank_wrong_coordinator):
        assert "coordinator_rank 4" in text
        assert "[0, 4)" in text


def on_rank_fail(rank: int, step: str, failing: list[int]) -> tuple[str, list[int]]:
    """One step in which some ranks raise, and then one in which none does."""
    group = TorchGroup(coordinator_rank=2)

    def local() -> bytes:
        if rank in failing:
            raise OSError(f"no space on {rank}")
        return b"plan"

    try:
        if step == "reduce_scatter":
            reduce_scatter(group, "plan", local, lambda plans: plans)
        elif step == "all_reduce":
            all_reduce(group, "plan", local, lambda _: b"")
        elif step == "decide":
            reduce_scatter(group, "plan", lambda: b"", lambda _: [local()] * 4)
        else:
            broadcast(group, "plan", local)
    except OSError as error:
        assert reduce_scatter(group, "next", lambda: b"x", lambda plans: plans) == b"x"
        together = error.__cause__
        ranks = together.failures if isinstance(together, RanksFailedError) else ()
        return str(error), [failure.rank for failure in ranks]
    return "", []


@pytest.mark.parametrize(
    "step, failing, named",
    [
        ("reduce_scatter", [1], [1]),
        ("reduce_scatter", [0, 2], [0, 2]),
        ("all_reduce", [3, 0], [0, 3]),
        ("decide", [2], [2]),
        ("broadcast", [2], [2]),
    ],
)
def test_a_failing_rank_raises_on_all(
    four_ranks: Ranks, step: str, failing: list[int], named: list[int]
) -> None:
    for text, ranks in four_ranks.run(on_rank_fail, step, failing):
        assert ranks == named
        assert "failed to plan" in text
        assert all(f"rank {rank}: OSError: no space on {rank}" in text for rank in named)


def on_rank_loses(rank: int, victim: int, when: str) -> tuple[str, list[int], float, bool]:
    """A rank is killed before, between or in the middle of the steps of a save."""
    group = TorchGroup(coordinator_rank=0)
    started = time.monotonic()

    def local(step: str) -> bytes:
        if rank == victim and step == when:
            die()
        # Long enough that no rank waits for a message that is on its way already.
        time.sleep(0.2 * rank)
        return bytes(1 << 20)

    def decide(step: str, plans: list[bytes]) -> list[bytes]:
        if rank == victim and step == f"decide {when}":
            die()
        return plans

    try:
        reduce_scatter(group, "plan", lambda: local("plan"), lambda plans: decide("plan", plans))
        all_reduce(group, "write", lambda: local("write"), lambda _: b"")
    except RanksFailedError as error:
        seconds = time.monotonic() - started
        with pytest.raises(RanksFailedError):
            group.gather(b"")  # at once, since the others are gone
        return str(error), [f.rank for f in error.failures], seconds, True
    return "", [], time.monotonic() - started, False


@pytest.mark.parametrize("victim, when", [(2, "plan"), (1, "write"), (0, "write")])
def test_a_killed_rank_is_noticed_at_once(victim: int, when: str) -> None:
    with Ranks(3) as ranks:
        answers = ranks.attempt(on_rank_loses, victim, when)
    for rank, (ok, answer) in enumerate(answers):
        if rank == victim:
            assert (ok, answer) == (False, "ended with code -9")
            continue
        assert ok, answer
        text, lost, seconds, raised = answer
        assert raised
        assert lost == [victim]
        assert text.startswith("lost contact with 1 rank")
        assert f"rank {victim}: " in text
        assert "killed" in text
        assert seconds < 10 * ALLOWANCE


def test_a_death_is_asked_of_gloo_whatever_the_default_device() -> None:
    class Asked:
        def rank(self) -> int:
            return 0

        def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
            devices.append(tensors[0].device.type)

    devices: list[str] = []
    asked: Any = Asked()
    with torch.device("meta"):
        assert not meeting._Deaths(asked).of(1)
    assert devices == ["cpu"]


def on_rank_comes_as_another_is_lost(rank: int, folder: Path) -> tuple[str, list[int]]:
    """Rank 2 dies; rank 1 connects when the coordinator has just found that."""
    if rank == 2:
        die()
    of, reach = meeting._Deaths.of, meeting.reach

    def found(self: meeting._Deaths, rank: int) -> str:
        death = of(self, rank)
        if death:
            (folder / "found").touch()
            await_sign(folder / "connected")
        return death

    def connect(*args: Any) -> Links:
        await_sign(folder / "found")
        links = reach(*args)
        (folder / "connected").touch()
        return links

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting._Deaths, "of", found)
        patch.setattr(meeting, "reach", connect)
        with pytest.raises(RanksFailedError) as caught:
            all_reduce(TorchGroup(), "plan", lambda: b"", lambda _: b"")
    return str(caught.value), [failure.rank for failure in caught.value.failures]


def test_a_rank_that_connects_as_another_is_lost_names_that_one(tmp_path: Path) -> None:
    with Ranks(3) as ranks:
        *answers, dead = ranks.attempt(on_rank_comes_as_another_is_lost, tmp_path)
    assert dead == (False, "ended with code -9")
    for ok, answer in answers:
        assert ok, answer
        assert answer[1] == [2] and "killed" in answer[0], answer


def on_rank_connects_to_one_without_files(rank: int) -> str:
    """The coordinator's system allows it no more open files than it has."""
    group: Any = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(resource, "getrlimit", lambda _: (8, 8))
        with pytest.raises(RanksFailedError) as caught:
            all_reduce(TorchGroup(group, 1), "plan", lambda: b"", lambda _: b"")
    dist.barrier()
    return str(caught.value)


def test_a_coordinator_that_cannot_hold_all_connections_says_so_on_all(four_ranks: Ranks) -> None:
    first, *others = four_ranks.run(on_rank_connects_to_one_without_files)
    assert "rank 1: StorageError: 4 ranks connect to this one" in first
    assert "its hard limit is 8. Raise it where the job is started: `ulimit -n " in first
    assert others == [first] * 3


def on_rank_is_silent(rank: int) -> tuple[str, float]:
    """Rank 1 lives, but does not take part."""
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=1))
    assert isinstance(impatient, dist.ProcessGroup)
    started = time.monotonic()
    if rank == 1:
        dist.barrier()
        return "", 0
    text, seconds = "no error", 0.0
    try:
        group = TorchGroup(impatient, coordinator_rank=3)
        group.gather(b"")
        group.broadcast(b"" if rank == 3 else None)
    except RanksFailedError as error:
        text, seconds = str(error), time.monotonic() - started
    # The group lives until the others have given up too: a closed connection is another error.
    dist.barrier()
    return text, seconds


def test_a_silent_rank_is_waited_for_as_long_as_the_process_group_says(four_ranks: Ranks) -> None:
    for rank, (text, seconds) in enumerate(four_ranks.run(on_rank_is_silent)):
        if rank != 1:
            assert "rank 1: sent nothing for 1 s; is it alive" in text
            assert 0.9 < seconds < 1 + 2 * ALLOWANCE


def on_rank_beside_others(rank: int) -> tuple[list[bytes] | None, int]:
    """The user's own messages are under way on the same process group."""
    group = TorchGroup()
    theirs = torch.full((1,), 42 if rank == 1 else -1)
    work = {0: lambda: dist.irecv(theirs, src=1), 1: lambda: dist.isend(theirs, dst=0)}.get(rank)
    started = work() if work else None
    gathered = group.gather(b"plan")
    if started is not None:
        started.wait()
    return gathered, int(theirs)


def test_messages_are_not_mixed_with_the_users(four_ranks: Ranks) -> None:
    answers = four_ranks.run(on_rank_beside_others)
    assert answers == [([b"plan"] * 4, 42), (None, 42), (None, -1), (None, -1)]


def on_rank_saves_in(rank: int, folder: str) -> list[int]:
    """Two pairs of ranks save and load, each in a process group or a mesh of its own."""
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "member"))
    state = {f"own{rank}": torch.full((2,), rank)}
    found: list[int] = []
    groups: list[Any] = [pairs[rank // 2], meshes["member"], meshes, None]
    for number, group in enumerate(groups):
        place = f"{folder}/{number}/{rank // 2 if number < 2 else 'all'}"
        saved = xckpt.save(place, state, group=group)
        xckpt.save_async(place, state, group=group, overwrite=True).result()
        assert int(xckpt.load(place, state, group=group)[f"own{rank}"][0]) == rank
        xckpt.load_into(place, state, group=group)
        found.append(len(saved))
    return found


def test_calls_take_process_groups_and_meshes(four_ranks: Ranks, tmp_path: Path) -> None:
    assert four_ranks.run(on_rank_saves_in, str(tmp_path)) == [[2, 2, 4, 4]] * 4


def on_rank_in_half_a_mesh(rank: int) -> str:
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="processes") as caught:
        find_group(cube["b", "c"])
    return str(caught.value)


def test_a_mesh_of_some_processes_has_no_group_of_its_own(four_ranks: Ranks) -> None:
    for message in four_ranks.run(on_rank_in_half_a_mesh):
        assert message.startswith("the DeviceMesh has 2 dimensions and 2 of the 4 processes")
        assert message.endswith("make one by torch.distributed.new_group, and give it as group=")


def on_rank_destroys(rank: int, path: Path, those: Sequence[int]) -> int:
    group: Any = dist.new_group()
    dist.barrier()
    state = {"w": torch.arange(1000)}
    saving = xckpt.save_async(path, state, group=group, timeout=30, overwrite=True)
    if rank in those:
        dist.destroy_process_group(group)
    return len(saving.result(60))


@pytest.mark.parametrize("those", [range(4), [1]])
def test_a_process_group_may_be_destroyed_while_a_save_goes_on(
    four_ranks: Ranks, tmp_path: Path, those: Sequence[int]
) -> None:
    """It ended in a KeyError or a TypeError of torch's."""
    assert four_ranks.run(on_rank_destroys, tmp_path / "a", those) == [1, 1, 1, 1]
    assert torch.equal(torch.from_numpy(xckpt.load(tmp_path / "a")["w"]), torch.arange(1000))


def on_rank_makes_groups_again(rank: int, path: Path) -> list[int]:
    """Files that are open after each of some groups that saved, loaded, and were destroyed."""
    counts: list[int] = []
    for _ in range(3):
        group: Any = dist.new_group()
        xckpt.save_async(path, {"w": np.ones(3)}, group=group, overwrite=True).result(60)
        xckpt.load(path, group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")
def test_a_destroyed_group_leaves_no_connection(four_ranks: Ranks, tmp_path: Path) -> None:
    """Each left seven open files, and torch's threads: what asks it for dead ranks held it."""
    for first, *_, last in four_ranks.run(on_rank_makes_groups_again, tmp_path / "c"):
        assert last == first
