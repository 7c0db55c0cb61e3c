"""The laws: what holds for every case, whatever the implementation.

Each is a function of an implementation and a case that returns, or raises: an `AssertionError` that
names leaf, box and rank, whatever the implementation raised, or `Refused`. `LAWS` names them all;
`run` draws cases and counts.

NumPy is the oracle: what a rank gets for a box is the whole array sliced there, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance import judge
from conformance.cases import Case, checksum, numpy_dtype, region
from conformance.implementation import (
    Array,
    Box,
    Fingerprints,
    Held,
    Implementation,
    Refused,
    Wanted,
    Writes,
)
from conformance.tilings import Placed

__all__ = ["LAWS", "check_loaded", "fresh_folder", "run"]

MEMORY = "/dev/shm"

Loaded = Sequence[Mapping[str, Sequence[NDArray[np.generic]]]]


@contextlib.contextmanager
def fresh_folder() -> Iterator[Path]:
    """A fresh folder for one case; a checkpoint goes below it.

    In memory where that can be: cases are small, and a save syncs many files.
    """
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="conformance-", dir=memory) as folder:
        yield Path(folder)


# The oracle.


def check_loaded(
    whole: Mapping[str, NDArray[np.generic]],
    wanted: Sequence[Mapping[str, Wanted]],
    loaded: Loaded,
) -> None:
    """Hold what was loaded against slices of the whole arrays.

    Raises:
        AssertionError: something is missing or differs; names leaf, box and rank.
    """
    assert len(loaded) == len(wanted), f"{len(wanted)} ranks load, {len(loaded)} answers came"
    for rank, (wishes, found) in enumerate(zip(wanted, loaded, strict=True)):
        for name, wish in wishes.items():
            boxes = found.get(name, ()) if wish.boxes else []
            assert len(boxes) == len(wish.boxes), (
                f"{name!r} on rank {rank}: {len(wish.boxes)} boxes wanted, {len(boxes)} loaded"
            )
            for box, data in zip(wish.boxes, boxes, strict=True):
                fault = difference(whole[name][(*box.region, ...)], data)
                assert not fault, f"{name!r} {region(box)} on rank {rank}: {fault}"


def difference(expected: NDArray[np.generic], found: NDArray[np.generic]) -> str:
    """How two arrays differ in shape, dtype or any bit; empty if they don't.

    Example:
        >>> difference(np.array([0.0, -0.0]), np.array([0.0, 0.0]))
        '1 of 2 elements differ; the first at (1,) is 0.0, not -0.0'
    """
    if found.shape != expected.shape:
        return f"the shape is {found.shape}, not {expected.shape}"
    if found.dtype != expected.dtype:
        return f"the dtype is {found.dtype}, not {expected.dtype}"
    size = (*expected.shape, expected.dtype.itemsize)
    one, other = (
        np.frombuffer(np.ascontiguousarray(each).tobytes(), np.uint8).reshape(size)
        for each in (expected, found)
    )
    wrong = (one != other).any(axis=-1)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} elements differ; the first at {at} is "
        f"{_shown(found[at])}, not {_shown(expected[at])}"
    )


def _shown(element: np.generic) -> str:
    """An element; its bytes too where its text does not tell it from others."""
    text = str(element)
    return f"{text} (0x{element.tobytes()[::-1].hex()})" if "nan" in text else text


def everything(arrays: Mapping[str, Array]) -> list[dict[str, Wanted]]:
    """One rank that wants the whole of all."""
    return [
        {
            name: Wanted(array, (Box((0,) * len(array.shape), array.shape),))
            for name, array in arrays.items()
        }
    ]


def _arrays(case: Case) -> dict[str, Array]:
    return {leaf.name: leaf.array for leaf in case.leaves}


def _check_everything(implementation: Implementation, path: Path, case: Case) -> None:
    wanted = everything(_arrays(case))
    check_loaded(case.whole(), wanted, implementation.load(path, wanted))


# The laws.


def reshard(implementation: Implementation, case: Case) -> None:
    """What is loaded equals NumPy slicing of the whole, bit for bit."""
    with fresh_folder() as folder:
        implementation.save(folder / "ckpt", case.held())
        wanted = case.wanted()
        check_loaded(case.whole(), wanted, implementation.load(folder / "ckpt", wanted))


def parts(implementation: Implementation, case: Case) -> None:
    """Loading a part equals slicing the loaded whole, and one leaf loads without the others."""
    with fresh_folder() as folder:
        path = folder / "ckpt"
        implementation.save(path, case.held())
        arrays = _arrays(case)
        names = list(arrays)
        first = {names[0]: arrays[names[0]]}
        for some in (arrays, first):
            wanted = everything(some)
            loaded = implementation.load(path, wanted)
            check_loaded(case.whole(), wanted, loaded)
            whole = {name: loaded[0][name][0] for name in some}
            wishes = [
                {name: wish for name, wish in wishes.items() if name in some}
                for wishes in case.wanted()
            ]
            check_loaded(whole, wishes, implementation.load(path, wishes))


def written_once(implementation: Implementation, case: Case) -> None:
    """Every element is written exactly once, by a rank that holds it."""
    if not isinstance(implementation, Writes):
        raise Refused("cannot tell what it writes")
    with fresh_folder() as folder:
        path = folder / "ckpt"
        implementation.save(path, case.held())
        written = implementation.written(path)
    for leaf in case.leaves:
        counts = np.zeros(leaf.array.shape, np.int64)
        for rank, box in written.get(leaf.name, ()):
            held_here = np.zeros(leaf.array.shape, np.bool_)
            for placed in leaf.source:
                if rank in placed.ranks:
                    held_here[(*placed.box.region, ...)] = True
            assert held_here[(*box.region, ...)].all(), (
                f"{leaf.name!r} {region(box)} on rank {rank}: written by a rank that lacks it"
            )
            counts[(*box.region, ...)] += 1
        wrong = np.argwhere(counts != 1)
        assert not len(wrong), (
            f"{leaf.name!r}: the element at {tuple(wrong[0].tolist())} is written "
            f"{counts[tuple(wrong[0])]} times"
        )


def saved_again(implementation: Implementation, case: Case) -> None:
    """Save, load, save: the second checkpoint is the first."""
    if not isinstance(implementation, Fingerprints):
        raise Refused("cannot tell whether two checkpoints are equal")
    with fresh_folder() as folder:
        first, second = folder / "first", folder / "second"
        implementation.save(first, case.held())
        wanted = [
            {
                name: Wanted(each.array, tuple(s.box for s in each.shards))
                for name, each in h.items()
            }
            for h in case.held()
        ]
        loaded = implementation.load(first, wanted)
        again = [
            {
                name: Held(
                    wish.array,
                    tuple(
                        replace(shard, data=data)
                        for shard, data in zip(
                            original[name].shards, found.get(name, ()), strict=True
                        )
                    ),
                )
                for name, wish in wishes.items()
            }
            for wishes, found, original in zip(wanted, loaded, case.held(), strict=True)
        ]
        implementation.save(second, again)
        _check_equal(implementation.fingerprint(first), implementation.fingerprint(second))


def _check_equal(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> None:
    for name in sorted({*first, *second}):
        assert first.get(name) == second.get(name), f"{name} is not the same in both checkpoints"


def ranks_permuted(implementation: Implementation, case: Case) -> None:
    """The same shards on other ranks make the same checkpoint, for readers in any order."""
    random = np.random.default_rng(checksum(case))
    savers = random.permutation(case.savers).tolist()
    with fresh_folder() as folder:
        path = folder / "ckpt"
        implementation.save(path, case.with_ranks(savers).held())
        wanted = case.wanted()
        loaders = random.permutation(case.loaders).tolist()
        shuffled = [wanted[rank] for rank in loaders]
        loaded = implementation.load(path, shuffled)
        check_loaded(case.whole(), shuffled, loaded)
        if isinstance(implementation, Fingerprints):
            implementation.save(folder / "unpermuted", case.held())
            first = implementation.fingerprint(folder / "unpermuted")
            _check_equal(first, implementation.fingerprint(path))


def replicas(implementation: Implementation, case: Case) -> None:
    """A box is read the same, no matter which other ranks hold it too."""
    for keep in (lambda ranks: ranks[:1], lambda ranks: ranks[-1:], lambda _: range(case.savers)):
        leaves = [
            replace(
                leaf,
                source=tuple(Placed(each.box, tuple(keep(each.ranks))) for each in leaf.source),
            )
            for leaf in case.leaves
        ]
        reshard(implementation, replace(case, leaves=tuple(leaves)))


def ranks_without(implementation: Implementation, case: Case) -> None:
    """A rank that holds or wants nothing of a leaf may omit it."""
    saved = [{name: each for name, each in rank.items() if each.shards} for rank in case.held()]
    wanted = [{name: each for name, each in rank.items() if each.boxes} for rank in case.wanted()]
    if not any(wanted):
        raise judge.Unfit  # a load of nothing at all may be refused
    with fresh_folder() as folder:
        implementation.save(folder / "ckpt", saved)
        check_loaded(case.whole(), wanted, implementation.load(folder / "ckpt", wanted))


def listing(implementation: Implementation, case: Case) -> None:
    """A checkpoint lists the names, shapes and dtypes of its leaves, and no others."""
    with fresh_folder() as folder:
        implementation.save(folder / "ckpt", case.held())
        found = implementation.list(folder / "ckpt")
    expected = _arrays(case)
    assert set(found) == set(expected), f"lists {sorted(found)}, not {sorted(expected)}"
    for name, array in expected.items():
        same = found[name].shape == array.shape and (
            numpy_dtype(found[name].dtype) == numpy_dtype(array.dtype)
        )
        assert same, f"{name!r} is listed as {found[name]}, not {array}"


def _other(case: Case) -> Case:
    """The same shapes with other elements."""
    leaves = [replace(leaf, seed=leaf.seed + 1000) for leaf in case.leaves]
    return replace(case, leaves=tuple(leaves))


def not_overwritten(implementation: Implementation, case: Case) -> None:
    """What is there stays, unless the caller says that it may be replaced; then it is replaced."""
    other = _other(case)
    with fresh_folder() as folder:
        path = folder / "ckpt"
        implementation.save(path, case.held())
        try:
            implementation.save(path, other.held())
        except Refused:
            raise
        except Exception:
            _check_everything(implementation, path, case)
        else:
            raise AssertionError("a second save to the same path raised nothing")
        implementation.save(path, other.held(), overwrite=True)
        _check_everything(implementation, path, other)


def deleted(implementation: Implementation, case: Case) -> None:
    """Nothing can be loaded or listed after a delete, and the path can be saved to again."""
    with fresh_folder() as folder:
        path = folder / "ckpt"
        implementation.save(path, case.held())
        implementation.delete(path)
        _check_raises("load", lambda: implementation.load(path, everything(_arrays(case))))
        _check_raises("list", lambda: implementation.list(path))
        implementation.save(path, _other(case).held())
        _check_everything(implementation, path, _other(case))


def _check_raises(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Refused:
        raise
    except Exception:
        return
    raise AssertionError(f"{what} raised nothing after a delete")


def sound(implementation: Implementation, case: Case) -> None:
    """Nothing is wrong with a checkpoint that was just saved, before and after it is read."""
    with fresh_folder() as folder:
        path = folder / "ckpt"
        implementation.save(path, case.held())
        for _ in range(2):
            found = implementation.verify(path)
            assert not found, f"verify says of a sound checkpoint: {found[0]}"
            implementation.load(path, case.wanted())


Law = Callable[[Implementation, Case], None]

LAWS: Mapping[str, Law] = {
    law.__name__.replace("_", "-"): law
    for law in (
        reshard,
        parts,
        written_once,
        saved_again,
        ranks_permuted,
        replicas,
        ranks_without,
        listing,
        not_overwritten,
        deleted,
        sound,
    )
}


run = partial(judge.judge_all, LAWS)
"""See `conformance.outcome.Part`."""
