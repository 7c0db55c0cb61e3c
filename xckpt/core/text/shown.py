"""How values look in a terminal and a notebook: on a screen, however large they are.

1. `brief` is a ``__repr__`` for dataclasses and structs: every field, long ones cut.
2. `outline` groups leaves by the first part of their names, for a terminal.
3. `documented` has `help` show the texts below the fields of a class.
4. `tree_html` makes a tree of ``<details>``, and `facts_html` a table; all text is escaped.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeVar, cast

from xckpt.core.text.printable import printable

MOST_LINES = 20
"""Lines of an outline."""
MOST_HTML_LEAVES = 2000
"""Leaves of a tree in HTML; more would make a notebook slow."""
UNITS = ("KiB", "MiB", "GiB", "TiB")

Class = TypeVar("Class")

_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlevel, _BRIEFLY.maxdict, _BRIEFLY.maxlist, _BRIEFLY.maxtuple = 3, 3, 4, 6
_BRIEFLY.maxstring = _BRIEFLY.maxother = 120


@dataclasses.dataclass(frozen=True, slots=True)
class ShownLeaf:
    """A leaf as it is shown."""

    name: str
    what: str
    """Its dtype and shape, or its type and value."""
    nbytes: int


def brief(self: object) -> str:
    """A ``repr`` of a dataclass or struct in which long fields are cut.

    Example:
        >>> from xckpt.core.manifest.entries import ValueEntry
        >>> len(brief(ValueEntry("note", "str", "x" * 10_000))) < 200
        True
    """
    names = getattr(type(self), "__struct_fields__", None)
    if names is None and dataclasses.is_dataclass(self):
        names = [field.name for field in dataclasses.fields(self) if field.repr]
    texts = (
        f"{name}={_BRIEFLY.repr(getattr(self, name))}" for name in cast("Sequence[str]", names)
    )
    return f"{type(self).__name__}({', '.join(texts)})"


class FieldTexts(dict[str, str]):
    """The slots of a class, each with the text below the field; empty where there is no source.

    Editors and the reference read that text in the source. A running program does not have it:
    `inspect` takes the text of a slot from ``__slots__``, if that is a dict. This one reads the
    source when it is asked for a text, so that an import costs nothing.
    """

    def __init__(self, owner: type) -> None:
        super().__init__(dict.fromkeys(cast("Iterable[str]", vars(owner)["__slots__"]), ""))
        self._owner: type | None = owner

    def __getitem__(self, name: str) -> str:
        if self._owner is not None:
            from xckpt.core.text.field_texts import texts_of  # only people ask

            self.update(texts_of(self._owner))
            self._owner = None
        return super().__getitem__(name)


def documented(owner: type[Class]) -> type[Class]:
    """Have `help` show the texts below the fields of a dataclass with slots.

    Example:
        >>> from xckpt.options import LoadOptions
        >>> LoadOptions.__slots__["deserialise"][:51]
        "Makes an object of the bytes that a save's ``serial"
    """
    type.__setattr__(owner, "__slots__", FieldTexts(owner))
    return owner


def readable_bytes(count: int) -> str:
    """A size in the largest unit that fits.

    Example:
        >>> readable_bytes(0), readable_bytes(1023), readable_bytes(1536), readable_bytes(3 << 30)
        ('0 B', '1023 B', '1.5 KiB', '3.0 GiB')
    """
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(UNITS))
    return f"{count / 1024**power:.1f} {UNITS[power - 1]}"


def total(leaves: Sequence[ShownLeaf]) -> str:
    """How many leaves, and how large.

    Example:
        >>> total([ShownLeaf("w", "int8 (3,)", 3)])
        '1 leaf, 3 B'
    """
    noun = "leaf" if len(leaves) == 1 else "leaves"
    return f"{len(leaves):,} {noun}, {readable_bytes(sum(leaf.nbytes for leaf in leaves))}"


def outline(leaves: Sequence[ShownLeaf]) -> list[str]:
    """A line for each leaf at the top and for each container there, with what it holds.

    Example:
        >>> outline([ShownLeaf("m/w", "int8 (3,)", 3), ShownLeaf("step", "int 7", 0)])
        ['m/: 1 leaf, 3 B', 'step: int 7']
    """
    lines = [
        f"{_cut(part)}/: {total(inside)}" if not leaf else f"{_cut(part)}: {_cut(leaf.what)}"
        for part, leaf, inside in _grouped(leaves, 0)
    ]
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"... {more:,} more"]


def tree_html(title: str, leaves: Sequence[ShownLeaf]) -> str:
    """A collapsible tree: containers with what they hold, leaves with what they are.

    Example:
        >>> tree_html("a", [ShownLeaf("m/<w>", "int8 (3,)", 3)]).count("<details")
        2
        >>> "<w>" in tree_html("a", [ShownLeaf("m/<w>", "int8 (3,)", 3)])
        False
    """
    shown = leaves[:MOST_HTML_LEAVES]
    more = len(leaves) - len(shown)
    rest = f"<p>and {more:,} more leaves</p>" if more else ""
    head = f"<summary><b>{escape(printable(title))}</b>: {total(leaves)}</summary>"
    return f"<details open>{head}{_items_html(shown, 0)}{rest}</details>"


def facts_html(title: str, facts: Iterable[tuple[str, object]]) -> str:
    """A table of facts, without those that are None.

    Example:
        >>> facts_html("w", [("shape", (3,)), ("sharding", None)]).count("<tr>")
        1
    """
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_cut(str(fact), 400))}</td></tr>"
        for name, fact in facts
        if fact is not None
    )
    return f"<table><caption>{escape(printable(title))}</caption>{rows}</table>"


def _items_html(leaves: Sequence[ShownLeaf], depth: int) -> str:
    items: list[str] = []
    for part, leaf, inside in _grouped(leaves, depth):
        if leaf:
            size = f", {readable_bytes(leaf.nbytes)}" if leaf.nbytes else ""
            items.append(
                f"<li><code>{escape(printable(part))}</code> {escape(_cut(leaf.what))}{size}</li>"
            )
        else:
            head = f"<summary><code>{escape(printable(part))}/</code> {total(inside)}</summary>"
            items.append(f"<li><details>{head}{_items_html(inside, depth + 1)}</details></li>")
    return f"<ul>{''.join(items)}</ul>"


def _grouped(
    leaves: Sequence[ShownLeaf], depth: int
) -> list[tuple[str, ShownLeaf | None, list[ShownLeaf]]]:
    """For each part of the names at a depth: the leaf that ends there, or the leaves below."""
    groups: dict[str, list[ShownLeaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.name.split("/")[depth], []).append(leaf)
    return [
        (part, inside[0] if inside[0].name.count("/") == depth else None, inside)
        for part, inside in groups.items()
    ]


def _cut(text: str, most: int = 100) -> str:
    return printable(text if len(text) <= most else f"{text[: most - 3]}...")
