"""The leaves that a command is about: names, containers and patterns, with suggestions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xckpt.cli.output import Failure
from xckpt.core.near_names import no_such_name
from xckpt.core.part.selection import NamePattern, with_containers


def chosen(path: str, names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The leaves that one of the patterns means, in their own order; all if there is none.

    Raises:
        Failure: a pattern means no leaf.

    Example:
        >>> chosen("ckpt", ["model/w", "model/b", "opt/w", "step"], ["model", "s*"])
        ['model/w', 'model/b', 'step']
    """
    if not patterns:
        return list(names)
    kept: set[str] = set()
    for pattern in patterns:
        meant = NamePattern(pattern)
        found = [name for name in names if meant.fits(name)]
        if not found:
            raise no_such_leaf(path, with_containers(names), pattern)
        kept.update(found)
    return [name for name in names if name in kept]


def no_such_leaf(path: str, names: Iterable[str], name: str) -> Failure:
    """The failure of a command whose leaf is not there.

    Example:
        >>> print(no_such_leaf("ckpt", ["model/w", "model/b"], "model/v"))
        ckpt has no leaf 'model/v'; did you mean model/w or model/b?
    """
    return Failure(no_such_name(name, names, path, "xckpt ls lists the leaves"))
