"""What a strict load does for each type of a stored leaf and of its target.

The table's rows are what is stored, its columns what is wanted:

    =  the stored one comes back as it was
    >  the same value comes back in the target's type
    c  the same with ``cast=True``, without it an error
    x  always an error
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

import xckpt
from tests.support.jobs import fresh_path
from xckpt.errors import TreeMismatchError

VALUES: Final[dict[str, Any]] = {
    "None": None,
    "bool": True,
    "int": 1,
    "float": 1.0,
    "complex": 1 + 0j,
    "str": "1",
    "bytes": b"1",
    "b0": np.ones((), np.bool_),
    "i0": np.ones((), np.int32),
    "u0": np.ones((), np.uint8),
    "f0": np.ones((), np.float32),
    "h0": np.ones((), "bfloat16"),
    "c0": np.ones((), np.complex64),
    "f1": np.ones(1, np.float32),
    "rank": xckpt.PerRank(1),
}
TABLE: Final = """
            None bool int float complex str bytes b0 i0 u0 f0 h0 c0 f1 rank
    None       =    =   =     =       =   =     =  x  x  x  x  x  x  x    x
    bool       =    =   =     =       =   x     x  >  c  c  c  c  x  x    x
    int        =    =   =     =       =   x     x  c  >  >  >  >  >  x    x
    float      =    =   =     =       =   x     x  c  c  c  >  >  >  x    x
    complex    =    =   =     =       =   x     x  x  x  x  x  x  >  x    x
    str        =    x   x     x       x   =     x  x  x  x  x  x  x  x    x
    bytes      =    x   x     x       x   x     =  x  x  x  x  x  x  x    x
    b0         x    >   c     c       x   x     x  =  c  c  c  c  c  x    x
    i0         x    c   >     c       x   x     x  c  =  c  c  c  c  x    x
    u0         x    c   >     c       x   x     x  c  c  =  c  c  c  x    x
    f0         x    c   c     >       x   x     x  c  c  c  =  c  c  x    x
    h0         x    c   c     >       x   x     x  c  c  c  c  =  c  x    x
    c0         x    x   x     x       >   x     x  x  x  x  x  x  =  x    x
    f1         x    x   x     x       x   x     x  x  x  x  x  x  x  =    x
    rank       x    x   x     x       x   x     x  x  x  x  x  x  x  x    =
"""
HEAD, *ROWS = (line.split() for line in TABLE.strip().splitlines())
PAIRS: Final = [
    (row[0], wanted, outcome) for row in ROWS for wanted, outcome in zip(HEAD, row[1:], strict=True)
]


def test_the_table_is_whole() -> None:
    assert HEAD == [row[0] for row in ROWS] == list(VALUES)


@pytest.fixture(scope="module")
def saved() -> dict[str, str]:
    paths = {kind: fresh_path() for kind in VALUES}
    for kind, value in VALUES.items():
        xckpt.save(paths[kind], {"x": value})
    return paths


@pytest.mark.parametrize("wanted", HEAD)
def test_a_pair_of_types(saved: dict[str, str], wanted: str) -> None:
    like = {"x": VALUES[wanted]}
    for stored, _, outcome in (pair for pair in PAIRS if pair[1] == wanted):
        for cast in (False, True):
            if outcome == "x" or (outcome == "c" and not cast):
                with pytest.raises(TreeMismatchError, match="x"):
                    xckpt.load(saved[stored], like, cast=cast)
                continue
            loaded = xckpt.load(saved[stored], like, cast=cast)["x"]
            expected = VALUES[stored if outcome == "=" else wanted]
            assert type(loaded) is type(expected), (stored, wanted)
            assert loaded == expected, (stored, wanted)
            assert getattr(loaded, "dtype", None) == getattr(expected, "dtype", None)


def test_all_that_differ_are_listed_and_nothing_is_changed() -> None:
    path = fresh_path()
    state = {"name": "run", "step": 7, "rate": 0.5, "on": True, "raw": b"b", "w": np.ones(2)}
    xckpt.save(path, state)
    like = {"name": 0, "step": "", "rate": b"", "on": "", "raw": "", "w": np.zeros(2)}
    before = dict(like)
    with pytest.raises(TreeMismatchError, match="5 leaves of another Python type") as caught:
        xckpt.load_into(path, like)
    kinds = {problem.leaf: problem.kind for problem in caught.value.problems}
    assert kinds == dict.fromkeys(("name", "step", "rate", "on", "raw"), "type")
    assert like == before and not like["w"].any()  # type: ignore[union-attr]


def test_a_number_comes_back_as_it_was_in_place_too() -> None:
    path, reports = fresh_path(), list[xckpt.LoadReport]()
    xckpt.save(path, {"weight_decay": 0.01, "lr": 1, "maximize": False})
    like = {"weight_decay": 0, "lr": 0.5, "maximize": 1}
    loaded = xckpt.load(path, like, report=reports.append)
    xckpt.load_into(path, like)
    for each in (loaded, like):
        assert repr(each) == "{'weight_decay': 0.01, 'lr': 1, 'maximize': False}"
    assert not reports[0].cast


def test_an_int_never_changes_its_value() -> None:
    path = fresh_path()
    xckpt.save(path, {"x": 2**53 + 1})
    for like in (np.zeros((), np.float32), np.zeros(())):
        for cast in (False, True):
            with pytest.raises(TreeMismatchError, match="x: the checkpoint holds 9007199254740993"):
                xckpt.load(path, {"x": like}, cast=cast)


def test_the_part_that_is_not_picked_is_not_compared() -> None:
    path = fresh_path()
    xckpt.save(path, {"a": "text", "b": 1})
    assert xckpt.load(path, {"a": 0, "b": 0}, select="b") == {"a": 0, "b": 1}


def test_a_random_state_fits_whether_it_holds_a_second_number_or_not() -> None:
    import random

    generator, path = random.Random(3), fresh_path()
    fresh = generator.getstate()
    generator.gauss()
    state = generator.getstate()
    assert fresh[2] is None and state[2] is not None
    for stored, like in ((fresh, state), (state, fresh)):
        xckpt.save(path, {"random": stored}, overwrite=True)
        assert xckpt.load(path, {"random": like})["random"] == stored
