"""Loads and slices under schedules."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import xckpt
from tests.attacks.schedules.states import (
    KINDS,
    LIKES,
    SMALL,
    THREADS,
    in_one_process,
    same,
    state,
)
from tests.support.schedules import SHARED, at_once, fuzzed
from tests.support.sharded_arrays import cut, holds, rows, wish
from xckpt import LoadOptions, SaveOptions
from xckpt.convert import Mapping, Rule
from xckpt.mapping.operations import Transpose


def load(kind: str, like: str, place: str, seed: int) -> None:
    tree = state(seed)
    xckpt.save(place, tree, options=KINDS[kind])
    with in_one_process(like == "dtensor"):
        target = LIKES[like](tree)
        with fuzzed(seed):
            loaded = xckpt.load(place, target, cast=like == "cast", options=THREADS)
        same(loaded, tree)


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


def closed_safetensors(place: str, seed: int) -> None:
    """Another file takes the place of what was closed; nothing of it is read."""
    tree = {name: leaf for name, leaf in state(seed).items() if name.startswith("w")}
    one, other = f"{place}.safetensors", f"{place}-other.safetensors"
    save_file(tree, one)
    save_file({name: np.zeros_like(leaf) for name, leaf in tree.items()}, other)

    def read(checkpoint: xckpt.Checkpoint) -> None:
        for name, leaf in tree.items():
            with contextlib.suppress(ValueError):  # it is closed
                np.testing.assert_array_equal(checkpoint.array(name)[...], leaf)

    def close(checkpoint: xckpt.Checkpoint) -> None:
        checkpoint.close()
        with xckpt.open(other) as opened:
            assert not opened.array("w0")[...].any()

    with fuzzed(seed, *SHARED, "formats"):
        checkpoint = xckpt.open(one, options=THREADS)
        at_once(partial(read, checkpoint), partial(read, checkpoint), partial(close, checkpoint))
