"""Ranks that do not save the same are refused, with leaf and ranks; `PerRank` is the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results, run_ranks
from tests.support.ranks import Ranks
from tests.support.sharded_arrays import cut
from xckpt.engine.ranks.compare import compare_ranks


def refused(tmp_path: Path, state: Any, size: int = 3, **arguments: Any) -> str:
    """What all ranks raise when rank r saves ``state(r)``; nothing is left behind."""
    outcomes = run_ranks(
        size,
        lambda group: xckpt.save(tmp_path / "a", state(group.rank), group=group, **arguments),
    )
    texts = {str(outcome.error) for outcome in outcomes}
    assert all(isinstance(outcome.error, xckpt.PlanError) for outcome in outcomes), texts
    assert len(texts) == 1 and not list(tmp_path.iterdir())
    return texts.pop()


@pytest.mark.parametrize(
    "leaf",
    [
        lambda rank: rank // 2,
        lambda rank: f"text {rank // 2}",
        lambda rank: np.array([1.0, rank // 2]),
        lambda rank: np.full((1 << 18), rank // 2, np.float32),
    ],
)
def test_small_leaves_that_differ_are_refused(tmp_path: Path, leaf: Any) -> None:
    text = refused(tmp_path, lambda rank: {"same": np.ones(3), "pos": leaf(rank)})
    assert "pos: differs between ranks 0, 1 and rank 2" in text
    assert "xckpt.PerRank(value)" in text and "DTensor" in text
    assert "SaveOptions(compare_replicas=False)" in text
    assert "same" not in text.replace("save the same", "")


def test_every_leaf_that_differs_is_a_problem(tmp_path: Path) -> None:
    def run(group: ThreadGroup) -> Any:
        state = {"a": group.rank, "b": [np.array(group.rank)], "c": 1}
        with pytest.raises(xckpt.PlanError) as caught:
            xckpt.save(tmp_path / "a", state, group=group)
        return [(problem.leaf, problem.kind) for problem in caught.value.problems]

    assert results(2, run) == [[("a", "replica"), ("b/0", "replica")]] * 2


def test_of_large_leaves_the_middle_is_compared_and_all_when_asked(tmp_path: Path) -> None:
    def state(rank: int, at: slice | int) -> Any:
        whole = np.zeros((1 << 18) + 1, np.float32)
        whole[at] = rank
        return {"w": whole}

    # As the moments of two pipeline stages, whose optimizers number their parameters from 0.
    text = refused(tmp_path, lambda rank: state(rank, slice(None)), 2)
    assert "w: [130560, 131584) differs between rank 0 and rank 1" in text
    results(2, lambda group: xckpt.save(tmp_path / "b", state(group.rank, 5), group=group))
    options = xckpt.SaveOptions(compare_replicas=True)
    for outcome in run_ranks(
        2, lambda g: xckpt.save(tmp_path / "c", state(g.rank, 5), group=g, options=options)
    ):
        assert isinstance(outcome.error, xckpt.PlanError)


@pytest.mark.parametrize(
    "one, other",
    [
        (np.arange(1 << 18) + 0.0, np.arange(1 << 18) + 1e-9),
        (np.float32(0.0), np.float32(-0.0)),
        (1, 2),
        (0.0, -0.0),
        (b"", b"\0"),
    ],
    ids=["large", "zero", "int", "float", "bytes"],
)
def test_any_bit_counts_when_asked(tmp_path: Path, one: Any, other: Any) -> None:
    options = xckpt.SaveOptions(compare_replicas=True)
    text = refused(tmp_path, lambda rank: {"x": other if rank else one}, 2, options=options)
    assert text.endswith("- x: differs between rank 0 and rank 1")


def test_equal_replicas_and_shards_pass(tmp_path: Path) -> None:
    array = np.arange(8.0).reshape(4, 2)
    rows = [((0, 0), (2, 2)), ((2, 0), (2, 2))]

    def state(rank: int) -> Any:
        return {
            "sharded": cut(array, [rows[rank]]),
            "strided": np.asfortranarray(array) if rank else array,
            "empty": np.zeros((0, 3)),
            "scalar": np.float16(1),
            "narrow": np.zeros(3, ml_dtypes.int4),
            "nan": float("nan"),
            "opaque": {1, 2},
            "own": xckpt.PerRank(np.full(3, rank)),
        }

    options = xckpt.SaveOptions(compare_replicas=True, serialise=lambda leaf: repr(leaf).encode())
    results(2, lambda g: xckpt.save(tmp_path / "a", state(g.rank), group=g, options=options))


def test_ranks_with_other_amounts_of_leaves_compare_what_they_share(tmp_path: Path) -> None:
    """One has room for all of a leaf, the other for a sample, as stages of other sizes have."""

    def state(rank: int) -> Any:
        own = {f"a{rank}/{n}": np.zeros(1 << 20, np.uint8) for n in range(5 + 35 * rank)}
        return {**own, "w": np.full(1 << 20, rank, np.uint8)}

    text = refused(tmp_path, state, 2)
    assert "w: [523776, 524800) differs between rank 0 and rank 1" in text


def test_of_tensors_above_the_limit_in_all_the_middle_is_compared(tmp_path: Path) -> None:
    """32 MiB in all, the smallest first; of what is above, all but the middle is not looked at."""

    def state(rank: int, differs: str, at: int = 0) -> Any:
        large = {f"a{n}": np.zeros(1 << 20, np.uint8) for n in range(32)}
        whole = {**large, "small": np.zeros(1 << 10, np.uint8)}
        whole[differs][at] = rank
        return whole

    text = refused(tmp_path, lambda rank: state(rank, "small"), 2)
    assert "small: differs between rank 0 and rank 1" in text
    text = refused(tmp_path, lambda rank: state(rank, "a30"), 2)
    assert "a30: differs" in text
    text = refused(tmp_path, lambda rank: state(rank, "a9", 1 << 19), 2)
    assert "a9: [523776, 524800) differs between rank 0 and rank 1" in text
    results(2, lambda g: xckpt.save(tmp_path / "a", state(g.rank, "a9"), group=g))
    options = xckpt.SaveOptions(compare_replicas=True)
    for outcome in run_ranks(
        2, lambda g: xckpt.save(tmp_path / "b", state(g.rank, "a9"), group=g, options=options)
    ):
        assert "a9: differs between rank 0 and rank 1" in str(outcome.error)


def test_any_one_is_kept_when_asked(tmp_path: Path) -> None:
    options = xckpt.SaveOptions(compare_replicas=False)
    results(2, lambda g: xckpt.save(tmp_path / "a", {"n": g.rank}, group=g, options=options))
    assert xckpt.load(tmp_path / "a")["n"] in (0, 1)


def test_leaves_that_only_some_ranks_have_are_no_fault(tmp_path: Path) -> None:
    results(2, lambda g: xckpt.save(tmp_path / "a", {"n": 1, f"stage{g.rank}": g.rank}, group=g))
    assert xckpt.load(tmp_path / "a") == {"n": 1, "stage0": 0, "stage1": 1}


def test_arguments_that_differ_are_refused(tmp_path: Path) -> None:
    def run(group: ThreadGroup) -> Any:
        path = tmp_path / ("b" if group.rank == 1 else "a")
        options = xckpt.SaveOptions(chunk_bytes=1 << (20 + group.rank))
        xckpt.save(path, {"n": 1}, group=group, options=options)

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, xckpt.PlanError)
        text = str(outcome.error)
        assert f"the argument path is '{tmp_path / 'a'}' on rank 0, but '{tmp_path / 'b'}'" in text
        assert "the argument chunk_bytes is 1048576 on rank 0, but 2097152 on rank 1" in text
    assert not list(tmp_path.iterdir())


CALLS: list[Callable[[Path, ThreadGroup], object]] = [
    lambda path, group: xckpt.save(path, {"n": 1}, group=group, overwrite=True),
    lambda path, group: xckpt.load(path, group=group),
    lambda path, group: xckpt.CheckpointManager(path, group=group),
]


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0), (0, 2), (2, 1)])
def test_ranks_that_make_different_calls_learn_it_at_once(
    tmp_path: Path, first: int, second: int
) -> None:
    """They waited for each other until the timeout."""
    words = ["save", "load", "CheckpointManager"]
    chosen = [first, second]
    for outcome in run_ranks(2, lambda group: CALLS[chosen[group.rank]](tmp_path / "a", group)):
        assert isinstance(outcome.error, xckpt.PlanError)
        text = f"the call is {words[first]} on rank 0, but {words[second]} on rank 1"
        assert text in str(outcome.error)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    for name in ("a", "b"):
        xckpt.save(path / name, {"w": np.ones(4, np.float32), "n": 1})
    return path


@pytest.mark.parametrize(
    "calls, text",
    [
        ([{"path": "a"}, {"path": "b"}], "the argument path is '{}/a' on rank 0, but '{}/b' on"),
        ([{"like": {"n": 0}}, {"like": None}], "the argument like is given on rank 0, but None on"),
        ([{}, {"strict": False}], "the argument missing is 'error' on rank 0, but 'ignore' on"),
        ([{}, {"cast": True}], "the argument cast is False on rank 0, but True on rank 1"),
        ([{"at": "n"}, {}], "the argument at is 'n' on rank 0, but '' on rank 1"),
        ([{"select": "n"}, {}], "the argument select is ['n'] on rank 0, but [] on rank 1"),
        (
            [{"options": xckpt.LoadOptions(share_reads=False)}, {}],
            "the argument share_reads is False on rank 0, but True on rank 1",
        ),
    ],
)
@pytest.mark.parametrize("coordinator", [0, 1])
def test_loads_that_are_called_differently_are_refused(
    saved: Path, calls: list[dict[str, Any]], text: str, coordinator: int
) -> None:
    def run(group: ThreadGroup) -> Any:
        call = dict(calls[group.rank])
        path = saved / call.pop("path", "a")
        call.setdefault("like", {"w": np.zeros(4, np.float32), "n": 0})
        return xckpt.load(path, group=group, **call)

    for outcome in run_ranks(2, run, coordinator=coordinator):
        assert isinstance(outcome.error, xckpt.PlanError)
        assert text.format(saved, saved) in str(outcome.error)
        assert "give all of them the same" in str(outcome.error)


def test_a_load_and_a_load_in_place_do_not_meet(saved: Path) -> None:
    def run(group: ThreadGroup) -> Any:
        call = xckpt.load if group.rank else xckpt.load_into
        return call(saved / "a", {"w": np.zeros(4, np.float32), "n": 0}, group=group)

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, xckpt.PlanError)
        assert "call is load_into on rank 0, but load on rank 1" in str(outcome.error)


def test_a_leaf_is_wanted_in_one_dtype(saved: Path) -> None:
    def run(group: ThreadGroup, dtypes: list[Any]) -> Any:
        like = {"w": np.zeros(4, dtypes[group.rank]), "n": 0}
        return xckpt.load(saved / "a", like, group=group, cast=True)["w"].dtype

    assert results(2, lambda g: run(g, [np.float64] * 2)) == [np.float64] * 2
    for outcome in run_ranks(3, lambda g: run(g, [np.float64, np.float16, np.float64])):
        assert isinstance(outcome.error, xckpt.PlanError)
        text = "w: wanted as float64 on ranks 0, 2, but as float16 on rank 1"
        assert text in str(outcome.error)


def test_equal_ranks_send_twenty_bytes_each() -> None:
    sent = sent_by(3, lambda rank: [(f"leaf{n}", 7) for n in range(1000)])
    assert max(sent) <= 20 + 8  # with what says that it is not a failure


def sent_by(size: int, leaves: Callable[[int], list[tuple[str, int]]]) -> list[int]:
    """Bytes that each rank sends when ranks with these leaves, names and values, are compared."""
    sent = [0] * size

    class Counting:
        def __init__(self, group: ThreadGroup) -> None:
            self.rank, self.size, self.coordinator = group.rank, group.size, group.coordinator
            self.scatter, self.broadcast, self._gather = (
                group.scatter,
                group.broadcast,
                group.gather,
            )

        def gather(self, data: bytes) -> list[bytes] | None:
            sent[self.rank] += len(data)
            return self._gather(data)

    def run(group: ThreadGroup) -> None:
        found = [(name, "", np.array([value], np.uint8)) for name, value in leaves(group.rank)]
        compare_ranks(Counting(group), {"path": "'a'"}, lambda: found)

    results(size, run)
    return sent


def test_stages_of_a_pipeline_send_what_they_have_in_common() -> None:
    """Each pair of ranks is a stage: one of each speaks, of names once and then of ``step``."""

    def leaves(rank: int) -> list[tuple[str, int]]:
        return [*((f"stage{rank // 2}/{n}", n % 200) for n in range(1000)), ("step", 1)]

    first, again = sent_by(6, leaves), sent_by(6, leaves)
    assert all(8_000 < sent < 8_200 for sent in first[::2])
    assert max(again) < 100 and max(first[1::2]) < 50


def test_stages_of_a_pipeline_are_compared(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        stage = {f"w{n}": np.full(3, n + (rank == 3 and n == 7)) for n in range(9)}
        return {f"stage{rank // 2}": stage, "step": 1 + (rank > 3)}

    text = refused(tmp_path, state, 6)
    assert text.count("\n  - rank 0: ") == 1
    assert "stage1/w7: differs between rank 2 and rank 3" in text
    assert "step: differs between ranks 0-3 and ranks 4, 5" in text


def on_rank_round_trip(rank: int, path: Path) -> Any:
    import torch

    torch.manual_seed(rank)
    own = {"rng": torch.get_rng_state(), "pos": torch.tensor([rank]), "seed": rank}
    xckpt.save(path, {"step": 5, "own": xckpt.PerRank(own)}, overwrite=True)
    saving = xckpt.save_async(path, {"step": 5, "own": xckpt.PerRank(own)}, overwrite=True)
    saving.result(30)
    like = {"rng": torch.zeros_like(own["rng"]), "pos": torch.zeros_like(own["pos"]), "seed": 0}
    back = xckpt.load(path, {"step": 0, "own": xckpt.PerRank(like)})["own"].value
    assert torch.equal(back["rng"], own["rng"])
    return back["seed"], int(back["pos"])


def test_each_rank_gets_its_own_again(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(on_rank_round_trip, tmp_path / "a") == [(0, 0), (1, 1)]
    assert list(xckpt.load(tmp_path / "a")["own"]) == ["rank0", "rank1"]
    like = {"step": 0, "own": xckpt.PerRank({"seed": 0})}
    with pytest.raises(xckpt.TreeMismatchError, match="own/rank1"):
        xckpt.load(tmp_path / "a", like)
    assert xckpt.load(tmp_path / "a", like, unexpected="ignore")["own"].value == {"seed": 0}


def on_rank_in_place(rank: int, path: Path) -> Any:
    own = {"step": 5, "seed": xckpt.PerRank(10 + rank), "own": xckpt.PerRank({"at": [rank]})}
    xckpt.save(path, own)
    state = {"step": 0, "seed": xckpt.PerRank(0), "own": xckpt.PerRank({"at": [0]})}
    xckpt.load_into(path, state)
    return state["step"], state["seed"].value, state["own"].value["at"]


def test_values_of_each_rank_come_back_in_place(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(on_rank_in_place, tmp_path / "a") == [(5, 10, [0]), (5, 11, [1])]


def test_a_leaf_that_differs_on_every_rank_names_them_as_a_run(tmp_path: Path) -> None:
    text = refused(tmp_path, lambda rank: {"same": np.ones(3), "pos": rank}, 4)
    assert "pos: differs on each of ranks 0-3" in text


def on_another_release(rank: int, path: Path) -> str:
    xckpt.__version__ = f"0.{rank}.0"
    with pytest.raises(xckpt.PlanError) as caught:
        xckpt.save(path, {"w": np.ones(3)})
    return str(caught.value)


def test_ranks_of_two_releases(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        for said in ranks.run(on_another_release, tmp_path / "a"):
            assert "release of xckpt is 0.0.0 on rank 0, but 0.1.0 on rank 1" in said
    assert not any(tmp_path.iterdir())
