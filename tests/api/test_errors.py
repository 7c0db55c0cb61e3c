"""The tree of errors: as drawn, all public, carried whole between processes."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

import xckpt
from xckpt import errors
from xckpt.errors import (
    SHOWN_PROBLEMS,
    ManifestError,
    PlanError,
    RankFailure,
    RanksFailedError,
    StorageError,
    XckptError,
)

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, XckptError)
}


def test_the_tree_is_the_one_drawn():
    """Each line of the docstring's drawing is a class; its depth and the words in brackets fit."""
    drawn = re.findall(r"^    ([│ ├└─]*)(\w+)(?: +\(also an? (\w+)\))?", errors.__doc__ or "", re.M)
    assert {name for _, name, _ in drawn} == set(CLASSES)
    above: dict[int, type] = {}
    for branch, name, also in drawn:
        depth = len(branch) // 4
        above[depth] = CLASSES[name]
        bases = {base.__name__ for base in CLASSES[name].__bases__}
        parent = above[depth - 1].__name__ if depth else "Exception"
        assert bases == {parent} | ({also} if also else set())


def test_every_error_is_public():
    for name, value in CLASSES.items():
        assert name in errors.__all__ and getattr(xckpt, name) is value
        assert inspect.getdoc(value)


@pytest.mark.parametrize("kind", CLASSES.values())
def test_an_error_says_its_message_as_it_is(kind):
    error = kind("it's 'quoted'\n  and long", ["a", "b"])
    assert str(error) == "it's 'quoted'\n  and long"
    assert error.problems == ("a", "b")
    assert kind("alone").problems == ()
    assert getattr(error, "errno", None) is None


@pytest.mark.parametrize("kind", CLASSES.values())
def test_an_error_survives_a_copy_and_a_pickle(kind):
    error = kind.listing("two", ["a: bad", "b: bad"])
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert str(again) == str(error) == "two\n  - a: bad\n  - b: bad"
        assert again.problems == ("a: bad", "b: bad")


def test_a_long_list_is_cut_in_the_message_only():
    problems = [f"leaf{n}: bad" for n in range(SHOWN_PROBLEMS + 5)]
    error = PlanError.listing("many", iter(problems))
    assert error.problems == tuple(problems)
    lines = str(error).splitlines()
    assert len(lines) == SHOWN_PROBLEMS + 2
    assert lines[-1] == "  ... and 5 more" and lines[-2] == f"  - leaf{SHOWN_PROBLEMS - 1}: bad"
    exact = PlanError.listing("exact", problems[:SHOWN_PROBLEMS])
    assert "more" not in str(exact)


def test_failed_ranks_are_all_named():
    failures = [RankFailure(1, "StorageError", "disk full"), RankFailure(3, "OSError", "gone")]
    error = RanksFailedError.of("write", failures)
    assert str(error) == (
        "2 ranks failed to write\n  - rank 1: StorageError: disk full\n  - rank 3: OSError: gone"
    )
    assert error.failures == tuple(failures)
    assert pickle.loads(pickle.dumps(error)).failures == tuple(failures)
    assert str(RanksFailedError.of("read", failures[:1])).startswith("1 rank failed to read")
    lost = RankFailure(0, "StorageError", "rank 1 of this host was lost", is_consequence=True)
    causes_first = str(RanksFailedError.of("read", [lost, *failures])).splitlines()
    assert [line[4:10] for line in causes_first[1:]] == ["rank 1", "rank 3", "rank 0"]


@pytest.mark.parametrize(
    "kind, builtin", [(ManifestError, ValueError), (StorageError, OSError), (PlanError, ValueError)]
)
def test_callers_can_catch_the_builtin(kind, builtin):
    with pytest.raises(builtin, match="no"):
        raise kind("no")
