"""What the command line says of a checkpoint, as values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xckpt.cli.report import (
    LeafReport,
    checkpoint_report,
    holdings,
    narrowed,
    readable_bytes,
    tree_rows,
)
from xckpt.core.manifest.entries import BytesEntry, Manifest, TensorEntry, ValueEntry
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.metadata import Sharding

SHARDING = Sharding(axes=(("dp", 2), ("tp", 2)), placements=("Shard(0)", "Replicate()"))
MANIFEST = Manifest(
    (
        TensorEntry("model/w", "bfloat16", (5, 8), chunk=(2, 8), sharding=SHARDING),
        TensorEntry(
            "model/table",
            "float32",
            (5, 8),
            pieces=Pieces.listed(
                [((0, 0), (3, 8), (3, 4), (3, 8)), ((3, 0), (2, 8), (2, 8), (2, 8))]
            ),
        ),
        ValueEntry("step", "int", "0x10"),
        BytesEntry("blob", "bytes", 100, 64),
    ),
    digests="",
    containers={"empty": "list", "model/none": "dict"},
    user={"run": 7},
)
REPORT = checkpoint_report("here", MANIFEST)
W, TABLE, STEP, BLOB = REPORT.leaves


def value(name: str) -> LeafReport:
    return LeafReport(name, "value", "int", None, 0, "manifest")


def test_a_regular_leaf() -> None:
    assert (W.kind, W.dtype, W.shape, W.bytes) == ("tensor", "bfloat16", (5, 8), 80)
    assert (W.layout, W.chunks, W.sharding) == ("regular", 3, SHARDING)
    assert [(a.path, a.chunk, a.shard) for a in W.arrays] == [("model/w", (2, 8), None)]


def test_a_leaf_in_pieces() -> None:
    assert (TABLE.layout, TABLE.chunks, TABLE.bytes) == ("pieces", 3, 160)
    assert [(a.path, a.offset, a.shape) for a in TABLE.arrays] == [
        ("model/table/0", (0, 0), (3, 8)),
        ("model/table/1", (3, 0), (2, 8)),
    ]
    assert [(a.chunk, a.shard) for a in TABLE.arrays] == [((3, 4), (3, 8)), ((2, 8), (2, 8))]


def test_values_in_the_manifest_and_outside() -> None:
    assert (STEP.dtype, STEP.value, STEP.bytes, STEP.layout) == ("int", "16", 0, "manifest")
    assert (BLOB.dtype, BLOB.value, BLOB.bytes, BLOB.chunks) == ("bytes", None, 100, 2)


def test_a_checkpoint_adds_up_its_leaves() -> None:
    assert (REPORT.tensors, REPORT.values, REPORT.bytes, REPORT.chunks) == (2, 2, 340, 8)
    assert holdings(REPORT) == "2 tensors and 2 values, 340 B in 8 chunks"
    assert REPORT.user_metadata == {"run": 7}
    rows = list(tree_rows(REPORT.leaves, REPORT.containers))
    assert [(row.depth, row.label, row.kind, row.bytes, row.chunks) for row in rows] == [
        (0, "model", "dict", 240, 6),
        (1, "w", "", 80, 3),
        (1, "table", "", 160, 3),
        (1, "none", "dict", 0, 0),
        (0, "step", "", 0, 0),
        (0, "blob", "", 100, 2),
        (0, "empty", "list", 0, 0),
    ]


def test_a_part_of_a_checkpoint() -> None:
    model = narrowed(REPORT, "model")
    assert model is not None
    assert [leaf.name for leaf in model.leaves] == ["model/w", "model/table"]
    assert (model.tensors, model.values, model.bytes) == (2, 0, 240)
    assert model.containers == {"model/none": "dict"}
    empty = narrowed(REPORT, "empty")
    assert empty is not None
    assert (empty.leaves, empty.containers) == ((), {"empty": "list"})
    for name in ("mod", "model/", "w", ""):
        assert narrowed(REPORT, name) is None


def test_empty_containers_are_shown_and_the_root_is_not() -> None:
    rows = list(tree_rows([], {"": "tuple", "a": "list", "a/0": "dict"}))
    assert [(row.depth, row.label, row.kind) for row in rows] == [
        (0, "a", "list"),
        (1, "0", "dict"),
    ]


def test_a_tree_that_is_one_leaf() -> None:
    [row] = tree_rows([value("")], {})
    assert (row.depth, row.label) == (0, "")
    assert row.leaf is not None


keys = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)


@given(st.lists(keys, unique=True, max_size=8))
def test_parents_come_just_before_their_children(names: list[str]) -> None:
    # A name that leads on to another is a container, not a leaf.
    leaves = [name for name in names if not any(other.startswith(f"{name}/") for other in names)]
    rows = list(tree_rows([value(name) for name in leaves], {}))
    path: list[str] = []
    seen: list[str] = []
    for row in rows:
        assert row.depth <= len(path)
        path = [*path[: row.depth], row.label]
        seen.append("/".join(path))
        if row.leaf is not None:
            assert row.leaf.name == seen[-1]
    assert len(set(seen)) == len(seen)
    assert {row.leaf.name for row in rows if row.leaf} == set(leaves)


@given(st.integers(0, 1 << 60))
def test_readable_bytes_are_near_the_count(count: int) -> None:
    number, unit = readable_bytes(count).split()
    power = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(float(number) * 1024**power - count) <= 0.05 * 1024**power + count * 1e-9
    assert power == 4 or float(number) <= 1024
