"""Every error that xckpt raises, in one tree.

::

    XckptError
    ├── NotACheckpointError      (also a FileNotFoundError)  nothing is committed at the path
    ├── CheckpointExistsError    (also a FileExistsError)    the path is taken already
    ├── ManifestError            (also a ValueError)         the manifest cannot be trusted
    │   ├── VersionError                                     a newer xckpt wrote it
    │   └── UnsafePickleError                                a pickle names a class it must not
    ├── CorruptCheckpointError   (also a ValueError)         the data differ from what was saved
    ├── TreeMismatchError        (also a ValueError)         the target does not fit
    ├── PlanError                (also a ValueError)         ranks disagree, or leave gaps
    ├── MappingError             (also a ValueError)         a mapping does not fit the tensors
    ├── UnsupportedLeafError     (also a TypeError)          a leaf that no adapter can carry
    ├── LeafTooLargeError        (also a MemoryError)        not enough memory to load a leaf
    ├── StorageError             (also an OSError)           the disk or the bucket refused
    └── RanksFailedError         (also a RuntimeError)       some rank failed, so every rank stops

Errors that can have several causes carry them all in ``problems``: lines that say as values which
leaf, box and rank each is about (`xckpt.core.problem.Problem`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from xckpt.core.problem import Problem

__all__ = [
    "CheckpointExistsError",
    "CorruptCheckpointError",
    "LeafTooLargeError",
    "ManifestError",
    "MappingError",
    "NotACheckpointError",
    "PlanError",
    "Problem",
    "RankFailure",
    "RanksFailedError",
    "StorageError",
    "TreeMismatchError",
    "UnsafePickleError",
    "UnsupportedLeafError",
    "VersionError",
    "XckptError",
]

SHOWN_PROBLEMS = 20
"""How many problems a message spells out; ``problems`` always holds all of them."""


class XckptError(Exception):
    """Base of all errors of this library.

    Example:
        >>> error = XckptError.listing("2 leaves are wrong", ["a: shape", "b: dtype"])
        >>> print(error)
        2 leaves are wrong
          - a: shape
          - b: dtype
        >>> error.problems
        ('a: shape', 'b: dtype')
        >>> error.problems[0].text
        'a: shape'
    """

    problems: tuple[Problem, ...]

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(map(Problem.of, problems))

    @classmethod
    def listing(cls, summary: str, problems: Iterable[str]) -> Self:
        """An error whose message is ``summary`` and one line for each problem.

        Further lines of a problem stand indented under its first.
        """
        problems = tuple(problems)
        lines = ["  - " + problem.replace("\n", "\n    ") for problem in problems[:SHOWN_PROBLEMS]]
        if len(problems) > SHOWN_PROBLEMS:
            lines.append(f"  ... and {len(problems) - SHOWN_PROBLEMS} more")
        return cls("\n".join([summary, *lines]), problems)

    def __str__(self) -> str:
        # KeyError and OSError subclasses would otherwise quote or reformat the message.
        return str(self.args[0]) if self.args else ""


class NotACheckpointError(XckptError, FileNotFoundError):
    """No committed checkpoint is at the path."""


class CheckpointExistsError(XckptError, FileExistsError):
    """Something is at the path already, and the caller did not ask to replace it."""


class ManifestError(XckptError, ValueError):
    """The manifest is truncated, altered, or breaks a rule of the format."""


class VersionError(ManifestError):
    """The checkpoint was written by a newer version of the format."""


class UnsafePickleError(ManifestError):
    """A pickle in another library's checkpoint names a class that it must not; nothing was run."""


class CorruptCheckpointError(XckptError, ValueError):
    """A chunk, its digest or its zarr metadata differs from what was saved."""


class TreeMismatchError(XckptError, ValueError):
    """Leaves are missing, unexpected, or of another shape or dtype than the target's."""


class PlanError(XckptError, ValueError):
    """The ranks' shards do not cover each tensor exactly once, or the ranks disagree."""


class MappingError(XckptError, ValueError):
    """A mapping between models is ambiguous, leaves gaps, or does not fit the tensors or data."""


class UnsupportedLeafError(XckptError, TypeError):
    """A leaf that cannot be saved or loaded; the message gives its name."""

    @classmethod
    def leaves(cls, fault: str, problems: Iterable[str]) -> Self:
        """The error for several leaves with one fault, such as ``"cannot be saved"``."""
        lines = tuple(problems)
        return cls.listing(
            f"{len(lines):,} {'leaf' if len(lines) == 1 else 'leaves'} {fault}", lines
        )


class LeafTooLargeError(XckptError, MemoryError):
    """There is not enough memory to load a leaf; the message gives its name."""


class StorageError(XckptError, OSError):
    """The storage refused: no space, no permission, no such bucket, no answer."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What went wrong on one rank."""

    rank: int
    """The rank in the group that saved or loaded."""
    kind: str
    """The exception's class name on that rank."""
    message: str
    """The exception's message on that rank."""


class RanksFailedError(XckptError, RuntimeError):
    """At least one rank failed; raised on every rank with all the failures.

    Example:
        >>> step = "write; nothing was committed"
        >>> error = RanksFailedError.of(step, [RankFailure(3, "StorageError", "disk full")])
        >>> print(error)
        1 rank failed to write; nothing was committed
          - rank 3: StorageError: disk full
        >>> error.failures[0].rank
        3
    """

    failures: tuple[RankFailure, ...] = ()

    @classmethod
    def of(cls, step: str, failures: Iterable[RankFailure]) -> RanksFailedError:
        """The error for the ranks that failed to ``step``, which also says what follows."""
        failures = tuple(failures)
        ranks = "1 rank" if len(failures) == 1 else f"{len(failures)} ranks"
        error = cls.listing(
            f"{ranks} failed to {step}",
            [Problem(rank=f.rank, kind=f.kind, text=f.message) for f in failures],
        )
        error.failures = failures
        return error
