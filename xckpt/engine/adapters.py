"""The adapters of the frameworks that this process has imported.

An adapter is a module with an `Adapter` named ``ADAPTER``. It is imported when its framework has
been: before that, no leaf of the framework can exist. So this imports no framework that the
program has not imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from xckpt.core.adapter import Adapter, Adapters

_MODULES: Final[dict[str, str]] = {
    # Before torch, whose tensors they are; CpuShards also where torch_xla was never imported.
    "torch_xla": "xckpt.torch.xla.adapter",
    "xckpt.torch.xla": "xckpt.torch.xla.adapter",
    "torch": "xckpt.torch.adapter",
    "jax": "xckpt.jax.adapter",
    "numpy": "xckpt.numpy",
}
"""Framework module -> adapter module, in the order in which adapters are asked."""


def _loaded() -> tuple[Adapter[Any], ...]:
    modules = [module for framework, module in _MODULES.items() if framework in sys.modules]
    # Two frameworks may have one adapter.
    return tuple(dict.fromkeys(importlib.import_module(module).ADAPTER for module in modules))


BY_DEFAULT: Final = Adapters(look_again=_loaded)
"""The adapters of a planner that is used without the engine: looked for when one is needed."""


def register_adapter(framework: str, module: str) -> None:
    """Have ``module`` handle the leaves of ``framework`` (a module name), after all other adapters.

    Example:
        >>> register_adapter("numpy", "xckpt.numpy")
    """
    _MODULES[framework] = module


def loaded_adapters() -> Adapters:
    """The adapters of the frameworks imported so far, in one value.

    A framework that is imported later is found too, when something of it turns up.

    Raises:
        ImportError: an adapter cannot be imported, though its framework is.

    Example:
        >>> import numpy as np
        >>> loaded_adapters().describe(np.zeros(3, np.int8), "w").dtype
        'int8'
    """
    return Adapters(_loaded(), _loaded)
