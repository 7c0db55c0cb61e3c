"""What the frameworks that this process has imported bring: adapters, and the group they joined.

1. An adapter is a module with an `Adapter` named ``ADAPTER``. It is imported when its framework has
   been: before that, no leaf of the framework can exist.
2. `register` takes an adapter from outside; those are asked first.
3. A framework that joins processes has a module with ``current_group``; `find_group` asks those.
   Where none has joined any, but a launcher has started several, it is an error.

So this imports no framework that the program has not imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection
from typing import Any, Final, Protocol

from xckpt.core.adapter import Adapter, Adapters
from xckpt.core.part.per_rank import PerRankAdapter
from xckpt.engine.ranks.group import Group, LocalGroup, TimedGroup
from xckpt.engine.ranks.launched import COUNTS, launched_with
from xckpt.errors import NoGroupError

_MODULES: Final[dict[str, str]] = {
    # First, because it is the quickest to ask.
    "numpy": "xckpt.numpy",
    # Before torch, whose tensors they are; CpuShards also where torch_xla was never imported.
    "torch_xla": "xckpt.torch.xla.adapter",
    "xckpt.torch.xla": "xckpt.torch.xla.adapter",
    "torch": "xckpt.torch.adapter",
    "jax": "xckpt.jax.adapter",
}
"""Framework module -> adapter module, in the order in which adapters are asked."""

_GROUPS: Final = {"torch.distributed": "xckpt.torch.group", "jax": "xckpt.jax.group"}
"""Framework module -> module with ``current_group``, in the order in which they are asked."""


_NOTICES: Final = {"jax": "xckpt.jax.preemption"}
"""Framework module -> module with ``current_notice``."""

_REGISTERED: Final[list[Adapter[Any]]] = []
"""Adapters from outside, the last one first: they are asked before all others."""


def _loaded() -> tuple[Adapter[Any], ...]:
    modules = [module for framework, module in _MODULES.items() if framework in sys.modules]
    ours = (importlib.import_module(module).ADAPTER for module in modules)
    # Two frameworks may have one adapter.
    return tuple(dict.fromkeys((*_REGISTERED, *ours)))


BY_DEFAULT: Final = Adapters(look_again=_loaded)
"""The adapters of a planner that is used without the engine: looked for when one is needed."""


def register_adapter(framework: str, module: str) -> None:
    """Have ``module`` handle the leaves of ``framework`` (a module name), after all other adapters.

    Example:
        >>> register_adapter("numpy", "xckpt.numpy")
    """
    _MODULES[framework] = module


def register(adapter: Adapter[Any]) -> None:
    """Have an adapter asked for leaves from now on, before all that are known.

    Args:
        adapter: an instance; see `xckpt.adapters`. Registering it again changes nothing.

    Raises:
        TypeError: it is no adapter, or a class.
        ValueError: it names no classes in ``leaves``, so nothing would be its own.
    """
    if not isinstance(adapter, Adapter):  # pyright: ignore[reportUnnecessaryIsInstance]
        given = adapter.__name__ if isinstance(adapter, type) else type(adapter).__name__
        raise TypeError(f"register an instance of a class of xckpt.adapters, not {given}")
    if not adapter.leaves:
        raise ValueError(f"{type(adapter).__name__}.leaves names no class: set it to the arrays'")
    if adapter not in _REGISTERED:
        _REGISTERED.insert(0, adapter)


def unregister(adapter: Adapter[Any]) -> None:
    """Forget an adapter that was registered.

    Raises:
        ValueError: it was not.
    """
    if adapter not in _REGISTERED:
        raise ValueError(f"{type(adapter).__name__} is not registered")
    _REGISTERED.remove(adapter)


def framework_adapter(framework: str) -> Adapter[Any]:
    """The adapter of a framework, which is imported for it.

    Raises:
        ValueError: there is no such framework.
        ImportError: it is not installed.

    Example:
        >>> framework_adapter("numpy").leaves[0].__name__
        'ndarray'
    """
    if framework not in _MODULES:
        known = ", ".join(repr(name) for name in ("torch", "jax", "numpy"))
        raise ValueError(f"framework={framework!r} is not known; give one of {known}")
    try:
        importlib.import_module(framework)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"framework={framework!r} needs {framework}, which is not installed"
        ) from error
    adapter: Adapter[Any] = importlib.import_module(_MODULES[framework]).ADAPTER
    return adapter


def loaded_adapters(rank: int = 0) -> Adapters:
    """The adapters of the frameworks imported so far, in one value.

    A framework that is imported later is found too, when something of it turns up.

    Args:
        rank: this process's in the group, for what each rank has its own of (`PerRank`).

    Raises:
        ImportError: an adapter cannot be imported, though its framework is.

    Example:
        >>> import numpy as np
        >>> loaded_adapters().describe(np.zeros(3, np.int8), "w").dtype
        'int8'
    """
    return Adapters((PerRankAdapter(rank), *_loaded()), _loaded)


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
        no_dist: this process alone, whatever other processes there are.
        timeout: seconds to wait for a silent rank in one step; None for what the group does.

    Raises:
        NoGroupError: a launcher has started several processes, but nothing joins them.
        TypeError: ``process_group`` is neither, or has no timeouts.
        ValueError: the group has no such coordinator, or this process is not in it; or the
            arguments contradict each other.

    Example:
        >>> find_group(LocalGroup()).size
        1
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}")
    if no_dist:
        if process_group is not None:
            raise ValueError("no_dist=True is this process alone: give no group with it")
        return LocalGroup()
    if isinstance(process_group, Group):
        if coordinator_rank not in (0, process_group.coordinator):
            raise ValueError(
                f"coordinator_rank is {coordinator_rank}, but the group's coordinator is "
                f"{process_group.coordinator}; leave coordinator_rank out"
            )
        return _timed(process_group, timeout)
    for framework, module in _GROUPS.items():
        if framework in sys.modules:
            current_group = importlib.import_module(module).current_group
            group: Group | None = current_group(coordinator_rank, process_group, timeout)
            if group is not None:
                return group
    if process_group is not None:
        raise TypeError(
            f"a group of processes is an xckpt.Group, a torch.distributed.ProcessGroup or a "
            f"DeviceMesh, not a {type(process_group).__name__}"
        )
    refuse_others()
    if coordinator_rank:
        raise ValueError(f"coordinator_rank is {coordinator_rank}, but there is only rank 0")
    return LocalGroup()


class PreemptionNotice(Protocol):
    """A framework's own way to learn that a process is to end soon."""

    signals: Collection[int]
    """Those that it has taken for itself."""

    def reached(self) -> bool:
        """Whether the processes are to stop now; all of them ask equally often."""
        ...


def preemption_notices() -> list[PreemptionNotice]:
    """The notices of the frameworks imported so far, where those have any.

    Example:
        >>> preemption_notices()
        []
    """
    modules = [module for framework, module in _NOTICES.items() if framework in sys.modules]
    found = (importlib.import_module(module).current_notice() for module in modules)
    return [notice for notice in found if notice is not None]


def _timed(group: Group, timeout: float | None) -> Group:
    if timeout is None or group.size == 1:
        return group
    if not isinstance(group, TimedGroup):
        raise TypeError(f"a {type(group).__name__} has no method `within`, so it takes no timeout")
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
