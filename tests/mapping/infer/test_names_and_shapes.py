"""More pairs that names and shapes do not decide: each is refused, or says what it assumes."""

from __future__ import annotations

import pytest

from xckpt.errors import MappingError
from xckpt.mapping.infer.infer import infer
from xckpt.mapping.spec import TensorSpec

Shapes = dict[str, tuple[int, ...]]
OTHER: Shapes = {"h.weight": (9, 8)}
OTHER_FLAX: Shapes = {"h/kernel": (8, 9)}
"""A layer that shows how the two trees turn their weights."""


def is_certain(source: Shapes, target: Shapes, dtypes: tuple[str, str]) -> bool:
    """Whether a mapping is proposed that is whole and assumes nothing."""
    sides = zip((source, target), dtypes, strict=True)
    trees = [
        {name: TensorSpec(shape, dtype) for name, shape in side.items()} for side, dtype in sides
    ]
    mapping = infer(*trees).mapping
    try:
        mapping.check(*trees)
    except MappingError:
        return False
    return not mapping.assumed


TRAPS: dict[str, tuple[Shapes, Shapes]] = {
    "position embeddings with offset 2": (
        OTHER | {"embed_positions.weight": (18, 8)},
        OTHER_FLAX | {"embed_positions/embedding": (16, 8)},
    ),
    "padded vocab both dims": (
        OTHER | {"wte.weight": (50257, 8)},
        OTHER_FLAX | {"wte/embedding": (50304, 8)},
    ),
    "fused qkv unequal vs split": (
        OTHER | {"a.qkv.weight": (16, 8)},
        OTHER_FLAX | {"a/q/kernel": (8, 8), "a/kv/kernel": (8, 8)},
    ),
    "w1 w3 exchanged": (
        {"ffn.w1.weight": (12, 8), "ffn.w3.weight": (12, 8), "ffn.w2.weight": (8, 12)},
        {"ffn/gate/kernel": (8, 12), "ffn/up/kernel": (8, 12), "ffn/down/kernel": (12, 8)},
    ),
    "w1 w2 of same shape exchanged": (
        {"ffn.w1.weight": (12, 8), "ffn.w2.weight": (12, 8), "ffn.c_proj.weight": (8, 12)},
        {"ffn/up/kernel": (8, 12), "ffn/gate/kernel": (8, 12), "ffn/down/kernel": (12, 8)},
    ),
    "q/k exchanged by name in other tree": (
        OTHER | {"attn.key.weight": (8, 8), "attn.query.weight": (8, 8)},
        OTHER_FLAX | {"attn/in_0/kernel": (8, 8), "attn/in_1/kernel": (8, 8)},
    ),
    "lora A B, r equals dims": (
        {"q.lora_A.weight": (8, 8), "q.lora_B.weight": (8, 8)},
        {"q/lora_down/kernel": (8, 8), "q/lora_up/kernel": (8, 8)},
    ),
    "lora A B square, names a b": (
        {"q.lora_A.default.weight": (8, 8), "q.lora_B.default.weight": (8, 8)},
        {"q/a": (8, 8), "q/b": (8, 8)},
    ),
    "mu nu exchanged": (
        {"opt.exp_avg.w": (9, 8), "opt.exp_avg_sq.w": (9, 8)},
        {"opt/nu/w": (9, 8), "opt/mu/w": (9, 8)},
    ),
    "moment1 moment2 by numbers": (
        {"opt.0.w": (9, 8), "opt.1.w": (9, 8)},
        {"opt/mu/w": (9, 8), "opt/nu/w": (9, 8)},
    ),
    "v for nu": ({"opt.m.w": (9, 8), "opt.v.w": (9, 8)}, {"opt/mu/w": (9, 8), "opt/nu/w": (9, 8)}),
    "running_var for var, mean alone": ({"bn.running_var": (8,)}, {"bn/mean": (8,)}),
    "running var as inverse std": (
        {"bn.running_mean": (8,), "bn.running_var": (8,)},
        {"bn/mean": (8,), "bn/inv_std": (8,)},
    ),
    "scan of interleaved blocks": (
        {f"layers.{n}.fc.weight": (12, 8) for n in range(4)},
        {"layers/fc/kernel": (2, 2, 8, 12)},
    ),
    "encoder and decoder stacked": (
        {"encoder.fc.weight": (12, 8), "decoder.fc.weight": (12, 8)},
        {"fc/kernel": (2, 8, 12)},
    ),
    "stack of two names": (
        {"a.fc.weight": (12, 8), "b.fc.weight": (12, 8)},
        {"fc/kernel": (2, 8, 12)},
    ),
    "case only": (
        {"W.weight": (9, 8), "w.weight": (9, 8)},
        {"w/kernel": (8, 9), "W/kernel": (8, 9)},
    ),
    "case only A a": ({"lora.A": (4, 4), "lora.a": (4, 4)}, {"lora/a": (4, 4), "lora/A": (4, 4)}),
    "case crossing": (
        {"m.B.weight": (9, 8), "m.b.weight": (9, 8)},
        {"m/B1/kernel": (8, 9), "m/b1/kernel": (8, 9)},
    ),
    "gpt2 conv1d named, square only c_proj": (
        {"attn.c_proj.weight": (8, 8)},
        {"attn/c_proj/kernel": (8, 8)},
    ),
    "conv equal dims OIHW HWIO": (
        OTHER | {"c.weight": (3, 3, 3, 3)},
        OTHER_FLAX | {"c/kernel": (3, 3, 3, 3)},
    ),
    "conv equal dims, no other layer": ({"c.weight": (3, 3, 3, 3)}, {"c/kernel": (3, 3, 3, 3)}),
    "conv 1d equal": ({"c.weight": (3, 3, 3)}, {"c/kernel": (3, 3, 3)}),
    "conv K=I": (OTHER | {"c.weight": (8, 3, 3)}, OTHER_FLAX | {"c/kernel": (3, 3, 8)}),
    "conv2d h w swapped": ({"c.weight": (8, 4, 3, 5)}, {"c/kernel": (5, 3, 4, 8)}),
    "square alone": ({"fc.weight": (8, 8)}, {"fc/kernel": (8, 8)}),
    "T5 relative bias": (
        OTHER | {"a.relative_attention_bias.weight": (32, 8)},
        OTHER_FLAX | {"a/rel_embedding": (8, 32)},
    ),
    "square relative bias": (
        OTHER | {"a.relative_attention_bias.weight": (8, 8)},
        OTHER_FLAX | {"a/rel_embedding": (8, 8)},
    ),
    "rms norm offset, other name": (OTHER | {"n.weight": (8,)}, OTHER_FLAX | {"n/gamma": (8,)}),
    "rms norm delta": (OTHER | {"n.weight": (8,)}, OTHER_FLAX | {"n/scale": (8,)}),
    "two layer scales": (
        {"ls1.gamma": (8,), "ls2.gamma": (8,)},
        {"gamma_1": (8,), "gamma_2": (8,)},
    ),
    "bias one side": ({"fc.weight": (9, 8), "fc.bias": (9,)}, {"fc/kernel": (8, 9)}),
    "bias other side": ({"fc.weight": (9, 8)}, {"fc/kernel": (8, 9), "fc/bias": (9,)}),
    "bias for scale": (OTHER | {"n.weight": (8,)}, OTHER_FLAX | {"n/bias": (8,)}),
    "scale and bias swapped 2": (
        OTHER | {"n.beta": (8,), "n.gamma": (8,)},
        OTHER_FLAX | {"n/b": (8,), "n/g": (8,)},
    ),
    "beta for gamma": (OTHER | {"n.beta": (8,)}, OTHER_FLAX | {"n/gamma": (8,)}),
    "scale for scale_inv": (
        {"fc.weight": (16, 8), "fc.weight_scale_inv": (16,)},
        {"fc.weight": (16, 8), "fc.weight_scale": (16,)},
    ),
    "experts other order": (
        {f"experts.{n}.w.weight": (12, 8) for n in range(4)},
        {"experts/w": (4, 8, 12)},
    ),
    "experts: gate up fused stacked": (
        {
            "experts.0.gate_proj.weight": (12, 8),
            "experts.0.up_proj.weight": (12, 8),
            "experts.1.gate_proj.weight": (12, 8),
            "experts.1.up_proj.weight": (12, 8),
            "experts.2.gate_proj.weight": (12, 8),
            "experts.2.up_proj.weight": (12, 8),
            "experts.3.gate_proj.weight": (12, 8),
            "experts.3.up_proj.weight": (12, 8),
        },
        {"experts/gate_up_proj": (4, 8, 24)},
    ),
    "experts square stacked": (
        OTHER | {f"experts.{n}.w.weight": (8, 8) for n in range(4)},
        OTHER_FLAX | {"experts/w": (4, 8, 8)},
    ),
    "cross and self by other names": (
        {"d.attn1.v.weight": (6, 8), "d.attn2.v.weight": (6, 8)},
        {"d/self_attn/v/kernel": (8, 6), "d/cross_attn/v/kernel": (8, 6)},
    ),
    "head tied with embedding renamed": (
        {"embed_out.weight": (50, 8)},
        {"embed_in/embedding": (50, 8)},
    ),
    "shared for encoder embed": (
        {"shared.weight": (50, 8)},
        {"encoder/embed_tokens/embedding": (50, 8)},
    ),
    "token type for position": (
        {"token_type_embeddings.weight": (2, 8)},
        {"position_embeddings/embedding": (2, 8)},
    ),
    "wte wpe same shape": (
        {"wte.weight": (50, 8), "wpe.weight": (50, 8)},
        {"embed/embedding": (50, 8), "pos/embedding": (50, 8)},
    ),
    "wpe for wte": ({"wpe.weight": (50, 8)}, {"wte/embedding": (50, 8)}),
    "class token vs pos": (
        {"cls_token": (1, 1, 8), "mask_token": (1, 1, 8)},
        {"cls": (1, 1, 8), "mask_tok": (1, 1, 8)},
    ),
    "mask token for cls": ({"mask_token": (1, 1, 8)}, {"cls_token": (1, 1, 8)}),
    "dist token": (
        {"cls_token": (1, 1, 8), "dist_token": (1, 1, 8)},
        {"token_0": (1, 1, 8), "token_1": (1, 1, 8)},
    ),
    "pre norm post norm": (
        {
            "self_attn_layer_norm.weight": (8,),
            "final_layer_norm.weight": (8,),
            "self_attn_layer_norm.bias": (8,),
            "final_layer_norm.bias": (8,),
        },
        {
            "layer_norm1/scale": (8,),
            "layer_norm2/scale": (8,),
            "layer_norm1/bias": (8,),
            "layer_norm2/bias": (8,),
        },
    ),
    "weight norm g v same names": (
        {"fc.weight_g": (9, 1), "fc.weight_v": (9, 8)},
        {"fc/scale": (9,), "fc/kernel": (8, 9)},
    ),
    "weight norm: original0/1": (
        {
            "fc.parametrizations.weight.original0": (9, 1),
            "fc.parametrizations.weight.original1": (9, 8),
        },
        {"fc/kernel": (8, 9)},
    ),
    "rnn gates ifgo vs iofg": (
        OTHER | {"rnn.weight_ih_l0": (32, 8)},
        OTHER_FLAX | {"rnn/ih/kernel": (8, 32)},
    ),
    "gru gates": (
        {"gru.weight_ih": (24, 8), "gru.weight_hh": (24, 8)},
        {"gru/wi/kernel": (8, 24), "gru/wh/kernel": (8, 24)},
    ),
    "lstm cell names flax fused": (
        OTHER | {"lstm.weight_ih": (32, 5)},
        OTHER_FLAX | {"lstm/ih/kernel": (5, 32)},
    ),
    "bidirectional reverse": (
        {"rnn.weight_ih_l0": (32, 5), "rnn.weight_ih_l0_reverse": (32, 5)},
        {"rnn/fwd/kernel": (5, 32), "rnn/bwd/kernel": (5, 32)},
    ),
    "separable depthwise multiplier": ({"dw.weight": (16, 1, 3, 3)}, {"dw/kernel": (3, 3, 8, 2)}),
    "groupnorm as heads": ({"gn.weight": (8,)}, {"gn/scale": (2, 4)}),
    "bias cut heads unnamed": (OTHER | {"proj.bias": (8,)}, OTHER_FLAX | {"proj/bias": (2, 4)}),
    "A_log for A": ({"m.A_log": (8, 4)}, {"m/log_A": (8, 4)}),
    "D for d": ({"m.D": (8,), "m.dt_bias": (8,)}, {"m/d": (8,), "m/dt": (8,)}),
    "log_std for std": ({"log_std": (4,)}, {"std": (4,)}),
    "inv_freq for freq": ({"rope.inv_freq": (4,)}, {"rope/freqs": (4,)}),
    "logit_scale exp": ({"logit_scale": ()}, {"temperature": ()}),
    "alpha beta": ({"m.alpha": (8,), "m.beta": (8,)}, {"m/a": (8,), "m/b": (8,)}),
    "k for q norm by order": (
        {"attn.norm_q.weight": (4,), "attn.norm_k.weight": (4,)},
        {"attn/norm1/scale": (4,), "attn/norm2/scale": (4,)},
    ),
    "Greek letters": ({"m.μ": (8,)}, {"m/σ": (8,)}),
    "Russian words": ({"слой.bias": (8,)}, {"голова/bias": (8,)}),
    "signs": ({"m.+": (8,)}, {"m/-": (8,)}),
    "real imag": ({"f.real": (4, 4), "f.imag": (4, 4)}, {"f/re": (4, 4), "f/im": (4, 4)}),
    "imag for real": ({"f.imag": (4, 5)}, {"f/real": (4, 5)}),
    "min for max": ({"obs.min_val": (4,)}, {"obs/max_val": (4,)}),
    "src for dst": ({"src_embed.weight": (50, 8)}, {"tgt_embed/embedding": (50, 8)}),
    "query for key": (
        OTHER | {"attn.q_proj.weight": (8, 6)},
        OTHER_FLAX | {"attn/k_proj/kernel": (6, 8)},
    ),
    "up for gate": ({"mlp.up_proj.weight": (12, 8)}, {"mlp/gate_proj/kernel": (8, 12)}),
    "mean for log_var": ({"enc.mean.weight": (4, 8)}, {"enc/log_var/kernel": (8, 4)}),
    "fc1 for fc2 square": (
        OTHER | {"mlp.fc1.weight": (8, 8)},
        OTHER_FLAX | {"mlp/fc2/kernel": (8, 8)},
    ),
    "layer index from 1": (
        {f"layers.{n}.fc.weight": (12, 8) for n in range(1, 4)},
        {f"layers_{n}/fc/kernel": (8, 12) for n in range(3)},
    ),
    "layer indices differ": (
        {f"layers.{n}.fc.weight": (12, 8) for n in (0, 2, 4)},
        {f"layers_{n}/fc/kernel": (8, 12) for n in (1, 3, 5)},
    ),
    "fewer layers": (
        {f"layers.{n}.fc.weight": (12, 8) for n in range(4)},
        {f"layers_{n}/fc/kernel": (8, 12) for n in range(3)},
    ),
    "master weights": (
        {"master.fc.weight": (12, 8), "model.fc.weight": (12, 8)},
        {"params/fc/kernel": (8, 12)},
    ),
    "hashed embedding transposed square vocab": ({"emb.weight": (8, 8)}, {"emb/embedding": (8, 8)}),
    "lm head square": ({"lm_head.weight": (8, 8)}, {"lm_head/kernel": (8, 8)}),
}


TYPES: dict[str, tuple[Shapes, Shapes, str, str]] = {
    "int8 alone": ({"fc.weight": (16, 8)}, {"fc/kernel": (8, 16)}, "int8", "float32"),
    "int4 packed": ({"fc.weight_packed": (16, 4)}, {"fc/kernel": (8, 16)}, "uint8", "float32"),
    "uint8 alone": ({"fc.weight": (16, 8)}, {"fc/kernel": (8, 16)}, "uint8", "float32"),
    "int32 qweight": ({"fc.qweight": (16, 8)}, {"fc/kernel": (8, 16)}, "int32", "float32"),
    "float to int": ({"fc.weight": (16, 8)}, {"fc/kernel": (8, 16)}, "float32", "int8"),
    "mask bool": ({"fc.weight": (16, 8)}, {"fc/kernel": (8, 16)}, "float32", "bool"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_refused(trap: str) -> None:
    source, target = TRAPS[trap]
    assert not is_certain(source, target, ("float32", "float32"))
    assert not is_certain(target, source, ("float32", "float32"))


@pytest.mark.parametrize("trap", TYPES)
def test_another_type_is_refused(trap: str) -> None:
    source, target, before, after = TYPES[trap]
    assert not is_certain(source, target, (before, after))


CERTAIN: dict[str, tuple[Shapes, Shapes]] = {
    "kv heads one, heads cut": (
        {
            "a.self_attn.k_proj.weight": (4, 8),
            "a.self_attn.q_proj.weight": (8, 8),
            "h.weight": (9, 8),
        },
        {
            "a/self_attn/k_proj/kernel": (8, 1, 4),
            "a/self_attn/q_proj/kernel": (8, 2, 4),
            "h/kernel": (8, 9),
        },
    ),
    "case only, one side": ({"Fc.weight": (9, 8)}, {"fc/kernel": (8, 9)}),
    "gpt2 conv1d both, known by c_attn": (
        {"attn.c_attn.weight": (8, 24), "attn.c_proj.weight": (8, 8)},
        {"attn/c_attn/kernel": (24, 8), "attn/c_proj/kernel": (8, 8)},
    ),
    "conv 1d I=O": (
        {"c.weight": (8, 8, 3), "h.weight": (9, 8)},
        {"c/kernel": (3, 8, 8), "h/kernel": (8, 9)},
    ),
    "conv3d depth vs hw": (
        {"c.weight": (8, 4, 3, 3, 3), "h.weight": (9, 8)},
        {"c/kernel": (3, 3, 3, 4, 8), "h/kernel": (8, 9)},
    ),
    "layer scale for scale": (
        {"n.weight": (8,), "n.bias": (8,), "ls1.gamma": (8,)},
        {"n/scale": (8,), "n/bias": (8,), "ls/gamma": (8,)},
    ),
    "one layer": ({"layers.0.fc.weight": (8, 9)}, {"layers/fc/kernel": (1, 9, 8)}),
    "one layer of three": (
        {"q.in_proj_weight": (12, 4), "layers.0.s": ()},
        {"q/in_proj_weight": (12, 4), "layers/s": (1,)},
    ),
    "numbers without a dot": (
        {f"fc{n}.weight": (8, 9) for n in range(3)},
        {"fc/kernel": (3, 9, 8)},
    ),
    "bias cut heads q": (
        {"attn.q_proj.bias": (8,), "h.weight": (9, 8)},
        {"attn/q_proj/bias": (2, 4), "h/kernel": (8, 9)},
    ),
}


@pytest.mark.parametrize("pair", CERTAIN)
def test_what_names_and_shapes_decide_is_certain(pair: str) -> None:
    source, target = CERTAIN[pair]
    assert is_certain(source, target, ("float32", "float32"))
