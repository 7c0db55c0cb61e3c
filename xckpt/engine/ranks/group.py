"""The processes that save or load together.

A `Group` moves bytes between processes and knows nothing else; `xckpt.engine.steps` runs a step on
all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from xckpt.core.geometry.spread import Processes
from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import SavePlan
from xckpt.errors import RankFailure


@runtime_checkable
class Group(Protocol):
    """Some processes, numbered from 0. Each method is collective: all ranks call it.

    Example:
        >>> alone = LocalGroup()  # of one process, the smallest
        >>> isinstance(alone, Group), alone.rank, alone.size, alone.gather(b"mine")
        (True, 0, 1, [b'mine'])
    """

    @property
    def rank(self) -> int:
        """This process's number, in ``[0, size)``."""
        ...

    @property
    def size(self) -> int:
        """How many processes take part."""
        ...

    @property
    def coordinator(self) -> int:
        """The rank that makes the global decisions and commits."""
        ...

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes in rank order, on the coordinator; None elsewhere."""
        ...

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """Entry ``rank`` of the coordinator's list; the others pass None."""
        ...

    def broadcast(self, data: bytes | None) -> bytes:
        """The coordinator's bytes, on every rank; the others pass None."""
        ...


@runtime_checkable
class TimedGroup(Group, Protocol):
    """A group that can give up waiting for a silent rank."""

    def within(self, seconds: float) -> Group:
        """The same ranks, waiting at most ``seconds`` for a silent one in a step."""
        ...


@runtime_checkable
class SuspectingGroup(Protocol):
    """A group in which a rank can report that others are silent."""

    def suspect(self, ranks: Sequence[int]) -> None:
        """This rank has timed out on others elsewhere: wait for them only a moment longer."""
        ...


@runtime_checkable
class OperationGroup(Group, SuspectingGroup, Protocol):
    """A group that separates one save or load from the next, and reports a rank that leaves."""

    timeout: float
    """Seconds that a silent rank is waited for."""

    @property
    def turn(self) -> contextlib.AbstractContextManager[object]:
        """Held through a save or load: threads that share its connections take turns."""
        ...

    def begin(self) -> None:
        """The next save or load begins; every rank calls this equally often."""
        ...

    def leave(self, error: BaseException) -> None:
        """Tell the others that this rank leaves the current save or load, and why."""
        ...


CALLS: Final = (
    "another function",
    "save",
    "save_async",
    "load",
    "load_into",
    "CheckpointManager",
    "save or should_save of its CheckpointManager",
    "restore of its CheckpointManager",
    "delete of its CheckpointManager",
    "steps of its CheckpointManager",
    "best of its CheckpointManager",
)
"""What a rank calls, as frames number it."""


def other_call(other: tuple[int, int], own: tuple[int, int]) -> RankFailure:
    """Why a rank cannot go on with this one: of both the rank, and its call's place in `CALLS`."""
    (rank, call), (own_rank, own_call) = other, own
    names = [CALLS[each] if each < len(CALLS) else CALLS[0] for each in (call, own_call)]
    return out_of_order(rank, f"it calls {names[0]}, and rank {own_rank} {names[1]}")


def out_of_order(rank: int, what: str) -> RankFailure:
    """Why a rank cannot go on with others: it is elsewhere in the order of calls."""
    text = f"{what}; every rank has to make the same calls in the same order"
    return RankFailure(rank, "RuntimeError", text)


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """What a rank has planned alone."""

    share: SavePlan
    """With orders, except for the place."""
    committed: Metadata
    """What the checkpoint will say, as far as a plan can tell."""
    planned: Metadata | None
    """What the planner says of the whole; on the coordinator only, which commits it."""


@dataclass(slots=True)
class KeptPlans:
    """What a group keeps from one save to the next: each by the digest of this rank's plan."""

    shares: dict[bytes, tuple[bytes, SavePlan]] = field(
        default_factory=dict[bytes, tuple[bytes, SavePlan]]
    )
    """The token, and this rank's share."""
    plans: dict[bytes, tuple[bytes, Metadata]] = field(
        default_factory=dict[bytes, tuple[bytes, Metadata]]
    )
    """On the coordinator, all ranks' tokens, and what was planned."""
    own: dict[bytes, OwnPlan] = field(default_factory=dict[bytes, OwnPlan])
    """What this rank has planned alone, by the digest of all plans that it knows."""


@runtime_checkable
class PlanCachingGroup(Protocol):
    """A group whose saves keep their plans for the next one: see `xckpt.engine.ranks.plans`."""

    @property
    def kept_plans(self) -> KeptPlans:
        """The plans of the saves of these processes."""
        ...


@runtime_checkable
class CallNamingGroup(Protocol):
    """A group whose ranks learn what the others call."""

    def name_call(self, call: int) -> None:
        """This rank is about to begin a call, by its place in `CALLS`."""
        ...


@runtime_checkable
class NumberedGroup(Protocol):
    """A group of processes that a framework numbers, by which its tensors say where they are."""

    @property
    def processes(self) -> Processes | None:
        """The framework's number of each rank; None where there are none."""
        ...


@contextlib.contextmanager
def operation(group: Group, call: str = CALLS[0]) -> Generator[None, None, None]:
    """One save or load of a group: a rank that is interrupted in it tells the others.

    Another thread of this process that uses the group waits until it is over. Threads that take
    turns in another order on another rank meet another call there, and raise.

    Args:
        group: the ranks.
        call: what this rank calls, one of `CALLS`: for the errors of ranks that call another.

    Example:
        >>> with operation(LocalGroup()):
        ...     pass
    """
    if not isinstance(group, OperationGroup):
        yield
        return
    if isinstance(group, CallNamingGroup):
        group.name_call(CALLS.index(call))
    with group.turn:
        group.begin()
        try:
            yield
        except BaseException as error:
            group.leave(error)
            raise


class TorchProcesses(Protocol):
    """The common attributes of a ``torch.distributed.ProcessGroup`` and a ``DeviceMesh``.

    Calls that take a `Group` take these too, and make a `Group` of them.
    """

    def size(self) -> int:
        """How many processes take part."""
        ...


class LocalGroup:
    """One process on its own, even if there are other processes.

    Example:
        >>> group = LocalGroup()
        >>> group.gather(b"plan"), group.scatter([b"plan"])
        ([b'plan'], b'plan')
    """

    rank: int = 0
    size: int = 1
    coordinator: int = 0

    def gather(self, data: bytes) -> list[bytes] | None:
        """The one rank's bytes."""
        return [data]

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """The one entry."""
        assert data is not None
        return data[0]

    def broadcast(self, data: bytes | None) -> bytes:
        """The data themselves."""
        assert data is not None
        return data
