"""`benchmarks.scale` simulates what ranks really say, and what they say does not grow with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
from click.testing import CliRunner

from benchmarks.scale import dtensors, hosts
from benchmarks.scale.__main__ import main
from benchmarks.scale.amplification import amplification, pairs
from benchmarks.scale.loads import simulate_load
from benchmarks.scale.placements import PLACEMENTS
from benchmarks.scale.saves import Placed, simulate
from tests.support.counted_bucket import environment_of
from xckpt.core.geometry.spread import Processes
from xckpt.core.manifest import objects
from xckpt.core.plan.items import WriteItems
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.adapters import loaded_adapters
from xckpt.storage import write_checkpoint


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_simulated_rank_has_the_plan_of_a_rank_with_tensors(name):
    placed = Placed(PLACEMENTS[name](16, 20))
    for rank in (0, 1, 15):
        planner = DefaultSavePlanner()
        planner.use_adapters(loaded_adapters())
        planner.set_up_planner(placed.state(rank))
        made, given = planner.create_local_plan(), placed.plan(rank)
        ours, theirs = WriteItems.of(given.items), WriteItems.of(made.items)
        assert list(ours) == list(theirs) and ours.table == theirs.table
        assert len(ours.of_kinds[0].leaf) == len(theirs.of_kinds[0].leaf)
        assert len(np.unique(ours.kinds)) == len(np.unique(theirs.kinds))


@pytest.mark.parametrize(("name", "tensors"), [("fsdp", 1), ("moe", 4)])
def test_what_a_rank_says_does_not_grow_with_the_ranks(name, tensors):
    """The same tensors a rank, on four times as many ranks."""
    few = simulate(PLACEMENTS[name](16, 24), saves=1, gathered=True)[0]
    many = simulate(PLACEMENTS[name](64, 24 * tensors), saves=1, gathered=True)[0]
    for way in ("up", "down"):
        # Without the last collective: the manifest has all leaves.
        before, after = sum(getattr(few, way)[:-1]) / 15, sum(getattr(many, way)[:-1]) / 63
        # And 64 bytes: which ranks of the groups shall send their leaf tables.
        assert after <= 1.1 * before + 64, (way, before, after)


@pytest.mark.parametrize(
    "name",
    [
        "mesh",
        "hsdp",
        pytest.param("fsdp", marks=pytest.mark.thorough),
        pytest.param("ddp", marks=pytest.mark.thorough),
    ],
)
def test_ranks_alone_say_as_much_of_many_tensors_as_of_few(name):
    few, many = (simulate(PLACEMENTS[name](16, tensors), saves=2) for tensors in (12, 48))
    for before, after in zip(few, many, strict=True):
        # What they save, what they know of all plans, and what they have written.
        assert before.up[:-1] == after.up[:-1] and before.down == after.down
        assert len(after.up) == 3 and sum(after.up[:-1]) <= 15 * 80
        # What is committed they know, but for the caller's metadata.
        assert after.down[-1] <= 15 * 16


def test_a_simulated_save_may_have_any_number_of_objects(monkeypatch):
    monkeypatch.setattr(write_checkpoint, "MANY_CHUNKS", 10)
    monkeypatch.setattr(objects, "MANY_OBJECTS", 10)
    (saved,) = simulate(PLACEMENTS["ragged"](16, 20), saves=1)
    assert saved.manifest > 0


@pytest.mark.parametrize("name", ["fsdp", "mesh", "ragged"])
def test_a_load_says_little_of_many_tensors(name):
    load = simulate_load(PLACEMENTS[name](16, 64))
    others = 15
    # What is loaded, a bit for each leaf, and that all is read.
    assert len(load.up) == 3 and sum(load.up) <= others * (64 + 64 // 8)
    # Besides the manifest, next to nothing.
    assert len(load.down) == 4 and sum(load.down) - load.down[1] <= others * 64


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_simulated_rank_holds_what_its_mesh_says(name):
    placement = PLACEMENTS[name](16, 20)
    for kind, spread in enumerate(placement.spreads()):
        if spread is not None:
            processes = Processes("torch", np.arange(16))
            for rank in range(16):
                assert spread.held_by(rank, processes) == placement.boxes(rank)[kind]


def test_what_hosts_want_is_read_once(monkeypatch):
    monkeypatch.setattr(hosts, "ELEMENTS", 1 << 16)
    for name in environment_of(0):
        monkeypatch.setenv(name, "")
    alone, three = hosts.loads_of((1, 3))
    assert alone.alone_times == alone.once_times == 1
    assert (three.alone_times, three.once_times) == (3, 1)


def test_readers_that_cut_otherwise_read_little_in_vain():
    """By pure planning, some of the benchmark's pairs; the objects stay as they were."""
    drawn = pairs(60)
    before, after = amplification(0, drawn), amplification(8, drawn)
    assert before.mean > 3 and before.most > 8
    assert after.mean <= 2.0 and after.most <= 8
    assert after.host_mean <= 1.1 and after.host_most <= 2
    assert after.objects == before.objects


def test_a_rank_describes_its_dtensors():
    described = dtensors.describe(16, 12, rounds=1)
    assert described.first > 0 and described.again > 0 and not dist.is_initialized()


def test_an_equal_plan_makes_no_orders(monkeypatch):
    """What each rank writes is kept, so the coordinator asks only where to."""
    asked: list[list[int]] = []
    prepare = write_checkpoint.ZarrStorageWriter.prepare_global_plan

    def prepared(self, plans, metadata):
        asked.append([len(plan.items) for plan in plans])
        return prepare(self, plans, metadata)

    monkeypatch.setattr(write_checkpoint.ZarrStorageWriter, "prepare_global_plan", prepared)
    simulate(PLACEMENTS["ragged"](4, 6), saves=2)
    assert asked == [[6] * 4, [0]]


@pytest.mark.parametrize(("name", "ranks", "tensors"), [("moe", 7, 3), ("moe", 66, 70)])
def test_experts_are_saved_by_any_number_of_ranks(name, ranks, tensors):
    (saved,) = simulate(PLACEMENTS[name](ranks, tensors), saves=1, gathered=True)
    assert saved.manifest > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--case", "mesh", "7", "3"], "mesh: this placement takes a multiple of 8 ranks, not 7"),
        (["--case", "hsdp", "4", "2"], "hsdp: this placement takes a multiple of 8 ranks, not 4"),
        (["--bucket", "--case", "fsdp", "4", "2"], "--case is of saves and --loads"),
    ],
)
def test_a_case_that_cannot_be_is_refused_in_a_line(arguments, said):
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2 and said in refused.output
