"""One plain file a tensor, written and read by one thread or two.

1. Two threads of ``readinto`` over such files are the limit that a load is measured against.  The
   tensors are handed out largest first, so that both threads end together.
2. The same with digests is the least time that a format with digests takes: each slab of half a
   MiB is hashed while it is in the cache, and nothing else is written but the elements.
3. Into new arrays, the kernel makes pages of zeros first: most often that takes longer than to
   read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.contender import Contender, Load, State

SLAB_BYTES = 1 << 19


def _each(threads: int, work: Callable[[str, np.ndarray], None], state: State) -> None:
    ordered = sorted(state.items(), key=lambda item: -item[1].nbytes)
    if threads == 1:
        for name, array in ordered:
            work(name, array)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, name, array) for name, array in ordered]:
            done.result()


def _write(path: Path, array: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        left = array.reshape(-1).view(np.uint8).data
        while len(left):
            left = left[file.write(left) :]


def _read(path: Path, array: np.ndarray) -> None:
    with path.open("rb", buffering=0) as file:
        left = array.reshape(-1).view(np.uint8).data
        while len(left):
            count = file.readinto(left)
            if not count:
                raise EOFError(f"{path} ends early")
            left = left[count:]


def _write_digested(path: Path, array: np.ndarray) -> None:
    content, digest = array.reshape(-1).view(np.uint8).data, xxhash.xxh3_128()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), SLAB_BYTES):
            slab = content[start : start + SLAB_BYTES]
            digest.update(slab)
            if os.pwrite(file.fileno(), slab, start) != len(slab):
                raise EOFError(f"{path} was not written whole")
    digest.digest()


def _read_digested(path: Path, array: np.ndarray) -> None:
    content, digest = array.reshape(-1).view(np.uint8).data, xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(content), SLAB_BYTES):
            slab = content[start : start + SLAB_BYTES]
            if os.preadv(file.fileno(), [slab], start) != len(slab):
                raise EOFError(f"{path} ends early")
            digest.update(slab)
    digest.digest()


def _contender(threads: int, *, digests: bool = False) -> Contender:
    write = _write_digested if digests else _write
    read = _read_digested if digests else _read

    def save(directory: Path, state: State) -> None:
        _each(threads, lambda name, array: write(directory / name, array), state)

    def load(directory: Path, target: State) -> State:
        _each(threads, lambda name, array: read(directory / name, array), target)
        return target

    def load_new(directory: Path, like: State) -> State:
        return load(directory, {name: np.empty_like(array) for name, array in like.items()})

    label = "1 thread" if threads == 1 else f"{threads} threads"
    loads = Load("into memory", False, load), Load("new arrays", True, load_new)
    label += ", digests" if digests else ""
    return Contender(f"plain files, {label}", "numpy", save, loads)


ONE_THREAD = _contender(1)
TWO_THREADS = _contender(2)
DIGESTED = _contender(2, digests=True)
