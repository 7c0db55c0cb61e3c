"""A process with one XLA device: saves a tensor, loads it back both ways, says nothing."""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime

import xckpt


def main(mode: str, path: str) -> None:
    values = torch.arange(35.0).reshape(7, 5)
    if mode == "spmd":
        torch_xla.runtime.use_spmd()
    tensor = values.to(torch_xla.device())
    if mode == "spmd":
        tensor = spmd.mark_sharding(tensor, spmd.Mesh(np.arange(1), (1, 1)), (0, 1))
    xckpt.save(path, {"w": tensor})
    loaded = xckpt.load(path, {"w": tensor})["w"]
    assert type(loaded) is type(tensor)
    assert torch.equal(getattr(loaded, "global_tensor", loaded).cpu(), values)
    inner = getattr(tensor, "global_tensor", tensor)
    inner.zero_()
    xckpt.load_into(path, {"w": tensor})
    assert torch.equal(inner.cpu(), values)


if __name__ == "__main__":
    main(*sys.argv[1:])
