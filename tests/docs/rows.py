"""Rows of docs/why/comparison.md, asked of each library itself.

A row is a function of a folder and of two ranks of torch; it returns the cells of `LIBRARIES`, in
this order. A library that refuses has to say so in the words that are expected (`cell`): a slip of
the question is an error, and no answer.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, suppress
from importlib.metadata import distribution
from io import StringIO
from pathlib import Path
from typing import Any, Final

import numpy as np

import xckpt
from conformance.cases import Case, Leaf, Placed
from conformance.implementation import Array, Box, Refused, find
from conformance.laws.properties import reshard
from tests.support.ranks import Ranks

LIBRARIES: Final = ("xckpt", "torch-dcp", "orbax", "safetensors")
WHOLE: Final = np.arange(64, dtype=np.float32).reshape(8, 8)
Cells = list[str]


def cell(question: Callable[[], object], refusal: str = "") -> str:
    """The word yes or no; a library that refuses says `refusal`."""
    try:
        return "yes" if question() else "no"
    except BaseException as error:  # DCP's is not an Exception
        if not refusal or not re.search(refusal, str(error)):
            raise
        return "no"


def placed(values: Any, dimension: int) -> Any:
    """A DTensor of the ranks, cut along a dimension."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.from_numpy(values.copy()), mesh, [Shard(dimension)])


def is_whole(tensor: Any) -> bool:
    """Whether a DTensor holds `WHOLE`."""
    return np.array_equal(tensor.full_tensor().numpy(), WHOLE)


def sharded(values: Any, *spec: str) -> Any:
    """A `jax.Array` on 2 x 4 devices."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))


def is_as(array: Any, like: Any) -> bool:
    """Whether an array of JAX holds `WHOLE`, sharded as another one."""
    return array.sharding == like.sharding and np.array_equal(np.asarray(array), WHOLE)


def orbax_loads(path: Path, like: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer().restore(path, {"w": like})["w"]


def orbax_saves(path: Path, array: Any) -> None:
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, {"w": array})
    checkpointer.wait_until_finished()


def saved_by_ranks(rank: int, folder: Path) -> Cells:
    """Save a DTensor cut one way, load it cut the other way."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    array, other = placed(WHOLE, 0), placed(np.zeros_like(WHOLE), 1)

    def ours() -> bool:
        xckpt.save(folder / "xckpt", {"w": array})
        return is_whole(xckpt.load(folder / "xckpt", {"w": other})["w"])

    def torchs() -> bool:
        dcp.save({"w": array}, checkpoint_id=folder / "dcp")
        dcp.load({"w": other}, checkpoint_id=folder / "dcp")
        return is_whole(other)

    return [
        cell(ours),
        cell(torchs),
        cell(lambda: orbax_saves(folder / f"orbax-{rank}", array), "not supported for tensor sub"),
        cell(lambda: save_file({"w": array}, folder / f"{rank}.st"), "invalid python storage"),
    ]


def dtensor(folder: Path, ranks: Ranks) -> Cells:
    first, second = ranks.run(saved_by_ranks, folder)
    assert first == second
    return first


def jax_array(folder: Path, ranks: Ranks) -> Cells:
    """Save an array sharded one way, load it sharded the other way."""
    import torch.distributed.checkpoint as dcp
    from safetensors.flax import load_file, save_file

    array, like = sharded(WHOLE, "x", "y"), sharded(np.zeros_like(WHOLE), "y", "x")

    def ours() -> bool:
        xckpt.save(folder / "xckpt", {"w": array})
        return is_as(xckpt.load(folder / "xckpt", {"w": like})["w"], like)

    def torchs() -> bool:
        state = {"w": like}
        dcp.save({"w": array}, checkpoint_id=folder / "dcp", no_dist=True)
        dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
        return is_as(state["w"], like)

    def orbax() -> bool:
        orbax_saves(folder / "orbax", array)
        return is_as(orbax_loads(folder / "orbax", like), like)

    def files() -> bool:
        save_file({"w": array}, folder / "safetensors")
        return is_as(load_file(folder / "safetensors")["w"], like)

    return [cell(ours), cell(torchs), cell(orbax), cell(files)]


def loaded_by_ranks(rank: int, folder: Path) -> Cells:
    """Load as a DTensor what JAX has saved; the last one loads it whole."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    like = placed(np.zeros_like(WHOLE), 1)

    def torchs() -> bool:
        dcp.load({"w": like}, checkpoint_id=folder / "dcp-jax")
        return is_whole(like)

    return [
        cell(lambda: is_whole(xckpt.load(folder / "xckpt-jax", {"w": like})["w"])),
        cell(torchs, "CheckpointException"),
        cell(lambda: orbax_loads(folder / "orbax-jax", like), "Unsupported type"),
        cell(lambda: np.array_equal(load_file(folder / "jax.st")["w"].numpy(), WHOLE)),
    ]


def saved_for_jax(rank: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    array = placed(WHOLE, 0)
    xckpt.save(folder / "xckpt-torch", {"w": array})
    dcp.save({"w": array}, checkpoint_id=folder / "dcp-torch")
    whole = array.full_tensor()
    if rank == 0:
        save_file({"w": whole}, folder / "torch.st")


def across(folder: Path, ranks: Ranks) -> Cells:
    """From JAX to torch and back."""
    import torch.distributed.checkpoint as dcp
    from safetensors.flax import load_file, save_file

    array = sharded(WHOLE, "x", "y")
    xckpt.save(folder / "xckpt-jax", {"w": array})
    dcp.save({"w": array}, checkpoint_id=folder / "dcp-jax", no_dist=True)
    orbax_saves(folder / "orbax-jax", array)
    save_file({"w": array}, folder / "jax.st")
    to_torch, other = ranks.run(loaded_by_ranks, folder)
    assert to_torch == other
    ranks.run(saved_for_jax, folder)
    like = sharded(np.zeros_like(WHOLE), "y", "x")

    def torchs() -> bool:
        state = {"w": like}
        dcp.load(state, checkpoint_id=folder / "dcp-torch", no_dist=True)
        return is_as(state["w"], like)

    to_jax = [
        cell(lambda: is_as(xckpt.load(folder / "xckpt-torch", {"w": like})["w"], like)),
        cell(torchs, "CheckpointException"),
        "no",  # Orbax saves no DTensor: `dtensor`.
        cell(lambda: np.array_equal(load_file(folder / "torch.st")["w"], WHOLE)),
    ]
    pairs = zip(to_torch, to_jax, strict=True)
    *both, files = ["yes" if pair == ("yes", "yes") else "no" for pair in pairs]
    return [*both, "whole tensors" if files == "yes" else "no"]


def irregular(folder: Path, ranks: Ranks) -> Cells:
    """Three ranks hold boxes that no grid makes; two others want other ones."""
    boxes = [Box((0, 0), (3, 5)), Box((0, 5), (3, 3)), Box((3, 0), (4, 8))]
    wanted = [Box((0, 0), (7, 3)), Box((2, 3), (5, 5))]
    source = tuple(Placed(box, (rank,)) for rank, box in enumerate(boxes))
    target = tuple(Placed(box, (rank,)) for rank, box in enumerate(wanted))
    case = Case(3, 2, (Leaf("w", Array((7, 8), "float32"), source, target),))

    def asked(library: str) -> bool:
        module = library.replace("-", "_")
        try:
            reshard(find(f"conformance.implementations.{module}"), case)
        except Refused:
            return False
        return True

    return [cell(lambda library=library: asked(library)) for library in LIBRARIES]


class Marked:
    """What a pickle makes a reader do: touch a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


def no_code(folder: Path, ranks: Ranks) -> Cells:
    """Each file of a checkpoint is a pickle, one at a time; does a load run what it says?"""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.numpy import load_file, save_file

    paths = {library: folder / library for library in LIBRARIES}
    mark = folder / "ran"
    xckpt.save(paths["xckpt"], {"w": WHOLE})
    dcp.save({"w": torch.from_numpy(WHOLE)}, checkpoint_id=paths["torch-dcp"], no_dist=True)
    orbax_saves(paths["orbax"], WHOLE)
    paths["safetensors"].mkdir()
    save_file({"w": WHOLE}, paths["safetensors"] / "file")
    target = {"w": torch.zeros(8, 8)}
    loads: Mapping[str, Callable[[Path], object]] = {
        "xckpt": xckpt.load,
        "torch-dcp": lambda path: dcp.load(target, checkpoint_id=path, no_dist=True),
        "orbax": lambda path: orbax_loads(path, WHOLE),
        "safetensors": lambda path: load_file(path / "file"),
    }

    def is_safe(library: str) -> bool:
        for file in [each for each in paths[library].rglob("*") if each.is_file()]:
            kept = file.read_bytes()
            file.write_bytes(pickle.dumps(Marked(mark)))
            with suppress(BaseException), redirect_stderr(StringIO()):
                loads[library](paths[library])
            file.write_bytes(kept)
            if mark.exists():
                mark.unlink()
                return False
        loads[library](paths[library])
        return True

    return [cell(lambda library=library: is_safe(library)) for library in LIBRARIES]


def by_zarr(folder: Path, ranks: Ranks) -> Cells:
    """What zarr-python reads; Orbax has an option for it."""
    import orbax.checkpoint as ocp
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.numpy import save_file
    from zarr import open_array

    def reads(path: Path) -> bool:
        return np.array_equal(np.asarray(open_array(path, mode="r")[:]), WHOLE)

    xckpt.save(folder / "xckpt", {"w": WHOLE})
    dcp.save({"w": torch.from_numpy(WHOLE)}, checkpoint_id=folder / "dcp", no_dist=True)
    orbax_saves(folder / "orbax", WHOLE)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    tree = ocp.args.PyTreeSave({"w": WHOLE})
    ocp.Checkpointer(handler).save(folder / "optional", args=tree)
    save_file({"w": WHOLE}, folder / "safetensors")
    nothing = "does not exist|[Nn]o array found|not a directory|Not a directory"
    by_option = cell(lambda: reads(folder / "optional" / "w")) == "yes"
    orbax = cell(lambda: reads(folder / "orbax" / "w"), nothing)
    return [
        cell(lambda: reads(folder / "xckpt" / "w")),
        cell(lambda: reads(folder / "dcp" / "w"), nothing),
        "by option" if (orbax, by_option) == ("no", True) else orbax,
        cell(lambda: reads(folder / "safetensors"), nothing),
    ]


def shell(folder: Path, ranks: Ranks) -> Cells:
    """Which commands a library installs; those known have nothing to do with checkpoints."""
    from click.testing import CliRunner

    from xckpt.cli.commands import commands

    xckpt.save(folder / "xckpt", {"w": WHOLE})
    for command in ("ls", "info", "verify"):
        assert CliRunner().invoke(commands, [command, str(folder / "xckpt")]).exit_code == 0
    others = {"torchrun", "torchfrtrace"}
    names = ("xckpt", "torch", "orbax-checkpoint", "safetensors")
    scripts = [
        {each.name for each in distribution(name).entry_points if each.group == "console_scripts"}
        for name in names
    ]
    return ["yes" if found - others else "no" for found in scripts]


ROWS: Mapping[str, Callable[[Path, Ranks], Cells]] = {
    "dtensor": dtensor,
    "jax-array": jax_array,
    "across": across,
    "irregular": irregular,
    "no-code": no_code,
    "zarr": by_zarr,
    "shell": shell,
}
"""Name in the last column of the page's table -> the question."""
