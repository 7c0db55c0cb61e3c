"""One thing that is wrong: a line of text that also says, as values, what it is about.

A `Problem` is a string, so that a list of problems prints, sorts and compares as its lines. Code
that acts on problems reads `leaf`, `box`, `rank` and `kind`, and never parses the line. The line is
safe to print, whatever the leaf is called; `leaf` is its name as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from xckpt.core.text.printable import printable, printable_lines

if TYPE_CHECKING:
    from xckpt.core.geometry.box import Box


class Problem(str):
    """A line that says what is wrong, and the leaf, box and rank that it is about.

    Args:
        leaf: the leaf's name (the root's is empty); None where no leaf is concerned.
        box: the elements concerned, ``[offset, offset + size)`` in each dimension; None for all.
        rank: the rank on which it is wrong; None where it is on every rank.
        kind: what sort of problem it is, one word such as ``"missing"`` or ``"dtype"``.
        text: what is wrong.

    Example:
        >>> problem = Problem("model/w", kind="dtype", text="bfloat16 in the checkpoint")
        >>> print(problem)
        model/w: bfloat16 in the checkpoint
        >>> problem.leaf, problem.kind, problem.rank
        ('model/w', 'dtype', None)
        >>> print(Problem(rank=3, kind="StorageError", text="disk full"))
        rank 3: StorageError: disk full
    """

    __slots__ = ("box", "kind", "leaf", "rank", "text")

    leaf: str | None
    box: Box | None
    rank: int | None
    kind: str
    text: str

    def __new__(
        cls,
        leaf: str | None = None,
        box: Box | None = None,
        rank: int | None = None,
        kind: str = "",
        text: str = "",
        line: str | None = None,
    ) -> Self:
        """A problem whose line is ``line``, or else what the other arguments make of it."""
        shown = printable_lines if leaf is None else printable
        line = _line(leaf, rank, kind, text) if line is None else line
        problem = super().__new__(cls, shown(line))
        problem.leaf, problem.box, problem.rank = leaf, box, rank
        problem.kind, problem.text = kind, text
        return problem

    @classmethod
    def of(cls, line: str) -> Self:
        """A line as a problem; one that is a problem already as it is.

        Example:
            >>> Problem.of("the disk is full").text
            'the disk is full'
        """
        return line if isinstance(line, cls) else cls(text=line)

    @classmethod
    def about(cls, leaf: str, line: str) -> Self:
        """A line that begins with the leaf's name, with the leaf as a value.

        Example:
            >>> problem = Problem.about("model/w", "model/w: a set is no tensor")
            >>> problem.leaf, problem.text
            ('model/w', 'a set is no tensor')
        """
        return cls(leaf, kind="type", text=line.removeprefix(f"{leaf or 'the root'}: "), line=line)

    def on(self, rank: int) -> Problem:
        """The same problem, with the rank on which it is."""
        return Problem(self.leaf, self.box, rank, self.kind, self.text, str(self))

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.leaf, self.box, self.rank, self.kind, self.text, str(self))
        return type(self), fields


def _line(leaf: str | None, rank: int | None, kind: str, text: str) -> str:
    if leaf is not None:
        return f"{leaf or 'the root'}: {text}"
    if rank is not None:
        return f"rank {rank}: {kind}: {text}" if kind else f"rank {rank}: {text}"
    return text
