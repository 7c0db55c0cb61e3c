"""The group of processes that a call works in, as `find_group` finds it.

1. A `Group` that the caller gives is taken as it is.
2. A framework that joins processes has a module with ``current_group``. These are asked in turn;
   only frameworks that the program has imported are.
3. If no framework has joined processes, but a launcher has started several, that is an error.
4. Else this process is alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Final

from xckpt.core.text.arguments import named, seconds_of, shown_value
from xckpt.engine.ranks.group import Group, LocalGroup, TimedGroup
from xckpt.engine.ranks.launched import COUNTS, launched_with
from xckpt.errors import NoGroupError, XckptError

_GROUPS: Final = {"torch.distributed": "xckpt.torch.group", "jax": "xckpt.jax.group"}
"""Framework module -> module with ``current_group``, in the order in which they are asked."""

LIKELY_SECONDS: Final = 30.0
"""How long a rank whose arguments make no group waits for others, to say so."""


def find_group(
    process_group: object = None,
    coordinator_rank: int = 0,
    *,
    no_dist: bool = False,
    timeout: float | None = None,
) -> Group:
    """The group of processes that work together.

    Args:
        process_group: a `Group`, or a torch process group or DeviceMesh. None: all processes of
            torch.distributed if it is initialised, else of JAX if there are several, else this
            process alone.
        coordinator_rank: the rank within the group that decides and commits. A `Group` has its
            own coordinator, so only 0 or that rank may be given with it.
        no_dist: this process alone, even if there are other processes.
        timeout: seconds to wait for a silent rank in one step; None for what the group does.

    Raises:
        NoGroupError: a launcher has started several processes, but nothing joins them.
        TypeError: ``process_group`` is not a group, or has no timeouts, or the rank is no int.
        ValueError: the group has no such coordinator, or this process is not in it; or the
            arguments contradict each other.

    Example:
        >>> find_group(LocalGroup()).size
        1
    """
    timeout = None if timeout is None else seconds_of(timeout)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout:g}")
    if no_dist:
        if process_group is not None:
            raise ValueError("no_dist=True means this process alone: give no group with it")
        return _alone(coordinator_rank)
    if isinstance(process_group, Group):
        if coordinator_rank not in (0, process_group.coordinator):
            raise ValueError(
                f"coordinator_rank is {coordinator_rank}, but the group's coordinator is "
                f"{process_group.coordinator}; leave coordinator_rank out"
            )
        return _timed(process_group, timeout)
    if not hasattr(coordinator_rank, "__index__"):
        what = shown_value(coordinator_rank)
        raise TypeError(f"coordinator_rank is a rank within the group, an int, not {what}")
    for framework, module in _GROUPS.items():
        if sys.modules.get(framework):
            current_group = importlib.import_module(module).current_group
            group: Group | None = current_group(coordinator_rank, process_group, timeout)
            if group is not None:
                return group
    if process_group is not None:
        raise TypeError(
            f"a group of processes is an xckpt.Group, a torch.distributed.ProcessGroup or a "
            f"DeviceMesh, not {named(type(process_group).__name__)}"
        )
    refuse_others()
    return _alone(coordinator_rank)


def _alone(coordinator_rank: int) -> Group:
    """The group of this process alone, which has one rank."""
    if coordinator_rank != 0:
        raise ValueError(f"coordinator_rank is {coordinator_rank!r}, but there is only rank 0")
    return LocalGroup()


@dataclass(slots=True)
class GroupFinder:
    """Finds the group of one call, once: JAX numbers its groups. See `find_group`.

    Example:
        >>> find = GroupFinder(LocalGroup(), timeout=-1)
        >>> find()
        Traceback (most recent call last):
        ValueError: timeout must be more than 0 seconds, got -1
        >>> find.likely().size
        1
    """

    group: object = None
    coordinator_rank: int = 0
    no_dist: bool = False
    timeout: float | None = None
    _found: Group | None = None

    def __call__(self) -> Group:
        """The group.

        Raises:
            NoGroupError, TypeError, ValueError: see `find_group`.
        """
        if self._found is None:
            self._found = find_group(
                self.group, self.coordinator_rank, no_dist=self.no_dist, timeout=self.timeout
            )
        return self._found

    def likely(self) -> Group:
        """The group that the other ranks have, also where the arguments of this rank are wrong.

        It waits for them a moment only: their arguments may name another one.
        """
        with contextlib.suppress(Exception):
            return self()
        if self.no_dist is True:
            return LocalGroup()
        if isinstance(self.group, Group):
            return self.group
        # If this rank's coordinator makes no sense, the others have most likely the usual one.
        for coordinator in (self.coordinator_rank, 0):
            for group in (self.group, None):
                with contextlib.suppress(TypeError):
                    try:
                        return find_group(group, coordinator, timeout=LIKELY_SECONDS)
                    except (ValueError, XckptError, RuntimeError):
                        break  # this process is in no group, or that has no such coordinator
        return LocalGroup()


def _timed(group: Group, timeout: float | None) -> Group:
    if timeout is None or group.size == 1:
        return group
    if not isinstance(group, TimedGroup):
        raise TypeError(
            f"{named(type(group).__name__)} has no method `within`, so it takes no timeout"
        )
    return group.within(timeout)


def refuse_others() -> None:
    """Refuse to work alone where a launcher has started more than this process.

    Raises:
        NoGroupError: it has; the message names the variable that says so.
    """
    launched = launched_with(os.environ)
    if launched is not None:
        variable, count = launched
        raise NoGroupError(
            f"{variable} says that there are {count} processes ({COUNTS[variable]}), but no "
            f"process group joins them, so each would save or load alone: call "
            f"torch.distributed.init_process_group() or jax.distributed.initialize() first; "
            f"or pass group=xckpt.LocalGroup() where one process alone is meant"
        )
