"""Planning a load: every wanted element read once, every difference listed at once."""

from __future__ import annotations

import io
import random
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.sharded_arrays import Target, Wanted, cut, holds, wish
from tests.support.tilings import Box, Shape, Tiling, holders, region, tiled_shapes, tilings
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import Grid
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.plan.items import LoadItemType, ReadItem
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.core.plan.wanted import local_reads
from xckpt.core.targets.compare import compare
from xckpt.core.values import encode_value, value_kind
from xckpt.engine.ranks.load_plans import LoadPlanCodec
from xckpt.errors import PlanError, TreeMismatchError, UnsupportedLeafError, XckptError

Moments = namedtuple("Moments", "mu nu")


def numbered(shape: Shape, dtype: str = "int32") -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def stored(array: np.ndarray, boxes: Tiling | None = None) -> TensorStorageMetadata:
    """What a checkpoint says of an array that it holds whole, or in pieces."""
    arrays = Boxes.of(boxes, rank=array.ndim) if boxes else Boxes.whole(array.shape)
    grid = Grid(arrays, np.maximum(arrays.sizes, 1))
    return TensorStorageMetadata(TensorProperties(array.dtype.name), array.shape, arrays, grid)


class Store:
    """A storage in memory: leaf name -> array or value, and where its pieces begin."""

    def __init__(self, leaves: Mapping[str, Any], pieces: Mapping[str, Tiling] | None = None):
        self.leaves = leaves
        self.pieces = pieces or {}

    def metadata(self, containers: Mapping[str, str] | None = None) -> Metadata:
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, leaf in self.leaves.items():
            kind = value_kind(leaf)
            described[name] = (
                stored(leaf, self.pieces.get(name)) if kind is None else BytesStorageMetadata(kind)
            )
        return Metadata(described, containers or {})

    def read(self, item: ReadItem) -> np.ndarray:
        """The elements that an item asks for."""
        name = item.storage_index.fqn
        whole = np.asarray(self.leaves[name])
        pieces = self.pieces.get(name) or [((0,) * whole.ndim, whole.shape)]
        offsets, sizes = pieces[item.storage_index.index or 0]
        assert item.storage_index.offset == offsets
        piece = np.asarray(whole[region((offsets, sizes))])
        return np.asarray(piece[region((item.storage_offsets, item.lengths))])

    def serve(self, planner: DefaultLoadPlanner, items: list[ReadItem], seed: int = 0) -> None:
        """Do for a planner what a storage does, in any order."""
        random.Random(seed).shuffle(items)
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                leaf = self.leaves[item.storage_index.fqn]
                planner.load_bytes(item, io.BytesIO(encode_value(leaf).encode()))
                continue
            tensor = planner.resolve_tensor(item)
            assert isinstance(tensor, np.ndarray) and tensor.shape == tuple(item.lengths)
            tensor[...] = self.read(item)
            planner.commit_tensor(item, tensor)


def load(
    store: Store,
    like: object,
    planner: DefaultLoadPlanner,
    containers: Mapping[str, str] | None = None,
) -> Any:
    """All hooks in order, on one rank."""
    planner.set_up_planner(like, store.metadata(containers), True)  # type: ignore[arg-type]
    plan = LoadPlanCodec().decode(LoadPlanCodec().encode(planner.create_local_plan()))
    (plan,) = planner.create_global_plan([plan])
    plan = planner.finish_plan(plan)
    store.serve(planner, list(plan.items))
    return planner.result()


@st.composite
def wishes(draw: st.DrawFn) -> tuple[np.ndarray, Tiling, Tiling]:
    """An array, the pieces it is stored in, and the boxes of another tiling that are wanted."""
    shape, pieces = draw(tiled_shapes())
    pieces = [box for box in pieces if 0 not in box[1]] or [((0,) * len(shape), shape)]
    wanted = draw(tilings(shape))
    (chosen,) = draw(holders(1, len(wanted)))
    return numbered(shape), pieces, list(dict.fromkeys(wanted[index] for index in chosen))


@given(wishes(), st.booleans())
@examples(40, 1000)
def test_reads_fill_each_wanted_box_exactly_once(case, with_grid):
    array, pieces, wanted = case
    target = Target(array.shape, "int32", Boxes.of(wanted, rank=array.ndim))
    tensor = stored(array, pieces)
    if not with_grid:
        # A planner of another package may give a plain list, and no grid.
        tensor = TensorStorageMetadata(tensor.properties, tensor.size, list(tensor.chunks))
    counts = [np.zeros(sizes, int) for _, sizes in wanted]
    found = [np.zeros(sizes, np.int32) for _, sizes in wanted]
    store = Store({"w": array}, {"w": pieces})
    for item in local_reads("w", target.boxes, tensor):
        number = item.dest_index.index
        assert number is not None and item.dest_index.offset == wanted[number][0]
        counts[number][region((item.dest_offsets, item.lengths))] += 1
        found[number][region((item.dest_offsets, item.lengths))] = store.read(item)
    for box, count, data in zip(wanted, counts, found, strict=True):
        assert (count == 1).all()
        assert np.array_equal(data, array[region(box)])


@given(wishes(), st.integers(0, 9))
@examples(50, 1000)
def test_a_planner_loads_what_is_wanted_in_any_order(case, seed):
    array, pieces, wanted = case
    store = Store({"w": array, "step": 3}, {"w": pieces})
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": wish(array, wanted), "step": 0}, store.metadata())
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    store.serve(planner, list(planner.finish_plan(plan).items), seed)
    result = planner.result()
    assert isinstance(result, dict)
    assert holds(result["w"], array) and result["step"] == 3


@pytest.mark.parametrize("box", [((2,), (3,)), ((-1,), (2,)), ((9,), (1,))])
def test_a_wish_for_what_is_not_stored_is_refused(box: Box):
    target = Target((4,), "int32", Boxes.of([box]))
    with pytest.raises(XckptError, match=r"w: \[.*\) is wanted, but not stored"):
        local_reads("w", target.boxes, stored(numbered((4,))))


def difference(array: np.ndarray, like: Wanted | None, *, cast: bool = False) -> Mapping[str, str]:
    target = like and Target(like.shape, like.dtype, like.boxes, annotation=like.annotation)
    return compare({"w": target}, Metadata({"w": stored(array)}), cast=cast)


def test_every_difference_of_every_rank_is_in_one_error():
    store = Store(
        {
            "shape": numbered((4, 2)),
            "dtype": numbered((4, 2)),
            "both": numbered((3,)),
            "value": 5,
            "tensor": numbered((2,)),
            "fine": numbered((2,)),
            "elsewhere": 1,
            "unwanted": 1,
            "unwanted too": numbered((2,)),
        }
    )
    likes = [
        {
            "shape": numbered((4, 3)),
            "dtype": numbered((4, 2), "float32"),
            "both": numbered((2,), "uint8"),
            "value": numbered((1,)),
            "fine": numbered((2,)),
        },
        {"shape": numbered((4, 3)), "tensor": 7, "missing": {"b": 0}, "elsewhere": 0},
    ]
    planners = [DefaultLoadPlanner(), DefaultLoadPlanner()]
    plans = []
    for planner, like in zip(planners, likes, strict=True):
        planner.set_up_planner(like, store.metadata())
        plans.append(LoadPlanCodec().decode(LoadPlanCodec().encode(planner.create_local_plan())))
    with pytest.raises(TreeMismatchError, match="strict=False") as caught:
        planners[0].create_global_plan(plans)
    assert caught.value.problems == (
        "shape: shape (4, 2) in the checkpoint, (4, 3) wanted",
        "dtype: dtype int32 in the checkpoint, float32 wanted (cast=True casts)",
        "both: shape (3,) in the checkpoint, (2,) wanted; "
        "dtype int32 in the checkpoint, uint8 wanted (cast=True casts)",
        "value: the checkpoint holds a Python int, not a tensor",
        "tensor: the checkpoint holds an int32 tensor of shape (2,), not a Python value",
        "missing/b: wanted, but not in the checkpoint",
        "unwanted: in the checkpoint, but not wanted",
        "unwanted too: in the checkpoint, but not wanted",
    )


def test_another_dtype_is_allowed_by_cast():
    array = numbered((3,), "complex64")
    assert difference(array, wish(array.astype("complex128"), []), cast=True) == {}
    for other in ("float32", "int8"):
        found = difference(array, wish(numbered((3,), other), []), cast=True)
        assert found == {"w": f"w: dtype complex64 in the checkpoint cannot be cast to {other}"}
    assert difference(numbered((3,)), wish(numbered((3,), "float16"), []), cast=True) == {}
    # The shape still has to fit.
    assert difference(numbered((3,)), wish(numbered((4,)), []), cast=True) == {
        "w": "w: shape (3,) in the checkpoint, (4,) wanted"
    }


def test_an_annotation_must_fit_where_both_have_one():
    array = numbered((2,), "uint32")
    tensor = TensorStorageMetadata(
        TensorProperties("uint32"), (2,), Boxes.whole((2,)), annotation="key:a"
    )
    for wanted, found in (
        ("key:a", {}),
        ("", {}),
        ("key:b", {"w": "w: key:a in the checkpoint, key:b wanted"}),
    ):
        target = Target((2,), "uint32", Boxes.whole((2,)), annotation=wanted)
        assert compare({"w": target}, Metadata({"w": tensor})) == found
    assert difference(array, Wanted((2,), "uint32", Boxes.whole((2,)), "key:b")) == {}


def test_without_strict_what_both_have_is_loaded():
    store = Store({"a": numbered((3,)), "b": 4, "unwanted": 1})
    like = {"a": np.zeros(3, np.int32), "b": 0, "extra": "kept", "more": np.full(2, 7)}
    loaded = load(store, like, DefaultLoadPlanner(strict=False))
    assert np.array_equal(loaded["a"], numbered((3,))) and loaded["b"] == 4
    assert loaded["extra"] == "kept" and loaded["more"] is like["more"]
    assert not like["a"].any() and "unwanted" not in loaded
    # What both have must fit all the same.
    with pytest.raises(TreeMismatchError, match="a: shape"):
        load(store, {"a": np.zeros(4, np.int32)}, DefaultLoadPlanner(strict=False))


def test_in_place_fills_arrays_and_replaces_values():
    store = Store(
        {
            "w": numbered((2, 3)),
            "betas/0": 0.9,
            "betas/1": 0.99,
            "m/mu": numbered((2,)),
            "m/nu": None,
        }
    )
    w, mu = np.zeros((2, 3), np.int32), np.zeros(2, np.int32)
    like = {"w": w, "betas": (0.0, 0.0), "m": Moments(mu, 1)}
    result = load(store, like, DefaultLoadPlanner(in_place=True))
    assert result is like and like["w"] is w and np.array_equal(w, numbered((2, 3)))
    assert like["betas"] == (0.9, 0.99)
    assert isinstance(like["m"], Moments) and like["m"].mu is mu and like["m"].nu is None
    assert np.array_equal(mu, numbered((2,)))


def test_in_place_fills_shards():
    array = numbered((4, 3))
    local = np.zeros((4, 3), np.int32)
    sharded = cut(local, [((1, 0), (2, 2))])
    result = load(Store({"w": array}), {"w": sharded}, DefaultLoadPlanner(in_place=True))
    assert result["w"] is sharded and holds(sharded, array)
    assert local.sum() == array[1:3, :2].sum()


def test_values_come_back_in_their_containers():
    store = Store({"t/0": 1, "t/1/x": b"b", "n/mu": None, "n/nu": True, "o": 2.5})
    like = {"t": (0, {"x": b""}), "n": Moments(0, False), "o": numbered((1,))}
    with pytest.raises(TreeMismatchError, match="o: the checkpoint holds a Python float"):
        load(store, like, DefaultLoadPlanner())
    like["o"] = None
    assert load(store, like, DefaultLoadPlanner()) == {
        "t": (1, {"x": b"b"}),
        "n": Moments(None, True),
        "o": 2.5,
    }


def test_without_a_target_everything_comes_as_numpy_arrays():
    store = Store({"l/0": numbered((2, 0)), "l/1": numbered(()), "v": "x"})
    loaded = load(store, None, DefaultLoadPlanner(), {"l": "list", "e": "tuple"})
    assert loaded["v"] == "x" and loaded["e"] == ()
    assert [part.shape for part in loaded["l"]] == [(2, 0), ()]
    assert all(isinstance(part, np.ndarray) and part.flags.writeable for part in loaded["l"])


def test_the_root_may_be_a_leaf():
    loaded = load(Store({"": numbered((3,))}), np.zeros(3, np.int32), DefaultLoadPlanner())
    assert np.array_equal(loaded, numbered((3,)))
    assert load(Store({"": 5}), None, DefaultLoadPlanner()) == 5
    with pytest.raises(TreeMismatchError, match="the root: shape"):
        load(Store({"": numbered((3,))}), np.zeros(4, np.int32), DefaultLoadPlanner())


def test_unusable_targets_are_listed_by_name():
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    planner = DefaultLoadPlanner(in_place=True)
    with pytest.raises(UnsupportedLeafError, match="2 leaves cannot be loaded into") as caught:
        planner.set_up_planner({"a": {"b": object()}, "c": fixed, "d": 1}, Metadata({}))
    assert [text.split(":")[0] for text in caught.value.problems] == ["a/b", "c"]


def test_opaque_bytes_come_as_they_are():
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"o": b""}, Metadata({"o": BytesStorageMetadata("opaque")}))
    (item,) = planner.create_local_plan().items
    planner.load_bytes(item, io.BytesIO(b"\xff\x00"))
    assert planner.result() == {"o": b"\xff\x00"}


def test_one_planner_can_load_again():
    planner = DefaultLoadPlanner()
    for store, like in (
        (Store({"a": 1}), {"a": 0}),
        (Store({"b": numbered((2,))}), {"b": numbered((2,))}),
    ):
        assert list(load(store, like, planner)) == list(like)


def test_more_elements_than_a_box_has_are_an_error():
    array = numbered((4, 3))
    store = Store({"w": array}, {"w": [((0, 0), (2, 3)), ((2, 0), (2, 3))]})
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": array}, store.metadata())
    items = list(planner.create_local_plan().items)
    assert len(items) == 2
    for item in items:
        planner.commit_tensor(item, planner.resolve_tensor(item))
    with pytest.raises(PlanError, match=r"w: \[2, 4\) x \[0, 3\) .* 6 elements too many"):
        planner.commit_tensor(items[1], None)


def test_a_plan_that_leaves_something_out_is_refused():
    array = numbered((4,))
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": wish(array, [((0,), (4,))])}, Store({"w": array}).metadata())
    plan = planner.create_local_plan()
    planner.check_plan(plan)
    with pytest.raises(PlanError, match="does not fill every target exactly once\n  - w"):
        planner.check_plan(replace(plan, items=[]))
    with pytest.raises(PlanError, match="does not fill every target exactly once\n  - w"):
        planner.check_plan(replace(plan, items=[*plan.items, *plan.items]))


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_box_without_elements_is_not_read(shape):
    array = numbered(shape)
    whole = Boxes.whole(shape)
    assert local_reads("w", whole, stored(array)) == []


@pytest.mark.parametrize("shape", [(), (1,), (1, 3), (3, 1)])
def test_a_whole_array_is_one_read(shape):
    array = numbered(shape)
    (item,) = local_reads("w", Boxes.whole(shape), stored(array))
    assert item.lengths == shape and item.storage_offsets == item.dest_offsets == (0,) * len(shape)


class InPlace(DefaultLoadPlanner):
    """Says by its class that it fills the targets."""

    in_place = True


def test_a_class_that_loads_in_place_does_so_in_any_load() -> None:
    planner = InPlace()
    planner.begin_load(in_place=False)
    assert planner.in_place
    usual = DefaultLoadPlanner()
    usual.begin_load(in_place=True)
    assert usual.in_place
    usual.begin_load(in_place=False)
    assert not usual.in_place
