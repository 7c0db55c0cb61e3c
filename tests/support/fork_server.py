"""Processes that start in milliseconds: forked from one that has imported much and used nothing.

To import torch or JAX takes seconds, to fork a process that has done so takes none. A process that
has used TensorStore, or initialised a JAX backend, cannot be forked; the server does neither. There
is one server for each process that runs tests.

A child sees the environment with which the server was started, not the one that its parent has now.
"""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "flax.training.train_state",
    "hypothesis.strategies",
    "jax",
    "numpy",
    "optax",
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "xckpt.convert",
    "xckpt.engine.load",
    "xckpt.engine.save",
    "xckpt.jax",
    "xckpt.storage",
    "xckpt.torch",
    "zarr",
]
"""What ranks need; what an environment lacks is left out."""


@functools.cache
def context() -> ForkServerContext:
    """The context whose processes are forked from the server."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server
