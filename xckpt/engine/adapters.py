"""The adapters that come with xckpt: framework -> module, registered by name only.

An adapter is loaded when a leaf of its framework can exist (`xckpt.core.frameworks`), so that this
imports no framework that the program has not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from xckpt.core.frameworks import adapters, register_adapter

__all__ = ["ADAPTERS", "register_adapters"]

ADAPTERS: Final[Mapping[str, str]] = {
    # Before torch, whose tensors they are; CpuShards also where torch_xla was never imported.
    "torch_xla": "xckpt.torch.xla.adapter",
    "xckpt.torch.xla.adapter": "xckpt.torch.xla.adapter",
    "torch": "xckpt.torch.adapter",
    "jax": "xckpt.jax.adapter",
    "numpy": "xckpt.numpy",
}
"""Who imports the left side may have leaves that the right side knows; asked in this order."""


def register_adapters() -> None:
    """Have every framework's leaves handled by the adapter that comes with xckpt."""
    for framework, module in ADAPTERS.items():
        register_adapter(framework, module)
    # What is imported already need not be waited for in the first save. An adapter that cannot be
    # loaded says so to those who need it.
    with suppress(Exception):
        adapters()
