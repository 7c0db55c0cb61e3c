"""Checkpoints with packs: what comes back, what is refused, and how few objects there are."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from conformance.strict_reader import Broken, StrictCheckpoint
from tests.support.examples import examples
from xckpt import LoadOptions, SaveOptions
from xckpt.convert import convert
from xckpt.core.manifest import objects
from xckpt.core.manifest.codec import encode, parse
from xckpt.core.manifest.packs import INLINE_BYTES
from xckpt.errors import CorruptCheckpointError, ManifestError, PlanError
from xckpt.storage import write_checkpoint
from xckpt.storage.array import digest_bytes
from xckpt.storage.packs.pack_output import PackObject
from xckpt.storage.packs.write_packs import IN_BUCKETS

PACKED = SaveOptions(pack_bytes=1 << 18)


def state(leaves: int = 40, seed: int = 0) -> dict[str, Any]:
    """Small leaves of several types and shapes, and one large one."""
    random = np.random.default_rng(seed)
    types = ["float32", "int8", "bool", "float64"]
    made: dict[str, Any] = {
        f"l{n}": random.integers(0, 2, (n % 5, 3)).astype(types[n % 4]) for n in range(leaves)
    }
    large = random.standard_normal((300, 300))
    return {"small": made, "large": large, "text": "x" * 9000, "scalar": np.float32(3), "n": 7}


def files(folder: Path) -> list[str]:
    """The files of a checkpoint, relative to it."""
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def packs(folder: Path) -> list[Path]:
    """The packs of a checkpoint."""
    found = [each for each in files(folder) if each.startswith("xckpt.packs/")]
    return [folder / each for each in found if not each.endswith("/places")]


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            same(value, other[name])
        elif isinstance(value, np.ndarray):
            assert value.dtype == other[name].dtype
            np.testing.assert_array_equal(value, other[name])
        else:
            assert value == other[name]


@examples(5, 80)
@given(
    leaves=st.integers(0, 9),
    seed=st.integers(0, 9),
    pack=st.sampled_from([1, 8, 40, 1 << 18, 1 << 29]),
    chunk=st.sampled_from([64, 1000, 8 << 20]),
    crc32c=st.booleans(),
    threads=st.sampled_from([1, 2, None]),
)
def test_everything_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    leaves: int,
    seed: int,
    pack: int,
    chunk: int,
    crc32c: bool,
    threads: int | None,
) -> None:
    path, saved = tmp_path_factory.mktemp("packs") / "c", state(leaves, seed)
    saved["large"] = saved["large"][:6]
    options = SaveOptions(pack_bytes=pack, chunk_bytes=chunk, crc32c=crc32c, threads=threads)
    xckpt.save(path, saved, options=options)
    same(saved, xckpt.load(path, options=LoadOptions(threads=threads)))
    opened = xckpt.open(path)
    assert opened.verify() == [] and StrictCheckpoint(path).verify() == []
    np.testing.assert_array_equal(opened.array("large")[3:5, ::7], saved["large"][3:5, ::7])
    for name, leaf in saved["small"].items():
        np.testing.assert_array_equal(StrictCheckpoint(path).read(f"small/{name}"), leaf)


def test_many_leaves_are_few_files(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", state(1000), options=PACKED)
    assert len(files(tmp_path / "c")) == 6  # manifest, digests, pack, root, large, its json
    group: Any = zarr.open_group(tmp_path / "c")
    assert list(group) == ["large"] and group["large"].shape == (300, 300)
    about = group.attrs["xckpt"]
    assert about["packed_arrays"] == 1002 and "SaveOptions(pack_bytes=0)" in about["packed"]


def test_large_packs_are_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xckpt.storage.packs.write_packs.PACK_BYTES", 100)
    saved = state(60)
    xckpt.save(tmp_path / "c", saved, options=PACKED)
    assert len(packs(tmp_path / "c")) > 5
    same(saved, xckpt.load(tmp_path / "c"))
    assert StrictCheckpoint(tmp_path / "c").verify() == []


def test_an_overwrite_and_a_copy_have_their_own_packs(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", state(seed=1), options=PACKED)
    before = packs(tmp_path / "c")
    xckpt.save(tmp_path / "c", state(seed=2), options=PACKED, overwrite=True)
    assert not set(before) & set(packs(tmp_path / "c"))
    xckpt.copy(tmp_path / "c", tmp_path / "copied")
    xckpt.copy(tmp_path / "c", "memory://packs/copied")
    xckpt.delete(tmp_path / "c")
    assert not (tmp_path / "c").exists()
    for copied in (str(tmp_path / "copied"), "memory://packs/copied"):
        same(state(seed=2), xckpt.load(copied))
    xckpt.save(tmp_path / "copied", state(seed=2), overwrite=True)
    assert not any("xckpt.packs" in each for each in files(tmp_path / "copied"))


def test_a_bucket_in_memory_has_packs_too() -> None:
    xckpt.save("memory://packs/saved", state(), options=PACKED)
    same(state(), xckpt.load("memory://packs/saved"))
    xckpt.delete("memory://packs/saved")
    assert not xckpt.exists("memory://packs/saved")


def test_a_changed_byte_is_found_in_its_leaf_alone(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", state(), options=PACKED)
    (pack,) = packs(tmp_path / "c")
    content = bytearray(pack.read_bytes())
    for place in range(0, len(content), 997):
        content[place] ^= 1
        pack.write_bytes(content)
        (problem,) = xckpt.open(tmp_path / "c").verify()
        assert problem.kind == "chunk" and "its digest differs" in problem.text
        with pytest.raises(CorruptCheckpointError, match=problem.leaf):
            xckpt.load(tmp_path / "c")
        assert len(StrictCheckpoint(tmp_path / "c").verify()) == 1
        content[place] ^= 1


def test_a_short_or_missing_pack_names_the_leaves_that_it_lacks(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", state(), options=PACKED)
    (pack,) = packs(tmp_path / "c")
    whole = pack.read_bytes()
    os.truncate(pack, len(whole) - 100)
    half = xckpt.open(tmp_path / "c").verify()
    assert half and all("truncated" in each.text for each in half)
    pack.unlink()
    none = xckpt.open(tmp_path / "c").verify()
    assert len(none) > len(half) and all("missing" in each.text for each in none)
    with pytest.raises(CorruptCheckpointError, match="the chunk is missing"):
        xckpt.load(tmp_path / "c")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_pipe_in_place_of_a_pack_is_refused(tmp_path: Path, threads: int) -> None:
    """A reader that opens it as a file waits for ever."""
    xckpt.save(tmp_path / "c", state(), options=PACKED)
    (pack,) = packs(tmp_path / "c")
    pack.unlink()
    os.mkfifo(pack)
    options = LoadOptions(threads=threads)
    with pytest.raises(CorruptCheckpointError, match="not a plain file"):
        xckpt.load(tmp_path / "c", options=options)
    assert xckpt.open(tmp_path / "c", options=options).verify()


def test_loads_of_local_packs_keep_no_memory_of_their_own(tmp_path: Path) -> None:
    """What is read of a pack goes through memory that the next range takes."""
    leaves = {f"w{n}": np.full(1 << 14, n, np.float32) for n in range(300)}
    xckpt.save(tmp_path / "c", leaves, options=PACKED)
    into = {name: np.zeros_like(leaf) for name, leaf in leaves.items()}
    xckpt.load_into(tmp_path / "c", into)
    tracemalloc.start()
    try:
        xckpt.load_into(tmp_path / "c", into)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert all(np.array_equal(into[name], leaf) for name, leaf in leaves.items())


@pytest.fixture(params=["in the manifest", "in a file"])
def inline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where the places of what is saved stand, and whether that is the manifest."""
    if request.param == "in a file":
        monkeypatch.setattr("xckpt.storage.packs.write_packs.INLINE_BYTES", 0)
    return request.param == "in the manifest"


def table_of(folder: Path) -> bytes:
    """The names of a checkpoint's packs, and the places of its chunks."""
    manifest = parse((folder / "xckpt.json").read_bytes(), digest_bytes)
    return manifest.inline_places or (folder / "xckpt.packs/places").read_bytes()


def forge(folder: Path, places: bytes) -> None:
    """Have a checkpoint's manifest confirm other places, where it has them."""
    manifest = parse((folder / "xckpt.json").read_bytes(), digest_bytes)
    if manifest.inline_places:
        forged = msgspec.structs.replace(manifest, inline_places=places)
    else:
        (folder / "xckpt.packs/places").write_bytes(places)
        forged = msgspec.structs.replace(manifest, places=digest_bytes(places).hex())
    (folder / "xckpt.json").write_bytes(encode(forged, digest_bytes))


def test_places_stand_in_the_manifest_up_to_a_bound_and_else_in_a_file(tmp_path: Path) -> None:
    for count, inline in ((INLINE_BYTES // 16 - 1, True), (INLINE_BYTES // 16, False)):
        path, saved = tmp_path / str(count), {"w": np.arange(count)}
        xckpt.save(path, saved, options=SaveOptions(chunk_bytes=8, pack_bytes=8))
        manifest = xckpt.open(path).manifest
        assert (bool(manifest.inline_places), bool(manifest.places)) == (inline, not inline)
        assert (path / "xckpt.packs/places").exists() != inline
        assert (path / "xckpt.json").stat().st_size < INLINE_BYTES * 3 // 2
        assert xckpt.open(path).verify() == [] and StrictCheckpoint(path).verify() == []
        same(saved, xckpt.load(path))
        copied = tmp_path / f"copy of {count}"
        xckpt.copy(path, copied)
        assert files(copied) == files(path) and xckpt.open(copied).verify() == []


@pytest.mark.parametrize("length", [0, 15, -16, 1 << 10])
def test_places_of_another_length_are_refused(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.storage.packs.write_packs.INLINE_BYTES", 0)
    xckpt.save(tmp_path / "c", state(), options=PACKED)
    content = (tmp_path / "c/xckpt.packs/places").read_bytes()
    other = content[:length] if length <= 16 else content + bytes(length)
    (tmp_path / "c/xckpt.packs/places").write_bytes(other)
    (problem,) = xckpt.open(tmp_path / "c").verify()
    assert "xckpt.packs/places: altered" in problem.text
    with pytest.raises(CorruptCheckpointError, match=r"xckpt\.packs/places: altered"):
        xckpt.load(tmp_path / "c")


def test_places_in_a_manifest_that_are_not_those_of_its_chunks_are_refused(tmp_path: Path) -> None:
    """By the manifest's own rules, before anything is allocated for them."""
    xckpt.save(tmp_path / "c", state(), options=PACKED)
    manifest = parse((tmp_path / "c/xckpt.json").read_bytes(), digest_bytes)
    table = manifest.inline_places
    for changes, complaint in (
        ({"inline_places": table[:-16]}, "bytes of places for 1 packs and"),
        ({"inline_places": table + bytes(16)}, "bytes of places for 1 packs and"),
        ({"packs": 2}, "bytes of places for 2 packs"),
        ({"packs": 0}, "places, but no packs"),
        ({"places": "0" * 32}, "places in the manifest and the digest of a file"),
        ({"inline_places": bytes(INLINE_BYTES + 16)}, "65,552 bytes of places.*at most 65,536"),
    ):
        forged = msgspec.structs.replace(manifest, **changes)
        with pytest.raises(ManifestError, match=complaint):
            encode(forged, digest_bytes)
        body = msgspec.json.encode(forged)
        digest = digest_bytes(body).hex().encode()
        head = b'{"format":"xckpt","version":1,"digest":"' + digest + b'","checkpoint":'
        (tmp_path / "c/xckpt.json").write_bytes(head + body + b"}")
        with pytest.raises(ManifestError, match=complaint):
            xckpt.load(tmp_path / "c")
        with pytest.raises(Broken):
            StrictCheckpoint(tmp_path / "c")


def test_a_checkpoint_whose_places_are_nowhere_is_refused(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", state(), options=PACKED)
    forge(tmp_path / "c", b"")
    with pytest.raises(CorruptCheckpointError, match=r"xckpt\.packs/places: missing"):
        xckpt.load(tmp_path / "c")


@pytest.mark.usefixtures("inline")
def test_forged_places_are_refused(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", state(), options=PACKED)
    content = table_of(tmp_path / "c")
    head, (_, offset) = content[:16], struct.unpack("<QQ", content[-16:])
    for pack, low, complaint in (
        (1, offset, "of a pack 1$"),
        (1 << 63, offset, "of a pack"),
        (0, offset + (1 << 40), "truncated|missing"),
        (0, (1 << 64) - 1, "there is no byte"),
        (0, offset - 1, "digest differs|shares bytes"),
    ):
        forge(tmp_path / "c", head + content[16:-16] + struct.pack("<QQ", pack, low))
        problems = [str(each) for each in xckpt.open(tmp_path / "c").verify()]
        assert problems, (pack, low)
        with pytest.raises(CorruptCheckpointError, match=complaint):
            xckpt.load(tmp_path / "c")


@pytest.mark.usefixtures("inline")
def test_chunks_that_share_bytes_are_refused_although_their_digests_fit(tmp_path: Path) -> None:
    ones = {"a": np.ones(4, np.int8), "b": np.ones(3, np.int8)}
    xckpt.save(tmp_path / "c", ones, options=PACKED)
    content = table_of(tmp_path / "c")
    forge(tmp_path / "c", content[:16] + struct.pack("<QQQQ", 0, 0, 0, 1))
    (problem,) = xckpt.open(tmp_path / "c").verify()
    assert "a chunk of b shares bytes with another" in problem.text
    with pytest.raises(CorruptCheckpointError, match="a chunk of b shares bytes with another"):
        xckpt.load(tmp_path / "c")
    assert "share bytes" in StrictCheckpoint(tmp_path / "c").verify()[0]


def test_more_packs_than_chunks_are_refused(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", {"a": np.ones(4)}, options=PACKED)
    manifest = parse((tmp_path / "c/xckpt.json").read_bytes(), digest_bytes)
    with pytest.raises(ManifestError, match="2 packs of 1 chunks"):
        encode(msgspec.structs.replace(manifest, packs=2), digest_bytes)


@pytest.mark.parametrize(("leaves", "packed"), [(256, 0), (257, 257)])
def test_small_leaves_are_packed_by_default_where_there_are_many(
    tmp_path: Path, leaves: int, packed: int
) -> None:
    many: dict[str, Any] = {f"w{n}": np.full((2, 1 + n % 3), n) for n in range(leaves)}
    saved = {**many, "large": np.ones((300, 300)), "text": "x" * 9000}
    xckpt.save(tmp_path / "c", saved)
    manifest = xckpt.open(tmp_path / "c").manifest
    assert manifest.pack_bytes == (1 << 18 if packed else 0)
    assert len(files(tmp_path / "c")) == (6 if packed else 2 * leaves + 7)
    assert (tmp_path / "c/large/c/0/0").is_file()
    same(saved, xckpt.load(tmp_path / "c"))
    xckpt.save(tmp_path / "plain", saved, options=SaveOptions(pack_bytes=0))
    group: Any = zarr.open_group(tmp_path / "plain")
    assert len(list(group)) == leaves + 2


def test_a_million_objects_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = {"few": np.zeros(4), "model": {"w": np.zeros(1_000_001, np.int8)}}
    tiny = SaveOptions(chunk_bytes=1, pack_bytes=0)
    refusal = (
        r"1,000,005 objects.*model/w alone has 1,000,001 in chunks of \(1,\).*many_objects=True"
    )
    with pytest.raises(PlanError, match=refusal):
        xckpt.save(tmp_path / "c", state, options=tiny)
    assert not list(tmp_path.iterdir())
    xckpt.save(tmp_path / "c", {"w": state["model"]["w"][:2000]}, options=tiny)


def test_the_objects_of_readers_are_counted_and_not_their_chunks(tmp_path: Path) -> None:
    """A save for other readers writes as many objects as without, and refuses as many."""
    state = {"w": np.zeros((1024, 1024), np.uint8)}
    for readers in (0, 8):
        options = SaveOptions(chunk_bytes=1, pack_bytes=0, readers=readers)
        with pytest.raises(PlanError, match=r"1,048,576 objects.*many_objects=True"):
            xckpt.save(tmp_path / "many", state, options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "MANY_OBJECTS", 2)
        patch.setattr(write_checkpoint, "MANY_CHUNKS", 2)
        options = SaveOptions(chunk_bytes=1 << 19, readers=8)
        xckpt.save(tmp_path / "few", {"w": np.zeros((512, 2048), np.uint8)}, options=options)
    assert len(xckpt.open(tmp_path / "few").chunk_source.arrays["w"]) == 1
    assert xckpt.open(tmp_path / "few").chunk_source.arrays["w"][0].count > 2


def test_a_conversion_writes_a_plain_zarr_copy(tmp_path: Path) -> None:
    saved = state(400)
    xckpt.save(tmp_path / "c", saved)
    assert packs(tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "plain", options=SaveOptions(pack_bytes=0))
    assert not any("xckpt.packs" in each for each in files(tmp_path / "plain"))
    array: Any = zarr.open_array(tmp_path / "plain", path="small/l7", mode="r")
    np.testing.assert_array_equal(array[:], saved["small"]["l7"])
    same(saved, xckpt.load(tmp_path / "plain"))


@pytest.mark.parametrize("memory_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("threads", [1, 2, None])
def test_packs_wait_for_no_budget_that_the_caller_holds(
    tmp_path: Path, memory_bytes: int, threads: int | None
) -> None:
    """Large and small chunks, packed or not, within any budget and in any number of threads."""
    state = {f"{n}": np.full(1 + 40 * n, n, np.float64) for n in range(12)}
    for place in (str(tmp_path / "ckpt"), f"memory://packs-budget-{memory_bytes}-{threads}"):
        xckpt.save(place, state, options=xckpt.SaveOptions(pack_bytes=1024, chunk_bytes=1500))
        options = xckpt.LoadOptions(memory_bytes=memory_bytes, threads=threads)
        loaded = xckpt.load(place, options=options)
        assert all((loaded[name] == array).all() for name, array in state.items())
        assert xckpt.open(place, options=options).verify() == []


def test_packs_of_a_local_folder_take_a_slab_of_memory(tmp_path: Path) -> None:
    """What fills lies in a file: memory does not grow with packs."""
    state = {f"{n}": np.full(1 << 15, n, np.int32) for n in range(400)}  # 50 MiB, 4 packs
    tracemalloc.start()
    xckpt.save(tmp_path / "c", state)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert len(packs(tmp_path / "c")) == 4
    assert StrictCheckpoint(tmp_path / "c").verify() == []


@pytest.mark.parametrize("memory_bytes", [2 << 20, 32 << 20])
def test_packs_of_a_bucket_stay_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    """What fills, what is sent, and what is made ready for that, all traced together."""
    state = {f"{n}": np.full(1 << 14, n, np.int32) for n in range(700)}  # 44 MiB
    most, sent = 0, 0
    write = PackObject.finish

    def finish(pack: PackObject) -> tuple[bytes, Any]:
        nonlocal most, sent
        sent += pack.size
        most = max(most, pack.size)
        return write(pack)

    monkeypatch.setattr(PackObject, "finish", finish)
    tracemalloc.start()
    options = SaveOptions(memory_bytes=memory_bytes)
    xckpt.save(f"memory://packs/budget-{memory_bytes}", state, options=options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sent == 700 << 16
    # TensorStore copies what it sends: up to four packs more than Python sees at once.
    assert peak + (IN_BUCKETS - 1) * most < memory_bytes + (4 << 20)


def test_a_digest_of_places_without_packs_is_refused(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", {"a": np.ones(4)})
    manifest = parse((tmp_path / "c/xckpt.json").read_bytes(), digest_bytes)
    assert not manifest.packs
    places = digest_bytes(b"").hex()
    with pytest.raises(ManifestError, match="places, but no packs"):
        encode(msgspec.structs.replace(manifest, places=places), digest_bytes)


def test_bytes_behind_the_chunks_of_a_pack_are_found(tmp_path: Path) -> None:
    """Such as another writer may have put there: then the pack's name is their digest, too."""
    xckpt.save(tmp_path / "a", state(), options=SaveOptions(pack_bytes=2000))
    pack = packs(tmp_path / "a")[0]
    with open(pack, "ab") as file:
        file.write(b"more")
    (problem,) = xckpt.open(tmp_path / "a").verify()
    assert problem.kind == "document"
    assert str(problem) == f"xckpt.packs/{pack.name}: altered: it is longer than the chunks in it"
    same(xckpt.load(tmp_path / "a"), state())
    named = digest_bytes(pack.read_bytes())
    manifest = parse((tmp_path / "a/xckpt.json").read_bytes(), digest_bytes)
    places = bytes.fromhex(pack.name), named
    changed = msgspec.structs.replace(
        manifest, inline_places=manifest.inline_places.replace(*places)
    )
    pack.rename(pack.with_name(named.hex()))
    (tmp_path / "a/xckpt.json").write_bytes(encode(changed, digest_bytes))
    assert xckpt.open(tmp_path / "a").verify() == []


def test_a_pack_with_holes_without_end_is_not_read(tmp_path: Path) -> None:
    """A verification read it as a whole: for hours, where it is sparse."""
    xckpt.save(tmp_path / "a", state(), options=SaveOptions(pack_bytes=2000))
    pack = packs(tmp_path / "a")[0]
    os.truncate(pack, 1 << 40)
    (problem,) = xckpt.open(tmp_path / "a").verify()
    assert str(problem) == f"xckpt.packs/{pack.name}: altered: it is longer than the chunks in it"
    same(xckpt.load(tmp_path / "a"), state())
