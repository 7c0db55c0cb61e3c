"""A LoRA adapter for MiniLM: few parameters that learn, beside many that never change.

Each query and value projection ``W x`` becomes ``W x + B A x``, where A is (RANK, hidden) and B is
(hidden, RANK). B begins as zeros, so the model begins as it was; W and all else is frozen.
"""

import torch
from torch import nn
from transformers import BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention

RANK = 8
"""Rows of A."""

ADAMW = {"lr": 1e-3, "foreach": False}


class Adapted(nn.Module):
    """A linear layer and its adapter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer makes of ``x``, and what the adapter adds."""
        return self.linear(x) + self.up(self.down(x))


def adapt(model: BertModel) -> None:
    """Freeze a model and give it adapters; the same on every rank."""
    torch.manual_seed(7)
    model.requires_grad_(False)
    for module in [*model.modules()]:
        if isinstance(module, BertSelfAttention):
            for name in ("query", "value"):
                setattr(module, name, Adapted(getattr(module, name)))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the adapters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
