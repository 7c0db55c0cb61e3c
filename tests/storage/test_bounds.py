"""What a manifest claims is bounded before it is allocated; the limit and its option are named."""

from __future__ import annotations

import os
import re
import resource
import tracemalloc
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

import xckpt
from conformance.twins.pieces import cut_of
from tests.support.hostile_claims import write_manifest
from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.grid import Grid, ZarrArray
from xckpt.core.manifest.codec import encode
from xckpt.core.manifest.entries import Manifest, TensorEntry
from xckpt.core.manifest.memory import DESTINATION_BYTES, REQUEST_BYTES
from xckpt.core.manifest.objects import check_many, load_bytes
from xckpt.core.manifest.pieces import Pieces
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks import digests
from xckpt.storage.chunks.requests import ChunkRequests

MEBIBYTE = 1 << 20


def hollow(path: Path, chunks: int) -> Path:
    """A checkpoint of chunks of one element, whose digests are a sparse file; no chunk is there."""
    path.mkdir()
    size = chunks * 16
    (path / "xckpt.digests").touch()
    os.truncate(path / "xckpt.digests", size)
    hashed, zeros = xxhash.xxh3_128(), bytes(8 * MEBIBYTE)
    for start in range(0, size, len(zeros)):
        hashed.update(zeros[: size - start])
    leaf = TensorEntry("model/w", "uint8", (chunks,), (1,))
    (path / "xckpt.json").write_bytes(encode(Manifest((leaf,), hashed.hexdigest()), digest_bytes))
    return path


def claiming(path: Path, shape: tuple[int, ...]) -> None:
    """A manifest that claims a leaf of chunks of one element, and a sparse file of digests."""
    leaf = TensorEntry("m/w", "uint8", shape, (1,) * len(shape))
    body = msgspec.json.encode(Manifest((leaf,), "00" * 16))
    text = b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}'
    (path / "xckpt.json").write_bytes(text % (digest_bytes(body).hex().encode(), body))
    (path / "xckpt.digests").touch()
    os.truncate(path / "xckpt.digests", 16 << 32)  # sparse


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollow(tmp_path_factory.mktemp("hollow") / "many", 1 << 24)


def test_chunks_without_number_are_refused(many: Path) -> None:
    tracemalloc.start()
    with pytest.raises(
        xckpt.LeafTooLargeError,
        match=r"model/w: .* 16,777,216 chunks takes 4.0 GiB, more than memory_bytes \(256.0 "
        r"MiB\); raise LoadOptions\(memory_bytes=\)",
    ):
        xckpt.load(many)
    with pytest.raises(xckpt.LeafTooLargeError, match="memory_bytes"):
        xckpt.open(many).array("model/w")[5:-5]
    assert tracemalloc.get_traced_memory()[1] < 64 * MEBIBYTE
    tracemalloc.stop()


@pytest.mark.parametrize(
    "shape, told",
    [
        ((1 << 63,), "m/w: impossible shape"),
        ((1 << 31, 1 << 31), "m/w: shape .* is more than"),
        ((1 << 55,), "m/w alone has 36,028,797,018,963,968; at most 4,294,967,296"),
        ((1 << 32,), "m/w: .* chunks takes 1.* [TG]iB, more than memory_bytes"),
    ],
)
def test_a_leaf_of_more_chunks_than_any_memory_holds(
    tmp_path: Path, shape: tuple[int, ...], told: str
) -> None:
    claiming(tmp_path, shape)
    tracemalloc.start()
    with pytest.raises(xckpt.XckptError, match=told):
        xckpt.load(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 16 * MEBIBYTE
    tracemalloc.stop()
    with pytest.raises(xckpt.XckptError, match=told):
        xckpt.open(tmp_path).array("m/w")[5:-5]


def test_verify_of_billions_of_chunks_ends_at_once(tmp_path: Path) -> None:
    """Its digests alone take 64 GiB, which are not read before the answer."""
    claiming(tmp_path, (1 << 32,))
    with pytest.raises(
        xckpt.LeafTooLargeError,
        match=r"claims 4,294,967,296 chunks, whose digests take 64.0 GiB, more than 8 times "
        r"memory_bytes \(256.0 MiB\); raise LoadOptions\(memory_bytes=\)",
    ):
        xckpt.open(tmp_path).verify()


def test_verify_ends_in_bounded_memory(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xckpt.storage.checkpoint.MOST_PROBLEMS", 100)
    tracemalloc.start()
    options = xckpt.LoadOptions(memory_bytes=32 * MEBIBYTE)
    problems = xckpt.open(many, options=options).verify()
    assert tracemalloc.get_traced_memory()[1] < 64 * MEBIBYTE
    tracemalloc.stop()
    chunks = [problem for problem in problems if problem.kind == "chunk"]
    assert 100 < len(chunks) < 400 and any("not looked at" in problem for problem in chunks)


def test_a_slice_needs_the_digests_of_its_block_only(tmp_path: Path) -> None:
    """As a checkpoint with more digests than a block: they are fetched as they are needed."""
    path = tmp_path / "ckpt"
    saved = np.arange(70_000, dtype=np.uint8)
    folder = hollow(path, len(saved))
    all_digests = b"".join(digest_bytes(bytes([value])) for value in saved)
    (folder / "xckpt.digests").write_bytes(all_digests)
    leaf = TensorEntry("w", "uint8", saved.shape, (1,))
    manifest = Manifest((leaf,), digest_bytes(all_digests).hex())
    (folder / "xckpt.json").write_bytes(encode(manifest, digest_bytes))
    (folder / "w" / "c").mkdir(parents=True)
    for number in (0, digests.BLOCK - 1, digests.BLOCK, len(saved) - 1):
        (folder / f"w/c/{number}").write_bytes(bytes([saved[number]]))
    source = xckpt.open(path).chunk_source
    assert not source.integrity.digests.problem()
    from xckpt.core.manifest.entries import array_document, arrays

    [array] = arrays(manifest)
    (folder / "w" / "zarr.json").write_bytes(array_document(array, (), manifest.zarr_json))
    stored = xckpt.open(path).array("w")
    assert stored[0:1] == saved[:1] and stored[-1:] == saved[-1:]
    around = slice(digests.BLOCK - 1, digests.BLOCK + 1)
    np.testing.assert_array_equal(stored[around], saved[around])
    with pytest.raises(xckpt.CorruptCheckpointError, match="the chunk is missing"):
        stored[1:2]


def test_a_long_digest_file_that_differs_is_altered(tmp_path: Path) -> None:
    path = hollow(tmp_path / "ckpt", 1 << 17)
    with (path / "xckpt.digests").open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"x")
    assert [problem.kind for problem in xckpt.open(path).verify()][:1] == ["digests"]
    os.truncate(path / "xckpt.digests", 1 << 20)
    assert "altered" in xckpt.open(path).verify()[0]
    (path / "xckpt.digests").unlink()
    assert "missing" in xckpt.open(path).verify()[0]


@pytest.mark.thorough
@pytest.mark.parametrize("chunks", [1 << 27])
def test_billions_of_chunks(tmp_path: Path, chunks: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = hollow(tmp_path / "ckpt", chunks)
    with pytest.raises(xckpt.LeafTooLargeError, match="memory_bytes"):
        xckpt.load(path)
    assert any("not looked at" in problem for problem in xckpt.open(path).verify())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (256 + 64) << 10


def test_of_many_altered_documents_some_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.storage.checkpoint.MOST_PROBLEMS", 3)
    path = tmp_path / "ckpt"
    xckpt.save(path, {f"w{n}": np.zeros(1 + n) for n in range(6)})
    for document in path.glob("w*/zarr.json"):
        document.unlink()
    problems = xckpt.open(path).verify()
    assert [problem.leaf for problem in problems] == ["w0", "w1", "w2", None]
    line = "3 zarr.json are altered or unreadable; the others were not looked at"
    assert str(problems[-1]) == line


def test_altered_documents_come_in_the_order_of_the_leaves(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, {"b": {"empty": np.zeros((0, 3)), "w": np.ones(3)}, "a": np.zeros(0)})
    for document in path.rglob("zarr.json"):
        document.unlink()
    problems = xckpt.open(path).verify()
    assert [problem.leaf for problem in problems] == ["b/empty", "b/w", "a", None, None]


def test_pieces_that_leaves_share_count_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece of each leaf is a destination of its own, however short the manifest."""
    monkeypatch.setattr("xckpt.storage.chunks.requests.FEWEST_BYTES", 1 << 20)
    count, leaves = 300, 4
    rows = [{"offset": [n], "shape": [1], "chunk": [1]} for n in range(count)]
    entry = {"kind": "tensor", "dtype": "int8", "shape": [count], "pieces": 0}
    size = count * leaves * 16
    (tmp_path / "xckpt.digests").write_bytes(bytes(size))
    body = {
        "leaves": [{**entry, "name": f"l/{n}"} for n in range(leaves)],
        "digests": xxhash.xxh3_128_hexdigest(bytes(size)),
        "cuts": [cut_of(rows, 1)],
        "pack_bytes": 0,
    }
    write_manifest(tmp_path, msgspec.json.encode(body))
    words = r"l/2: .* takes 1.0 MiB, more than memory_bytes .*; raise LoadOptions\(memory_bytes=\)"
    with pytest.raises(xckpt.LeafTooLargeError, match=words):
        xckpt.load(tmp_path, options=xckpt.LoadOptions(memory_bytes=1))
    # Chunks and zarr.json are read at the same time: either may be missed first.
    with pytest.raises(xckpt.CorruptCheckpointError, match="missing"):
        xckpt.load(tmp_path)


def test_a_save_warns_of_as_many_pieces_as_a_load_refuses() -> None:
    """With 64 MiB, the least that a load may take for its lists."""
    refused = (64 * MEBIBYTE) // (DESTINATION_BYTES + REQUEST_BYTES) + 2
    requests = ChunkRequests(64 * MEBIBYTE)
    one = [ZarrArray("w", n, "int8", (n,), (1,), (1,)) for n in range(refused)]
    for array in one[:-1]:
        requests.add(array, Box((0,), (1,)))
    with pytest.raises(xckpt.LeafTooLargeError, match=f"{refused:,} chunks"):
        requests.add(one[-1], Box((0,), (1,)))
    for count in (refused - 2, refused):
        starts = np.arange(count)[:, None]
        pieces = Pieces.of(Grid(Boxes(starts, np.ones_like(starts)), np.ones_like(starts)))
        planned = Manifest((TensorEntry("w", "int8", (count,), pieces=pieces),), "")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_many(planned, "/ckpt", confirmed=False, memory_bytes=64 * MEBIBYTE)
        said = [str(each.message) for each in caught]
        assert len(said) == (count == refused)
        needs = (
            rf"^/ckpt: a rank that loads .* LoadOptions\(memory_bytes=({load_bytes(planned):,})\)"
        )
        assert all(re.search(needs, text) and "pieces, each a zarr" in text for text in said)
