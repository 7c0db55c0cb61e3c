"""The way of a call through xckpt: which packages it enters, in which order, and which files.

1. `trace` runs a call under `sys.setprofile` and notes the file of each Python function entered.
2. `Way.packages` lists the packages entered, in order; a move is a step from one to the next. A
   module of the top level, such as ``api``, counts as a package. The ground on which all stand is
   left out: `xckpt.core`, errors and options.
3. `Way.distinct_files` counts every file, those of the ground too.

Worker threads are not traced. `save_of_a_dtensor` and `load_into_a_jax_struct` are the examples::

    python -m tests.support.way
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import xckpt
from tests.support.fork_server import context

HOUSE = Path(xckpt.__file__).parent
GROUND = ("core", "errors", "options")


@dataclass(frozen=True)
class Way:
    """Files entered on the way of a call, relative to the package xckpt, in order."""

    files: tuple[str, ...]

    @property
    def packages(self) -> list[str]:
        """The packages entered, in order, without the ground."""
        packages = [package for package in map(package_of, self.files) if package not in GROUND]
        return [package for package, _ in groupby(packages)]

    @property
    def moves(self) -> int:
        """Steps from one package to another."""
        return len(self.packages) - 1

    @property
    def distinct_files(self) -> list[str]:
        """Each file entered, once, in order."""
        return list(dict.fromkeys(self.files))


def package_of(file: str) -> str:
    """The package of a file: ``storage`` of ``storage/commit/staging.py``, else its name."""
    return file.split("/")[0].removesuffix(".py")


def trace(call: Callable[[], object]) -> Way:
    """The way of a call in this thread."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{HOUSE}/"):
            file = path[len(f"{HOUSE}/") :]
            if not entered or entered[-1] != file:
                entered.append(file)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Way(tuple(entered))


def in_a_fresh_process() -> dict[str, Way]:
    """The ways of the examples of this module, by the names of their functions."""
    here, there = context().Pipe()
    process = context().Process(target=_send, args=(there,))
    process.start()
    there.close()
    ways = here.recv()
    process.join()
    return ways


def _send(pipe: Connection) -> None:
    pipe.send({name: example() for name, example in EXAMPLES.items()})


def save_of_a_dtensor() -> Way:
    """The way of a second save of one DTensor by a process group of one, to a new folder."""
    import jax  # noqa: F401  # so that its adapter is there to be asked
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        mesh = init_device_mesh("cpu", (1,))
        state = {"w": distribute_tensor(torch.arange(32.0).reshape(4, 8), mesh, [Shard(0)])}
        # What is imported and looked up once is not a part of the way.
        xckpt.save(f"{folder}/first", state)
        way = trace(lambda: xckpt.save(f"{folder}/second", state))
    dist.destroy_process_group()
    return way


def load_into_a_jax_struct() -> Way:
    """The way of a second load into one jax.ShapeDtypeStruct, in one process."""
    import jax
    import numpy as np
    import torch  # noqa: F401  # so that its adapter is there to be asked
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    like = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)}
    with tempfile.TemporaryDirectory() as folder:
        xckpt.save(folder, {"w": np.zeros((8, 4), np.float32)})
        xckpt.load(folder, like)
        return trace(lambda: xckpt.load(folder, like))


EXAMPLES: dict[str, Callable[[], Way]] = {
    "save_of_a_dtensor": save_of_a_dtensor,
    "load_into_a_jax_struct": load_into_a_jax_struct,
}


def main() -> None:
    """Print a summary of the ways of the examples."""
    for name, example in EXAMPLES.items():
        way = example()
        print(f"{name}: {way.moves} moves, {len(way.distinct_files)} files")
        print(f"  {' -> '.join(way.packages)}")


if __name__ == "__main__":
    main()
