"""A record of a training state that xckpt has no part in: what the demo judges xckpt by.

1. torch itself gathers each tensor (`full_tensor()`), and `safetensors` writes the whole tensors.
2. A tensor's name is its key path, joined with "/" here, not by xckpt.
3. The process that loaded the state compares it with the record, bit by bit.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy


@dataclass(frozen=True, slots=True)
class Record:
    """A whole state on one host."""

    tensors: dict[str, np.ndarray]
    values: dict[str, object]
    """What is not a tensor: None, bools, numbers and strings."""

    def add(self, name: str, leaf: object) -> None:
        """Take up one whole leaf."""
        if isinstance(leaf, np.ndarray):
            self.tensors[name] = np.asarray(leaf, order="C")  # safetensors ignores strides
        else:
            self.values[name] = leaf

    def differences(self, state: Mapping[str, object]) -> list[str]:
        """The names whose leaf is missing, unexpected or in any bit not as recorded."""
        recorded = self.tensors | self.values
        return [
            name
            for name in sorted(state.keys() | recorded.keys())
            if name not in state or name not in recorded or not same(state[name], recorded[name])
        ]

    def size(self) -> str:
        """For people: how much the record holds."""
        elements = sum(tensor.size for tensor in self.tensors.values())
        return f"{elements:,} elements in {len(self.tensors)} tensors, {len(self.values)} values"

    def write(self, folder: Path) -> None:
        """Write `tensors.safetensors` and `values.json` into a new folder."""
        folder.mkdir(parents=True)
        safetensors.numpy.save_file(self.tensors, folder / "tensors.safetensors")
        (folder / "values.json").write_text(json.dumps(self.values))

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read what `write` wrote."""
        return cls(
            tensors=safetensors.numpy.load_file(folder / "tensors.safetensors"),
            values=json.loads((folder / "values.json").read_text()),
        )


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested dicts, lists and tuples, each with its key path.

    >>> list(leaves({"optim": {"betas": (0.9, 0.999)}, "step": 3}))
    [('optim/betas/0', 0.9), ('optim/betas/1', 0.999), ('step', 3)]
    """
    if isinstance(tree, Mapping):
        children = list(tree.items())
    elif isinstance(tree, list | tuple):
        children = list(enumerate(tree))
    else:
        yield path, tree
        return
    for key, child in children:
        yield from leaves(child, f"{path}/{key}" if path else str(key))


def same(one: object, other: object) -> bool:
    """Equal type and value, and for arrays equal shape, dtype and bits.

    >>> same(np.array([0.0, np.nan]), np.array([0.0, np.nan]))
    True
    >>> same(np.array([0.0]), np.array([-0.0]))
    False
    """
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other
