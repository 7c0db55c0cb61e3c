"""The group that saves or loads together: the one named, or the one that a framework has joined.

Only frameworks that the program has imported already are asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from xckpt.engine.group import Group, LocalGroup


def find_group(process_group: object = None, coordinator_rank: int = 0) -> Group:
    """The group of processes that work together.

    Args:
        process_group: a `Group`, or a torch process group. None: all processes of torch.distributed
            if it is initialised, else of JAX if there are several, else this process alone.
        coordinator_rank: the rank within the group that decides and commits. A `Group` has its
            own coordinator, so only 0 or that rank may be given with it.

    Raises:
        TypeError: ``process_group`` is neither.
        ValueError: the group has no such coordinator, or this process is not in it.

    Example:
        >>> find_group(LocalGroup()).size
        1
    """
    if process_group is None:
        return _current_group(coordinator_rank)
    if isinstance(process_group, Group):
        if coordinator_rank not in (0, process_group.coordinator):
            raise ValueError(
                f"coordinator_rank is {coordinator_rank}, but the group's coordinator is "
                f"{process_group.coordinator}; leave coordinator_rank out"
            )
        return process_group
    group = _group_of_torch(process_group, coordinator_rank)
    if group is None:
        raise TypeError(
            f"process_group must be a torch process group or an xckpt Group, not a "
            f"{type(process_group).__name__}"
        )
    return group


def _group_of_torch(process_group: object, coordinator_rank: int) -> Group | None:
    """A torch process group as a `Group`; None for anything else."""
    if "torch.distributed" not in sys.modules:
        return None
    from xckpt.torch.group import group_of

    return group_of(process_group, coordinator_rank)


def _current_group(coordinator_rank: int) -> Group:
    """The group that a framework has joined, else this process alone."""
    finders: list[Callable[[int], Group | None]] = []
    if "torch.distributed" in sys.modules:
        from xckpt.torch.group import current_group as of_torch

        finders.append(of_torch)
    if "jax" in sys.modules:
        from xckpt.jax.group import current_group as of_jax

        finders.append(of_jax)
    for find in finders:
        group = find(coordinator_rank)
        if group is not None:
            return group
    if coordinator_rank:
        raise ValueError(f"coordinator_rank is {coordinator_rank}, but there is only rank 0")
    return LocalGroup()
