"""Every error that xckpt raises, in one tree.

::

    XckptError
    ├── NotACheckpointError      (also a FileNotFoundError)  nothing is committed at the path
    ├── CheckpointExistsError    (also a FileExistsError)    the path is taken already
    ├── ManifestError            (also a ValueError)         the manifest cannot be trusted
    │   ├── VersionError                                     a newer xckpt wrote it
    │   ├── MemoryLimitError                                 it takes more than memory_bytes
    │   └── UnsafePickleError                                a pickle names a class it must not
    ├── CorruptCheckpointError   (also a ValueError)         the data differ from what was saved
    ├── TreeMismatchError        (also a ValueError)         the target does not fit
    ├── PlanError                (also a ValueError)         ranks disagree, or leave gaps
    ├── MappingError             (also a ValueError)         a mapping does not fit the tensors
    ├── UnsupportedLeafError     (also a TypeError)          a leaf that no adapter can carry
    ├── LeafTooLargeError        (also a MemoryError)        not enough memory for a leaf
    ├── NoGroupError             (also a RuntimeError)       several processes that nothing joins
    ├── StorageError             (also an OSError)           the disk or the bucket refused
    │   ├── CheckpointReplacedError                          another save came while it was read
    │   └── PathError            (also a ValueError)         the path names no place
    └── RanksFailedError         (also a RuntimeError)       several causes, or lost ranks

Errors that can have several causes carry them all in ``problems``: lines that say as values which
leaf, box and rank each is about (`xckpt.core.problem.Problem`). Messages are safe to print: control
characters in the names and texts of a checkpoint are escaped (`xckpt.core.text.printable`).

A failure has the same class on one rank and on many:

1. Every rank of a group raises when one fails. Where all failing ranks failed for one cause, each
   rank raises that cause's class: ``except NotACheckpointError`` catches it on 2 ranks too. Its
   ``failures`` say what happened on which rank; in a group of one there are none. A rank that
   stopped only since another had (they share reads) is no cause.
2. `RanksFailedError` is for mixed causes, for lost ranks, and for classes that other ranks lack.
3. A TypeError, a ValueError, a MemoryError or an OSError of all failing ranks is raised as such,
   and its ``__cause__`` is the `RanksFailedError` with the ``failures``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from xckpt.core.problem import Problem
from xckpt.core.text.printable import printable_lines

__all__ = [
    "CheckpointExistsError",
    "CheckpointReplacedError",
    "CorruptCheckpointError",
    "LeafTooLargeError",
    "ManifestError",
    "MappingError",
    "MemoryLimitError",
    "NoGroupError",
    "NotACheckpointError",
    "PathError",
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

RESTORE: Final = "restore it from a copy of the checkpoint, or load an older one"
"""What to do about damaged files."""
SHOWN_PROBLEMS = 20
"""How many problems a message lists; ``problems`` always holds all of them."""


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
    failures: tuple[RankFailure, ...] = ()
    """What happened on each rank that failed; empty in a group of one."""
    is_consequence: bool = False
    """Whether this rank failed only because another had; the other's error says why."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(printable_lines(message))
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


class MemoryLimitError(ManifestError):
    """The manifest takes more memory than ``memory_bytes`` allows; it may be sound."""


class UnsafePickleError(ManifestError):
    """A pickle of another library names a class that is not allowed; nothing was run."""


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
    """There is not enough memory for a leaf, whose name the message gives, or for a call."""


class NoGroupError(XckptError, RuntimeError):
    """This process was started as one of several, but no process group joins them."""


class StorageError(XckptError, OSError):
    """The storage refused: no space, no permission, no such bucket, no answer."""


class CheckpointReplacedError(StorageError):
    """Another save has replaced the checkpoint, or it was removed, while it was read or deleted.

    A load starts again from the new one before it raises this: 5 times, and up to 100 times in its
    first minute. What `xckpt.open` has opened does not change under its reader: open it again.
    """


class PathError(StorageError, ValueError):
    """The path names no place: it is empty, a URL without a bucket, or of an unknown scheme."""


LONGEST_SAID: Final = 1 << 16
"""Characters of an exception's message that go to other ranks, at most; of each note too."""


def said_by(error: BaseException) -> list[str]:
    """An exception's message and notes, whatever its class makes of them."""
    try:
        said = [str(error), *map(str, getattr(error, "__notes__", ()))]
    except Exception as fault:
        said = [f"(what it says raises {type(fault).__name__})"]
    return [printable_lines(each[:LONGEST_SAID]) for each in said]


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What went wrong on one rank."""

    rank: int
    """The rank in the group that saved or loaded."""
    kind: str
    """The exception's class name on that rank."""
    message: str
    """The exception's message on that rank, and its notes."""
    cause: str = ""
    """The nearest class of that exception which every rank can raise; empty if there is none."""
    problems: tuple[tuple[str | None, int | None, str, str, str], ...] = ()
    """The exception's ``problems`` on that rank: leaf, rank, kind, text and line of each."""
    is_consequence: bool = False
    """Whether another rank's failure is the cause of this one."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """An exception as text that can be sent.

        Example:
            >>> failure = RankFailure.of(1, BlockingIOError("busy"))
            >>> failure.kind, failure.message, failure.cause
            ('BlockingIOError', 'busy', 'OSError')
        """
        message = "\n  ".join(said_by(error))  # indented, as all further lines of a message
        classes = _classes()
        cause = next((c.__name__ for c in type(error).__mro__ if classes.get(c.__name__) is c), "")
        follows = isinstance(error, XckptError) and error.is_consequence
        problems = error.problems if isinstance(error, XckptError) else ()
        sent = [
            (p.leaf and _sendable(p.leaf), p.rank, p.kind, _sendable(p.text), _sendable(p))
            for p in problems
        ]
        return cls(rank, type(error).__name__, message, cause, tuple(sent), follows)


class RanksFailedError(XckptError, RuntimeError):
    """Ranks failed for several causes, or were lost; raised on every rank with all the failures.

    Example:
        >>> step = "write; nothing was committed"
        >>> error = RanksFailedError.of(step, [RankFailure(3, "StorageError", "disk full")])
        >>> print(error)
        1 rank failed to write; nothing was committed
          - rank 3: StorageError: disk full
        >>> error.failures[0].rank
        3
    """

    @classmethod
    def of(cls, step: str, failures: Iterable[RankFailure]) -> RanksFailedError:
        """The error for the ranks that failed to ``step``, which also says what follows."""
        failures = tuple(failures)
        ranks = "1 rank" if len(failures) == 1 else f"{len(failures)} ranks"
        said: dict[tuple[str, str], list[int]] = {}
        for failure in sorted(failures, key=lambda each: each.is_consequence):  # causes first
            said.setdefault((failure.kind, failure.message), []).append(failure.rank)
        error = cls.listing(
            f"{ranks} failed to {step}",
            [_of_ranks(ranks, kind, text) for (kind, text), ranks in said.items()],
        )
        error.failures = failures
        return error

    def one_cause(self) -> Exception:
        """The error to raise: of the class of all failures if they share one, else this one.

        Example:
            >>> lacking = [RankFailure(0, "NotACheckpointError", "gone", "NotACheckpointError")]
            >>> type(RanksFailedError.of("read", lacking).one_cause()).__name__
            'NotACheckpointError'
        """
        first = [failure for failure in self.failures if not failure.is_consequence]
        causes = {failure.cause for failure in first or self.failures}
        kind = _classes().get(causes.pop(), RanksFailedError) if len(causes) == 1 else type(self)
        if issubclass(kind, RanksFailedError):
            return self
        if not issubclass(kind, XckptError):
            return kind(str(self))
        sent = dict.fromkeys(p for failure in self.failures for p in failure.problems)
        problems = [Problem(leaf, None, rank, *words) for leaf, rank, *words in sent]
        error = kind(str(self), problems)
        error.failures = self.failures
        return error


def _of_ranks(ranks: Sequence[int], kind: str, text: str) -> Problem:
    """A message that several ranks share."""
    if len(ranks) == 1:
        return Problem(rank=ranks[0], kind=kind, text=text)
    return Problem(kind=kind, text=text, line=f"{ranks_in_words(ranks)}: {kind}: {text}")


@contextlib.contextmanager
def naming(where: object) -> Iterator[None]:
    """Prefix the message of an error of this library with the place.

    Example:
        >>> with naming("model.json"):
        ...     raise ManifestError("the index is damaged")
        Traceback (most recent call last):
        xckpt.errors.ManifestError: model.json: the index is damaged
    """
    try:
        yield
    except XckptError as error:
        raise type(error)(f"{where}: {error}", error.problems) from error


def _classes() -> dict[str, type[Exception]]:
    """The classes that a failure may have on every rank, by name."""
    ours = {name: kind for name, kind in globals().items() if name in __all__}
    errors = {name: kind for name, kind in ours.items() if issubclass(kind, XckptError)}
    plain = (TypeError, ValueError, MemoryError, OSError, FileNotFoundError, PermissionError)
    return {**{kind.__name__: kind for kind in plain}, **errors}


def _sendable(text: str) -> str:
    # An error that could not be sent would leave the other ranks waiting.
    return text.encode("utf-8", "backslashreplace").decode()


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks in words: runs of them shortened, and of many runs the first eight.

    Example:
        >>> ranks_in_words([3]), ranks_in_words([0, 1, 2, 3, 7])
        ('rank 3', 'ranks 0-3, 7')
        >>> ranks_in_words(range(0, 40, 2))
        'ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:8]]
    more = f" and {left:,} more" if (left := sum(map(len, runs[8:]))) else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(said)}{more}"
