"""Pairs of models whose names and shapes suggest a mapping that gives other weights.

Each is refused: the mapping has a gap that `check` names, or a rule that says what it assumes. What
frameworks really call alike stays certain.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import xckpt
from xckpt.convert import convert
from xckpt.errors import MappingError
from xckpt.mapping.infer.infer import infer
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec

D, H, HEAD, LAYERS = 8, 2, 4, 2
Shapes = dict[str, tuple[int, ...]]


def specs(shapes: Shapes, dtype: str = "float32") -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}


def attention(torch: str, flax: str, q: str, k: str, to_q: str, to_k: str) -> tuple[Shapes, Shapes]:
    """Queries and keys of two layers, and an MLP that is not square."""
    source: Shapes = {f"{torch}.{n}.mlp.fc.weight": (12, D) for n in range(LAYERS)}
    target: Shapes = {f"{flax}_{n}/mlp/fc/kernel": (D, 12) for n in range(LAYERS)}
    for n in range(LAYERS):
        source |= {f"{torch}.{n}.attention.{each}.weight": (D, D) for each in (q, k)}
        target |= {f"{flax}_{n}/attention/{each}/kernel": (D, D) for each in (to_q, to_k)}
    return source, target


FUSED: Shapes = {"h.0.attn.query_key_value.weight": (3 * D, D), "h.0.fc.weight": (12, D)}
FC: Shapes = {"h_0/fc/kernel": (D, 12)}
ROTARY = attention("text.layers", "text/layers", "wq", "wk", "q_proj", "k_proj")
CONVOLVED: Shapes = {"conv.weight": (32, 3, 3, 3), "out.weight": (10, 128)}
CONVOLVED_FLAX: Shapes = {"conv/kernel": (3, 3, 3, 32), "out/kernel": (128, 10)}

TRAPS: dict[str, tuple[Shapes, Shapes]] = {
    "rotary pairs of wq, wk": attention("layers", "layers", "wq", "wk", "q_proj", "k_proj"),
    "rotary halves of q_proj": attention("layers", "layers", "q_proj", "k_proj", "query", "key"),
    "rotary order of to_q": attention("blocks", "blocks", "to_q", "to_k", "q_proj", "k_proj"),
    "heads of a query": (
        {"a.attention.wq.weight": (H * HEAD, D), "a.fc.weight": (12, D)},
        {"a/attention/query/kernel": (D, H, HEAD), "a/fc/kernel": (D, 12)},
    ),
    "interleaved qkv, cut in three": (FUSED, FC | {"h_0/attn/query_key_value/kernel": (D, 3, D)}),
    "interleaved qkv, cut in heads": (
        FUSED,
        FC | {"h_0/attn/query_key_value/kernel": (D, 3, H, HEAD)},
    ),
    "interleaved qkv, named otherwise": (FUSED, FC | {"h_0/attn/qkv/kernel": (D, 3 * D)}),
    "fused qkv, cut": (
        {"h.0.attn.qkv.weight": (3 * D, D), "h.0.fc.weight": (12, D)},
        FC | {"h_0/attn/qkv/kernel": (D, 3, H, HEAD)},
    ),
    "interleaved gate and up": (
        {"mlp.gate_up_proj.weight": (24, D)},
        {"mlp/gate_up_proj/kernel": (D, 2, 12)},
    ),
    "gate and up, named otherwise": (
        {"mlp.gate_up_proj.weight": (24, D)},
        {"mlp/gate_up/kernel": (D, 24)},
    ),
    "a router for a gate": (
        {"mlp.gate.weight": (24, D), "mlp.up_proj.weight": (24, D)},
        {"mlp/gate_proj/kernel": (D, 24), "mlp/up_proj/kernel": (D, 24)},
    ),
    "a router for a gate, deeper": (
        {f"layers.{n}.mlp.gate.linear.weight": (24, D) for n in range(2)},
        {"layers/mlp/gate_proj/linear/kernel": (2, D, 24)},
    ),
    "upwards by an even kernel": (
        {"up.0.weight": (8, 8, 2, 2), "down.0.weight": (8, 3, 3, 3)},
        {"up_0/kernel": (2, 2, 8, 8), "down_0/kernel": (3, 3, 3, 8)},
    ),
    "ups by an even kernel": (
        {"ups.1.weight": (8, 8, 4, 4), "ups.0.weight": (8, 8, 4, 4)},
        {"ups_1/kernel": (4, 4, 8, 8), "ups_0/kernel": (4, 4, 8, 8)},
    ),
    "an even kernel of as many channels": (
        {"decoder.expand.weight": (8, 8, 2, 2)},
        {"decoder/expand/kernel": (2, 2, 8, 8)},
    ),
    "a transposed convolution by its name": (
        {"deconv.weight": (8, 8, 3, 3)},
        {"deconv/kernel": (3, 3, 8, 8)},
    ),
    "flattened into a square layer": (
        CONVOLVED | {"fc.weight": (128, 128)},
        CONVOLVED_FLAX | {"fc/kernel": (128, 128)},
    ),
    "flattened into the first of two square layers": (
        CONVOLVED | {"fc1.weight": (128, 128), "fc2.weight": (128, 128)},
        CONVOLVED_FLAX | {"fc1/kernel": (128, 128), "fc2/kernel": (128, 128)},
    ),
    "flattened into a narrower layer": (
        {"conv.weight": (32, 3, 3, 3), "fc.weight": (10, 512)},
        {"conv/kernel": (3, 3, 3, 32), "fc/kernel": (512, 10)},
    ),
    "experts with equal dimensions": (
        {"experts.weight": (8, 8, 8)},
        {"experts/kernel": (8, 8, 8)},
    ),
    "experts beside layers": (
        {"moe.experts.weight": (8, 8, 8), "fc.weight": (12, 8)},
        {"moe/experts/kernel": (8, 8, 8), "fc/kernel": (8, 12)},
    ),
    "words in another order": (
        {f"mlp.w{n}.weight": (8, 8) for n in (1, 2, 3)} | {"head.weight": (9, 8)},
        {f"mlp/Dense_{n}/kernel": (8, 8) for n in range(3)} | {"head/kernel": (8, 9)},
    ),
    "linear1 and linear2": (
        {f"b.linear{n}.weight": (8, 8) for n in (1, 2)} | {"head.weight": (9, 8)},
        {f"b/Dense_{n}/kernel": (8, 8) for n in range(2)} | {"head/kernel": (8, 9)},
    ),
    "norm1 and norm2": (
        {f"b.norm{n}.{role}": (8,) for n in (1, 2) for role in ("weight", "bias")},
        {f"b/LayerNorm_{n}/{role}": (8,) for n in range(2) for role in ("scale", "bias")},
    ),
    "fc1 to fc3": (
        {f"fc{n}.weight": (8, 8) for n in (1, 2, 3)} | {"head.weight": (9, 8)},
        {f"Dense_{n}/kernel": (8, 8) for n in range(3)} | {"head/kernel": (8, 9)},
    ),
    "stacked along one of two axes": (
        {f"layers.{n}.a.weight": (4, 4) for n in range(4)}
        | {f"layers.{n}.b.weight": (6, 5) for n in range(4)},
        {"layers/a/kernel": (4, 4, 4), "layers/b/kernel": (4, 5, 6)},
    ),
    "stacked scales": (
        {f"layers.{n}.n.weight": (4,) for n in range(4)}
        | {f"layers.{n}.b.weight": (6, 5) for n in range(4)},
        {"layers/n/scale": (4, 4), "layers/b/kernel": (4, 5, 6)},
    ),
    "GPT-2's convolutions, all square": (
        {f"h.0.attn.{name}.weight": (8, 8) for name in ("c_attn", "c_proj")},
        {f"h_0/attn/{name}/kernel": (8, 8) for name in ("c_attn", "c_proj")},
    ),
    "every layer square": ({"a.fc.weight": (8, 8)}, {"a/fc/kernel": (8, 8)}),
    "a scale less one": (
        {"layers.0.input_layernorm.weight": (8,), "fc.weight": (9, 8)},
        {"layers_0/input_layernorm/scale": (8,), "fc/kernel": (8, 9)},
    ),
    "a final scale less one": (
        {"model.norm.weight": (8,), "fc.weight": (9, 8)},
        {"norm/scale": (8,), "fc/kernel": (8, 9)},
    ),
    "einsum of as many heads as channels": (
        {"attn.q_einsum.weight": (4, 4, 2)},
        {"attn/q_einsum/kernel": (4, 4, 2)},
    ),
    "scales that the other side lacks": (
        {"fc.weight": (16, 8), "fc.weight_scale_inv": (1, 1)},
        {"fc/kernel": (8, 16)},
    ),
    "scales of an 8-bit layer": (
        {"fc.weight": (16, 8), "fc.SCB": (16,)},
        {"fc/kernel": (8, 16)},
    ),
    "blocks and their scales": (
        {"down_proj_blocks": (4, 8), "down_proj_scales": (4,)},
        {"down_proj_blocks": (4, 8)},
    ),
    "averaged weights": (
        {"model_ema.fc.weight": (9, 8)},
        {"params/fc/kernel": (8, 9)},
    ),
    "averaged weights beside the others": (
        {"model.fc.weight": (9, 8), "ema.fc.weight": (9, 8)},
        {"params/fc/kernel": (8, 9)},
    ),
    "what was added to the weights": (
        {"delta.fc.weight": (9, 8)},
        {"params/fc/kernel": (8, 9)},
    ),
    "factors of low rank, without alpha": (
        {"q.lora_A.weight": (4, 8), "q.lora_B.weight": (9, 4)},
        {"q/lora_a/kernel": (8, 4), "q/lora_b/kernel": (4, 9)},
    ),
    "factors of low rank, merged": (
        {"q.base_layer.weight": (9, 8), "q.lora_A.weight": (4, 8), "q.lora_B.weight": (9, 4)},
        {"q/kernel": (8, 9)},
    ),
    "a head that is the embedding": (
        {"lm_head.weight": (50, 8)},
        {"embed/embedding": (50, 8)},
    ),
    "a head that only one side has": (
        {"embed_tokens.weight": (50, 8)},
        {"embed_tokens/embedding": (50, 8), "lm_head/kernel": (8, 50)},
    ),
    "shifts and scales, scales first": (
        {"final_layer.adaLN_modulation.1.weight": (16, 8)},
        {"norm_out/linear/kernel": (8, 16)},
    ),
    "an encoder for a decoder": (
        {"encoder.fc.weight": (9, 8)},
        {"decoder/fc/kernel": (8, 9)},
    ),
    "a teacher for a student": (
        {"teacher.fc.weight": (9, 8)},
        {"student/fc/kernel": (8, 9)},
    ),
    "the norm before for that behind": (
        {f"input_layernorm.{role}": (8,) for role in ("weight", "bias")},
        {f"post_layernorm/{role}": (8,) for role in ("scale", "bias")},
    ),
    "the first norm for the second": (
        {f"b.norm1.{role}": (8,) for role in ("weight", "bias")},
        {f"b/norm2/{role}": (8,) for role in ("scale", "bias")},
    ),
    "layers in reverse": (
        {f"layers.{n}.fc.weight": (12, 8 + n) for n in range(3)},
        {f"layers_{2 - n}/fc/kernel": (8 + n, 12) for n in range(3)},
    ),
    "gates of an LSTM, fused": (
        {"lstm.weight_ih_l0": (32, 5), "lstm.weight_hh_l0": (32, 8), "lstm.bias_ih_l0": (32,)},
        {"lstm/kernel": (5, 32), "lstm/recurrent_kernel": (8, 32), "lstm/bias": (32,)},
    ),
    "gates of an LSTM, apart": (
        {"lstm.weight_ih_l0": (32, 8), "lstm.weight_hh_l0": (32, 8)},
        {f"lstm/{side}{gate}/kernel": (8, 8) for side in "ih" for gate in "ifgo"},
    ),
    "two biases for one": (
        {"rnn.weight_ih": (32, 5), "rnn.bias_ih": (32,), "rnn.bias_hh": (32,)},
        {"rnn/weight_ih": (32, 5), "rnn/bias": (32,)},
    ),
    "length and direction of a weight": (
        {"fc.weight_g": (9, 1), "fc.weight_v": (9, 8)},
        {"fc/kernel": (8, 9)},
    ),
    "a weight that a norm divides": (
        {"fc.weight_orig": (9, 8), "fc.weight_u": (9,), "fc.weight_v": (8,)},
        {"fc/kernel": (8, 9)},
    ),
    "a weight that a mask prunes": (
        {"fc.weight_orig": (9, 8), "fc.weight_mask": (9, 8)},
        {"fc/kernel": (8, 9)},
    ),
    "a variance for a deviation": (
        {"bn.running_mean": (8,), "bn.running_var": (8,)},
        {"bn/mean": (8,), "bn/std": (8,)},
    ),
    "a logarithm for its number": ({"mixer.A_log": (8, 4)}, {"mixer/A": (8, 4)}),
    "a table that is padded": ({"emb.weight": (50, 8)}, {"emb/embedding": (64, 8)}),
    "queries and fewer keys in one": (
        {"attn.wqkv.weight": (16, 8), "fc.weight": (9, 8)},
        {"attn/q/kernel": (8, 8), "attn/k/kernel": (8, 4), "attn/v/kernel": (8, 4)}
        | {"fc/kernel": (8, 9)},
    ),
    "keys and values in one": (
        {"attn.q_proj.weight": (8, 8), "attn.kv_proj.weight": (16, 8), "h.weight": (9, 8)},
        {f"attn/{each}_proj/kernel": (8, 8) for each in "qkv"} | {"h/kernel": (8, 9)},
    ),
    "a patch that is a layer": (
        {"patch_embed.proj.weight": (8, 3, 4, 4)},
        {"patch_embed/proj/kernel": (48, 8)},
    ),
    "a channel's own convolution": (
        {"dw.weight": (8, 1, 3, 3), "fc.weight": (9, 8)},
        {"dw/kernel": (3, 3, 8, 1), "fc/kernel": (8, 9)},
    ),
    "layers of two kinds in turn": (
        {f"layers.{n}.{'attn' if n % 2 else 'mamba'}.weight": (8, 8) for n in range(4)},
        {"attn/kernel": (2, 8, 8), "mamba/kernel": (2, 8, 8)},
    ),
    "every other layer": (
        {f"layers.{n}.mlp.weight": (12, 8) for n in range(4)},
        {f"layers_{n}/mlp/kernel": (2, 8, 12) for n in range(2)},
    ),
    "a layer cut in three": (
        {"attn.proj_in.weight": (3 * D, D), "h.weight": (9, D)},
        {"attn/proj_in/kernel": (D, 3, H, HEAD), "h/kernel": (D, 9)},
    ),
    "a layer cut in two": (
        {"mlp.wi.weight": (24, D), "h.weight": (9, D)},
        {"mlp/wi/kernel": (D, 2, 12), "h/kernel": (D, 9)},
    ),
    "the bias of a layer cut in two": (
        {"mlp.wi.bias": (24,), "h.weight": (9, D)},
        {"mlp/wi/bias": (2, 12), "h/kernel": (D, 9)},
    ),
    "stages of a pipeline": (
        {f"layers.{n}.fc.weight": (12, 8) for n in range(8)},
        {"layers/fc/kernel": (2, 4, 8, 12)},
    ),
    "a bilinear layer": (
        {"pair.weight": (5, 8, 8), "h.weight": (9, D)},
        {"pair/kernel": (8, 8, 5), "h/kernel": (D, 9)},
    ),
    "flattened, and as wide as a later layer": (
        {"conv.weight": (32, 3, 3, 3), "mean.weight": (16, 512), "first.weight": (512, 16)},
        {"conv/kernel": (3, 3, 3, 32), "mean/kernel": (512, 16), "first/kernel": (16, 512)},
    ),
    "unflattened": (
        {"first.weight": (512, 16), "conv.weight": (3, 32, 3, 3)},
        {"first/kernel": (16, 512), "conv/kernel": (3, 3, 32, 3)},
    ),
    "flattened, and as wide as another branch": (
        {"state.weight": (128, 6), "conv.weight": (32, 3, 3, 3), "fc1.weight": (64, 128)},
        {"state/kernel": (6, 128), "conv/kernel": (3, 3, 3, 32), "fc1/kernel": (128, 64)},
    ),
    "rotary, beside a tower with learned positions": (
        {"vision.embeddings.position_embedding.weight": (5, D)} | ROTARY[0],
        {"vision/embeddings/position_embedding/embedding": (5, D)} | ROTARY[1],
    ),
    "gamma for scale": (
        {"n.gamma": (D,), "h.weight": (9, D)},
        {"n/scale": (D,), "h/kernel": (D, 9)},
    ),
    "a mask of square weights": (
        {"fc.weight": (8, 8), "fc.weight_mask": (8, 8), "h.weight": (9, 8)},
        {"fc/kernel": (8, 8), "fc/weight_mask": (8, 8), "h/kernel": (8, 9)},
    ),
    "patches in a row": (
        {"patch_embed.weight": (8, 48), "h.weight": (9, 8)},
        {"patch_embed/kernel": (48, 8), "h/kernel": (8, 9)},
    ),
    "upwards by an odd kernel": (
        {"decoder.up.weight": (8, 8, 3, 3)},
        {"decoder/up/kernel": (3, 3, 8, 8)},
    ),
    "three channels and a kernel of three, channels last": (
        {"a.weight": (8, 3, 3, 3), "b.weight": (8, 8, 3, 3)},
        {"a.weight": (8, 3, 3, 3), "b.weight": (8, 3, 3, 8)},
    ),
    "one deviation for another": (
        {"fc_std.weight": (4, 8), "h.weight": (9, 8)},
        {"fc_logstd/kernel": (8, 4), "h/kernel": (8, 9)},
    ),
    "the start for the end": (
        {"start_logits.weight": (4, 8), "h.weight": (9, 8)},
        {"end_logits/kernel": (8, 4), "h/kernel": (8, 9)},
    ),
    "texts for images": (
        {"text_projection.weight": (4, 8), "h.weight": (9, 8)},
        {"visual_projection/kernel": (8, 4), "h/kernel": (8, 9)},
    ),
    "users for items": (
        {"user_embedding.weight": (50, 8)},
        {"item_embedding/embedding": (50, 8)},
    ),
    "the queries' norm for the keys'": (
        {"attn.q_norm.weight": (4,), "attn.q_norm.bias": (4,)},
        {"attn/k_norm/scale": (4,), "attn/k_norm/bias": (4,)},
    ),
    "a critic's values by quantile or by head": (
        {"critic.value.weight": (8, 6), "fc.weight": (3, 6)},
        {"critic/value/kernel": (6, 2, 4), "fc/kernel": (6, 3)},
    ),
    "learned positions and rotated ones": (
        {"pos_embed": (1, 10, 8), "b.0.q_proj.weight": (12, 8), "b.0.rope.inv_freq": (3,)},
        {"pos_embed": (1, 10, 8), "b_0/query/kernel": (8, 12), "b_0/rope/inv_freq": (3,)},
    ),
    "scales on the target's side": (
        {"fc.weight": (16, 8)},
        {"fc.weight": (16, 8), "fc.weight_scale": (16,)},
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("backwards", [False, True], ids=["there", "back"])
def test_a_trap_is_refused(trap: str, backwards: bool) -> None:
    source, target = map(specs, reversed(TRAPS[trap]) if backwards else TRAPS[trap])
    mapping = infer(source, target).mapping
    if not mapping.assumed:
        with pytest.raises(MappingError, match="does not fit"):
            mapping.check(source, target)
    else:
        with pytest.raises(MappingError, match="the mapping assumes what"):
            mapping.require_accepted()


PLAIN: dict[str, tuple[Shapes, Shapes]] = {
    "one name on both sides": (
        {f"layers.{n}.self_attn.{each}.weight": (D, D) for n in (0, 1) for each in ("q_proj", "k")}
        | {"layers.0.norm.weight": (D,), "head.weight": (9, D)},
        {f"layers_{n}/self_attn/{each}/kernel": (D, D) for n in (0, 1) for each in ("q_proj", "k")}
        | {"layers_0/norm/weight": (D,), "head/kernel": (D, 9)},
    ),
    "learned positions": (
        {"position_embeddings.weight": (16, D), "attention.q.weight": (D, D), "h.weight": (9, D)},
        {
            "position_embeddings/embedding": (16, D),
            "attention/query/kernel": (D, D),
            "h/kernel": (D, 9),
        },
    ),
    "a normalisation with a bias": (
        {"ln_f.weight": (D,), "ln_f.bias": (D,)},
        {"ln_f/scale": (D,), "ln_f/bias": (D,)},
    ),
    "layers of a Sequential": (
        {f"net.{2 * n}.weight": (D, D) for n in range(3)} | {"head.weight": (9, D)},
        {f"Dense_{n}/kernel": (D, D) for n in range(3)} | {"head/kernel": (D, 9)},
    ),
    "downwards by an odd kernel": (
        {"up.0.conv.weight": (8, 8, 3, 3)},
        {"up_0/conv/kernel": (3, 3, 8, 8)},
    ),
    "an embedding and its head": (
        {"embed_tokens.weight": (50, 8), "lm_head.weight": (60, 8)},
        {"embed_tokens/embedding": (50, 8), "lm_head/kernel": (8, 60)},
    ),
    "averages on both sides": (
        {"model.fc.weight": (9, 8), "ema.fc.weight": (9, 8)},
        {"model/fc/kernel": (8, 9), "ema/fc/kernel": (8, 9)},
    ),
    "statistics in a collection of their own": (
        {f"bn.{role}": (8,) for role in ("weight", "bias", "running_mean", "running_var")},
        {"params/bn/scale": (8,), "params/bn/bias": (8,)}
        | {"batch_stats/bn/mean": (8,), "batch_stats/bn/var": (8,)},
    ),
    "params within params": ({"fc.weight": (9, 8)}, {"params/params/fc/kernel": (8, 9)}),
    "convolutions in groups": (
        {"conv.weight": (8, 4, 3, 3), "fc.weight": (9, 8)},
        {"conv/kernel": (3, 3, 4, 8), "fc/kernel": (8, 9)},
    ),
    "a layer as a convolution of one": (
        {"proj.weight": (8, 6), "fc.weight": (9, 8)},
        {"proj/kernel": (1, 1, 6, 8), "fc/kernel": (8, 9)},
    ),
    "more than ten experts": (
        {f"experts.{n}.w.weight": (12, 8) for n in range(11)},
        {f"experts_{n}/w/kernel": (8, 12) for n in range(11)},
    ),
    "routers and gates, each of one name": (
        {"moe.mlp.gate.weight": (9, D), "moe.experts.0.gate_proj.weight": (12, D)},
        {"moe/mlp/gate/kernel": (D, 9), "moe/experts_0/gate_proj/kernel": (D, 12)},
    ),
    "fused alike": ({"attn.qkv.weight": (3 * D, D)}, {"attn/qkv/kernel": (D, 3 * D)}),
    "pooled into a layer": (
        {"conv.weight": (64, 3, 3, 3), "fc.weight": (10, 64)},
        {"conv/kernel": (3, 3, 3, 64), "fc/kernel": (64, 10)},
    ),
    "channels last": (
        {"a.weight": (8, 5, 3, 3), "b.weight": (8, 8, 3, 3), "b.bias": (8,)},
        {"a.weight": (8, 3, 3, 5), "b.weight": (8, 3, 3, 8), "b.bias": (8,)},
    ),
    "flattened in a list": (
        {"net.0.weight": (8, 3, 3, 3), "net.3.weight": (64, 32), "net.5.weight": (64, 64)}
        | {"net.2.weight": (32,), "net.2.bias": (32,), "net.7.weight": (9, 64)},
        {"net_0/kernel": (3, 3, 3, 8), "net_3/kernel": (32, 64), "net_5/kernel": (64, 64)}
        | {"net_2/scale": (32,), "net_2/bias": (32,), "net_7/kernel": (64, 9)},
    ),
    "a wide layer of a block beside a convolution": (
        {"patch.weight": (8, 3, 2, 2)}
        | {f"layers.{n}.mlp.fc1.weight": (32, 8) for n in range(2)}
        | {f"layers.{n}.mlp.fc2.weight": (8, 32) for n in range(2)},
        {"patch/kernel": (2, 2, 3, 8)}
        | {f"layers_{n}/mlp/fc1/kernel": (8, 32) for n in range(2)}
        | {f"layers_{n}/mlp/fc2/kernel": (32, 8) for n in range(2)},
    ),
    "heads of an attention": (
        {"attn.value.weight": (8, 6), "attn.out.weight": (6, 8), "attn.out.bias": (6,)},
        {"attn/value/kernel": (6, 2, 4), "attn/out/kernel": (2, 4, 6), "attn/out/bias": (6,)},
    ),
    "a critic beside an actor": (
        {"actor.weight": (4, 8), "value_head.weight": (1, 8), "query_embed.weight": (9, 8)},
        {
            "actor/kernel": (8, 4),
            "value_head/kernel": (8, 1),
            "query_embed/embedding": (9, 8),
        },
    ),
    "heads by their queries": (
        {"a.q.weight": (9, 6), "a.value.weight": (8, 6), "h.weight": (3, 6)},
        {"a/q/kernel": (6, 9), "a/value/kernel": (6, 2, 4), "h/kernel": (6, 3)},
    ),
    "scales on both sides": (
        {"fc.weight": (16, 8), "fc.weight_scale": (16,)},
        {"fc/weight": (16, 8), "fc/weight_scale": (16,)},
    ),
}


@pytest.mark.parametrize("pair", PLAIN)
def test_what_is_called_alike_stays_certain(pair: str) -> None:
    source, target = map(specs, PLAIN[pair])
    inference = infer(source, target)
    assert not inference.assumed
    inference.mapping.check(source, target)


def test_numbers_of_few_bits_are_assumed_to_be_the_weights() -> None:
    source = specs({"fc.weight": (16, 8)}, "float8_e4m3fn")
    [match] = infer(source, specs({"fc/kernel": (8, 16)})).assumed
    assert "scale" in match.assumes
    assert not infer(source, specs({"fc/kernel": (8, 16)}, "float8_e4m3fn")).assumed


def test_nothing_is_loaded_or_converted_before_it_is_accepted(tmp_path: Path) -> None:
    shapes, wanted = TRAPS["rotary pairs of wq, wk"]
    arrays = {name: np.random.rand(*shape).astype("f4") for name, shape in shapes.items()}
    xckpt.save(tmp_path / "a", arrays)
    like = unflatten_dict({name: np.zeros(shape, "f4") for name, shape in wanted.items()}, sep="/")
    mapping = infer(specs(shapes), specs(wanted)).mapping
    mapping.to_file(tmp_path / "mapping.toml")
    assert LeafMapping.from_file(tmp_path / "mapping.toml") == mapping
    assert mapping.inverse().assumed
    words = r"rule layers\.\{layer\}\.attention\.w.\.weight -> .* and 1 more: .*rotate the channels"
    for strict in (True, False):
        with pytest.raises(MappingError, match=words):
            xckpt.load(tmp_path / "a", like, mapping=mapping, strict=strict)
    with pytest.raises(MappingError, match=words):
        convert(tmp_path / "a", tmp_path / "b", mapping=mapping)
    assert not (tmp_path / "b").exists()
    assert mapping.accept("another thing") == mapping
    loaded = xckpt.load(tmp_path / "a", like, mapping=mapping.accept("rotate"))
    name = "layers.1.attention.wk.weight"
    made = loaded["layers_1"]["attention"]["k_proj"]["kernel"]
    np.testing.assert_array_equal(made, arrays[name].T)


@pytest.mark.parametrize(
    "name, scales",
    [
        ("w", "w_scale_inv"),
        ("fc.weight", "fc.scale_weight"),
        ("fc.weight_packed", "fc.weight_scale"),
        ("fc.weight._data", "fc.weight._scale"),
        ("fc._weight_qdata", "fc._weight_scale"),
        ("fc.weight", "fc.weight.absmax"),
        ("fc.weight", "fc.weight_block_scale"),
        ("fc.weight", "fc.input_scale"),
        ("fc.weight", "fc.qscale"),
        ("fc.w1", "fc.w1_weight_scale_2"),
        ("fc.kernel", "fc.scale"),
        ("fc.weight", "fc.weights_scaling_factor"),
        ("fc.weight", "fc.weight.SCB"),
        ("fc.weight", "fc.weight._scale_inv"),
    ],
)
def test_weights_with_scales_are_not_cast_alone(name: str, scales: str, tmp_path: Path) -> None:
    weight = np.ones((4, 4), np.float32).astype(ml_dtypes.float8_e4m3fn)
    xckpt.save(tmp_path / "a", {name: weight, scales: np.ones((1, 1), "f4")})
    with pytest.raises(MappingError, match=f"{name}: its scales are {scales}"):
        convert(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    convert(tmp_path / "a", tmp_path / "c")
    mapping = LeafMapping([Rule(name, "w")])
    like = {"w": np.zeros((4, 4), np.float32)}
    with pytest.raises(MappingError, match=f"becomes w, float32, without its scales, {scales}"):
        xckpt.load(tmp_path / "a", like, mapping=mapping, cast=True, strict=False)
    with pytest.raises(xckpt.TreeMismatchError, match=f"{name}: .*not its scales, {scales}"):
        xckpt.load(tmp_path / "a", {name: like["w"]}, cast=True, strict=False)
    both = {name: like["w"], scales: np.zeros((1, 1), "f4")}
    assert (xckpt.load(tmp_path / "a", both, cast=True)[name] == 1).all()


@pytest.mark.parametrize("name", ["norm.bias", "fc.weight", "w"])
def test_a_scale_that_is_no_weights_is_none(name: str, tmp_path: Path) -> None:
    """A normalisation's, or one that the model learns."""
    other = {"norm.bias": "norm.scale", "fc.weight": "fc.logit_scale", "w": "norm.scale"}[name]
    small = ml_dtypes.float8_e4m3fn
    xckpt.save(tmp_path / "a", {name: np.ones(4, small), other: np.ones(1, "f4")})
    convert(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    loaded = xckpt.load(tmp_path / "a", {name: np.zeros(4, "f4")}, cast=True, strict=False)
    assert (loaded[name] == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_weight_of_more_than_8_bits_is_cast_beside_a_scale(dtype: str, tmp_path: Path) -> None:
    """It was refused, though nothing says that its numbers are not the weights."""
    weight = np.full((4, 4), 1.5).astype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
    xckpt.save(tmp_path / "a", {"w": weight, "w_scale": np.ones(4, "f4")})
    to = "float32" if dtype == "bfloat16" else "bfloat16"
    convert(tmp_path / "a", tmp_path / "b", dtype=to)
    assert (xckpt.load(tmp_path / "b")["w"] == 1.5).all()
    like = {"w": np.zeros((4, 4), to if to != "bfloat16" else ml_dtypes.bfloat16)}
    assert (xckpt.load(tmp_path / "a", like, cast=True, strict=False)["w"] == 1.5).all()
    rules = LeafMapping([Rule("w", "v")])
    loaded = xckpt.load(tmp_path / "a", {"v": like["w"]}, mapping=rules, cast=True, strict=False)
    assert (loaded["v"] == 1.5).all()


@pytest.mark.parametrize("name, dtype", [("fc.W_q", "uint8"), ("fc.weight", "int8")])
def test_integers_with_a_scale_are_a_weight(name: str, dtype: str, tmp_path: Path) -> None:
    """As HQQ has them; a counter beside the scale of a loss is none."""
    scale = np.ones((4, 1), np.float32)
    xckpt.save(tmp_path / "a", {name: np.ones((4, 4), dtype), "fc.scale": scale})
    with pytest.raises(MappingError, match=f"{name}: its scales are fc.scale"):
        convert(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    like = {name: np.zeros((4, 4), np.float32)}
    with pytest.raises(xckpt.TreeMismatchError, match=f"{name}: .*not its scales, fc.scale"):
        xckpt.load(tmp_path / "a", like, cast=True, strict=False)
    xckpt.save(tmp_path / "c", {"fin_steps": np.ones((), np.int32), "scale": scale})
    convert(tmp_path / "c", tmp_path / "d", dtype="bfloat16")


def test_a_key_with_slashes_is_a_path_for_its_scales(tmp_path: Path) -> None:
    """As files of safetensors have them."""
    weight = np.ones((4, 4), np.float32).astype(ml_dtypes.float8_e4m3fn)
    xckpt.save(tmp_path / "a", {"fc/kernel": weight, "fc/qscale": np.ones((1, 1), "f4")})
    with pytest.raises(MappingError, match="fc%2Fkernel: its scales are fc%2Fqscale"):
        convert(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
