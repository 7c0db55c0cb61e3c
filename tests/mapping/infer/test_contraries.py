"""Modules of one shape that words tell apart: one is never proposed for the other as certain."""

from __future__ import annotations

import pytest

from tests.mapping.infer.test_names_and_shapes import Shapes, is_certain

WORDS = [
    ("cross_attn", "self_attn"),
    ("attn_cross", "attn_self"),
    ("encoder_attn", "self_attn"),
    ("vision_model", "text_model"),
    ("visual", "text"),
    ("image_encoder", "text_encoder"),
    ("audio_tower", "vision_tower"),
    ("down_blocks.0", "up_blocks_0"),
    ("in_layers", "out_layers"),
    ("src_mask", "tgt_mask"),
    ("encoder_k", "encoder_q"),
    ("old_policy", "policy"),
    ("ref_model", "model"),
    ("best_model", "model"),
    ("grad", "params"),
    ("grads", "params"),
    ("momentum_buffer", "params"),
    ("mu", "params"),
    ("nu", "params"),
    ("trace", "params"),
    ("exp_avg", "params"),
    ("exp_avg_sq", "params"),
    ("exp_avg", "exp_avg_sq"),
    ("mu", "nu"),
    ("m", "v"),
    ("first", "last"),
    ("start", "end"),
    ("top", "bottom"),
    ("low", "high"),
    ("lower", "upper"),
    ("min", "max"),
    ("real", "imag"),
    ("spatial", "temporal"),
    ("row_attn", "col_attn"),
    ("user_tower", "item_tower"),
    ("front", "rear"),
    ("inner", "outer"),
    ("fast", "slow"),
    ("long", "short"),
    ("source", "sink"),
    ("reader", "writer"),
    ("head", "tail"),
    ("prefix", "suffix"),
    ("train", "eval"),
    ("main", "aux"),
    ("main_head", "aux_head"),
    ("shared_expert", "expert"),
    ("shared_experts", "experts"),
    ("shared_expert", "experts_0"),
    ("routed_experts", "shared_experts"),
    ("q1", "q2"),
    ("critic1", "critic2"),
    ("critic_target", "critic"),
    ("target_net", "net"),
    ("moving_average", "params"),
    ("ema_model.module", "model"),
    ("model_ema", "model"),
    ("backup", "params"),
    ("snapshot", "params"),
    ("avg", "params"),
    ("average_model", "model"),
    ("time_mix", "channel_mix"),
    ("attn_norm_in", "attn_norm_out"),
    ("sender", "receiver"),
    ("edge_mlp", "node_mlp"),
    ("mean_head", "std_head"),
    ("mean", "var"),
    ("question_encoder", "ctx_encoder"),
    ("question_encoder", "passage_encoder"),
    ("coarse", "fine"),
    ("rgb", "depth"),
    ("content", "style"),
    ("adapter_a", "adapter_b"),
    ("block_a", "block_b"),
    ("task1", "task2"),
]
"""Modules of one kind, of which one is not the other."""


@pytest.mark.parametrize(("one", "other"), WORDS)
def test_words_that_tell_modules_apart_are_no_names_of_one(one: str, other: str) -> None:
    source: Shapes = {f"{one}.fc.weight": (12, 8)}
    target: Shapes = {f"{other}/fc/kernel": (8, 12)}
    for trees in ((source, target), (target, source)):
        assert not is_certain(*trees, ("float32", "float32"))
    both = source | {f"{other}.fc.weight": (12, 8)}
    flax = target | {f"{one}/fc/kernel": (8, 12)}
    assert is_certain(both, flax, ("float32", "float32")) or "." in one
