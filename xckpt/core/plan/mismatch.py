"""What to say of a target that does not fit the checkpoint: counts, both sides, the likely cause.

1. `mismatch` counts the differences by kind, and shows some of each kind.
2. `guess` looks for one cause of many: all names of one side begin with a prefix that the other
   side lacks (``module.``), or the same shapes have other names (a rename).

All of it takes time linear in the number of leaves, but for the names of a rename, which are few.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from xckpt.core.near_names import near_names
from xckpt.core.problem import Problem
from xckpt.errors import SHOWN_PROBLEMS, TreeMismatchError

MISSING = "missing"
"""Kind of a leaf that is wanted, but not in the checkpoint."""

UNEXPECTED = "unexpected"
"""Kind of a leaf that is in the checkpoint, but not wanted."""

_COUNTED: Mapping[str, str] = {
    MISSING: "wanted but not in the checkpoint",
    UNEXPECTED: "in the checkpoint but not wanted",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "value": "with a value on one side and a tensor on the other",
    "type": "of another Python type",
    "length": "of another length",
}

COMMON_PREFIXES = ("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module.", "_forward_module.")
"""What wrappers put before each name: DDP, torch.compile, a trainer's attribute, FSDP1, Fabric."""

_CURES: Mapping[str, str] = {
    "module.": "save and load model.module of a DistributedDataParallel",
    "_orig_mod.": "save and load the model that torch.compile was given, as it is named by "
    "._orig_mod",
}

_RANK = re.compile("(?:.*?/)?rank[0-9]+(?=/|$)")
"""How the name of a leaf of one rank begins; see `xckpt.PerRank`."""

_RANK_PART = re.compile("^rank[0-9]+(?:/|$)|/rank[0-9]+(?=/|$)")
"""What is in such a name only because of its rank."""

FEW = 50
"""Up to this many missing leaves, each is looked for among the unexpected ones."""


def mismatch(
    problems: Iterable[Problem],
    advice: str = "",
    *,
    mapped: bool = False,
    both: Iterable[str] = (),
) -> TreeMismatchError:
    """The error that lists all differences; its message begins with counts and what may be wrong.

    Args:
        problems: the differences; those of the kinds `MISSING` and `UNEXPECTED` are compared with
            each other.
        advice: how to load what fits nevertheless; by default, the arguments that do so.
        mapped: whether a mapping is loaded through, which refuses ``at=`` and ``select=``.
        both: the names that target and checkpoint both have.

    Example:
        >>> missing = Problem("module.w", kind=MISSING, text="wanted, but not in the checkpoint")
        >>> extra = Problem("w", kind=UNEXPECTED, text="in the checkpoint, but not wanted")
        >>> print(mismatch([missing, extra]))
        the target does not fit the checkpoint: 1 leaf wanted but not in the checkpoint, 1 leaf in the checkpoint but not wanted (strict=False loads what both have; missing= and unexpected= are for one side each)
          1 name in the target holds 'module.' and is in the checkpoint without it: save and load model.module of a DistributedDataParallel
          - module.w: wanted, but not in the checkpoint
          - w: in the checkpoint, but not wanted
    """  # noqa: E501  # a message is one line
    by_kind: dict[str, list[Problem]] = defaultdict(list)
    everything = tuple(problems)
    for problem in everything:
        by_kind[problem.kind].append(problem)
    advice = advice or _advice(bool(by_kind[MISSING]), bool(by_kind[UNEXPECTED]), mapped)
    lines = [f"the target does not fit the checkpoint: {_counts(by_kind)}"]
    lines[0] += f" ({advice})" if advice else ""
    names = ([each.leaf or "" for each in by_kind[kind]] for kind in (MISSING, UNEXPECTED))
    lines += (f"  {line}" for line in guess(*names, mapped=mapped, both=both))
    kinds = [kind for kind in by_kind.values() if kind]
    for kind, shown in zip(kinds, _shares([len(kind) for kind in kinds]), strict=True):
        lines += [f"  - {problem}" for problem in kind[:shown]]
        if len(kind) > shown:
            lines.append(f"  ... and {len(kind) - shown:,} more {_COUNTED.get(kind[0].kind, '')}")
    return TreeMismatchError("\n".join(line.rstrip() for line in lines), everything)


def _advice(missing: bool, unexpected: bool, mapped: bool) -> str:
    """The arguments that allow what differs; none allows another shape.

    Example:
        >>> _advice(missing=False, unexpected=True, mapped=False)
        'unexpected="ignore" or strict=False loads without them, at= or select= a part'
    """
    if missing and unexpected:
        return "strict=False loads what both have; missing= and unexpected= are for one side each"
    if missing:
        return 'missing="ignore" or strict=False keeps them as they are in the target'
    if unexpected:
        part = "" if mapped else ", at= or select= a part"
        return f'unexpected="ignore" or strict=False loads without them{part}'
    return ""


def merged_problems(by_rank: Sequence[Sequence[Problem]]) -> list[Problem]:
    """The problems of all ranks, each line once; one that only some ranks have names a rank.

    Ranks of one job usually differ from the checkpoint in the same way.

    Example:
        >>> same, own = Problem("w", text="gone"), Problem("b", text="gone")
        >>> [(str(each), each.rank) for each in merged_problems([[same], [same, own]])]
        [('w: gone', None), ('b: gone', 1)]
    """
    ranks: dict[str, list[int]] = {}
    first: dict[str, Problem] = {}
    alike: dict[int, list[int]] = {}  # id of the problems -> the ranks that have these
    for rank, problems in enumerate(by_rank):
        alike.setdefault(id(problems), []).append(rank)
    for those in alike.values():
        for problem in by_rank[those[0]]:
            known = Problem.of(problem)
            first.setdefault(str(known), known)
            ranks.setdefault(str(known), []).extend(those)
    return [
        problem if len(ranks[line]) == len(by_rank) else problem.on(ranks[line][0])
        for line, problem in first.items()
    ]


def _counts(by_kind: Mapping[str, Sequence[Problem]]) -> str:
    counted = {_COUNTED.get(name, "that differ"): len(kind) for name, kind in by_kind.items()}
    return ", ".join(
        f"{count:,} {'leaf' if count == 1 else 'leaves'} {what}"
        for what, count in counted.items()
        if count
    )


def _shares(counts: Sequence[int]) -> list[int]:
    """How many of each kind are shown: few ones all, the others equally.

    Example:
        >>> _shares([10_000, 2, 10_000])
        [9, 2, 9]
    """
    shown = [0] * len(counts)
    room = SHOWN_PROBLEMS
    while room and (open_kinds := [n for n, count in enumerate(counts) if shown[n] < count]):
        for number in open_kinds[:room]:
            shown[number] += 1
        room -= len(open_kinds[:room])
    return shown


def guess(
    missing: Sequence[str],
    unexpected: Sequence[str],
    *,
    mapped: bool = False,
    both: Iterable[str] = (),
) -> list[str]:
    """Sentences on what may have gone wrong; empty where nothing can be recognised.

    Args:
        missing: names that are wanted, but not in the checkpoint.
        unexpected: names that are in the checkpoint, but not wanted.
        mapped, both: see `mismatch`.

    Example:
        >>> guess(["w"], ["_orig_mod.w"])[0]
        "1 name in the checkpoint holds '_orig_mod.' and is in the target without it: save and load the model that torch.compile was given, as it is named by ._orig_mod"
        >>> guess(["head/kernel"], ["head/kernels"])
        ['probably renamed: head/kernels in the checkpoint is head/kernel in the target']
    """  # noqa: E501  # a message is one line
    if not missing or not unexpected:
        return _of_ranks([*missing, *unexpected], both)
    if about := _about_own(missing, unexpected):
        return [about]
    prefix, count = _prefix(missing, unexpected)
    if prefix:
        return [_about_prefix(prefix, count, "the target", "the checkpoint", "")]
    prefix, count = _prefix(unexpected, missing)
    if prefix:
        takes = prefix.endswith("/") and not mapped
        cure = f"load(path, like, at={prefix[:-1]!r}) takes that part" if takes else ""
        return [_about_prefix(prefix, count, "the checkpoint", "the target", cure)]
    if len(missing) > FEW:
        return []
    renamed = [
        f"{near[0]} in the checkpoint is {name} in the target"
        for name in missing
        if (near := near_names(name, unexpected, most=1))
    ]
    return [f"probably renamed: {'; '.join(renamed[:5])}"] if renamed else []


def _of_ranks(names: Iterable[str], both: Iterable[str]) -> list[str]:
    """What to do about leaves of an `xckpt.PerRank` that one side lacks.

    A rank of which both sides have leaves was there on both.

    Example:
        >>> len(_of_ranks(["data/rank2/position"], ["data/rank1/position"]))
        1
        >>> _of_ranks(["data/rank0/workers/1"], ["data/rank0/step"]), _of_ranks(["data/ranks"], [])
        ([], [])
    """
    if not (ranks := _ranks(names)) or ranks <= _ranks(both):
        return []
    cure = "xckpt.PerRank.all in the target takes what each had of its own, to be divided again"
    return [f"probably saved by another number of ranks: {cure}"]


def _about_own(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What to do where only one side has leaves as those of an `xckpt.PerRank`; else ``""``.

    Example:
        >>> _about_own(["rng/seed"], ["rng/rank0/seed", "rng/rank1/seed"])
        'probably saved as an xckpt.PerRank: give one in the target too (rng/seed)'
        >>> _about_own(["data/rank0"], ["data"])
        'probably saved without xckpt.PerRank: leave it out in the target (data)'
    """
    if both := {_RANK_PART.sub("", name, 1) for name in unexpected} & set(missing):
        return f"probably saved as an xckpt.PerRank: give one in the target too ({min(both)})"
    if both := {_RANK_PART.sub("", name, 1) for name in missing} & set(unexpected):
        return f"probably saved without xckpt.PerRank: leave it out in the target ({min(both)})"
    return ""


def _ranks(names: Iterable[str]) -> set[str]:
    """How the names of leaves of one rank begin, up to that rank."""
    return {found[0] for found in map(_RANK.match, names) if found}


def _prefix(longer: Sequence[str], shorter: Sequence[str]) -> tuple[str, int]:
    """What stands before names of ``longer`` whose rest is in ``shorter``, and before how many.

    Empty where it explains less than half of the side that has fewer names.
    """
    known = set(shorter)
    for prefix in (*COMMON_PREFIXES, *_containers(longer, known)):
        stripped = (rest for name in longer if (rest := _without(name, prefix)) != name)
        count = len(known.intersection(stripped))
        if 2 * count >= min(len(longer), len(known)):
            return prefix, count
    return "", 0


def _without(name: str, prefix: str) -> str:
    """A name without a prefix, which may stand at its beginning or at that of a later part.

    Example:
        >>> _without("model/blocks.0._orig_mod.weight", "_orig_mod.")
        'model/blocks.0.weight'
    """
    if name.startswith(prefix):
        return name[len(prefix) :]
    for end in "/.":
        before, found, after = name.partition(f"{end}{prefix}")
        if found:
            return f"{before}{end}{after}"
    return name


def _containers(longer: Sequence[str], known: set[str]) -> list[str]:
    """The commonest beginnings of names whose rest is known, up to a ``/`` or a dot."""
    counts: Counter[str] = Counter()
    for name in longer[:FEW]:
        starts = [0, *(at + 1 for at, letter in enumerate(name) if letter == "/")]
        ends = [at + 1 for at, letter in enumerate(name) if letter in "/."]
        for start, end in product(starts, ends):
            if start < end and name[:start] + name[end:] in known:
                counts[name[start:end]] += 1
    return [prefix for prefix, _ in counts.most_common(1)]


def _about_prefix(prefix: str, count: int, side: str, other: str, cure: str) -> str:
    names = "1 name" if count == 1 else f"{count:,} names"
    hold, are = ("holds", "is") if count == 1 else ("hold", "are")
    cure = _CURES.get(prefix) or cure or f"take the prefix off the names of {side}"
    return f"{names} in {side} {hold} {prefix!r} and {are} in {other} without it: {cure}"
