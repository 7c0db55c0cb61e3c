"""Do all ranks save the same? Asked before a save plans, and answered with 16 bytes a rank.

1. Every rank digests what all should have alike: the arguments of the call, and the small leaves
   that are replicas (`SavePlanner.replicas`). It sends one digest of all digests.
2. Where all ranks' are equal, that is all. Else each sends its digests leaf by leaf, and the
   coordinator says which leaves differ on which ranks. Leaves that only some ranks have (in
   pipelines) make the digests differ too, but are no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import xxhash

from xckpt.core.plan.save import SavePlanner
from xckpt.core.problem import Problem
from xckpt.engine.ranks.group import Group
from xckpt.engine.steps import all_reduce
from xckpt.errors import PlanError, spelled_ranks

COMPARE = "compare what they are to save; nothing was written"
SUMMARY = (
    "the ranks do not save the same, and only one rank's would be kept. Give each rank its own as "
    "xckpt.PerRank(value), or make it a DTensor or a sharded array; "
    "options=xckpt.SaveOptions(compare_replicas=False) keeps any one"
)


class _Described(msgspec.Struct, array_like=True):
    """What a rank is to have as all others."""

    arguments: dict[str, str]
    leaves: dict[str, bytes]
    """Leaf name, NUL and type -> digest."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Described).decode


def compare_ranks(
    group: Group,
    describe: Callable[[], SavePlanner],
    arguments: Mapping[str, str],
    *,
    contents: bool = True,
) -> None:
    """Refuse a save whose ranks have not the same arguments or replicas.

    Args:
        group: the ranks that save.
        describe: has the planner take the state.
        arguments: name -> value in words, of the call.
        contents: whether to look at the replicas.

    Raises:
        PlanError: something differs; everything that does is listed with the ranks.
    """
    described: list[bytes] = []

    def local() -> bytes:
        leaves = describe().replicas() if contents else ()
        # Another dtype or shape is another key: the plan says more about those.
        digests = {f"{n}\0{kind}": xxhash.xxh3_128_digest(data.data) for n, kind, data in leaves}
        described.append(_encode(_Described(dict(arguments), digests)))
        return xxhash.xxh3_128_digest(described[0])

    differs = all_reduce(group, COMPARE, local, lambda found: b"x" if len(set(found)) > 1 else b"")
    if differs:
        all_reduce(group, COMPARE, lambda: described[0], _refuse)


def _refuse(answers: Sequence[bytes]) -> bytes:
    ranks = [_decode(answer) for answer in answers]
    problems = [
        *_differences([rank.arguments for rank in ranks], _argument),
        *_differences([rank.leaves for rank in ranks], _leaf),
    ]
    if problems:
        raise PlanError.listing(SUMMARY, problems)
    return b""


def _differences(
    found: Sequence[Mapping[str, object]], say: Callable[[str, Mapping[object, list[int]]], Problem]
) -> list[Problem]:
    """What is said of each name under which ranks have different values."""
    values: dict[str, dict[object, list[int]]] = {}
    for rank, named in enumerate(found):
        for name, value in named.items():
            values.setdefault(name, {}).setdefault(value, []).append(rank)
    return [say(name, ranks) for name, ranks in values.items() if len(ranks) > 1]


def _argument(name: str, ranks: Mapping[object, list[int]]) -> Problem:
    each = [f"{value} on {spelled_ranks(those)}" for value, those in ranks.items()]
    return Problem(kind="argument", text=f"the argument {name} is {', but '.join(each)}")


def _leaf(name: str, ranks: Mapping[object, list[int]]) -> Problem:
    each = [spelled_ranks(those) for those in ranks.values()]
    shown = each if len(each) <= 8 else [*each[:8], f"{len(each) - 8} more"]
    return Problem(
        name.rpartition("\0")[0], kind="replica", text=f"differs between {' and '.join(shown)}"
    )
