"""`family` itself: what it takes, what it refuses, and that its files say what they mean.

That the mappings are right is shown in tests/models, on the models themselves.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from xckpt.convert import Mapping, TensorSpec, family
from xckpt.convert.families import families
from xckpt.errors import MappingError

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


@pytest.mark.parametrize("text", ["[1]", "{", ""])
def test_a_configuration_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MappingError, match="not a model's configuration"):
        family("llama", tmp_path)


def test_a_layer_too_few_is_named() -> None:
    mapping = family("llama", SIZES, scanned=True)
    with pytest.raises(MappingError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        mapping.resolve({"layers.0.mlp.up_proj.weight": spec(48, 32)})


def test_a_name_that_no_rule_knows_is_left_over() -> None:
    leaves = {"wpe.weight": spec(8, 4), "wqe.weight": spec(8, 4)}
    assert family("gpt2", SIZES).resolve(leaves).unused == ("wqe.weight",)
