"""A save with a base shares packs, and is whole by itself all the same."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from conformance.implementations.threads import results
from conformance.strict_reader import StrictCheckpoint
from tests.storage.base.test_sharing import written_to
from tests.support.examples import examples
from xckpt import SaveOptions
from xckpt.storage.base.chunks import BaseChunks

PACKED = SaveOptions(pack_bytes=1 << 18)

State = dict[str, Any]


def a_state(leaves: int = 300) -> State:
    random = np.random.default_rng(0)
    small = {f"l{n}": random.standard_normal((n % 5 + 1, 50)) for n in range(leaves)}
    return {**small, "flag": np.array([True, False]), "large": np.ones((300, 300)), "n": 7}


def packs(folder: Path) -> dict[str, os.stat_result]:
    """The packs of a checkpoint."""
    found = {each.name: each.stat() for each in (folder / "xckpt.packs").iterdir()}
    found.pop("places", None)
    return found


def check(path: Path, state: State) -> None:
    assert xckpt.open(path).verify() == [] and StrictCheckpoint(path).verify() == []
    loaded = xckpt.load(path)
    assert loaded.keys() == state.keys()
    assert all(np.array_equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("options", [SaveOptions(), PACKED, SaveOptions(crc32c=True)])
def test_the_packs_of_an_unchanged_state_are_shared(tmp_path: Path, options: SaveOptions) -> None:
    state = a_state(1000)
    xckpt.save(tmp_path / "a", state, options=options)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=options)
    nbytes = sum(each.nbytes for each in state.values() if isinstance(each, np.ndarray))
    own = sum((tmp_path / "b" / each).stat().st_size for each in ("xckpt.json", "xckpt.digests"))
    assert written_to(tmp_path / "b") == own  # nothing of the state itself
    # An entry of the manifest, a digest and a place each: decision 10.
    assert own < (85 + 16 + 22) * len(state) < 0.11 * nbytes
    assert packs(tmp_path / "a").keys() == packs(tmp_path / "b").keys()
    assert all(each.st_nlink == 2 for each in packs(tmp_path / "b").values())
    check(tmp_path / "b", state)
    shutil.rmtree(tmp_path / "a")
    check(tmp_path / "b", state)


def test_what_changed_is_packed_anew_beside_a_shared_pack(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    changed = {**state, "l3": state["l3"] + 1, "l7": state["l7"][:, :3], "new": np.ones(4)}
    xckpt.save(tmp_path / "b", changed, base=tmp_path / "a")
    (new,) = (each for each in packs(tmp_path / "b").values() if each.st_nlink == 1)
    assert new.st_size == sum(changed[name].nbytes for name in ("l3", "l7", "new"))
    check(tmp_path / "b", changed)
    check(tmp_path / "a", state)


def test_a_pack_of_which_little_is_used_is_not_shared(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state, options=PACKED)
    for kept, shared in ((200, True), (100, False)):
        changed = {**state, **{f"l{n}": state[f"l{n}"] + 1 for n in range(kept, 300)}}
        xckpt.save(tmp_path / "b", changed, base=tmp_path / "a", options=PACKED, overwrite=True)
        assert [each.st_nlink for each in packs(tmp_path / "b").values()].count(2) == shared
        check(tmp_path / "b", changed)


def test_an_adapter_beside_a_frozen_model_of_many_small_leaves(tmp_path: Path) -> None:
    frozen, lora = a_state(1500), {f"lora{n}": np.full((8, 4), n) for n in range(100)}
    xckpt.save(tmp_path / "a", {**frozen, **lora})
    trained = {name: array + 1 for name, array in lora.items()}
    before = written_to(tmp_path / "a")
    xckpt.save(tmp_path / "b", {**frozen, **trained}, base=tmp_path / "a")
    trainable = sum(array.nbytes for array in trained.values())
    assert trainable < written_to(tmp_path / "b") < trainable + 0.15 * before
    check(tmp_path / "b", {**frozen, **trained})


@pytest.mark.parametrize(("verify", "pack"), [(True, "damaged"), (True, "short"), (False, "short")])
def test_a_damaged_pack_is_written_anew(tmp_path: Path, verify: bool, pack: str) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    (name,) = packs(tmp_path / "a")
    content = (tmp_path / "a/xckpt.packs" / name).read_bytes()
    other = content[:-8] if pack == "short" else content[:100] + b"x" + content[101:]
    (tmp_path / "a/xckpt.packs" / name).write_bytes(other)
    options = SaveOptions(verify_base=verify)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=options)
    check(tmp_path / "b", state)


def test_where_nothing_can_be_linked_everything_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: BaseChunks, key: str, new: str, synced: bool) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    state = a_state()
    xckpt.save(tmp_path / "a", state)
    monkeypatch.setattr(BaseChunks, "_link", refused)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    assert all(each.st_nlink == 1 for each in packs(tmp_path / "b").values())
    check(tmp_path / "b", state)


def test_a_base_of_plain_arrays_gives_no_packs_and_the_other_way_round(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "plain", state, options=SaveOptions(pack_bytes=0))
    xckpt.save(tmp_path / "packed", state, base=tmp_path / "plain")
    plain = SaveOptions(pack_bytes=0)
    xckpt.save(tmp_path / "again", state, base=tmp_path / "packed", options=plain)
    for name in ("packed", "again"):
        check(tmp_path / name, state)
        assert (tmp_path / name / "large/c/0/0").stat().st_nlink == 3


def test_another_size_of_what_is_packed_gives_no_wrong_place(tmp_path: Path) -> None:
    state = {f"l{n}": np.full(n * 8 + 1, n, np.int8) for n in range(20)}
    sizes = [40, 100, 20, 1 << 18, 60]
    xckpt.save(tmp_path / "0", state, options=SaveOptions(pack_bytes=80))
    for number, size in enumerate(sizes):
        base, path = tmp_path / str(number), tmp_path / str(number + 1)
        xckpt.save(path, state, base=base, options=SaveOptions(pack_bytes=size))
        check(path, state)


@pytest.mark.parametrize("inline_bytes", [0, 1 << 16])
def test_ranks_share_a_pack_that_one_rank_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    """The places of the base stand in a file, or in its manifest."""
    monkeypatch.setattr("xckpt.storage.packs.write_packs.INLINE_BYTES", inline_bytes)
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    assert (tmp_path / "a/xckpt.packs/places").exists() == (not inline_bytes)
    results(2, lambda group: xckpt.save(tmp_path / "b", state, base=tmp_path / "a", group=group))
    check(tmp_path / "b", state)
    shared = [each for each in packs(tmp_path / "b").values() if each.st_nlink == 2]
    assert len(shared) <= 1


@examples(8, 150)
@given(
    st.lists(st.lists(st.integers(0, 15), max_size=12), min_size=1, max_size=5),
    st.sampled_from([0, 64, 128]),
    st.data(),
)
def test_a_chain_of_saves(
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[list[int]],
    pack_bytes: int,
    data: st.DataObject,
) -> None:
    """Whatever changes and whatever is deleted, each step holds what was saved."""
    root = tmp_path_factory.mktemp("chain")
    state = {"w": np.arange(256.0).reshape(16, 16), "v": np.arange(3), "b": np.zeros(9, np.int8)}
    saved: dict[int, State] = {}
    options = SaveOptions(chunk_bytes=128, pack_bytes=pack_bytes)
    for number, rows in enumerate(edits):
        state = {name: array.copy() for name, array in state.items()}
        state["w"][rows] += 1
        base = data.draw(st.sampled_from([None, *saved]))
        where = None if base is None else root / str(base)
        xckpt.save(root / str(number), state, base=where, options=options)
        saved[number] = state
        gone = data.draw(st.sampled_from([None, *saved]))
        if gone is not None:
            xckpt.delete(root / str(gone))
            del saved[gone]
    for number, expected in saved.items():
        check(root / str(number), expected)


def test_a_base_of_plain_chunks_stays_plain(tmp_path: Path) -> None:
    """A save that would pack by default links the files of what did not change."""
    state: State = {f"l{n}": np.full(2000, n, np.float64) for n in range(300)}
    xckpt.save(tmp_path / "a", state, options=SaveOptions(pack_bytes=0))
    changed = {**state, "l3": state["l3"] + 1, "new": np.ones(4)}
    xckpt.save(tmp_path / "b", changed, base=tmp_path / "a")
    assert not (tmp_path / "b/xckpt.packs").exists()
    chunks = [tmp_path / f"b/{name}/c/0" for name in changed]
    assert sum(path.stat().st_nlink == 2 for path in chunks) == 299
    check(tmp_path / "b", changed)
    xckpt.save(tmp_path / "c", changed, base=tmp_path / "b", options=PACKED)  # as the caller says
    assert list(packs(tmp_path / "c").values())


def test_a_base_with_packs_keeps_its_packs(tmp_path: Path) -> None:
    state = a_state(300)
    xckpt.save(tmp_path / "a", state)
    fewer = {f"l{n}": state[f"l{n}"] for n in range(200)}  # which would be plain by default
    xckpt.save(tmp_path / "b", fewer, base=tmp_path / "a")
    assert [each.st_nlink for each in packs(tmp_path / "b").values()] == [2]
    check(tmp_path / "b", fewer)


@pytest.mark.parametrize("tiny", [True, False])
def test_a_plain_base_of_little_use_is_no_reason_for_plain_chunks(
    tmp_path: Path, tiny: bool
) -> None:
    """Chunks as short as their zarr.json, and a base that has few of the leaves."""
    old: State = {f"l{n}": np.full(100 if tiny else 2000, n) for n in range(200)}
    new: State = {f"new{n}": np.full(100 if tiny else 2000, n) for n in range(100 if tiny else 300)}
    xckpt.save(tmp_path / "a", old)
    xckpt.save(tmp_path / "b", {**old, **new}, base=tmp_path / "a")
    assert [each.st_nlink for each in packs(tmp_path / "b").values()] == [1]
    check(tmp_path / "b", {**old, **new})
