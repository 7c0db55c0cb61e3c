"""Suggestions for a name that does not exist.

1. `near_names` looks for the ends of longer names (``wte`` for ``model/wte``), small letters for
   capitals (``w`` for ``W``), and for similar names.
2. `no_such_name` is the message about a name that is not there, with the nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from xckpt.core.text.arguments import any_repr
from xckpt.core.text.printable import printable

COMPARED = 2_000
"""Among more names than this, only those of nearly the same length are compared."""

MOST_COMPARED = 30_000
"""How many names are compared at most: about a second."""


def near_names(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Up to ``most`` names that may be meant by ``name``, the likeliest first.

    Example:
        >>> near_names("wte", ["model/wte", "model/wpe"])
        ['model/wte']
        >>> near_names("Model/WTE", ["model/wte", "model/wpe"])
        ['model/wte']
        >>> near_names("modle/wte", ["model/wte", "opt/count"])
        ['model/wte']
    """
    known = list(names)
    end = f"/{name}"
    ends = [other for other in known if other.endswith(end)][:most]
    if ends or not name:
        return ends
    for slack in (8, 2):
        if len(known) > COMPARED:
            known = [other for other in known if abs(len(other) - len(name)) <= slack]
    spelled = name.casefold()
    same = [each for each in known if len(each) == len(name) and each.casefold() == spelled]
    if same:
        return same[:most]
    return difflib.get_close_matches(name, known[:MOST_COMPARED], n=most)


def no_such_name(
    name: object, names: Iterable[str], where: str, otherwise: str = "", what: str = "leaf"
) -> str:
    """The message about a leaf or container that does not exist.

    Args:
        name: what was asked for; what is no str has no near names.
        names: what there is.
        where: where it was looked for.
        otherwise: what to do where no name is near.
        what: what the names are of.

    Example:
        >>> no_such_name("modle/w", ["model/w", "step"], "run/10")
        "run/10 has no leaf 'modle/w'; did you mean model/w?"
        >>> no_such_name("x", [], "run/10", "xckpt ls lists the leaves")
        "run/10 has no leaf 'x'; xckpt ls lists the leaves"
    """
    near = near_names(name, names) if isinstance(name, str) else []
    hint = f"did you mean {printable(' or '.join(near))}?" if near else otherwise
    return f"{printable(where)} has no {what} {any_repr(name)}" + (f"; {hint}" if hint else "")
