"""Processes that start in milliseconds: forked from one that has imported much and used nothing.

To import torch or JAX takes seconds, to fork a process that has done so takes none. A process that
has used TensorStore, or initialised a JAX backend, cannot be forked; the server does neither. There
is one server for each process that runs tests: a new process that imports `PRELOADED`, or, in a
worker of the whole suite, a fork of the worker, which needs these modules as well (`fork_here`).

`python -m tests.support.fork_server` imports them once, so that Python keeps their byte code.

A child sees the environment with which the server was started, not the one that its parent has now.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from unittest import mock

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


def fork_here() -> None:
    """Make the server a fork of this process, which has to be as clean as the server is.

    multiprocessing starts a new interpreter; in its place one is forked that runs the same command.
    """
    preload()
    context()
    resource_tracker.ensure_running()
    with mock.patch("multiprocessing.util.spawnv_passfds", _forked):
        forkserver.ensure_running()


def preload() -> None:
    """Import what is there of `PRELOADED`."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _forked(_path: str, command: Sequence[str], passed: Sequence[int]) -> int:
    """A forked process that runs the last word of a command of Python; its number."""
    process = os.fork()
    if process == 0:
        try:
            faulthandler.disable()
            _keep(passed)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            logging.getLogger().handlers.clear()  # pytest's, of this moment
            exec(command[-1], {})
        finally:
            os._exit(0)
    return process


def _keep(passed: Sequence[int]) -> None:
    """Keep these files; every other becomes the null device, the output of ranks too.

    Pipes of the parent have to end with it, but objects that hold a file's number are still there:
    a file that is opened later may not get that number.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number != null and number not in passed:
            os.dup2(null, number)


if __name__ == "__main__":
    preload()
