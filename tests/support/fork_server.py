"""Processes that start in milliseconds: forked from one that has imported much and used nothing.

To import torch or JAX takes seconds, to fork a process that has done so takes none. A process that
has used TensorStore, or initialised a JAX backend, cannot be forked; the server does neither. There
is one server for each process that runs tests, a new process that imports `PRELOADED`.

`python -m tests.support.fork_server` imports them once, so that Python keeps their byte code.

A child sees the environment with which the server was started, not the one that its parent has now.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
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
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "xckpt.convert",
    "xckpt.engine.load",
    "xckpt.engine.save",
    "xckpt.jax",
    "xckpt.storage.checkpoint",
    "xckpt.storage.read_checkpoint",
    "xckpt.storage.write_checkpoint",
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


def preload() -> None:
    """Import what is there of `PRELOADED`."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


if __name__ == "__main__":
    preload()
