"""`install`: callers that only pass ``checkpoint_id=`` to `dcp.save` and `dcp.load` use xckpt.

Torch asks one function for the storage of a ``checkpoint_id``, `_storage_setup`, by the names that
its savers and its loaders have of it. These names are replaced, and put back.

1. A caller that gives a storage of its own gets that.
2. A save goes to an `XckptStorageWriter`.
3. A load of a folder that torch's storage wrote (``.metadata``) is torch's; else it goes to an
   `XckptStorageReader`. So a run that began without xckpt resumes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed.checkpoint.state_dict_loader as loaders
import torch.distributed.checkpoint.state_dict_saver as savers

from xckpt.options import LoadOptions, SaveOptions
from xckpt.torch.dcp.reader import XckptStorageReader
from xckpt.torch.dcp.writer import XckptStorageWriter

Setup = Callable[..., Any]
"""Gives the storage for a storage or None, a ``checkpoint_id`` and whether it is to be read."""

TORCHS_OWN: Setup = savers._storage_setup


def install(*, options: SaveOptions | None = None, load_options: LoadOptions | None = None) -> None:
    """From here on ``dcp.save(state, checkpoint_id=path)`` writes checkpoints of xckpt.

    `dcp.async_save` and `dcp.load` likewise, for all callers in this process, such as a trainer
    that gives no storage. A path may be a URL. Folders that torch's storage wrote are read by
    torch as before. Calling it again changes the options.

    Args:
        options: for each save.
        load_options: for each load.

    Example:
        >>> import torch, warnings, torch.distributed.checkpoint as dcp
        >>> warnings.simplefilter("ignore")  # DCP says that it works in one process
        >>> from xckpt.torch.dcp import installed
        >>> with installed():
        ...     _ = dcp.save({"w": torch.ones(3)}, checkpoint_id="run", no_dist=True)
        >>> import xckpt
        >>> xckpt.load("run")
        {'w': array([1., 1., 1.], dtype=float32)}
    """

    def setup(storage: object, checkpoint_id: str | os.PathLike[str], reader: bool = False) -> Any:  # noqa: ANN401
        if storage or not checkpoint_id:
            return TORCHS_OWN(storage, checkpoint_id, reader)
        if not reader:
            return XckptStorageWriter(checkpoint_id, options=options)
        if os.path.exists(os.path.join(checkpoint_id, ".metadata")):
            return TORCHS_OWN(storage, checkpoint_id, reader)
        return XckptStorageReader(checkpoint_id, options=load_options)

    _set(setup, setup)


def uninstall() -> None:
    """Put torch's own storage back; without an `install` before, it does nothing.

    Example:
        >>> install()
        >>> uninstall()
        >>> savers._storage_setup is TORCHS_OWN
        True
    """
    _set(TORCHS_OWN, TORCHS_OWN)


@contextlib.contextmanager
def installed(
    *, options: SaveOptions | None = None, load_options: LoadOptions | None = None
) -> Iterator[None]:
    """`install` for a block; what was there before comes back.

    Args:
        options: for each save.
        load_options: for each load.

    Example:
        >>> with installed():
        ...     savers._storage_setup is TORCHS_OWN
        False
    """
    before = savers._storage_setup, loaders._storage_setup
    install(options=options, load_options=load_options)
    try:
        yield
    finally:
        _set(*before)


def _set(saving: Setup, loading: Setup) -> None:
    savers._storage_setup = saving
    loaders._storage_setup = loading
