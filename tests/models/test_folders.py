"""Folders as transformers writes them: several safetensors files with an index, and config.json.

There: `xckpt.load` of the folder, which transformers' own Flax classes do not read; back: `convert`
into a folder that its torch classes read again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import xckpt
from tests.models import moves
from tests.models.catalogue import CASES
from tests.models.oracle import Pair, flat, transformers, tree
from xckpt.convert import convert, family

WEIGHTS = "model.safetensors"


@pytest.mark.models
@pytest.mark.parametrize(
    "case", ["llama tied", "gpt2", "bert BertForMaskedLM", "clip", "whisper", "t5 gated, untied"]
)
def test_a_folder_there_and_back(case: str, tmp_path: Path) -> None:
    pair = Pair.of(CASES[case])
    folder = tmp_path / "hugging-face"
    pair.torch_model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / f"{WEIGHTS}.index.json").is_file()
    assert len(list(folder.glob("*.safetensors"))) > 2

    mapping = family(CASES[case].family, folder)
    expected = pair.converted()
    params = xckpt.load(folder, moves.targets(tree(expected)), mapping=mapping)
    moves.same(flat(params), expected)

    xckpt.save(tmp_path / "trained", params)
    back = tmp_path / "back"
    back.mkdir()
    shutil.copy(folder / "config.json", back)
    convert(tmp_path / "trained", back / WEIGHTS, mapping=mapping.inverse())
    state = getattr(transformers(), CASES[case].model).from_pretrained(back).state_dict()
    wanted = {name: leaf.numpy() for name, leaf in pair.state().items()}
    moves.same({name: leaf.numpy() for name, leaf in state.items()}, wanted)
