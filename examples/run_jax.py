"""The run of `examples.demo_run` goes on in JAX: one process, eight devices.

    python -m examples.run_jax ROOT

1. The manager restores the newest step, each tensor cut over a 2 x 4 mesh.
2. Every element is compared with what NumPy reads of the same step.
3. The next step is saved from the devices, and shares with the step before what did not change.
"""

import sys

import jax
import numpy as np

import xckpt
from examples.jax_reshard import targets
from examples.record import leaves, same


def go_on(root: str) -> bool:
    """Restore, compare, save; whether all was equal."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with xckpt.CheckpointManager(root) as checkpoints:
        newest = checkpoints.latest()
        assert newest is not None
        path = checkpoints.path(newest.number)
        state = checkpoints.restore(targets(xckpt.open(path), mesh))
        stored = dict(leaves(xckpt.load(path)))
        wrong = [
            name
            for name, leaf in leaves(state)
            if isinstance(leaf, jax.Array) and not same(np.asarray(leaf), stored[name])
        ]
        arrays = sum(isinstance(leaf, jax.Array) for _, leaf in leaves(state))
        print(f"  JAX: step {newest.number}, {arrays} tensors, {len(wrong)} differ", flush=True)
        checkpoints.save(checkpoints.next_step, state, force=True)
    return not wrong


def main() -> int:
    """Go on over the root that the command line names; the exit code."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    return 0 if go_on(sys.argv[1]) else 1


if __name__ == "__main__":
    sys.exit(main())
