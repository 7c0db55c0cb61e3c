"""Plans of several ranks: what is kept or known already gives the shares that all of it would."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from benchmarks.scale.ranks import Aside, Coordinator, Rank
from conformance.implementations.threads import ThreadGroup, results
from tests.support.examples import examples
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.spread import MeshProcesses, OnMesh, Processes
from xckpt.core.leaf import HostSource
from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.core.plan.alone.known import KnownPlans
from xckpt.core.plan.items import LeafRow, SavePlan, WriteItems
from xckpt.core.plan.merge import global_plan
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.core.storage import BriefData
from xckpt.engine.ranks.group import KeptPlans, OwnPlan
from xckpt.engine.ranks.plans import MOST_KEPT, KnownCommit, Planning, plan_together

RANKS = 3
PLAN = "plan"


class Orders:
    """What a storage gives a rank: the number of the save."""

    def __init__(self, save: int) -> None:
        self.save = save

    def brief(self, table: tuple[LeafRow, ...]) -> object:
        return len(table)

    def place(self) -> object:
        return self.save


def state(rank: int, turned: bool, own: bool, layers: int) -> dict[str, Any]:
    """Rows of some layers, from the first rank or from the last, and perhaps a leaf of its own."""
    part = RANKS - 1 - rank if turned else rank
    held = Boxes.of([((part * 2, 0), (2, 4))])
    nothing = np.zeros((2, 4), np.int8)
    shape, order = (RANKS * 2, 4), range(RANKS)[:: -1 if turned else 1]
    spread = OnMesh(shape, MeshProcesses("torch", np.array(order)), ((0,), ()))
    leaves: dict[str, Any] = {
        f"w{n}": HostSource(shape, "int8", held, (nothing,), True, spread=lambda: spread)
        for n in range(layers)
    }
    return leaves | ({f"own{rank}": np.zeros(5, np.float32)} if own else {}) | {"step": 3}


class Save:
    """One save of all ranks, as far as the shares."""

    def __init__(
        self,
        number: int,
        states: list[dict[str, Any]],
        key: bytes | None,
        knowing: Collection[int] = (),
    ) -> None:
        self.number, self.key = number, key
        self.plans: list[SavePlan] = []
        self.known: list[KnownPlans | None] = []
        """What each rank knows of all plans."""
        processes = Processes("torch", np.arange(RANKS))
        for rank, each in enumerate(states):
            planner = DefaultSavePlanner()
            planner.use_adapters(adapters())
            planner.set_up_planner(each)
            plan = planner.create_local_plan()
            self.plans.append(plan)
            knows = rank in knowing
            self.known.append(planner.known_plans(plan, rank, processes) if knows else None)
        self.shares: dict[int, SavePlan] = {}
        self.metadata: Metadata | None = None
        self.decided = 0

    def decide(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.decided += 1
        shares, self.metadata = global_plan(plans)
        orders = Orders(self.number)
        return [SavePlan(share.items, orders) for share in shares]

    def own(self, known: KnownPlans) -> OwnPlan | None:
        made = known.share()
        assert made is not None
        orders = BriefData(None, WriteItems.of(made[0].items).table)
        return OwnPlan(SavePlan(made[0].items, orders), made[1], made[1])

    def repeat(self, metadata: Metadata, share: SavePlan) -> object:
        self.metadata = metadata
        return self.number

    def run(self, group: Any) -> None:
        def planned() -> Metadata:
            assert self.metadata is not None
            return self.metadata

        mine, known = self.plans[group.rank], self.known[group.rank]
        hooks = lambda: mine, self.decide, planned, self.repeat
        planning = Planning(*hooks, self.key, lambda _: known, self.own)
        self.shares[group.rank], _ = plan_together(group, PLAN, planning, group.kept_plans)

    def together(self, kept: list[KeptPlans]) -> Coordinator:
        had = [copied(each) for each in kept]

        def run(rank: Rank) -> None:
            rank.kept_plans = copied(had[rank.rank])
            self.run(rank)

        with TemporaryFile() as file:
            aside = Aside(file.fileno())
            others = [Rank(rank, RANKS, aside) for rank in range(1, RANKS)]
            group = Coordinator(others, run, kept[0])
            self.run(group)
            for other in others:
                other.again()
                run(other)
                kept[other.rank].shares = other.kept_plans.shares
                kept[other.rank].own = other.kept_plans.own
        return group


def copied(kept: KeptPlans) -> KeptPlans:
    return KeptPlans(dict(kept.shares), dict(kept.plans), dict(kept.own))


def adapters() -> Any:
    from xckpt.engine.adapters import loaded_adapters

    return loaded_adapters()


def assert_as_fresh(save: Save) -> None:
    shares, metadata = global_plan(save.plans)
    assert save.metadata == metadata
    for rank, share in enumerate(shares):
        found = save.shares[rank]
        assert list(found.items) == list(share.items)
        place = getattr(found.storage_data, "place", None)
        assert place in (None, save.number)


of_a_save = st.tuples(
    st.booleans(),
    st.integers(1, 2),
    st.lists(st.booleans(), min_size=RANKS, max_size=RANKS),
    st.sets(st.integers(0, RANKS - 1)),
    st.sampled_from([(0, 1, 2), (), (0, 1), (2,)]),
)


@examples(20, 400)
@given(st.lists(of_a_save, min_size=2, max_size=6))
def test_kept_plans_are_those_that_would_be_made(saves):
    """Whatever changed since, on whichever rank, and whichever rank has forgotten what it kept.

    And whichever ranks know all plans.
    """
    kept = [KeptPlans() for _ in range(RANKS)]
    before: list[object] = []
    for number, (turned, layers, own, forget, knowing) in enumerate(saves):
        for rank in forget:
            kept[rank] = KeptPlans()
        states = [state(rank, turned, own[rank], layers) for rank in range(RANKS)]
        save = Save(number, states, b"key", knowing)
        save.together(kept)
        assert_as_fresh(save)
        if before[-1:] == [(turned, layers, own, knowing)] and not forget:
            assert not save.decided
        before.append((turned, layers, own, knowing))


def test_an_equal_plan_costs_each_rank_16_bytes():
    kept = [KeptPlans() for _ in range(RANKS)]
    states = [state(rank, False, True, 2) for rank in range(RANKS)]
    first = Save(0, states, b"key").together(kept)
    again = Save(1, states, b"key")
    traffic = again.together(kept).traffic
    assert again.decided == 0
    # 16 bytes, and what says of which step they are.
    assert len(traffic.up) == 1 and traffic.up[0] <= (16 + 14) * (RANKS - 1) < first.traffic.up[0]
    assert_as_fresh(again)


def test_ranks_that_know_all_plans_say_16_bytes_the_first_time():
    kept = [KeptPlans() for _ in range(RANKS)]
    for number in range(2):
        states = [state(rank, True, False, 2) for rank in range(RANKS)]
        save = Save(number, states, b"key", range(RANKS))
        traffic = save.together(kept).traffic
        assert save.decided == 0 and len(traffic.up) == 1
        assert traffic.up[0] <= (16 + 14) * (RANKS - 1) and traffic.down[0] <= 30 * (RANKS - 1)
        assert_as_fresh(save)


@pytest.mark.parametrize("differs", ["own", "unknown"])
def test_one_rank_that_differs_has_all_plans_gathered(differs):
    """Once: the next time the ranks have kept what they were given."""
    kept = [KeptPlans() for _ in range(RANKS)]
    own, knowing = (1, range(RANKS)) if differs == "own" else (-1, (0, 2))
    for number in range(2):
        states = [state(rank, False, rank == own, 2) for rank in range(RANKS)]
        save = Save(number, states, b"key", knowing)
        rounds = len(save.together(kept).traffic.up)
        assert save.decided == (number == 0)
        assert rounds == (1 if number else 3 if differs == "own" else 2)
        assert_as_fresh(save)


def test_kinds_of_values_that_were_not_planned_are_sent():
    planned = {"a": BytesStorageMetadata("int"), "b": BytesStorageMetadata("opaque")}
    known = KnownCommit(Metadata(planned))
    written = planned | {"b": BytesStorageMetadata("str")}
    committed = Metadata(written, user_metadata={"loss": 2**4000})
    received = known.committed(known.brief(committed))
    assert received == committed and list(received) == ["a", "b"]


def test_plans_without_a_key_are_gathered():
    states = [state(rank, False, False, 2) for rank in range(RANKS)]
    save = Save(0, states, None, range(RANKS))
    save.together([KeptPlans() for _ in range(RANKS)])
    assert save.decided == 1


def test_plans_of_another_key_are_made_anew():
    kept = [KeptPlans() for _ in range(RANKS)]
    states = [state(rank, False, False, 1) for rank in range(RANKS)]
    for number, key in enumerate((b"a", b"b", None, b"a")):
        save = Save(number, states, key)
        save.together(kept)
        assert save.decided == (number < 3), key


def test_a_group_keeps_few_plans():
    kept = [KeptPlans() for _ in range(RANKS)]
    for layers in range(1, 3 * MOST_KEPT):
        Save(layers, [state(rank, False, False, layers) for rank in range(RANKS)], b"").together(
            kept
        )
    assert {len(each.shares) for each in kept} == {MOST_KEPT} and len(kept[0].plans) == MOST_KEPT


def test_a_leaf_table_comes_from_one_rank_of_those_that_have_it():
    """Ranks 1 and 2 have a table that the coordinator lacks: one of them sends it."""
    names = [f"layer{n}/{Random(n).randbytes(60).hex()}" for n in range(40)]  # hard to compress
    both = Boxes.whole((2,))
    shards = [Boxes.of([((n,), (1,))]) for n in range(2)]
    alike = {
        rank: {
            name: HostSource((2,), "int8", shards[rank - 1], (np.zeros(1, np.int8),), sharded=True)
            for name in names
        }
        for rank in (1, 2)
    }
    first = {"alone": HostSource((2,), "int8", both, (np.zeros(2, np.int8),))}
    save = Save(0, [first, alike[1], alike[2]], b"key")
    traffic = save.together([KeptPlans() for _ in range(RANKS)]).traffic
    assert_as_fresh(save)
    assert len(traffic.up) == 2 and traffic.up[0] < 50 * 40 < traffic.up[1] < 2 * 50 * 40
    assert traffic.down[1] < 50 * 40


def test_a_share_of_leaves_that_a_rank_lacks_brings_their_table():
    planner = DefaultSavePlanner()
    planner.use_adapters(adapters())
    planner.set_up_planner({"step": 1})
    plan = planner.create_local_plan()

    class Moved(Save):
        def decide(self, plans: list[SavePlan]) -> list[SavePlan]:
            self.metadata = Metadata({})
            items = WriteItems.of(list(plans[0].items))
            return [SavePlan([]), SavePlan(items), SavePlan([])]

    save = Moved(0, [{"other": 2}, {}, {}], None)
    save.together([KeptPlans() for _ in range(RANKS)])
    assert [item.index.fqn for item in save.shares[1].items] == ["other"]
    assert list(plan.items) and not list(save.shares[2].items)


@pytest.mark.parametrize("count", [2, 4])
def test_answers_for_other_ranks_than_there_are_are_refused(count):
    class Miscounted(Save):
        def decide(self, plans: list[SavePlan]) -> list[SavePlan]:
            self.metadata = Metadata({})
            return [SavePlan([])] * count

    save = Miscounted(0, [{"step": 1}] * RANKS, None)
    with pytest.raises(Exception, match=f"{count} answers for 3 ranks"):
        save.together([KeptPlans() for _ in range(RANKS)])


OPTIONS = {
    "chunk_bytes": st.sampled_from([64, 1 << 20]),
    "shard_bytes": st.sampled_from([0, 512]),
    "pack_bytes": st.sampled_from([0, 128]),
    "crc32c": st.booleans(),
    "dimension_names": st.sampled_from([None, {"w": ("rows", "columns")}]),
}

WHOLE = np.arange(RANKS * 16, dtype=np.float32).reshape(RANKS * 2, 8)


@dataclass(frozen=True, slots=True)
class LastingThreads(ThreadGroup):
    """Threads whose saves keep their plans."""

    kept_plans: KeptPlans = field(default_factory=KeptPlans)


@examples(10, 200)
@given(st.lists(st.fixed_dictionaries({}, optional=OPTIONS), min_size=2, max_size=4))
def test_options_that_change_what_is_written_are_not_kept(saves):
    """A group that has saved with other options writes what a new group does."""
    lasting = [KeptPlans() for _ in range(RANKS)]
    for each in saves:
        options = xckpt.SaveOptions(**each)
        fresh = [KeptPlans() for _ in range(RANKS)]
        assert written(options, lasting) == written(options, fresh)


def written(options: xckpt.SaveOptions, kept: list[KeptPlans]) -> list[str]:
    """The keys of a save of rows, made with what the ranks have kept."""
    path = f"memory://options-of-plans-{uuid.uuid4()}"

    def save(group: ThreadGroup) -> None:
        mine = WHOLE[group.rank * 2 :][:2]
        leaf = HostSource(
            WHOLE.shape, "float32", Boxes.of([((group.rank * 2, 0), (2, 8))]), (mine,), sharded=True
        )
        ranks = LastingThreads(group.rank, group.table, kept_plans=kept[group.rank])
        xckpt.save(path, {"w": leaf, "b": np.ones(3)}, group=ranks, options=options)

    results(RANKS, save)
    assert xckpt.open(path).verify() == []
    assert (xckpt.load(path)["w"] == WHOLE).all()
    return keys(path)


def keys(path: str) -> list[str]:
    """What a save in memory has written, but for the names of its staging folder."""
    store = ts.KvStore.open(path + "/").result()
    listed = [key.decode() for key in store.list().result()]
    return sorted(re.sub(r"xckpt-[0-9a-f-]+", "staged", key) for key in listed)
