"""The models that the families are tried on: a small configuration each, and what to feed it.

A case names a class of transformers by its torch name; the Flax class of the same model, where
there is one, is that name with `Flax` before it. Sizes differ from one another wherever the model
allows it, so that no transposition and no exchange of two axes goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY, POSITIONS, TOKENS, BATCH = 104, 40, 12, 3


@dataclass(frozen=True)
class Case:
    """One model of one family."""

    family: str
    config: str
    """The class of the configuration, in transformers."""
    model: str
    """The class of the model in torch; `Flax` before it names the other."""
    sizes: Mapping[str, Any]
    """What the configuration is made from."""
    inputs: str
    """Which inputs the model takes: text, image, both, sound or pair."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `family` is given besides the configuration."""


def sizes(**more: Any) -> dict[str, Any]:
    """The names that most configurations share."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
    }
    return common | more


GROUPED = sizes(num_key_value_heads=2)
GEMMA = sizes(num_key_value_heads=1, head_dim=16, hidden_activation="gelu_pytorch_tanh")
MIXTRAL = GROUPED | {"num_local_experts": 5}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
# ViT has a place for a class token besides the patches of 4 x 4.
VIT = sizes(image_size=16, patch_size=4, num_labels=5)
CLIP = {
    "projection_dim": 24,
    "text_config": sizes(eos_token_id=VOCABULARY - 1, projection_dim=24),
    "vision_config": sizes(hidden_size=40, image_size=16, patch_size=4, projection_dim=24),
}
WHISPER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "num_mel_bins": 8,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 56,
    "max_source_positions": 20,
    "max_target_positions": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 10,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def _heads(family: str, config: str, sizes: Mapping[str, Any], inputs: str, *models: str) -> Any:
    return {f"{family} {model}": Case(family, config, model, sizes, inputs) for model in models}


CASES: dict[str, Case] = {
    "llama": Case("llama", "LlamaConfig", "LlamaForCausalLM", GROUPED, "text"),
    "llama tied": Case(
        "llama", "LlamaConfig", "LlamaForCausalLM", GROUPED | {"tie_word_embeddings": True}, "text"
    ),
    "llama without a head": Case("llama", "LlamaConfig", "LlamaModel", GROUPED, "text"),
    "llama scanned": Case(
        "llama", "LlamaConfig", "LlamaForCausalLM", GROUPED, "text", {"scanned": True}
    ),
    "llama pairs": Case(
        "llama", "LlamaConfig", "LlamaForCausalLM", GROUPED, "text", {"rope": "pairs"}
    ),
    "llama biased, scanned, pairs": Case(
        "llama",
        "LlamaConfig",
        "LlamaForCausalLM",
        GROUPED | {"attention_bias": True},
        "text",
        {"scanned": True, "rope": "pairs"},
    ),
    "mixtral": Case("mixtral", "MixtralConfig", "MixtralForCausalLM", MIXTRAL, "text"),
    "mixtral scanned": Case(
        "mixtral", "MixtralConfig", "MixtralForCausalLM", MIXTRAL, "text", {"scanned": True}
    ),
    "mistral": Case("mistral", "MistralConfig", "MistralForCausalLM", GROUPED, "text"),
    "gemma": Case("gemma", "GemmaConfig", "GemmaForCausalLM", GEMMA, "text"),
    "gpt2": Case("gpt2", "GPT2Config", "GPT2LMHeadModel", GPT2, "text"),
    "gpt2 without a head": Case("gpt2", "GPT2Config", "GPT2Model", GPT2, "text"),
    **_heads(
        "bert",
        "BertConfig",
        sizes(),
        "text",
        "BertModel",
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
        "BertForNextSentencePrediction",
    ),
    "bert untied": Case(
        "bert", "BertConfig", "BertForMaskedLM", sizes(tie_word_embeddings=False), "text"
    ),
    **_heads(
        "roberta",
        "RobertaConfig",
        sizes(pad_token_id=1),
        "text",
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "RobertaForTokenClassification",
        "RobertaForQuestionAnswering",
    ),
    "vit": Case("vit", "ViTConfig", "ViTModel", VIT, "image"),
    "vit classifier": Case("vit", "ViTConfig", "ViTForImageClassification", VIT, "image"),
    "clip": Case("clip", "CLIPConfig", "CLIPModel", CLIP, "both"),
    "clip text": Case(
        "clip", "CLIPTextConfig", "CLIPTextModelWithProjection", CLIP["text_config"], "text"
    ),
    "clip vision": Case(
        "clip", "CLIPVisionConfig", "CLIPVisionModel", CLIP["vision_config"], "image"
    ),
    "whisper": Case(
        "whisper", "WhisperConfig", "WhisperForConditionalGeneration", WHISPER, "sound"
    ),
    "whisper without a head": Case("whisper", "WhisperConfig", "WhisperModel", WHISPER, "sound"),
    "whisper classifier": Case(
        "whisper", "WhisperConfig", "WhisperForAudioClassification", WHISPER, "sound alone"
    ),
    "t5": Case("t5", "T5Config", "T5ForConditionalGeneration", T5, "pair"),
    "t5 without a head": Case("t5", "T5Config", "T5Model", T5, "pair"),
    "t5 encoder": Case("t5", "T5Config", "T5EncoderModel", T5, "text"),
    "t5 gated, untied": Case(
        "t5",
        "T5Config",
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "pair",
    ),
}
