"""Whatever the order in which threads run: the elements are right, errors come, and nothing stays.

Each call is made under schedules that hardly ever happen (`tests.support.schedules`), and on leaves
of which threads take very small parts; what was saved says what is right. The default tier tries a
few schedules, the thorough tier many.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty

import xckpt
from conformance.implementations.threads import results
from tests.support.schedules import at_once, fuzzed
from tests.support.sharded_arrays import cut, holds, rows, wish
from xckpt import LoadOptions, SaveOptions
from xckpt.convert import Mapping, Rule, convert
from xckpt.mapping.operations import Transpose
from xckpt.numpy import ArrayTarget
from xckpt.policies import Latest
from xckpt.staging import BlockingAsyncStager

HANDED_OVER = {
    "xckpt.storage.chunks.window.TOGETHER": 2,
    "xckpt.storage.chunks.write_chunks.TOGETHER": 2,
    "xckpt.storage.write_checkpoint.TOGETHER": 2,
    "xckpt.storage.chunks.window.SMALL_BYTES": 64,
    "xckpt.storage.chunks.read_chunks.SMALL_BYTES": 64,
    "xckpt.storage.chunks.write_chunks.SMALL_BYTES": 64,
    "xckpt.storage.chunks.chunk.SMALL_BYTES": 64,
    "xckpt.storage.chunks.plain_files.SLAB_BYTES": 128,
    "xckpt.storage.packs.read_packs.FILE_BYTES": 256,
    "xckpt.storage.packs.read_packs.GAP_BYTES": 0,
    "xckpt.storage.chunks.shards.reads.GAP_BYTES": 0,
    "xckpt.storage.stored_array.PARALLEL_BYTES": 64,
    "xckpt.storage.budget.FEW_PROCESSORS": 1,
    "xckpt.formats.reader.PART_BYTES": 256,
    "xckpt.formats.opened.PART_BYTES": 256,
    "xckpt.convert.mapped_reads.BLOCK_BYTES": 256,
    "xckpt.engine.host_copy.ALONE_BYTES": 64,
    "xckpt.engine.host_copy.SLAB": 256,
}
"""Sizes from which on threads take parts of the work: of these leaves they are few bytes."""

SIZES = (24, 40)
SMALL = SaveOptions(chunk_bytes=1 << 9, threads=3)
KINDS = {
    "chunks": SMALL,
    "packs": replace(SMALL, pack_bytes=1 << 12),
    "shards": replace(SMALL, shard_bytes=1 << 11),
    "readers": SaveOptions(readers=8, threads=3),
    "checksums": replace(SMALL, crc32c=True),
}
THREADS = LoadOptions(threads=4)
Tree = dict[str, Any]


def state(seed: int) -> Tree:
    """Leaves of several types, large and small; none holds a zero, as new memory often does."""
    random = np.random.default_rng(seed)
    large = {
        f"w{n}": random.integers(1, 100, SIZES).astype(["float32", "int32", "int8"][n])
        for n in range(3)
    }
    small = {f"s{n}": random.integers(1, 100, (n + 1, 3)).astype("float32") for n in range(6)}
    return {**large, "small": small, "step": 7, "text": "x" * 900}


def mapped(tree: Tree, make: Callable[[Any], Any]) -> Tree:
    """The tree with another leaf for each array."""
    return {
        name: mapped(leaf, make)
        if isinstance(leaf, dict)
        else make(leaf)
        if isinstance(leaf, np.ndarray)
        else leaf
        for name, leaf in tree.items()
    }


def whole(leaf: Any) -> Any:
    return np.asarray(leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf)


def same(loaded: Tree, expected: Tree) -> None:
    """Whether a tree is what was saved."""
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            same(loaded[name], value)
        else:
            np.testing.assert_array_equal(whole(loaded[name]), value, name)


def on_devices(array: Any) -> Any:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    spec = PartitionSpec("a", "b") if array.shape == SIZES else PartitionSpec()
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def on_mesh(array: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    return empty(
        *array.shape, dtype=torch.from_numpy(array).dtype, device_mesh=mesh, placements=[Shard(0)]
    )


LIKES: dict[str, Callable[[Tree], Any]] = {
    "nothing": lambda tree: None,
    "numpy": partial(mapped, make=np.empty_like),
    "torch": partial(mapped, make=lambda a: torch.empty_like(torch.from_numpy(a))),
    "meta": partial(mapped, make=lambda a: torch.empty_like(torch.from_numpy(a), device="meta")),
    "dtensor": partial(mapped, make=on_mesh),
    "jax": partial(mapped, make=on_devices),
    "cast": partial(mapped, make=lambda a: np.empty(a.shape, "float64")),
    "transposed": partial(mapped, make=lambda a: np.empty(a.shape[::-1], a.dtype).T),
}


def load(kind: str, like: str, place: str, seed: int) -> None:
    tree = state(seed)
    xckpt.save(place, tree, options=KINDS[kind])
    with in_one_process(like == "dtensor"):
        target = LIKES[like](tree)
        with fuzzed(seed):
            loaded = xckpt.load(place, target, cast=like == "cast", options=THREADS)
        same(loaded, tree)


@contextlib.contextmanager
def in_one_process(of_torch: bool) -> Iterator[None]:
    """A process group of this process, for DTensors."""
    if of_torch:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if of_torch:
            dist.destroy_process_group()


def load_into(kind: str, like: str, place: str, seed: int) -> None:
    tree = state(seed)
    xckpt.save(place, tree, options=KINDS[kind])
    target = LIKES[like](tree)
    with fuzzed(seed):
        xckpt.load_into(place, target, options=THREADS)
    same(target, tree)


def load_mapped(place: str, seed: int) -> None:
    tree = state(seed)
    xckpt.save(place, tree, options=SMALL)
    mapping = Mapping(
        [
            Rule("w{i}", "t/{i}", [Transpose((1, 0))]),
            Rule("small/s{i}", "s/{i}"),
            Rule("step", "step"),
        ]
    )
    with fuzzed(seed):
        loaded = xckpt.load(place, mapping=mapping, strict=False, options=THREADS)
    same(loaded["t"], {str(n): tree[f"w{n}"].T for n in range(3)})
    same(loaded["s"], {str(n): tree["small"][f"s{n}"] for n in range(6)})


def slices(kind: str, place: str, seed: int) -> None:
    """One open checkpoint serves many threads."""
    tree = state(seed)
    xckpt.save(place, tree, options=KINDS[kind])

    def read(checkpoint: xckpt.Checkpoint, number: int) -> None:
        low = number * 3
        name = f"w{number % 3}"
        found = checkpoint.array(name)[low : low + 9, number:]
        np.testing.assert_array_equal(found, tree[name][low : low + 9, number:])
        small = checkpoint.array(f"small/s{number}")[...]
        np.testing.assert_array_equal(small, tree["small"][f"s{number}"])
        assert checkpoint["text"] == tree["text"]

    with fuzzed(seed):
        checkpoint = xckpt.open(place, options=LoadOptions(threads=2))
        calls = [partial(read, checkpoint, number) for number in range(4)]
        *_, problems, again = at_once(*calls, checkpoint.verify, checkpoint.verify)
    assert problems == again == []


def closed(place: str, seed: int) -> None:
    """A checkpoint is closed while it is read: that is said, or what is read is right."""
    tree = state(seed)
    xckpt.save(place, tree, options=KINDS["checksums"])

    def read(checkpoint: xckpt.Checkpoint) -> None:
        for n in range(3):
            with contextlib.suppress(ValueError):  # it is closed
                np.testing.assert_array_equal(checkpoint.array(f"w{n}")[...], tree[f"w{n}"])

    with fuzzed(seed):
        checkpoint = xckpt.open(place, options=THREADS)
        at_once(partial(read, checkpoint), partial(read, checkpoint), checkpoint.close)


def damaged(kind: str, place: str, seed: int) -> None:
    """A damaged file is found by whichever thread reads it, and named."""
    tree = state(seed)
    xckpt.save(place, tree, options=KINDS[kind])
    files = [
        path for path in Path(place).rglob("*") if path.is_file() and "xckpt.packs" in str(path)
    ]
    files = files or [*Path(place, "w1").rglob("c/*/*")]
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(content)
    with fuzzed(seed):
        with pytest.raises(xckpt.CorruptCheckpointError):
            xckpt.load(place, options=THREADS)
        assert xckpt.open(place, options=THREADS).verify() != []


class _Fails(xckpt.planner.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> object:
        if write_item.index.fqn == "w1":
            raise ArithmeticError("of this leaf")
        return super().resolve_data(write_item)


def failing(kind: str, place: str, seed: int) -> None:
    """What a planner raises in a thread is raised, and nothing is left of the save."""
    with fuzzed(seed), pytest.raises(ArithmeticError, match="of this leaf"):
        xckpt.save(place, state(seed), planner=_Fails(), options=KINDS[kind])
    assert os.listdir(Path(place).parent) == []


def save(kind: str, place: str, seed: int) -> None:
    tree = state(seed)
    with fuzzed(seed):
        xckpt.save(place, tree, options=KINDS[kind])
    assert xckpt.open(place).verify() == []
    same(xckpt.load(place), tree)


def share(kind: str, place: str, seed: int, *, verify: bool = False) -> None:
    """A save that shares with a base."""
    tree = state(seed)
    options = replace(KINDS[kind], verify_base=verify)
    xckpt.save(f"{place}-base", tree, options=options)
    tree["w1"] = tree["w1"] + 1
    tree["small"]["s3"] = tree["small"]["s3"] + 1
    with fuzzed(seed):
        xckpt.save(place, tree, base=f"{place}-base", options=options)
    assert xckpt.open(place).verify() == []
    same(xckpt.load(place), tree)


def changed(tree: Tree) -> None:
    """Change every array in place."""
    for leaf in (*tree.values(), *tree["small"].values()):
        if isinstance(leaf, np.ndarray):
            leaf += 1


def save_async(kind: str, place: str, seed: int) -> None:
    """Saves in a row, of a state that changes as soon as it may."""
    tree, saved, saving = state(seed), list[Tree](), list[Any]()
    with fuzzed(seed):
        for n in range(2):
            saved.append(mapped(tree, np.copy))
            saving.append(xckpt.save_async(f"{place}{n}", tree, options=KINDS[kind]))
            saving[-1].staged()
            changed(tree)
        for each in saving:
            each.result()
    for n in range(2):
        same(xckpt.load(f"{place}{n}"), saved[n])


def two_async(place: str, seed: int, *, shared: bool) -> None:
    """Two threads save in the background, with stagers of their own or with one."""
    stager = BlockingAsyncStager(cache_staged_state_dict=True) if shared else None

    def run(n: int) -> None:
        tree = state(seed + n)
        saving = xckpt.save_async(f"{place}{n}", tree, stager=stager, options=SMALL)
        saving.staged()
        changed(tree)
        saving.result()

    with fuzzed(seed):
        at_once(partial(run, 0), partial(run, 1))
    for n in range(2):
        same(xckpt.load(f"{place}{n}"), state(seed + n))


def two_paths(place: str, seed: int) -> None:
    trees = [state(seed + n) for n in range(3)]
    paths = [f"{place}{n}" for n in range(3)]
    with fuzzed(seed):
        saves = (
            partial(xckpt.save, *each, options=SMALL) for each in zip(paths, trees, strict=True)
        )
        at_once(*saves)
        loaded = at_once(*(partial(xckpt.load, path, options=THREADS) for path in paths))
    for each, tree in zip(loaded, trees, strict=True):
        same(each, tree)


def one_path(place: str, seed: int, *, overwrite: bool) -> None:
    """Of saves to one path one is there, whole; without ``overwrite`` the others are refused."""
    trees = [{"w": np.full((20, 40), n + 1)} for n in range(3)]

    def run(n: int) -> bool:
        try:
            xckpt.save(place, trees[n], options=SMALL, overwrite=overwrite)
        except xckpt.CheckpointExistsError:
            return False
        return True

    with fuzzed(seed):
        saved = at_once(*(partial(run, n) for n in range(3)))
    assert sum(saved) >= 1 if overwrite else sum(saved) == 1
    (number,) = set(np.unique(xckpt.load(place)["w"]))
    assert overwrite or saved[number - 1]
    assert xckpt.open(place).verify() == []
    assert place.startswith("memory") or os.listdir(Path(place).parent) == [Path(place).name]


def overwritten(place: str, seed: int) -> None:
    """Loads beside a save that overwrites give the old state or the new one."""
    trees = [state(n) for n in range(2)]
    xckpt.save(place, trees[0], options=SMALL)

    def read() -> None:
        loaded = xckpt.load(place, options=THREADS)
        same(loaded, trees[int(not np.array_equal(loaded["w0"], trees[0]["w0"]))])

    with fuzzed(seed):
        at_once(partial(xckpt.save, place, trees[1], overwrite=True, options=SMALL), read, read)


def pieces(place: str, seed: int) -> None:
    """Boxes that no grid fits."""
    array = np.arange(1, 1 + 23 * 17, dtype=np.float32).reshape(23, 17)
    boxes = [((0, 0), (7, 5)), ((0, 5), (7, 12)), ((7, 0), (16, 3)), ((7, 3), (16, 14))]
    with fuzzed(seed):
        tree = {"w": cut(array, boxes), "r": rows(array, 5, 6, 13)}
        xckpt.save(place, tree, options=SaveOptions(chunk_bytes=128, threads=3))
        like = {"w": wish(array, [((0, 0), (20, 17)), ((20, 0), (3, 17))]), "r": wish(array, boxes)}
        loaded = xckpt.load(place, like, options=THREADS)
    assert holds(loaded["w"], array)
    assert holds(loaded["r"], array)


def ranks(place: str, seed: int, *, hosts: int) -> None:
    """Ranks that read for each other, on one host or between hosts."""
    array = np.arange(1, 1 + 48 * 24, dtype=np.float32).reshape(48, 24)

    def on_rank(group: Any) -> None:
        tree = {"w": cut(array, [((16 * group.rank, 0), (16, 24))]), "o": array}
        xckpt.save(place, tree, group=group, options=replace(SMALL, threads=2))
        like = {"w": wish(array, [((8, 0), (40, 24))]), "o": np.empty_like(array)}
        host = f"host{group.rank % hosts}"
        options = LoadOptions(threads=2, host=host, share_reads="job")
        loaded = xckpt.load(place, like, group=group, options=options)
        assert holds(loaded["w"], array)
        np.testing.assert_array_equal(loaded["o"], array)

    with fuzzed(seed):
        results(3, on_rank)


def conversion(format: str, place: str, seed: int) -> None:
    tree = {name: leaf for name, leaf in state(seed).items() if name != "text"}
    xckpt.save(f"{place}-ours", tree, options=SMALL)
    options = SaveOptions(chunk_bytes=1 << 9, memory_bytes=1 << 15, threads=3)
    with fuzzed(seed):
        convert(f"{place}-ours", place, format=format, options=options)
        loaded = xckpt.load(place, options=THREADS)
        opened = xckpt.open(place, options=THREADS)
        name = "w0" if "w0" in opened else "model.w0"
        at_once(*(lambda: same({name: opened.array(name)[...]}, {name: tree["w0"]}),) * 2)
    if format == "safetensors":  # whose names have no levels
        small = {f"small.{name}": leaf for name, leaf in tree.pop("small").items()}
        tree |= small
    same(loaded, tree)


def manager(place: str, seed: int) -> None:
    """A run is looked at, waited for and restored from while it goes on."""
    over, rounds = threading.Event(), 4
    run = xckpt.CheckpointManager(place, keep=[Latest(2)], options=SMALL)

    def train() -> None:
        try:
            for step in range(rounds):
                run.save(step, {"w": np.full(SIZES, step + 1)}, force=True)
            run.wait()
        finally:
            over.set()

    def look() -> None:
        while not over.is_set():
            numbers = [record.number for record in run.steps()]
            assert numbers == sorted(set(numbers))

    def wait() -> None:
        while not over.is_set():
            run.wait()

    def restore() -> None:
        while not over.is_set():
            found = run.restore(default=None)
            assert found is None or len(np.unique(found["w"])) == 1

    with fuzzed(seed):
        at_once(train, look, wait, restore)
    run.wait()
    run.reload()
    assert [record.number for record in run.steps()][-1] == rounds - 1
    assert (run.restore()["w"] == rounds).all()


Call = Callable[[str, int], None]
CALLS: dict[str, Call] = {
    **{f"load {kind} {like}": partial(load, kind, like) for kind in KINDS for like in LIKES},
    **{
        f"load_into {kind} {like}": partial(load_into, kind, like)
        for kind in KINDS
        for like in ("numpy", "torch", "transposed")
    },
    "load mapped": load_mapped,
    **{f"slices {kind}": partial(slices, kind) for kind in KINDS},
    "closed": closed,
    **{f"damaged {kind}": partial(damaged, kind) for kind in ("chunks", "packs", "checksums")},
    **{f"failing {kind}": partial(failing, kind) for kind in KINDS},
    **{f"save {kind}": partial(save, kind) for kind in KINDS},
    **{f"share {kind}": partial(share, kind) for kind in KINDS},
    **{f"share {k} verified": partial(share, k, verify=True) for k in ("chunks", "packs")},
    **{f"save_async {kind}": partial(save_async, kind) for kind in KINDS},
    "two async": partial(two_async, shared=False),
    "two async, one stager": partial(two_async, shared=True),
    "two paths": two_paths,
    "one path": partial(one_path, overwrite=False),
    "one path, overwritten": partial(one_path, overwrite=True),
    "overwritten": overwritten,
    "pieces": pieces,
    "ranks of a host": partial(ranks, hosts=1),
    "ranks of two hosts": partial(ranks, hosts=2),
    **{f"convert {f}": partial(conversion, f) for f in ("safetensors", "dcp", "orbax", "xckpt")},
    "manager": manager,
}
IN_MEMORY = [name for name in CALLS if name.split()[0] in ("load", "slices", "save", "two")]
"""The calls that are made of ``memory://``, too, which goes through TensorStore."""
QUICK = [
    *("load chunks nothing", "load packs torch", "load shards jax", "load_into readers transposed"),
    *("load mapped", "slices checksums", "closed", "damaged chunks", "failing packs"),
    *("save readers", "share packs", "save_async chunks", "two async, one stager"),
    *("one path, overwritten", "ranks of two hosts", "convert dcp", "manager"),
]


@pytest.fixture(autouse=True)
def _threads_take_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in HANDED_OVER.items():
        monkeypatch.setattr(name, size)


def threads_left() -> list[str]:
    """Threads of xckpt, except those in which a manager deletes for as long as it lives."""
    names = [thread.name for thread in threading.enumerate()]
    ours = [name for name in names if name.startswith("xckpt")]
    return [name for name in ours if not name.startswith(("xckpt-hide", "xckpt-delete"))]


def files_open() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def called(name: str, place: str, seed: int) -> None:
    """Make a call under a schedule, and look what it has left."""
    xckpt.save("memory://schedules", {}, overwrite=True)  # TensorStore has begun, and has its files
    before = files_open()
    CALLS[name](place, seed)
    end = time.monotonic() + 5
    while (threads_left() or files_open() > before) and time.monotonic() < end:
        time.sleep(0.01)  # a thread ends after it has said that its save is over
    assert threads_left() == []
    assert files_open() <= before or "dtensor" in name  # torch keeps some of a process group


@pytest.mark.parametrize("name", QUICK)
def test_a_call_under_a_schedule(name: str, tmp_path: Path) -> None:
    called(name, str(tmp_path / "ckpt"), 0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", range(1, 6))
def test_every_call_under_many_schedules(name: str, seed: int, tmp_path: Path) -> None:
    called(name, str(tmp_path / "ckpt"), seed)
    if name in IN_MEMORY:
        called(name, f"memory://schedules/{name}/{seed}", seed)


def test_the_schedules_find_two_threads_that_make_one_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its lock a target is found out by some of a few seeds, and with it by none."""

    def arrays(seed: int) -> int:
        target = ArrayTarget((3,), "int8", np.dtype("int8"))
        with fuzzed(seed, "numpy.py"):
            return len({id(each) for each in at_once(*(lambda: target.buffer(0),) * 4)})

    assert {arrays(seed) for seed in range(20)} == {1}
    monkeypatch.setattr("xckpt.numpy._MAKING", contextlib.nullcontext())
    assert max(arrays(seed) for seed in range(20)) > 1
