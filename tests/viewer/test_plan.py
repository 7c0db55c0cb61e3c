"""The plan of a load with another mesh, against reading every element one by one."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from xckpt.core.manifest.entries import arrays
from xckpt.viewer.plan.load import plan_shown
from xckpt.viewer.plan.mesh_text import reader_mesh

NAMES = count()


def rows_of(size: int, parts: int, part: int) -> range:
    step = -(-size // parts)
    return range(size)[step * part : step * (part + 1)]


@examples(25)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([(1, 4), (2, 2), (4, 2), (3, 1)]),
    st.booleans(),
    st.integers(4, 200),
)
def test_it_counts_what_ranks_read(
    shape: tuple[int, int], mesh: tuple[int, int], two_hosts: bool, chunk_bytes: int
) -> None:
    path = f"memory://test-plan-{next(NAMES)}"
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    state = {"a": array, "b": array[:, :1].copy(), "step": 3}
    xckpt.save(path, state, options=xckpt.SaveOptions(chunk_bytes=chunk_bytes))
    manifest = xckpt.open(path).manifest
    hosts = 2 if two_hosts and (mesh[0] * mesh[1]) % 2 == 0 else 1
    text = f"mesh x={mesh[0]} x y={mesh[1]}\nhosts {hosts}\na: x, y\nb: y"
    plan = plan_shown(manifest, reader_mesh(text), text)
    size = [2 * int(np.prod(each.chunk)) for each in arrays(manifest)]
    wanted, own = [], [list[tuple[str, int]]() for _ in plan.ranks]
    for rank in range(len(plan.ranks)):
        x, y = divmod(rank, mesh[1])
        boxes = {
            "a": (rows_of(shape[0], mesh[0], x), rows_of(shape[1], mesh[1], y)),
            "b": (rows_of(shape[0], mesh[1], y), range(1)),
        }
        met = set()
        for stored in arrays(manifest):
            rows, columns = boxes[stored.leaf]
            grid = -(-stored.shape[1] // stored.chunk[1])
            for row in rows:
                for column in columns:
                    at = (row // stored.chunk[0]) * grid + column // stored.chunk[1]
                    met.add((stored.leaf, at))
        wanted.append((2 * sum(len(r) * len(c) for r, c in boxes.values()), met))
    for chunk in {each for _, met in wanted for each in met}:
        leaf, number = chunk
        rows = plan.readers[str("ab".index(leaf))]
        for _, reader, *takers in [row for row in rows if row[0] == number]:
            own[reader].append(chunk)
            assert all(chunk in wanted[each][1] for each in (reader, *takers))
    share = len(plan.ranks) // hosts
    for rank, shown in enumerate(plan.ranks):
        host = range(rank // share * share, (rank // share + 1) * share)
        assert shown.wanted == wanted[rank][0]
        assert shown.read == sum(size["ab".index(leaf)] for leaf, _ in own[rank])
        missing = wanted[rank][1] - set(own[rank])
        assert shown.taken == sum(size["ab".index(leaf)] for leaf, _ in missing)
        assert missing <= {each for other in host for each in own[other]}
    assert (
        sum(host.read for host in plan.hosts) == sum(plan.read) == sum(r.read for r in plan.ranks)
    )
    assert sum(plan.written) == 2 * (array.size + shape[0])
    assert sum(host.wanted for host in plan.hosts) == sum(plan.wanted)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no mesh"),
        ("data", "is not 'mesh"),
        ("data on data", "is not a mesh"),
        ("x on a=2 x a=2", "is not a mesh"),
        ("b on a=2", "no axis b"),
        ("Shard(3) on a=2", "does not fit"),
        ("a on a=9999999", "ranks"),
        ("mesh a=0\n*: a", "ranks"),
        ("mesh a=4\nhosts 3\n*: a", "evenly"),
        ("mesh a=4\nhosts x\n*: a", "evenly"),
    ],
)
def test_what_cannot_be_planned(text: str, words: str) -> None:
    xckpt.save("memory://test-plan-refused", {"w": np.zeros((4, 4))}, overwrite=True)
    with pytest.raises(ValueError, match=words):
        xckpt.view("memory://test-plan-refused").plan(text)


def test_the_first_pattern_counts_and_notes_are_left_out() -> None:
    mesh = reader_mesh("# who loads\nmesh a=2, b=3\n\nopt/**/mu: a  # rows\nopt/*: -, b\n")
    assert (mesh.axes, mesh.ranks) == ((("a", 2), ("b", 3)), 6)
    assert [mesh.spec(name) for name in ("opt/x/y/mu", "opt/y/w", "w")] == ["a", "-, b", ""]
    mesh = reader_mesh("mesh a=2\nopt/*/mu: a")  # as in select=, a star crosses no slash
    assert [mesh.spec(name) for name in ("opt/x/mu", "opt/x/y/mu")] == ["a", ""]
