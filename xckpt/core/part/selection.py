"""A part of a checkpoint: the leaves below a name, or those whose names fit patterns.

1. `NamePattern` fits leaf names: ``*`` is any text without a ``/``, ``**`` any text, ``?`` one
   character but ``/``; all else is itself. A pattern that fits a container's name fits all below.
2. `Selection` says which leaves are in the part, and renames them: below ``at`` they are counted
   from there.
3. `Selection.of` describes the part as if it were a checkpoint. A list, tuple or namedtuple that
   has lost an element is a dict of those that are left, under their own keys.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, cast

from xckpt.core.metadata import Metadata
from xckpt.core.near_names import near_names
from xckpt.errors import SHOWN_PROBLEMS, TreeMismatchError

if TYPE_CHECKING:
    from xckpt.core.part.name_search import NameSearch

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern of leaf names.

    Example:
        >>> bias = NamePattern("model/*/bias")
        >>> bias.fits("model/0/bias"), bias.fits("model/0/w"), bias.fits("model/0/1/bias")
        (True, False, False)
        >>> NamePattern("opt/**/mu").fits("opt/mu"), NamePattern("opt").fits("opt/0/mu")
        (True, True)
    """

    text: str

    @property
    def is_name(self) -> bool:
        """Whether it fits one name alone, and what is below it."""
        return "*" not in self.text and "?" not in self.text

    def fits(self, name: str) -> bool:
        """Whether it fits a name, or that of a container around it."""
        if self.is_name:
            return name == self.text or name.startswith(f"{self.text}/")
        return _search(self.text).fits(name)


@functools.lru_cache(maxsize=4096)
def _search(pattern: str) -> NameSearch:
    from xckpt.core.part.name_search import NameSearch  # most programs have no pattern

    return NameSearch(pattern)


@dataclass(frozen=True, slots=True)
class Selection:
    """The leaves below a name that fit a pattern.

    Example:
        >>> part = Selection.asked("model", "*/bias")
        >>> part.picks("0/bias"), part.picks("0/w"), part.outer("0/bias"), part.below("model/0/w")
        (True, False, 'model/0/bias', '0/w')
    """

    at: str = ""
    """Name of a container or leaf of the checkpoint; empty for the root."""
    patterns: tuple[NamePattern, ...] = ()
    """Patterns of leaf names, counted from `at`; none for all leaves."""
    _names: frozenset[str] = field(init=False, repr=False, compare=False)
    """Those of them that are names: thousands are looked up as fast as one."""
    _searched: tuple[NamePattern, ...] = field(init=False, repr=False, compare=False)
    """The others."""

    def __post_init__(self) -> None:
        names = frozenset(pattern.text for pattern in self.patterns if pattern.is_name)
        object.__setattr__(self, "_names", names)
        searched = tuple(pattern for pattern in self.patterns if not pattern.is_name)
        object.__setattr__(self, "_searched", searched)

    @classmethod
    def asked(cls, at: object = "", select: object = None) -> Selection:
        """The part that a caller asks for.

        Raises:
            TypeError: ``at`` or a pattern is not a str.
            ValueError: ``select`` has no pattern, or an empty one.
        """
        if not isinstance(at, str):
            raise TypeError(f"at= takes the name of a container or leaf, got {at!r}")
        if select is None:
            return cls(at)
        if not isinstance(select, str | Iterable):
            raise TypeError(f"select= takes patterns of leaf names, got {select!r}")
        patterns: list[NamePattern] = []
        for pattern in (select,) if isinstance(select, str) else cast(Iterable[object], select):
            if not isinstance(pattern, str):
                raise TypeError(f"select= takes patterns of leaf names, got {pattern!r}")
            if not pattern:
                raise ValueError("select= has an empty pattern, which fits nothing")
            patterns.append(NamePattern(pattern))
        if not patterns:
            raise ValueError("select= needs at least one pattern of leaf names")
        return cls(at, tuple(patterns))

    def picks(self, inner: str) -> bool:
        """Whether a leaf name, counted from `at`, fits a pattern."""
        if not self.patterns or any(pattern.fits(inner) for pattern in self._searched):
            return True
        return not self._names.isdisjoint(with_containers([inner]))

    def outer(self, inner: str) -> str:
        """The name in the checkpoint; inverse of `below`."""
        return "/".join(part for part in (self.at, inner) if part)

    def below(self, name: str) -> str:
        """The name of what is in the part, counted from `at`.

        Raises:
            KeyError: it is not below `at`.
        """
        below = below_name(self.at, name)
        if below is None:
            raise KeyError(name)
        return below

    def of(self, metadata: Metadata) -> Metadata:
        """What a checkpoint says about the part.

        Raises:
            TreeMismatchError: the checkpoint has nothing at the name, or nothing fits a pattern.
        """
        stored, kinds = metadata.state_dict_metadata, metadata.containers
        below = _all_below(self.at, dict.fromkeys([*stored, *kinds]))
        self._refuse_nothing(below, [*stored, *kinds])
        leaves = {n: each for n, each in _all_below(self.at, stored).items() if self.picks(n)}
        containers = _all_below(self.at, kinds)
        kept = with_containers([*leaves, *filter(self.picks, containers)])
        whole = _whole(containers, with_containers(below), kept)
        return replace(metadata, state_dict_metadata=leaves, containers=whole)

    def _refuse_nothing(self, below: Collection[str], names: Collection[str]) -> None:
        if not below:
            raise TreeMismatchError(
                f"at={self.at!r}: the checkpoint has no such container or leaf"
                f"{_near(self.at, with_containers(names))}"
            )
        known, problems = with_containers(below), list[str]()
        for pattern in self.patterns:
            if pattern.text in known if pattern.is_name else any(map(pattern.fits, below)):
                continue
            near = _near(pattern.text, known) if len(problems) < SHOWN_PROBLEMS else ""
            where = f" below {self.at}" if self.at else ""
            problems.append(f"select={pattern.text!r}: no leaf{where} fits{near}")
        if len(problems) == 1:
            raise TreeMismatchError(problems[0], problems)
        if problems:
            summary = f"{len(problems):,} patterns of select= fit nothing"
            raise TreeMismatchError.listing(summary, problems)


def _all_below(at: str, named: Mapping[str, Value]) -> dict[str, Value]:
    """What is at a name or below it, under the names from there."""
    pairs = ((below_name(at, name), value) for name, value in named.items())
    return {below: value for below, value in pairs if below is not None}


def _whole(
    containers: Mapping[str, str], names: Collection[str], kept: Collection[str]
) -> dict[str, str]:
    """The kinds of the containers that are kept; one that has lost a child becomes a dict.

    Args:
        containers: name -> kind, before.
        names: of all leaves and containers, before.
        kept: those of them that are left.
    """
    torn = {name.rpartition("/")[0] for name in names if name and name not in kept}
    return {name: kind for name, kind in containers.items() if name in kept and name not in torn}


def below_name(at: str, name: str) -> str | None:
    """A name as it is seen from ``at``; None if it is neither that nor below it.

    Example:
        >>> below_name("opt", "opt/0/mu"), below_name("opt", "opt"), below_name("opt", "optimizer")
        ('0/mu', '', None)
    """
    if not at:
        return name
    if name == at:
        return ""
    return name[len(at) + 1 :] if name.startswith(f"{at}/") else None


def with_containers(names: Iterable[str]) -> dict[str, None]:
    """Names, and those of all containers around them, each once.

    Example:
        >>> list(with_containers(["opt/0/mu", "step"]))
        ['opt/0/mu', 'opt/0', 'opt', '', 'step']
    """
    found: dict[str, None] = {}
    for name in names:
        while name not in found:
            found[name] = None
            name = name.rpartition("/")[0]
    return found


def _near(name: str, names: Iterable[str]) -> str:
    near = near_names(name, [other for other in names if other])
    return f"; did you mean {' or '.join(near)}?" if near else ""
