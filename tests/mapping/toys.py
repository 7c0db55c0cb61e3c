"""Small models twice: in torch and in Flax, Linen or NNX, with the same forward pass."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch.nn import functional

WIDTH, HEADS, WORDS, LAYERS = 12, 3, 20, 3
EPSILON = 1e-6


def torch_mlp() -> torch.nn.Module:
    """Three layers of one size among others, which shapes cannot tell apart."""
    layers = (
        torch.nn.Linear(5, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.LayerNorm(WIDTH, eps=EPSILON),
        torch.nn.Linear(WIDTH, 4),
    )
    return torch.nn.Sequential(*layers)


class LinenMlp(nn.Module):
    """`torch_mlp` with the names that Linen gives."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(WIDTH)(x))
        x = nn.relu(nn.Dense(WIDTH)(x))
        x = nn.LayerNorm(epsilon=EPSILON)(nn.Dense(WIDTH)(x))
        return nn.Dense(4)(x)


class TorchAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(WIDTH, WIDTH)
        self.k_proj = torch.nn.Linear(WIDTH, WIDTH)
        self.v_proj = torch.nn.Linear(WIDTH, WIDTH)
        self.o_proj = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = TorchAttention()
        self.ln_1 = torch.nn.LayerNorm(WIDTH, eps=EPSILON)
        self.ln_2 = torch.nn.LayerNorm(WIDTH, eps=EPSILON)
        self.mlp = torch.nn.ModuleDict(
            {"fc1": torch.nn.Linear(WIDTH, 4 * WIDTH), "fc2": torch.nn.Linear(4 * WIDTH, WIDTH)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.ln_1(x))
        return x + self.mlp["fc2"](torch.relu(self.mlp["fc1"](self.ln_2(x))))


class TorchTransformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList([TorchBlock() for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(WIDTH, eps=EPSILON)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LinenMlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH, name="fc2")(nn.relu(nn.Dense(4 * WIDTH, name="fc1")(x)))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm(epsilon=EPSILON, name="ln_1")(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(y, y)
        y = nn.LayerNorm(epsilon=EPSILON, name="ln_2")(x)
        return x + LinenMlpBlock(name="mlp")(y), None


class LinenTransformer(nn.Module):
    """`TorchTransformer` with other names, DenseGeneral heads, and scanned layers if wanted."""

    scanned: bool = False

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        x = nn.Embed(WORDS, WIDTH, name="embed")(words)
        if self.scanned:
            axes: Any = {"params": 0}
            keys: Any = {"params": True}
            scan = nn.scan(LinenBlock, variable_axes=axes, split_rngs=keys, length=LAYERS)
            x, _ = scan(name="layers")(x, None)
        else:
            for number in range(LAYERS):
                x, _ = LinenBlock(name=f"layers_{number}")(x)
        x = nn.LayerNorm(epsilon=EPSILON, name="final_norm")(x)
        return nn.Dense(WORDS, use_bias=False, name="head")(x)


class TorchConvolutions(torch.nn.Module):
    """A convolution in one dimension and in two, a batch norm, and a flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 4, 3)
        self.bn = torch.nn.BatchNorm2d(4, eps=EPSILON)
        self.conv2 = torch.nn.Conv2d(4, 4, 3)
        self.fc1 = torch.nn.Linear(16, 7)
        self.sequence = torch.nn.Conv1d(1, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 6, 6) -> (batch, 1, 5)"""
        x = torch.relu(self.conv2(torch.relu(self.bn(self.conv1(x)))))
        return self.sequence(self.fc1(x.flatten(1))[:, None])


class LinenConvolutions(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 6, 6, 3) -> (batch, 5, 1)"""
        x = nn.Conv(4, (3, 3), padding="VALID")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True, epsilon=EPSILON)(x))
        x = nn.relu(nn.Conv(4, (3, 3), padding="VALID")(x))
        x = nn.Dense(7)(x.reshape(len(x), -1))
        return nn.Conv(1, (3,), padding="VALID", name="sequence")(x[..., None])


class TorchLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.bn = torch.nn.BatchNorm1d(WIDTH, eps=1e-5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.bn(x)


class NnxLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.bn = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.embed(words)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.bn(x)


def torch_encoder() -> torch.nn.Module:
    """torch's own encoder, whose attention keeps query, key and value in one tensor."""
    layer = torch.nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, dropout=0.0, layer_norm_eps=EPSILON, batch_first=True
    )
    return torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


class LinenEncoderLayer(nn.Module):
    """One layer of `torch_encoder`: torch's names, or those that Linen gives."""

    named: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        def name(given: str) -> str | None:
            return given if self.named else None

        mixed = nn.MultiHeadDotProductAttention(HEADS, name=name("attention"))(x, x)
        x = nn.LayerNorm(epsilon=EPSILON, name=name("norm1"))(x + mixed)
        wide = nn.relu(nn.Dense(2 * WIDTH, name=name("linear1"))(x))
        narrow = nn.Dense(WIDTH, name=name("linear2"))(wide)
        return nn.LayerNorm(epsilon=EPSILON, name=name("norm2"))(x + narrow), None


class LinenEncoder(nn.Module):
    """`torch_encoder`: layer by layer, or scanned."""

    named: bool = True
    scanned: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scanned:
            axes: Any = {"params": 0}
            keys: Any = {"params": True}
            scan = nn.scan(LinenEncoderLayer, variable_axes=axes, split_rngs=keys, length=LAYERS)
            return scan(self.named, name="layers")(x, None)[0]
        for number in range(LAYERS):
            x, _ = LinenEncoderLayer(self.named, name=f"layers_{number}")(x)
        return x
