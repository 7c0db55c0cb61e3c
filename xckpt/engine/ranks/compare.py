"""The check that all ranks call alike and save the same: the first step, with 20 bytes a rank.

1. Every rank hashes what should be equal on all ranks: the arguments of the call, and the small
   leaves that are replicas (`SavePlanner.replicas`), many at once (`joined`). It sends one hash of
   their names, one of the rest, and one of its host.
2. The coordinator answers how many ranks a host has, at most: they share its memory. If the other
   hashes of all ranks are equal, the check ends there. Else one rank speaks for all that sent the
   same hashes.
3. The speakers send the hash of each name, and learn which names several of them have. The stages
   of a pipeline have other leaves each: the coordinator remembers what they have in common, and
   does not ask for it again.
4. The speakers send a digest of each common leaf, and the coordinator says which differ on which
   ranks. Leaves that only some ranks have are not a fault.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from xckpt.core.adapter import NO_ADAPTERS, Adapters
from xckpt.core.names import about_numbered
from xckpt.core.part.replicas import joined
from xckpt.core.problem import Problem
from xckpt.engine.ranks.alive import WORK
from xckpt.engine.ranks.group import Group, operation
from xckpt.engine.ranks.rendezvous import host_identity
from xckpt.engine.ranks.waiting import SILENT
from xckpt.engine.steps import all_reduce
from xckpt.errors import PlanError, RanksFailedError, ranks_in_words

COMPARE = "compare what they save or load; nothing was written or loaded"
ARGUMENTS = "the ranks call with different arguments; give all of them the same"
SUMMARY = (
    "the ranks do not save the same, and only one rank's would be kept. Give each rank its own as "
    "xckpt.PerRank(value), or make it a DTensor or a sharded array; "
    "options=xckpt.SaveOptions(compare_replicas=False) keeps any one"
)

Leaves = Iterable[tuple[str, str, object]]
"""Name, type and data of leaves that must be equal: tensors of any framework."""

Hashes = NDArray[np.uint64]

CALL: Final = "call"
"""What the ranks call: compared like an argument, for another call begins with the same step."""

ALIKE: Final = ("chunk_bytes", "shard_bytes", "readers", "compare_replicas", "share_reads")
"""Options that must be equal on all ranks."""


class _Question(msgspec.Struct, array_like=True):
    """The coordinator's answer, and its question if hashes differ."""

    host_ranks: int
    """How many ranks a host has, at most."""
    speakers: list[int] = []
    """None where all hashes are equal."""
    common: bytes | None = None
    """Hashes of the names that several speakers have, if they are known."""


class _Details(msgspec.Struct, array_like=True):
    """What a speaker answers."""

    arguments: dict[str, str]
    leaves: dict[str, bytes]
    """Leaf name, NUL and type -> digest; the common ones."""


_encode = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(_Question).decode
_details = msgspec.msgpack.Decoder(_Details).decode

MOST_REMEMBERED: Final = 16
_common: Final[dict[tuple[bytes, ...], bytes]] = {}
"""Hashes of the speakers' lists of names -> the names that they share; from the last saves."""


def compare_ranks(
    group: Group,
    arguments: Mapping[str, str],
    replicas: Callable[[], Leaves] = tuple,
    adapters: Adapters = NO_ADAPTERS,
    host: str | None = None,
) -> int:
    """Refuse a call whose ranks have different arguments or replicas.

    Args:
        group: the ranks that save or load.
        arguments: name -> value in words, of the call, and `CALL`.
        replicas: the leaves that must be equal on the ranks that have them; may raise.
        adapters: know the frameworks of the leaves.
        host: the name of this rank's host; None finds it.

    Returns:
        How many ranks a host has, at most.

    Raises:
        PlanError: something differs; everything that does is listed with the ranks.
    """
    # Another release may write another format, or say other things to the ranks.
    release = {"release of xckpt": sys.modules["xckpt"].__version__}
    mine = _Own(release | dict(arguments), adapters, host or host_identity())
    comparison = _Comparison()

    def summary() -> bytes:
        mine.take(replicas())
        return mine.summary()

    question = _question(all_reduce(group, COMPARE, summary, comparison.ask))
    if not question.speakers:
        return question.host_ranks
    speaks = group.rank in question.speakers
    common = question.common
    if common is None:
        names = (lambda: mine.hashes().tobytes()) if speaks else bytes
        common = all_reduce(group, COMPARE, names, comparison.find_common)
    shared = np.frombuffer(common, np.uint64)
    details = (lambda: _encode(mine.details(shared))) if speaks else bytes
    all_reduce(group, COMPARE, details, comparison.refuse)
    return question.host_ranks


def refuse(group: Group, error: Exception, step: str = COMPARE) -> None:
    """Say in the first step of a call that this rank cannot take part; collective.

    The other ranks call `compare_ranks`, or begin with another ``step``. In a group of one it
    returns: there is no other rank to inform.

    Raises:
        Exception: ``error``, on every rank; see `xckpt.engine.steps`. If other ranks are silent,
            on this one.
    """
    if group.size == 1:
        return

    def fail() -> bytes:
        raise error

    try:
        with operation(group):
            all_reduce(group, step, fail, lambda _: b"")
    except RanksFailedError as lost:
        if any(failure.kind == SILENT for failure in lost.failures):
            raise error from lost
        raise


def arguments_of(storage: object) -> dict[str, str]:
    """A storage's arguments that must be equal on all ranks, in words; none of unknown storages.

    Options that suit a machine, such as ``threads``, may differ.

    Example:
        >>> import xckpt
        >>> reader = xckpt.storage.ZarrStorageReader("s3://bucket/run/7")
        >>> arguments_of(reader)
        {'path': "'s3://bucket/run/7'", 'share_reads': 'True'}
    """
    where = getattr(storage, "target", getattr(storage, "location", None))
    arguments = {} if where is None else {"path": repr(str(where))}
    options = getattr(storage, "options", None)
    return arguments | _in_words(storage, ("overwrite", "base")) | options_of(options)


def options_of(options: object) -> dict[str, str]:
    """Those options of a save or of a load that must be equal on all ranks, in words."""
    return _in_words(options, ALIKE)


def _in_words(holder: object, names: Iterable[str]) -> dict[str, str]:
    """Those attributes that it has."""
    return {name: repr(getattr(holder, name)) for name in names if hasattr(holder, name)}


@dataclass(slots=True)
class _Own:
    """What this rank has, leaves in the order of their names."""

    arguments: Mapping[str, str]
    adapters: Adapters
    host: str
    names: list[str] = field(default_factory=list[str])
    """Leaf name, NUL and type: another dtype or shape is another leaf here, because the plan's
    checks say more about those."""
    data: list[object] = field(default_factory=list[object])

    def take(self, leaves: Leaves) -> None:
        """Take the leaves; ranks may have them in different orders."""
        found: list[tuple[str, object]] = []
        for name, kind, data in leaves:
            found.append((f"{name}\0{kind}", data))
            WORK.get().moved = time.monotonic()
        found.sort(key=itemgetter(0))
        self.names = [name for name, _ in found]
        self.data = [data for _, data in found]

    def summary(self) -> bytes:
        """A hash of the names, one of what they stand for and of the arguments, and the host's."""
        names = xxhash.xxh3_64(_text("\n".join(self.names)))
        contents = xxhash.xxh3_64(_encode(self.arguments))
        for array in joined(zip(map(_leaf_of, self.names), self.data, strict=True), self.adapters):
            contents.update(_bytes_of(array))
            WORK.get().moved = time.monotonic()
        return names.digest() + contents.digest() + xxhash.xxh32_digest(_text(self.host))

    def hashes(self) -> Hashes:
        """A hash of each name."""
        return np.array([xxhash.xxh3_64_intdigest(_text(name)) for name in self.names], np.uint64)

    def details(self, common: Hashes) -> _Details:
        """Each argument, and the digest of each leaf that others have too."""
        leaves: dict[str, bytes] = {}
        for number in np.flatnonzero(np.isin(self.hashes(), common)).tolist():
            array = self.adapters.to_numpy(self.data[number], _leaf_of(self.names[number]))
            leaves[self.names[number]] = xxhash.xxh3_128_digest(_bytes_of(array))
            WORK.get().moved = time.monotonic()
        return _Details(dict(self.arguments), leaves)


def _leaf_of(name: str) -> str:
    """The leaf of a name of `_Own.names`."""
    return name.rpartition("\0")[0]


def _part_of(name: str) -> str:
    """Which part of the leaf a name of `_Own.names` is about; empty if all."""
    return name.rpartition("\0")[2].partition("\n")[2]


def _text(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class _Comparison:
    """What the coordinator learns in one comparison."""

    def __init__(self) -> None:
        self._ranks: list[list[int]] = []
        """For each speaker the ranks that it speaks for, itself first."""
        self._lists: tuple[bytes, ...] = ()
        """The hash of each speaker's names, sorted."""

    def ask(self, summaries: Sequence[bytes]) -> bytes:
        """How many ranks share a host; and a question to the speakers unless all are equal."""
        host_ranks = max(Counter(summary[16:] for summary in summaries).values())
        alike: dict[bytes, list[int]] = {}
        for rank, summary in enumerate(summaries):
            alike.setdefault(summary[:16], []).append(rank)
        if len(alike) == 1:
            return _encode(_Question(host_ranks))
        self._ranks = list(alike.values())
        self._lists = tuple(sorted(summary[:8] for summary in alike))
        speakers = [ranks[0] for ranks in self._ranks]
        return _encode(_Question(host_ranks, speakers, _common.get(self._lists)))

    def find_common(self, answers: Sequence[bytes]) -> bytes:
        """The hashes of the names that several speakers have."""
        lists = [np.frombuffer(answers[ranks[0]], np.uint64) for ranks in self._ranks]
        names, counts = np.unique(np.concatenate(lists), return_counts=True)
        common = names[counts > 1].tobytes()
        while len(_common) >= MOST_REMEMBERED:
            del _common[next(iter(_common))]
        _common[self._lists] = common
        return common

    def refuse(self, answers: Sequence[bytes]) -> bytes:
        """Raise if an argument or a common leaf differs."""
        said = [(_details(answers[ranks[0]]), ranks) for ranks in self._ranks]
        calls = _differences([(each.arguments, ranks) for each, ranks in said], _argument)
        leaves = _differences([(each.leaves, ranks) for each, ranks in said], _leaf)
        whole = {_leaf_of(name) for name in leaves if not _part_of(name)}
        told = [
            leaf for name, leaf in leaves.items() if not _part_of(name) or leaf.leaf not in whole
        ]
        if calls or told:
            by_number = about_numbered(each.leaf or "" for each in told)
            summary = SUMMARY + by_number if told else ARGUMENTS
            raise PlanError.listing(summary, [*calls.values(), *told])
        return b""


def _differences(
    said: Iterable[tuple[Mapping[str, object], Sequence[int]]],
    say: Callable[[str, Mapping[object, list[int]]], Problem],
) -> dict[str, Problem]:
    """The message for each name under which ranks have different values."""
    values: dict[str, dict[object, list[int]]] = {}
    for named, ranks in said:
        for name, value in named.items():
            values.setdefault(name, {}).setdefault(value, []).extend(ranks)
    return {name: say(name, ranks) for name, ranks in values.items() if len(ranks) > 1}


def _argument(name: str, ranks: Mapping[object, list[int]]) -> Problem:
    each = [f"{value} on {ranks_in_words(those)}" for value, those in ranks.items()]
    what = "call" if name == CALL else f"argument {name}"
    return Problem(kind="argument", text=f"the {what} is {', but '.join(_few(each))}")


def _leaf(name: str, ranks: Mapping[object, list[int]]) -> Problem:
    groups = list(ranks.values())
    if len(groups) == len(every := [rank for those in groups for rank in those]) > 2:
        text = f"differs on each of {ranks_in_words(every)}"
    else:
        text = f"differs between {' and '.join(_few([*map(ranks_in_words, groups)]))}"
    part = f"{box} " if (box := _part_of(name)) else ""
    return Problem(_leaf_of(name), kind="replica", text=part + text)


def _few(said: Sequence[str]) -> Sequence[str]:
    return said if len(said) <= 8 else [*said[:8], f"{len(said) - 8} more"]
