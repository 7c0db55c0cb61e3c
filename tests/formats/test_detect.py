"""What lies at a path, and what is said where nothing known does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import xckpt
from tests.formats import orbax_writers
from tests.torch.dcp.folders import save_alone
from xckpt.formats.detect import LOOKED_FOR, SOURCES, detect, open_sink, open_source
from xckpt.formats.source import TensorSource


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A checkpoint of each format, in several shapes."""
    array = {"w": np.arange(3)}
    xckpt.save(tmp_path / "ours", array)
    safetensors.numpy.save_file(array, tmp_path / "one.safetensors")
    (tmp_path / "one").write_bytes((tmp_path / "one.safetensors").read_bytes())
    (tmp_path / "folder").mkdir()
    safetensors.numpy.save_file(array, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "config.json").write_text("{}")
    torch.save({"w": torch.arange(3)}, tmp_path / "weights.pt")
    (tmp_path / "hub").mkdir()
    torch.save({"w": torch.arange(3)}, tmp_path / "hub" / "pytorch_model.bin")
    return {
        "weights.pt": tmp_path / "weights.pt",
        "hub": tmp_path / "hub",
        "orbax": orbax_writers.save(tmp_path / "orbax", {"w": np.arange(3)}),
        "steps": orbax_writers.save_steps(tmp_path / "steps", 3, default={"w": np.arange(3)}),
        "dcp": save_alone({"w": torch.arange(3)}, tmp_path / "dcp"),
        "ours": tmp_path / "ours",
        "one.safetensors": tmp_path / "one.safetensors",
        "one": tmp_path / "one",
        "folder": tmp_path / "folder",
    }


FORMATS = {
    "ours": "xckpt",
    "one.safetensors": "safetensors",
    "one": "safetensors",
    "folder": "safetensors",
    "weights.pt": "torch",
    "hub": "torch",
    "dcp": "dcp",
    "orbax": "orbax",
    "steps": "orbax",
}


@pytest.mark.parametrize("place", FORMATS)
def test_the_format_is_found_out(places: dict[str, Path], place: str) -> None:
    path = places[place]
    assert detect(path) == FORMATS[place]
    for given in (None, FORMATS[place]):
        source = open_source(path, given)
        assert isinstance(source, TensorSource)
        assert source.specs["w"].shape == (3,)
        into = np.zeros(3, np.int64)
        source.read("w", xckpt.ChunkStorageMetadata((0,), (3,)), into)
        assert into.tolist() == [0, 1, 2]
        assert source.chunks("w") in ((1,), (3,))
        source.close()


def test_a_url_is_ours() -> None:
    xckpt.save("memory://detected", {"w": np.arange(3)})
    assert detect("memory://detected") == "xckpt"


def test_what_is_unknown(tmp_path: Path) -> None:
    """Told: what was looked for, and what is there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").mkdir()
    for number in range(10):
        (tmp_path / "folder" / f"note-{number}.txt").write_text("mine")
    (tmp_path / "file").write_text("hello world")
    found = {
        "folder": "note-0.txt, note-1.txt.* and 2 more",
        "empty": "an empty folder",
        "file": "a file of 11 bytes that begins with b'hello wo'",
    }
    for name, description in found.items():
        with pytest.raises(xckpt.NotACheckpointError, match=f"Found: {description}") as caught:
            open_source(tmp_path / name)
        assert all(what in str(caught.value) for what in LOOKED_FOR.values())
    with pytest.raises(xckpt.NotACheckpointError, match="it does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="'pickle' cannot be read; known are xckpt"):
        open_source(tmp_path / "file", "pickle")
    assert set(LOOKED_FOR) == set(SOURCES)


def test_what_is_meant_is_said_as_of_a_load(tmp_path: Path) -> None:
    """A root of steps, a slip, a container of a checkpoint, a link that leads nowhere."""
    xckpt.save(tmp_path / "run" / "step-1", {"m": {"w": np.arange(3)}})
    (tmp_path / "link").symlink_to("gone")
    for place in ("run", "run/step-2", "run/step-1/m", "run/step-1/m/none", "link"):
        with pytest.raises(xckpt.NotACheckpointError) as opened:
            xckpt.open(tmp_path / place)
        with pytest.raises(xckpt.NotACheckpointError) as detected:
            detect(tmp_path / place)
        said = str(detected.value).removeprefix(f"{tmp_path / place}: ")
        assert str(opened.value) == f"{tmp_path / place} holds no committed checkpoint: {said}"
    assert said == "it is a link to gone, which does not exist"


def test_where_an_output_goes(tmp_path: Path) -> None:
    assert open_sink(tmp_path / "out") is None
    assert open_sink(tmp_path / "out.pt", "xckpt") is None
    with pytest.raises(TypeError, match="a path must be a str or a PathLike of str, not bytes"):
        open_sink(b"out")  # type: ignore[arg-type]
    for slip in ("w.safetensor", "model.pt", "pytorch_model.bin", "m.safetensors.index.json"):
        with pytest.raises(xckpt.PathError, match="a file with this ending cannot be written"):
            open_sink(tmp_path / slip)
    for format in ("xckpt", "dcp", "orbax"):
        with pytest.raises(xckpt.PathError, match=f"{format}' makes a folder; choose another name"):
            open_sink(tmp_path / "out.safetensors", format)
    assert open_sink("s3://bucket/out", "xckpt") is None
    for spelt in ("w.safetensors", "w.safetensors/"):
        sink = open_sink(f"{tmp_path}/{spelt}")
        assert sink is not None and sink.single and type(sink).__name__ == "SafetensorsSink"
    assert type(open_sink(tmp_path / "out", "safetensors")).__name__ == "SafetensorsSink"
    with pytest.raises(ValueError, match=r"\['dcp'\] cannot be written; known are xckpt"):
        open_sink(tmp_path / "out", ["dcp"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'torch' cannot be written; known are xckpt"):
        open_sink(tmp_path / "out", "torch")


def test_one_file_beside_checkpoints_is_not_taken_for_the_folder(tmp_path: Path) -> None:
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    assert detect(tmp_path) == "torch"
    xckpt.save(tmp_path / "step-1", {"w": np.arange(3)})
    with pytest.raises(xckpt.NotACheckpointError, match=r"give the path of one: .*/step-1"):
        xckpt.load(tmp_path)
