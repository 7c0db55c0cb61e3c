"""What an entry of the reference has: the members of a class, and what is said of each.

A base that has an entry of its own keeps its members there; those of any other base of this
package are shown as the class's own, because a reader knows no other place to look.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Member:
    """A public member of a class that says what it is."""

    name: str
    signature: str
    """Of a method; empty for anything else."""
    text: str


def shown_bases(thing: type, described: Collection[type]) -> list[type]:
    """A class and those of its bases whose members its entry shows.

    Args:
        thing: the class.
        described: the classes that have entries of their own.
    """
    within = (base for base in thing.__mro__ if base.__module__.split(".")[0] == "xckpt")
    return [base for base in within if base is thing or base not in described]


def members(thing: type, described: Collection[type]) -> Iterator[Member]:
    """The members that the entry of a class shows, in the order of its bases and their text.

    Args:
        thing: the class.
        described: the classes that have entries of their own.
    """
    seen: set[str] = set()
    for base in shown_bases(thing, described):
        texts = attribute_texts(base)
        for name in [*texts, *vars(base)]:
            if name.startswith("_") or name in seen:
                continue
            member = inspect.getattr_static(base, name, None)
            text = texts.get(name) or _said_of(member)
            if text:
                seen.add(name)
                yield Member(name, _signature(getattr(base, name, None)), text)


def attribute_texts(thing: type) -> dict[str, str]:
    """Attribute -> the text that stands below it in the source of its class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, after in pairwise(body.body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def _said_of(member: object) -> str:
    described = isinstance(member, property | classmethod | staticmethod) or callable(member)
    return (inspect.getdoc(member) or "") if described else ""


def _signature(member: object) -> str:
    return str(inspect.signature(member)) if inspect.isroutine(member) else ""
