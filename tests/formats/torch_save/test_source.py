"""Files of torch.save as a source: torch is the oracle, and nothing is unpickled."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import xckpt
from tests.formats.arrays import boxes, check_source, read, same_bits
from tests.models.oracle import transformers
from tests.support.tilings import Box, region
from xckpt.formats.detect import open_source
from xckpt.formats.torch_save.source import TorchSaveSource
from xckpt.torch.leaf import to_numpy

DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


def expected(tensor: torch.Tensor) -> NDArray:
    return np.array(to_numpy(tensor.detach().resolve_conj().resolve_neg()))


def test_every_dtype_and_kind_of_view(tmp_path: Path) -> None:
    """Tied, transposed, sliced, expanded, conjugated, parameters; also the scalar and the empty."""
    base = torch.arange(60.0).reshape(5, 12)
    z = torch.randn(3, 4, dtype=torch.complex64)
    state = {
        **{name: torch.arange(12).reshape(3, 4).to(getattr(torch, name)) for name in DTYPES},
        "base": base,
        "tied": base,
        "transposed": base.T,
        "sliced": base[1::2, 3:9:2],
        "conjugated": z.conj(),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(base[0]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    }
    torch.save(state, tmp_path / "all.pt")
    source = open_source(tmp_path / "all.pt")
    check_source(source, {name: expected(tensor) for name, tensor in state.items()})
    again = TorchSaveSource(tmp_path / "all.pt")
    assert again.identity() == source.identity()
    source.close()


@given(boxes(), st.permutations(range(4)))
def test_any_box_of_any_order(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Box], order: list[int]
) -> None:
    shape, box = case
    axes = [axis for axis in order if axis < len(shape)]
    dense = torch.arange(int(np.prod(shape))).reshape([shape[axis] for axis in axes])
    tensor = dense.permute(*np.argsort(axes).tolist()) if shape else dense
    path = tmp_path_factory.mktemp("any") / "t.pt"
    torch.save(tensor, path)
    found = read(TorchSaveSource(path), "", box)
    assert same_bits(found, np.asarray(expected(tensor)[region(box)]))


def test_trees_of_training(tmp_path: Path) -> None:
    """A model, an optimizer and plain values; lists stay lists where they are loaded whole."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "t.pth")
    source = open_source(tmp_path / "t.pth")
    assert source.values["epoch"] == 3
    assert source.values["optimizer/param_groups/0/betas/1"] == 0.999
    moment = expected(optimizer.state_dict()["state"][0]["exp_avg"])
    assert same_bits(read(source, "optimizer/state/0/exp_avg"), moment)
    assert same_bits(read(source, "model/weight"), expected(model.weight))


def test_transformers_shards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers().BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers().BertModel(config)
    state = {name: expected(tensor) for name, tensor in model.state_dict().items()}
    for most, index in (("1MB", False), ("10KB", True)):
        folder = tmp_path / most
        model.save_pretrained(folder, max_shard_size=most, safe_serialization=False)
        (folder / "training_args.bin").write_bytes(b"")
        assert (folder / "pytorch_model.bin.index.json").exists() == index
        check_source(open_source(folder), state)
    edit(folder, lambda names: names.update({"pooler.dense.bias": "../pytorch_model.bin"}))
    with pytest.raises(
        xckpt.ManifestError, match=r"pooler\.dense\.bias: .* leads out of the folder"
    ):
        open_source(folder)
    edit(folder, lambda names: names.update({"pooler.dense.bias": names["pooler.dense.weight"]}))
    edit(folder, lambda names: names.update({"more": names["pooler.dense.weight"]}))
    with pytest.raises(xckpt.ManifestError, match="more: the index says that it is in"):
        open_source(folder)


def edit(folder: Path, change: Any) -> None:
    path = folder / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


class Evil:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil-was-run",)


def pickled(state: object, *, new: bool = True) -> bytes:
    data = io.BytesIO()
    torch.save(state, data, _use_new_zipfile_serialization=new)
    return data.getvalue()


def cut_in(data: bytes, name: str) -> bytes:
    """An archive without one of its entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith(name):
                new.writestr(entry, old.read(entry))
    return out.getvalue()


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = pickled({"w": torch.arange(4.0), "s": 1})
    cases: dict[str, tuple[bytes, type[Exception], str]] = {
        "legacy": (pickled({"w": torch.zeros(2)}, new=False), xckpt.UnsupportedLeafError, "1.6"),
        "a class": (pickled({"w": Evil()}), xckpt.UnsafePickleError, "posix.mkdir"),
        "a model": (pickled(torch.nn.Linear(1, 1)), xckpt.UnsafePickleError, "Linear"),
        "a set": (pickled({"w": {1}}), xckpt.ManifestError, "set"),
        "truncated": (good[:-30], xckpt.CorruptCheckpointError, "not an archive of torch.save"),
        "a storage missing": (cut_in(good, "data/0"), xckpt.CorruptCheckpointError, "no data/0"),
        "no pickle": (cut_in(good, "data.pkl"), xckpt.CorruptCheckpointError, "without data.pkl"),
        "a key of floats": (pickled({1.5: torch.zeros(1)}), xckpt.UnsupportedLeafError, "float"),
        "two of one name": (
            pickled({0: torch.zeros(1), "0": torch.zeros(1)}),
            xckpt.XckptError,
            "two leaves",
        ),
        "a sparse one": (
            pickled({"w": torch.zeros(2, 2).to_sparse()}),
            xckpt.UnsafePickleError,
            "rebuild_sparse",
        ),
    }
    for number, (data, error, words) in enumerate(cases.values()):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(data)
        with pytest.raises(error, match=words) as caught:
            open_source(path, "torch")
        assert path.name in str(caught.value)
    assert not Path("evil-was-run").exists()


def test_a_file_that_was_cut_off_meanwhile(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "w.pt")
    source = open_source(tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes(b"PK")
    with pytest.raises(xckpt.CorruptCheckpointError, match="truncated"):
        read(source, "w")


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({name: torch.zeros(1)}, tmp_path / name)
    with pytest.raises(
        xckpt.NotACheckpointError, match=r"found: a\.pt, b\.pt; give the path of one"
    ):
        open_source(tmp_path)
    (tmp_path / "b.pt").unlink()
    assert list(open_source(tmp_path).specs) == ["a.pt"]
