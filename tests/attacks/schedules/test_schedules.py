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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.attacks.schedules import reading, together, writing
from tests.attacks.schedules.states import HANDED_OVER, KINDS, LIKES
from tests.support.schedules import at_once, fuzzed
from xckpt.numpy import ArrayTarget

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FORMATS = ("safetensors", "dcp", "orbax", "xckpt")
Call = Callable[[str, int], None]
CALLS: dict[str, Call] = {
    **{f"load {k} {like}": partial(reading.load, k, like) for k in KINDS for like in LIKES},
    **{
        f"load_into {kind} {like}": partial(reading.load_into, kind, like)
        for kind in KINDS
        for like in ("numpy", "torch", "transposed")
    },
    "load mapped": reading.load_mapped,
    **{f"slices {kind}": partial(reading.slices, kind) for kind in KINDS},
    "closed": reading.closed,
    "closed safetensors": reading.closed_safetensors,
    **{f"damaged {k}": partial(reading.damaged, k) for k in ("chunks", "packs", "checksums")},
    "overwritten": reading.overwritten,
    "pieces": reading.pieces,
    **{f"failing {kind}": partial(writing.failing, kind) for kind in KINDS},
    **{f"save {kind}": partial(writing.save, kind) for kind in KINDS},
    **{f"share {kind}": partial(writing.share, kind) for kind in KINDS},
    **{f"share {k} verified": partial(writing.share, k, verify=True) for k in ("chunks", "packs")},
    **{f"save_async {kind}": partial(writing.save_async, kind) for kind in KINDS},
    "two async": partial(writing.two_async, shared=False),
    "two async, one stager": partial(writing.two_async, shared=True),
    "two paths": writing.two_paths,
    "one path": partial(writing.one_path, overwrite=False),
    "one path, overwritten": partial(writing.one_path, overwrite=True),
    "one path, in the background": writing.one_path_async,
    "copies": writing.copies,
    "by dcp": writing.by_dcp,
    "ranks of a host": partial(together.ranks, hosts=1),
    "ranks of two hosts": partial(together.ranks, hosts=2),
    "spoiled": together.spoiled,
    **{f"convert {f}": partial(together.conversion, f) for f in FORMATS},
    **{
        f"convert {f} by an executor": partial(together.conversion, f, in_executor=True)
        for f in FORMATS
    },
    "manager": together.manager,
    "deletion": together.deletion,
}
IN_MEMORY = [
    name for name in CALLS if name.split()[0] in ("load", "slices", "save", "two", "deletion")
]
"""The calls that are made of ``memory://``, too, which goes through TensorStore."""
QUICK = [
    *("load chunks nothing", "load packs torch", "load shards jax", "load_into readers transposed"),
    *("load mapped", "slices checksums", "closed", "damaged chunks", "failing packs"),
    *("save readers", "share packs", "save_async chunks", "two async, one stager"),
    *(
        "by dcp",
        "convert safetensors by an executor",
        "one path, overwritten",
        "ranks of two hosts",
        "spoiled",
        "manager",
    ),
]


@pytest.fixture(autouse=True)
def _threads_take_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in HANDED_OVER.items():
        monkeypatch.setattr(name, size)


def threads_left() -> list[str]:
    """Threads of xckpt, except those of a process's requests and of a manager's deletions.

    They live as long as the process and the manager.
    """
    names = [thread.name for thread in threading.enumerate()]
    ours = [name for name in names if name.startswith("xckpt")]
    lasting = "xckpt-server-side", "xckpt-hide", "xckpt-delete"
    return [name for name in ours if not name.startswith(lasting)]


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
