"""Conversions of very many small leaves: packed as saves pack them, and read in few requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from conformance.strict_reader import StrictCheckpoint
from tests.convert.test_run import files
from tests.support.counted_bucket import CountedBucket, kinds
from tests.support.servers import bucket
from xckpt import SaveOptions
from xckpt.convert.run import convert

__all__ = ["bucket"]

LEAVES = 400
OPTIONS = SaveOptions(memory_bytes=1 << 18, threads=2)  # units of 16 KiB


def state() -> dict[str, Any]:
    """Small leaves, one large one, and a value that is an array of bytes."""
    many = {f"l{n}": np.arange(n, n + 50, dtype=np.int32) for n in range(LEAVES)}
    return {"many": many, "large": np.ones((300, 300)), "text": "x" * 9000, "n": 7}


def check(path: str | Path) -> None:
    """Whether a checkpoint is whole, and has the state."""
    loaded, saved = xckpt.load(path), state()
    assert isinstance(loaded, dict)
    assert all(np.array_equal(loaded["many"][name], leaf) for name, leaf in saved["many"].items())
    assert np.array_equal(loaded["large"], saved["large"]) and loaded["text"] == saved["text"]
    assert xckpt.open(path).verify() == []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "source"
    xckpt.save(path, state(), options=SaveOptions(pack_bytes=0))
    return path


def packs(path: Path) -> int:
    return len(list((path / "xckpt.packs").iterdir())) - 1


def test_small_leaves_lie_in_packs_of_the_units(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "c", options=OPTIONS)
    assert done.tensors == LEAVES + 1
    check(tmp_path / "c")
    assert StrictCheckpoint(tmp_path / "c").verify() == []
    assert 5 < packs(tmp_path / "c") < 12  # 80 KB in units of 16, and the text
    assert len(files(tmp_path / "c")) < 20
    convert(tmp_path / "c", tmp_path / "plain", options=SaveOptions(pack_bytes=0))
    check(tmp_path / "plain")
    array: Any = zarr.open_array(tmp_path / "plain", path="many/l7", mode="r")
    assert array[3] == 10


def test_a_conversion_that_failed_goes_on_with_its_packs(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", options=OPTIONS)

    def tell(progress: xckpt.Progress) -> None:
        if progress.done > 0.9 * progress.total:
            raise RuntimeError("the caller has had enough")

    failing = SaveOptions(memory_bytes=1 << 18, threads=2, progress=tell)
    with pytest.raises(RuntimeError, match="had enough"):
        convert(source, tmp_path / "c", options=failing)
    done = convert(source, tmp_path / "c", options=OPTIONS)
    assert done.bytes_before > done.bytes / 2
    check(tmp_path / "c")
    assert files(tmp_path / "c").keys() == files(tmp_path / "whole").keys()


def test_ranks_pack_their_units(source: Path, tmp_path: Path) -> None:
    def work(group: ThreadGroup) -> object:
        return convert(source, tmp_path / "c", options=OPTIONS, group=group)

    assert len(results(3, work)) == 3
    check(tmp_path / "c")
    assert StrictCheckpoint(tmp_path / "c").verify() == []
    assert 5 < packs(tmp_path / "c") < 12


def test_a_bucket_gets_packs(source: Path) -> None:
    convert(source, "memory://convert-packs/c", options=OPTIONS)
    check("memory://convert-packs/c")
    assert xckpt.open("memory://convert-packs/c").manifest.packs > 1


@pytest.mark.parametrize("name", ["model.safetensors", "dcp"])
def test_packs_are_read_in_few_requests(tmp_path: Path, bucket: CountedBucket, name: str) -> None:
    tensors = state()["many"]
    xckpt.save("s3://bucket/packed", tensors)
    bucket.taken()
    format = None if name != "dcp" else "dcp"
    convert("s3://bucket/packed", tmp_path / name, format=format, options=OPTIONS)
    seen = kinds(bucket.taken())
    loaded = xckpt.load(tmp_path / name)
    assert isinstance(loaded, dict)
    assert all(np.array_equal(loaded[name], leaf) for name, leaf in tensors.items())
    assert seen["GET pack"] < 20
