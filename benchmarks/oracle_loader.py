"""A Hugging Face folder into a Flax model's arrays, beside transformers' own loader.

1. A BERT-base of random weights is saved as transformers saves it: once as safetensors, once as a
   torch file.
2. Three ways lead to new JAX arrays on one device: `xckpt.load` through the family's mapping;
   transformers' bare conversion of the file; and `FlaxBertModel.from_pretrained`, which makes
   random parameters before it converts. A bar is held against each of the latter two.
3. In the first round, which is not timed, the arrays of all three are compared bit for bit; it also
   pays for imports and for what XLA compiles. The other rounds take the ways by turns.
4. A load ends when one element of each page of every array has been read.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import speed, state

FILES = {"safetensors": "model.safetensors", "torch.save": "pytorch_model.bin"}
"""The kinds of file that hold torch's weights, and their names in a folder."""
XCKPT = "xckpt.load"
CONVERSION = "transformers, conversion alone"
PRETRAINED = "transformers, from_pretrained"
ORACLES = (CONVERSION, PRETRAINED)
LOADERS = (XCKPT, *ORACLES)
SMALL: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}
"""What makes BERT small, beside its four heads."""

Loader = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Loading:
    """Seconds of each loader, by turns, for one kind of file."""

    file: str
    size: int
    """Bytes of the arrays."""
    seconds: dict[str, list[float]]

    def median(self, loader: str) -> float:
        """The usual seconds of one loader."""
        return statistics.median(self.seconds[loader])

    def over(self, loader: str) -> float:
        """Speed of xckpt, over that of another loader."""
        return self.median(loader) / self.median(XCKPT)


def run(parent: Path, rounds: int, quick: bool, tell: Callable[[str], None]) -> list[Loading]:
    """Time the loaders for each kind of file, in a separate process."""
    found: list[Loading] = []
    for kind in list(FILES)[:1] if quick else FILES:
        tell(f"BERT from {kind} into Flax arrays")
        with tempfile.TemporaryDirectory(prefix="xckpt-bench-", dir=parent) as folder:
            command = [sys.executable, "-m", "benchmarks.oracle_loader", folder, kind, str(rounds)]
            done = subprocess.run(
                [*command, *(["quick"] if quick else [])],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            )
        found.append(Loading(**json.loads(done.stdout.splitlines()[-1])))
    return found


def config_of(quick: bool) -> Any:
    """BERT-base, or a small one."""
    from transformers import BertConfig

    return BertConfig(**SMALL, num_attention_heads=4) if quick else BertConfig()


def write_model(folder: Path, kind: str, config: Any) -> None:
    """Save a torch model of noise as transformers does."""
    import torch
    from transformers import BertModel

    torch.manual_seed(0)
    model = BertModel(config)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # biases begin as 0, norms as 1: no two are to be alike
            parameter.normal_()
    model.save_pretrained(folder, safe_serialization=kind == "safetensors")


def loaders(folder: Path, kind: str, config: Any) -> dict[str, Loader]:
    """The ways from the folder to arrays by "/"-joined names."""
    import jax
    from flax.traverse_util import flatten_dict, unflatten_dict
    from jax.sharding import SingleDeviceSharding
    from transformers import FlaxBertModel
    from transformers.modeling_flax_pytorch_utils import load_pytorch_checkpoint_in_flax_state_dict

    import xckpt
    from xckpt.convert import family

    mapping = family("bert", config)
    path = str(folder / FILES[kind])
    on_device = SingleDeviceSharding(jax.devices()[0])
    flax_class: Any = FlaxBertModel
    bare = flax_class(config, _do_init=False)
    shapes: dict[str, Any] = flatten_dict(bare.params_shape_tree)
    like = unflatten_dict(
        {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_device)
            for name, leaf in shapes.items()
        }
    )
    # What the conversion asks of a model; a whole one has no parameters unless it makes them.
    model = SimpleNamespace(params=like, base_model_prefix=bare.base_model_prefix)
    trees: dict[str, Callable[[], Any]] = {
        XCKPT: lambda: xckpt.load(folder, like, mapping=mapping),
        CONVERSION: lambda: load_pytorch_checkpoint_in_flax_state_dict(model, path, False),
        PRETRAINED: lambda: flax_class.from_pretrained(folder, from_pt=True).params,
    }

    def flat(tree: Callable[[], Any]) -> Mapping[str, Any]:
        return flatten_dict(jax.block_until_ready(tree()), sep="/")

    return {name: partial(flat, tree) for name, tree in trees.items()}


def verify(loaders: Mapping[str, Loader]) -> int:
    """Load by every way and compare every bit; return the bytes of the arrays.

    Raises:
        RuntimeError: a way gives other arrays than the first.
    """
    found = {
        name: {leaf: np.asarray(array) for leaf, array in load().items()}
        for name, load in loaders.items()
    }
    expected = found[XCKPT]
    for name, arrays in found.items():
        differing = state.differing(arrays, expected)
        if differing:
            raise RuntimeError(f"{name} and {XCKPT} differ: {', '.join(differing[:5])}")
    return sum(array.nbytes for array in expected.values())


def measure(folder: Path, kind: str, config: Any, rounds: int) -> dict[str, Any]:
    """The fields of a `Loading`."""
    write_model(folder, kind, config)
    ways = loaders(folder, kind, config)
    size = verify(ways)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in speed.order(LOADERS, number, rounds):
            seconds[name].append(speed.seconds_of(partial(_load_and_touch, ways[name])))
    return {"file": kind, "size": size, "seconds": seconds}


def _load_and_touch(load: Loader) -> None:
    state.touch({name: np.asarray(array) for name, array in load().items()})


def main(arguments: Sequence[str]) -> None:
    """The process in which one kind of file is loaded."""
    folder, kind, rounds = Path(arguments[0]), arguments[1], int(arguments[2])
    found = measure(folder, kind, config_of("quick" in arguments), rounds)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
