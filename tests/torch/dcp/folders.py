"""DCP folders as torch itself writes and reads them, in one process or on the ranks of a test.

Functions named ``on_rank_*`` run in the ranks; the others in the test's process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from xckpt.torch.leaf import to_numpy


@contextmanager
def alone():
    """torch warns of each save or load in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def save_alone(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """A DCP folder that one process wrote."""
    with alone():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def load_alone(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The state, filled from a DCP folder."""
    with alone():
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def blank(node: Any) -> Any:
    """A tree like another, with zeros for its tensors and None for its values."""
    if isinstance(node, dict):
        return {key: blank(child) for key, child in node.items()}
    if isinstance(node, list):
        return [blank(child) for child in node]
    return torch.zeros_like(node) if isinstance(node, torch.Tensor) else None


def raw(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """All that tells two tensors apart, down to the bits."""
    array = to_numpy(tensor)
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def bits(node: Any, tensor: Callable[[torch.Tensor], Any] = raw) -> Any:
    """A tree with its tensors as `raw`."""
    if isinstance(node, dict):
        return {key: bits(child, tensor) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(bits(child, tensor) for child in node)
    return tensor(node) if isinstance(node, torch.Tensor) else node
