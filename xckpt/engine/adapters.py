"""The adapters of the frameworks that this process has imported.

1. An adapter is a module with an `Adapter` named ``ADAPTER``. It is imported once its framework is
   imported: before that, no leaf of the framework can exist.
2. `register` adds an adapter from outside xckpt; these are asked first.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from xckpt.core.adapter import Adapter, Adapters
from xckpt.core.part.per_rank import PerRankAdapter

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

_REGISTERED: Final[list[Adapter[Any]]] = []
"""Adapters from outside, the last one first: they are asked before all others."""


def _loaded() -> tuple[Adapter[Any], ...]:
    # A None among the modules forbids an import.
    modules = [module for framework, module in _MODULES.items() if sys.modules.get(framework)]
    ours = (importlib.import_module(module).ADAPTER for module in modules)
    # Two frameworks may have one adapter.
    return tuple(dict.fromkeys((*_REGISTERED, *ours)))


BY_DEFAULT: Final = Adapters(look_again=_loaded)
"""The adapters of a planner that is used without the engine: looked for when one is needed."""


def register(adapter: Adapter[Any]) -> None:
    """Have an adapter asked for leaves from now on, before all that are known.

    Args:
        adapter: an instance; see `xckpt.adapters`. Registering it again changes nothing.

    Raises:
        TypeError: it is not an adapter, or a class.
        ValueError: it names no classes in ``leaves``, so it would own nothing.

    Example:
        >>> import numpy as np
        >>> from xckpt.numpy import NumpyAdapter
        >>> register(mine := NumpyAdapter())
        >>> loaded_adapters().owner(np.zeros(3)) is mine
        True
        >>> unregister(mine)
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

    Args:
        adapter: the same instance.

    Raises:
        ValueError: it was not registered.

    Example:
        >>> from xckpt.numpy import NumpyAdapter
        >>> unregister(NumpyAdapter())
        Traceback (most recent call last):
        ValueError: this NumpyAdapter is not registered: give the instance that was
    """
    if adapter not in _REGISTERED:
        kind = type(adapter).__name__
        raise ValueError(f"this {kind} is not registered: give the instance that was")
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
    if not isinstance(framework, str) or framework not in _MODULES:  # pyright: ignore[reportUnnecessaryIsInstance]
        known = ", ".join(repr(name) for name in ("torch", "jax", "numpy"))
        raise ValueError(f"framework={framework!r} is not known; give one of {known}")
    try:
        importlib.import_module(framework)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"framework={framework!r} needs {framework}, which is not installed: "
            f"pip install 'xckpt[{framework}]'"
        ) from error
    adapter: Adapter[Any] = importlib.import_module(_MODULES[framework]).ADAPTER
    return adapter


def loaded_adapters(rank: int = 0, *, saves: bool = False) -> Adapters:
    """The adapters of the frameworks imported so far, in one value.

    A framework that is imported later is found too, when one of its objects turns up.

    Args:
        rank: this process's rank in the group, for leaves that differ by rank (`PerRank`).
        saves: whether they open a tree that is to be saved.

    Raises:
        ImportError: an adapter cannot be imported, though its framework is.

    Example:
        >>> import numpy as np
        >>> loaded_adapters().describe(np.zeros(3, np.int8), "w").dtype
        'int8'
    """
    return Adapters((PerRankAdapter(rank, saves), *_loaded()), _loaded)
