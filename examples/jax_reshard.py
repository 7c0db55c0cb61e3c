"""The JAX phase of the demo: from 4 torch ranks' shardings to one process with 8 devices.

    python -m examples.jax_reshard FOLDER

1. Ask the checkpoint what is in it; give each tensor a sharding on a 2 x 4 mesh.
2. Load: each device gets its shard, whatever the shards were that torch saved.
3. Compare every element on every device with the record that torch made itself.
4. Save the arrays under their new shardings, for the next torch phase.

Matrices are cut in both dimensions (torch cut most of them by rows only), vectors over the four
"model" devices, with a copy on each of the two rows of the mesh, and scalars are on all devices.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xckpt
from examples import phase
from examples.phase import Check, Layout, Report
from examples.record import Record, leaves, same
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.stored_array import StoredArray


def reshard(folder: Path) -> Report:
    """Load what torch saved, compare, save again (1. to 4. above)."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    like = targets(xckpt.open(folder / phase.FROM_TORCH), mesh)
    state, load_seconds = timed(lambda: xckpt.load(folder / phase.FROM_TORCH, like))

    arrays = {name: leaf for name, leaf in leaves(state) if isinstance(leaf, jax.Array)}
    print(f"  {len(arrays)} tensors on {mesh.size} devices in {load_seconds:.2f} s", flush=True)
    check = check_equal(state, Record.read(folder / phase.RECORD_AT_SAVE), mesh)

    _, save_seconds = timed(lambda: xckpt.save(folder / phase.FROM_JAX, state))
    return Report(
        layouts={name: layout_of(array) for name, array in arrays.items()},
        seconds={"load": load_seconds, "save": save_seconds},
        checks=[check],
    )


def targets(stored: Checkpoint, mesh: Mesh) -> object:
    """The checkpoint's tree with the wanted sharding of each tensor; values stay values."""

    def target(leaf: object) -> object:
        if isinstance(leaf, StoredArray):
            sharding = NamedSharding(mesh, spec_of(leaf.shape))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return leaf

    return jax.tree.map(target, stored.tree)


def spec_of(shape: tuple[int, ...]) -> PartitionSpec:
    """How a tensor of this shape is cut: P("data", "model"), P("model") or P()."""
    axes = ("data", "model")
    return PartitionSpec(*axes[len(axes) - len(shape) :])


def check_equal(state: object, record: Record, mesh: Mesh) -> Check:
    """Is each shard on each device, and each value, exactly what was recorded?"""
    whole = {name: np.asarray(leaf) if is_array(leaf) else leaf for name, leaf in leaves(state)}
    wrong = set(record.differences(whole))
    for name, leaf in leaves(state):
        if isinstance(leaf, jax.Array) and name in record.tensors:
            wanted = NamedSharding(mesh, spec_of(leaf.shape))
            recorded = record.tensors[name]
            equal = all(
                same(np.asarray(shard.data), np.asarray(recorded[shard.index]))
                for shard in leaf.addressable_shards
            )
            if not equal or leaf.sharding != wanted:
                wrong.add(name)
    return Check(
        "JAX holds on 8 devices bit for bit what 4 torch ranks saved",
        not wrong,
        f"{len(wrong)} leaves differ: {', '.join(sorted(wrong)[:5])}" if wrong else record.size(),
    )


def is_array(leaf: object) -> bool:
    """Is the leaf an array of JAX?"""
    return isinstance(leaf, jax.Array)


def layout_of(array: jax.Array) -> Layout:
    """The array's sharding and the shape of its shards."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    axes = ", ".join("-" if axis is None else str(axis) for axis in sharding.spec)
    return Layout(
        dtype=str(array.dtype),
        shape=array.shape,
        nbytes=array.nbytes,
        sharding=f"P({axes})",
        shards=(sharding.shard_shape(array.shape),),
    )


def timed(work: Callable[[], object]) -> tuple[object, float]:
    """The result of `work`, on the devices, and its wall-clock seconds."""
    begin = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, time.perf_counter() - begin


def main() -> None:
    """Run the phase on 8 devices that share this host's CPU."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    folder = Path(sys.argv[1])
    reshard(folder).write(folder / "reshard.json")


if __name__ == "__main__":
    main()
