"""Shards that make up no array: what must be refused, and not guessed at.

Each law spoils what the ranks hold of a case, and has it saved. The save must raise, and leave
nothing that can be loaded. A case that cannot be spoilt (an array without elements) is `Unfit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from conformance import judge
from conformance.cases import Case, checksum, numpy_dtype, region
from conformance.implementation import Array, Box, Held, Implementation, Refused, Shard
from conformance.laws.properties import fresh_folder

__all__ = ["LAWS", "run"]

Ranks = list[dict[str, Held]]
Spoil = Callable[[Case, Ranks], str]
"""Changes what ranks hold; says what is wrong then, or nothing if it could not."""


def overlaps(implementation: Implementation, case: Case) -> None:
    """Two boxes that share an element are refused: there is no way to know which of them counts."""
    _refused(implementation, case, _overlap)


def gaps(implementation: Implementation, case: Case) -> None:
    """An element that no rank holds is missed."""
    _refused(implementation, case, _gap)


def contradictions(implementation: Implementation, case: Case) -> None:
    """Ranks that do not agree on what an array is are refused."""
    _refused(implementation, case, _contradiction)


LAWS = {law.__name__: law for law in (overlaps, gaps, contradictions)}


def _refused(implementation: Implementation, case: Case, spoil: Spoil) -> None:
    ranks = case.held()
    wrong = spoil(case, ranks)
    if not wrong:
        raise judge.Unfit
    with fresh_folder() as folder:
        try:
            implementation.save(folder / "ckpt", ranks)
        except Refused:
            raise
        except Exception:
            _check_nothing_there(implementation, folder / "ckpt", wrong)
        else:
            raise AssertionError(f"{wrong}: the save raised nothing")


def _check_nothing_there(implementation: Implementation, path: Path, wrong: str) -> None:
    try:
        found = implementation.list(path)
    except Exception:
        return
    raise AssertionError(f"{wrong}: the save raised, but {sorted(found)} can be loaded")


def _overlap(case: Case, ranks: Ranks) -> str:
    """Let a rank hold besides a box that reaches from one box into another."""
    random = np.random.default_rng(checksum(case))
    for leaf in case.leaves:
        boxes = [each.box for each in leaf.source if 0 not in each.box.sizes]
        if len(boxes) < 2:
            continue
        box = boxes[random.integers(len(boxes))]
        whole = Box((0,) * len(leaf.array.shape), leaf.array.shape)
        if box == whole:
            continue
        grown = _grown(box, leaf.array.shape)
        rank = int(random.integers(len(ranks)))
        held = ranks[rank][leaf.name]
        # Other elements, so that it matters who wins.
        data = np.ascontiguousarray(leaf.values[(*grown.region, ...)])
        data = (data.view(np.uint8) ^ 1).view(data.dtype)
        ranks[rank][leaf.name] = replace(held, shards=(*held.shards, Shard(grown, data)))
        return f"{leaf.name!r}: rank {rank} holds {region(grown)} besides, which overlaps"
    return ""


def _grown(box: Box, shape: tuple[int, ...]) -> Box:
    """A box that is larger by one index in the first dimension where that is possible."""
    offsets, sizes = list(box.offsets), list(box.sizes)
    for d, size in enumerate(shape):
        if sizes[d] < size:
            offsets[d] -= offsets[d] > 0
            sizes[d] += 1
            break
    return Box(tuple(offsets), tuple(sizes))


def _gap(case: Case, ranks: Ranks) -> str:
    """Take one box away from all ranks, where another one remains."""
    random = np.random.default_rng(checksum(case))
    for leaf in case.leaves:
        boxes = [each.box for each in leaf.source if 0 not in each.box.sizes]
        if len(boxes) < 2:
            continue
        lost = boxes[random.integers(len(boxes))]
        for rank in ranks:
            held = rank[leaf.name]
            kept = tuple(shard for shard in held.shards if shard.box != lost)
            rank[leaf.name] = replace(held, shards=kept)
        return f"{leaf.name!r}: {region(lost)} is held by no rank"
    return ""


def _contradiction(case: Case, ranks: Ranks) -> str:
    """Let one of two ranks that hold something of a leaf speak of another dtype."""
    for leaf in case.leaves:
        holding = [rank for rank, leaves in enumerate(ranks) if leaves[leaf.name].shards]
        if len(holding) < 2:
            continue
        rank = holding[-1]
        held = ranks[rank][leaf.name]
        other = "int16" if leaf.array.dtype != "int16" else "float64"
        array = Array(leaf.array.shape, other)
        shards = tuple(
            Shard(shard.box, np.ones(shard.box.sizes, numpy_dtype(other))) for shard in held.shards
        )
        ranks[rank][leaf.name] = Held(array, shards)
        return f"{leaf.name!r}: {other} on rank {rank}, {leaf.array.dtype} on others"
    return ""


run = partial(judge.judge_all, LAWS)
"""See `conformance.outcome.Part`."""
