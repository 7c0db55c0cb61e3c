"""A decoder in plain JAX over the layouts for which transformers has no Flax class.

It runs Llama's and Mixtral's parameters with layers stacked or not, experts stacked, and rotary
embeddings over neighbouring channels or over a head's halves. That its logits are torch's shows
that each array is in the layout that its code expects; a wrong order of heads, layers, experts or
channels gives others.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def logits(
    params: Params, config: Any, ids: jax.Array, mask: jax.Array, *, rope: str = "halves"
) -> jax.Array:
    """Logits of shape (batch, tokens, vocabulary).

    Args:
        params: with a head; stacked layers where ``params["model"]["layers"]`` is one layer's tree.
        config: sizes, by transformers' names.
        ids: token numbers, shape (batch, tokens).
        mask: 1 for a token, 0 for padding at the end of a text; the shape of `ids`.
        rope: "halves" or "pairs".
    """
    model = params["model"]
    hidden = model["embed_tokens"]["embedding"][ids]
    for layer in _layers(model["layers"], config.num_hidden_layers):
        normed = _norm(hidden, layer["input_layernorm"], config)
        hidden = hidden + _attention(layer["self_attn"], config, normed, mask, rope)
        normed = _norm(hidden, layer["post_attention_layernorm"], config)
        moe = layer.get("block_sparse_moe")
        hidden = hidden + (_experts(moe, config, normed) if moe else _dense(layer["mlp"], normed))
    return _norm(hidden, model["norm"], config) @ params["lm_head"]["kernel"]


def _layers(layers: Params, count: int) -> list[Params]:
    if "0" in layers:
        return [layers[str(i)] for i in range(count)]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(count)]


def _norm(hidden: jax.Array, norm: Params, config: Any) -> jax.Array:
    mean = jnp.mean(hidden**2, axis=-1, keepdims=True)
    return hidden * jax.lax.rsqrt(mean + config.rms_norm_eps) * norm["weight"]


def _attention(
    layer: Params, config: Any, hidden: jax.Array, mask: jax.Array, rope: str
) -> jax.Array:
    batch, tokens, _ = hidden.shape
    channels = config.hidden_size // config.num_attention_heads

    def heads(name: str) -> jax.Array:
        projected = hidden @ layer[name]["kernel"] + layer[name].get("bias", 0.0)
        return projected.reshape(batch, tokens, -1, channels)

    query = _rotated(heads("q_proj"), config.rope_theta, rope)
    key = _rotated(heads("k_proj"), config.rope_theta, rope)
    repeats = config.num_attention_heads // config.num_key_value_heads
    key, value = (jnp.repeat(each, repeats, axis=2) for each in (key, heads("v_proj")))
    scores = jnp.einsum("bqhc,bkhc->bhqk", query, key) / channels**0.5
    seen = jnp.tril(jnp.ones((tokens, tokens), bool)) & mask.astype(bool)[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    mixed = jnp.einsum("bhqk,bkhc->bqhc", weights, value).reshape(batch, tokens, -1)
    return mixed @ layer["o_proj"]["kernel"] + layer["o_proj"].get("bias", 0.0)


def _rotated(heads: jax.Array, theta: float, rope: str) -> jax.Array:
    """Each head's channels turned by angles that grow with the position."""
    _, tokens, _, channels = heads.shape
    speeds = theta ** -(jnp.arange(0, channels, 2) / channels)
    angles = jnp.arange(tokens)[:, None, None] * speeds
    split = {
        "halves": lambda: jnp.split(heads, 2, axis=-1),
        "pairs": lambda: (heads[..., 0::2], heads[..., 1::2]),
    }[rope]
    a, b = split()
    turned = a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)
    if rope == "halves":
        return jnp.concatenate(turned, axis=-1)
    return jnp.stack(turned, axis=-1).reshape(heads.shape)


def _dense(mlp: Params, hidden: jax.Array) -> jax.Array:
    gate = jax.nn.silu(hidden @ mlp["gate_proj"]["kernel"])
    return (gate * (hidden @ mlp["up_proj"]["kernel"])) @ mlp["down_proj"]["kernel"]


def _experts(moe: Params, config: Any, hidden: jax.Array) -> jax.Array:
    """Every expert on every token, and the best of them weighed."""
    chances = jax.nn.softmax(hidden @ moe["gate"]["kernel"], axis=-1)
    best, chosen = jax.lax.top_k(chances, config.num_experts_per_tok)
    best = best / best.sum(axis=-1, keepdims=True)
    weights = jnp.einsum("btk,btke->bte", best, jax.nn.one_hot(chosen, chances.shape[-1]))
    w1, w2, w3 = (moe["experts"][name]["kernel"] for name in ("w1", "w2", "w3"))
    inner = jax.nn.silu(jnp.einsum("btd,edf->btef", hidden, w1))
    inner = inner * jnp.einsum("btd,edf->btef", hidden, w3)
    return jnp.einsum("btef,efd,bte->btd", inner, w2, weights)
