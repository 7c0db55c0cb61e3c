"""`family` itself: what it takes, what it refuses, and that its files say what they mean.

That the mappings are right is shown in tests/models, on the models themselves.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from xckpt.convert import Mapping, TensorSpec, convert, family
from xckpt.convert.family import MAX_CONFIG_BYTES
from xckpt.errors import MappingError
from xckpt.mapping.families import families

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "n_layer": 2,
    "num_layers": 2,
}


class Configuration:
    """As those of transformers: it can say what it holds."""

    def to_dict(self) -> dict[str, Any]:
        return dict(SIZES)


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32")


def test_the_families() -> None:
    wanted = {"bert", "clip", "gemma", "gpt2", "llama", "mistral", "mixtral", "roberta", "t5"}
    assert set(families()) == wanted | {"vit", "whisper"}


@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_can_be_written_and_inverted(name: str, tied: bool) -> None:
    decoder = name in ("llama", "mistral", "mixtral", "gemma")
    for scanned, rope in product((False, True), ("halves", "pairs")):
        choices: dict[str, Any] = {"scanned": scanned, "rope": rope} if decoder else {}
        mapping = family(name, SIZES | {"tie_word_embeddings": tied}, **choices)
        assert len(mapping.rules) > 5
        assert Mapping.from_document(mapping.to_document()) == mapping
        assert mapping.inverse().inverse() == mapping


def test_a_configuration_has_many_forms(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES))
    first, *others = (
        family("llama", config) for config in (SIZES, Configuration(), file, str(file), tmp_path)
    )
    assert all(mapping == first for mapping in others)


@pytest.mark.parametrize(
    "name, config, choices, words",
    [
        ("lama", SIZES, {}, ["'lama'", "llama", "xckpt map infer"]),
        ("llama", SIZES, {"scan": True}, ["scanned, rope", "scan = True", "no such choice"]),
        ("llama", SIZES, {"rope": "meta"}, ["rope = 'meta'", "'halves', 'pairs'"]),
        ("clip", SIZES, {"scanned": True}, ["choices none", "scanned = True"]),
        ("llama", {"hidden_size": 4}, {}, ["no num_hidden_layers", "no num_attention_heads"]),
        ("llama", "/nowhere/config.json", {}, ["/nowhere/config.json", "No such file"]),
    ],
)
def test_what_is_refused(name: str, config: Any, choices: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(MappingError) as caught:
        family(name, config, **choices)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[1]", "{", "", "[" * 100_000], ids=["list", "cut", "empty", "deep"]
)
def test_a_configuration_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MappingError, match="not a model's configuration"):
        family("llama", tmp_path)


def test_a_configuration_that_is_too_long_says_so(tmp_path: Path) -> None:
    """It was "Expecting value: line 1 column 1", as of an empty file."""
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(MappingError, match=r"config\.json .*longer than the 16,777,216 bytes"):
        family("llama", tmp_path / "config.json")


def test_a_layer_too_few_is_named() -> None:
    mapping = family("llama", SIZES, scanned=True)
    with pytest.raises(MappingError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        mapping.resolve({"layers.0.mlp.up_proj.weight": spec(48, 32)})


def test_a_name_that_no_rule_knows_is_left_over() -> None:
    leaves = {"wpe.weight": spec(8, 4), "wqe.weight": spec(8, 4)}
    assert family("gpt2", SIZES).resolve(leaves).unused == ("wqe.weight",)


def gpt2(**more: Any) -> dict[str, Any]:
    """The leaves of a GPT-2 without layers."""
    wte = np.arange(12, dtype=np.float32).reshape(4, 3)
    leaves = {
        "transformer.wte.weight": wte,
        "transformer.wpe.weight": np.ones((5, 3), np.float32),
        "transformer.ln_f.weight": np.ones(3, np.float32),
        "transformer.ln_f.bias": np.zeros(3, np.float32),
        "lm_head.weight": wte.copy(),
    }
    return leaves | more


def flax() -> dict[str, Any]:
    """What a Flax model of that wants."""
    model = {
        "wte": {"embedding": np.full((4, 3), 7, np.float32)},
        "wpe": {"embedding": np.full((5, 3), 7, np.float32)},
        "ln_f": {"scale": np.full(3, 7, np.float32), "bias": np.full(3, 7, np.float32)},
    }
    return {"transformer": model}


def test_a_head_that_is_the_embeddings_is_read_once() -> None:
    xckpt.save("memory://family-tied", gpt2())
    mapping = family("gpt2", SIZES)
    loaded = xckpt.load("memory://family-tied", flax(), mapping=mapping)
    assert np.array_equal(loaded["transformer"]["wte"]["embedding"], gpt2()["lm_head.weight"])


def test_tied_weights_that_differ_are_refused_before_anything_is_loaded() -> None:
    other = gpt2()["lm_head.weight"]
    other[2, 1] += 1
    xckpt.save("memory://family-untied", gpt2(**{"lm_head.weight": other}))
    target = flax()
    with pytest.raises(MappingError, match=r"lm_head\.weight.*tied tensors must be equal"):
        xckpt.load_into("memory://family-untied", target, mapping=family("gpt2", SIZES))
    assert all((leaf == 7).all() for leaf in target["transformer"]["wte"].values())
    with pytest.raises(MappingError, match=r"lm_head\.weight"):
        convert("memory://family-untied", "memory://family-none", mapping=family("gpt2", SIZES))
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.open("memory://family-none")


def test_position_numbers_that_are_none_are_refused() -> None:
    numbers = np.arange(5)[None]
    numbers[0, 3] = 9
    leaves = {"embeddings.position_ids": numbers, "embeddings.word_embeddings.weight": np.ones(3)}
    xckpt.save("memory://family-numbers", leaves)
    target = {"embeddings": {"word_embeddings": {"embedding": np.zeros(3)}}}
    with pytest.raises(MappingError, match=r"embeddings\.position_ids.*count up"):
        xckpt.load("memory://family-numbers", target, mapping=family("bert", SIZES))
