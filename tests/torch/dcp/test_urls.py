"""``s3://``, ``gs://`` and ``memory://`` through DCP, without fsspec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import xckpt
from tests.storage.test_buckets import environment, gcs, keys, s3, url
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

__all__ = ["environment", "gcs", "s3", "url"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.arange(40.0).reshape(8, 5) + step}, "step": step}


def check(path: str, step: int) -> None:
    loaded: dict[str, Any] = {"model": {"w": torch.zeros(8, 5)}, "step": -1}
    dcp.load(loaded, storage_reader=XckptStorageReader(path))
    assert torch.equal(loaded["model"]["w"], state(step)["model"]["w"])
    assert loaded["step"] == step
    assert np.array_equal(xckpt.load(path)["model"]["w"], state(step)["model"]["w"])


def test_buckets(url: str):
    """Twice to one place: the second replaces the first; a third that fails leaves the second."""
    for step in (1, 2):
        dcp.save(state(step), storage_writer=XckptStorageWriter(url))
        check(url, step)
    before = keys(url)
    odd = {"w": torch.ones(2), "meta": torch.ones(2, device="meta")}
    with pytest.raises(dcp.CheckpointException, match="meta device"):
        dcp.save(odd, storage_writer=XckptStorageWriter(url))
    check(url, 2)
    assert keys(url) == before


def test_memory():
    for step in (1, 2):
        dcp.save(state(step), storage_writer=XckptStorageWriter("memory://dcp-urls"))
        check("memory://dcp-urls", step)


def test_a_checkpoint_id_may_be_a_url(s3: str):
    writer = XckptStorageWriter("memory://elsewhere")
    dcp.save(state(3), storage_writer=writer, checkpoint_id=f"{s3}/by-id")
    check(f"{s3}/by-id", 3)
