"""Hostile checkpoints, generated: each is refused or read, in the memory that the options allow.

1. `tests.support.hostile_claims` writes one of nothing, `tests.support.hostile_copies` one that was
   real, from a seed.
2. Each is opened, loaded, verified, and whatever else is done with a checkpoint of its kind.
   Whatever happens is an error of the tree, and the peak of resident memory above what the process
   had stays within ``memory_bytes`` + 64 MiB.

They have up to 500 leaves; a leaf that is loaded takes 4 to 6 KiB beside that.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.support.hostile_claims import OF_FOREIGN, OF_NOTHING, safetensors, sparse, zarr
from tests.support.hostile_copies import ODD, OF_REAL, edit, orbax, steps
from tests.support.states import arrays
from xckpt.cli.steps import step_lines
from xckpt.convert import convert
from xckpt.policies import Latest
from xckpt.storage.array import digest_bytes
from xckpt.storage.foreign.zarr_arrays import ZarrFolder
from xckpt.storage.location import Location, open_store
from xckpt.viewer.run import shared_at, steps_at

MEMORY_BYTES = 32 << 20
ALLOWED = MEMORY_BYTES + (64 << 20)
OPTIONS = xckpt.LoadOptions(memory_bytes=MEMORY_BYTES)
SAVE_OPTIONS = xckpt.SaveOptions(memory_bytes=MEMORY_BYTES, chunk_bytes=150)

Kind = Callable[[Path, random.Random], None]


def _uses(kind: Kind, path: Path) -> Iterator[Callable[[], object]]:
    """All that can be done with one hostile checkpoint."""
    if kind is zarr:
        yield lambda: ZarrFolder(path, fill_missing=True).open("w", version=3)
        return
    if kind is steps:
        run = xckpt.CheckpointManager(path, load_options=OPTIONS)
        yield from (run.steps, run.latest, lambda: run.best("loss"), run.restore)
        yield lambda: list(step_lines(steps_at(str(path)), {}))
        yield lambda: shared_at(str(path), run.steps())
        return
    at = path / "model.safetensors" if kind is safetensors else path
    yield lambda: xckpt.open(at, options=OPTIONS).verify()
    yield lambda: xckpt.load(at, options=OPTIONS)
    if kind in (orbax, sparse):
        yield lambda: convert(path, path.with_name("converted"), options=SAVE_OPTIONS)
    elif kind in OF_REAL:
        yield lambda: _slices(path)
        yield lambda: xckpt.diff(path, path)
        state = {name: np.zeros_like(array) for name, array in arrays().items()}
        saved = path.with_name("based")
        yield lambda: xckpt.save(saved, state, base=path, overwrite=True, options=SAVE_OPTIONS)


def test_what_is_put_into_a_document_is_a_copy() -> None:
    """Else a later edit changes it, or puts it into itself; seeds would depend on each other."""
    before = repr(ODD)
    for seed in range(100):
        document = {"a": [1, {"b": [2, 3]}], "c": {"d": 4}}
        for _ in range(5):
            edit(document, random.Random(seed))
    assert repr(ODD) == before


def _slices(path: Path) -> None:
    """Read a part of each leaf."""
    for stored in xckpt.open(path, options=OPTIONS).values():
        if isinstance(stored, xckpt.StoredArray) and stored.shape:
            _try(lambda stored=stored: stored[:3])


def _try(call: Callable[[], object]) -> None:
    with contextlib.suppress(xckpt.XckptError):
        call()


def _peak() -> int:
    """The most resident memory of this process since `_reset`, bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def _reset() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _attack(folder: Path, seed: int, kinds: tuple[Kind, ...]) -> None:
    """Everything that can be done with one hostile checkpoint."""
    chance = random.Random(seed)
    kind = kinds[seed % len(kinds)]
    path = folder / str(seed)
    path.mkdir()
    kind(path, chance)
    before = _reset()
    for use in _uses(kind, path):
        _try(use)
    assert _peak() - before <= ALLOWED, (seed, kind.__name__, _peak() - before)
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand missing chunks take a while."""
    monkeypatch.setattr("xckpt.storage.checkpoint.MOST_PROBLEMS", 100)


linux = pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")


@linux
@pytest.mark.parametrize("first", [0, 5])
def test_hostile_checkpoints_stay_within_memory(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 5):
        _attack(tmp_path, seed, OF_NOTHING)


@linux
def test_descriptions_and_chunks_of_others_stay_within_memory(tmp_path: Path) -> None:
    for seed in range(8):
        _attack(tmp_path, seed, OF_FOREIGN)


@linux
@pytest.mark.parametrize("kind", range(len(OF_REAL)), ids=lambda n: OF_REAL[n].__name__)
def test_altered_checkpoints_stay_within_memory(tmp_path: Path, kind: int) -> None:
    for seed in range(kind, 2 * len(OF_REAL), len(OF_REAL)):
        _attack(tmp_path, seed, OF_REAL)


@linux
def test_the_errors_of_skipped_steps_hold_no_manifests(tmp_path: Path) -> None:
    """Ten steps that a restore skips: five manifests of 4 MB name 50,000 leaves alike."""
    _attack(tmp_path, 9805, OF_REAL)


def _long() -> bytes:
    """Bytes that are no manifest, and more than are read of one."""
    return b" " * (ALLOWED + (32 << 20))


def _of_many_objects() -> bytes:
    """A manifest of 19 MB that takes 8 times as much once it is decoded."""
    leaf = b'{"kind":"tensor","dtype":"int8","shape":[%s]}' % b",".join([b"256"] * 32)
    body = b'{"leaves":[%s],"digests":""}' % b",".join([leaf] * 110_000)
    digest = digest_bytes(body).hex().encode()
    return b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}' % (digest, body)


@linux
@pytest.mark.parametrize(
    "place, make",
    [
        ("folder", _of_many_objects),
        ("memory", _long),
        pytest.param("folder", _long, marks=pytest.mark.thorough),
        pytest.param("memory", _of_many_objects, marks=pytest.mark.thorough),
    ],
)
def test_a_listing_stays_within_memory(
    tmp_path: Path, place: str, make: Callable[[], bytes]
) -> None:
    """What takes more stays a step, which no policy counts or deletes, and a restore names."""
    root = str(tmp_path) if place == "folder" else f"memory://listed{make.__name__}"
    run = xckpt.CheckpointManager(root, keep=Latest(1), load_options=OPTIONS)
    for step in (1, 2):
        assert run.save(step, {"w": np.full(2, step)}, force=True)
    run.wait()
    store, long = open_store(Location.parse(root)), make()
    for step in (3, 4):
        store.write(f"step-{step}/xckpt.json", long).result()
    size = f"{len(long):,}"
    del long
    before = _reset()
    again = xckpt.CheckpointManager(root, keep=Latest(1), load_options=OPTIONS)
    assert [record.number for record in again.steps()] == [2]
    assert _peak() - before <= ALLOWED, (_peak() - before) >> 20
    why = rf"step-4: the manifest of {size} bytes takes .*raise LoadOptions\(memory_bytes=\)"
    with pytest.raises(xckpt.MemoryLimitError, match=why):
        again.restore()
    assert again.restore(step=2)["w"][0] == 2
    assert again.save(6, {"w": np.ones(2)})
    again.wait()
    named = sorted(key.partition(b"/")[0] for key in store.list().result() if b"json" in key)
    assert set(named) == {b"step-00000006", b"step-3", b"step-4"}


@linux
@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 10_000, 100))
@pytest.mark.parametrize(
    "kinds", [OF_NOTHING, OF_REAL, OF_FOREIGN], ids=["nothing", "real", "foreign"]
)
def test_ten_thousand_hostile_checkpoints(
    tmp_path: Path, first: int, kinds: tuple[Kind, ...]
) -> None:
    for seed in range(first, first + 100):
        _attack(tmp_path, seed, kinds)
