"""Two ways to spread MiniLM over torch ranks: FSDP over tensor parallelism, and FSDP alone.

Both replace the model's parameters by DTensors, in place, and say which part of each global batch
the calling rank computes. No shape is padded, so some shards are uneven:

- on 2 x 2 ranks, tensor parallelism halves the 30522 rows of the word embeddings, and FSDP cuts
  the 15261 of each half into 7631 and 7630;
- on 3 ranks, the 512 positions are cut into 171, 171 and 170, and the two token types leave the
  third rank an empty shard. (384, 1536 and 30522, the other sizes, do divide by 3.)
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention


@dataclass(frozen=True, slots=True)
class Part:
    """The calling rank computes part `index` of `count` equal parts of a global batch."""

    index: int
    count: int


def fsdp(model: BertModel) -> Part:
    """Cut every parameter's first dimension over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return _fully_shard(model, mesh)


def fsdp_over_tp(model: BertModel) -> Part:
    """Cut the linear layers and the word embeddings over "tp", then all parameters over "dp".

    The mesh is 2 x 2. Parameters that tensor parallelism leaves alone, such as the layer norms,
    are DTensors over "dp" only: each of their shards is on two ranks.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], _tensor_parallel_plan(model))
    for module in model.modules():
        if isinstance(module, BertSelfAttention):
            module.num_attention_heads //= mesh["tp"].size()
            module.all_head_size //= mesh["tp"].size()
    return _fully_shard(model, mesh["dp"])


def _fully_shard(model: BertModel, mesh: DeviceMesh) -> Part:
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Part(mesh.get_local_rank(), mesh.size())


def _tensor_parallel_plan(model: BertModel) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "embeddings.word_embeddings": RowwiseParallel(input_layouts=Replicate())
    }
    for i in range(len(model.encoder.layer)):
        layer = f"encoder.layer.{i}"
        for projection in ("query", "key", "value"):
            plan[f"{layer}.attention.self.{projection}"] = ColwiseParallel()
        plan[f"{layer}.attention.output.dense"] = RowwiseParallel()
        plan[f"{layer}.intermediate.dense"] = ColwiseParallel()
        plan[f"{layer}.output.dense"] = RowwiseParallel()
    return plan
