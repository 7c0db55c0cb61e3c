"""safetensors: one file; a load either maps it or copies it into tensors that exist."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contender import Contender, Load, State

FILE = "model.safetensors"


def _save(directory: Path, state: State) -> None:
    from safetensors.torch import save_file

    save_file(dict(state), directory / FILE)


def _load_into(directory: Path, target: State) -> State:
    from safetensors import safe_open

    with safe_open(directory / FILE, framework="pt") as file:
        for name, tensor in target.items():
            tensor.copy_(file.get_tensor(name))
    return target


def _load_new(directory: Path, like: State) -> State:
    from safetensors.torch import load_file

    return load_file(directory / FILE)


SAFETENSORS = Contender(
    "safetensors",
    "torch",
    _save,
    (Load("into memory", False, _load_into), Load("new arrays", True, _load_new)),
)
