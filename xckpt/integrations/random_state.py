"""The random generators of a torch training: Python's, NumPy's, torch's on the CPU and on CUDA."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from xckpt.api.load import load, load_into
from xckpt.core.part.per_rank import PerRank


class RandomState:
    """Stands for the generators of this process in a state that is saved or loaded.

    Example:
        >>> import random
        >>> generators = RandomState()
        >>> before = generators.state_dict()
        >>> once = random.random()
        >>> generators.load_state_dict(before)
        >>> random.random() == once
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Where the generators are, as arrays and numbers."""
        import torch

        version, numbers, normal = random.getstate()
        name, keys, position, has_normal, cached = np.random.get_state(legacy=True)
        return {
            "python": [version, np.array(numbers, np.uint32), normal],
            "numpy": [name, keys, position, has_normal, cached],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the generators there."""
        import torch

        version, numbers, normal = state["python"]
        random.setstate((version, tuple(map(int, numbers)), normal))
        np.random.set_state(tuple(state["numpy"]))
        torch.set_rng_state(state["torch"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])


def random_states(processes: int) -> dict[str, object]:
    """The part of a state that holds the generators of each process, and how many there are."""
    return {"processes": processes, "random": PerRank(RandomState())}


def load_random_states(path: str, processes: int, **others: object) -> None:
    """Put the generators of each process where they were; of another number, they stay.

    Every process calls it.

    Args:
        path: of a checkpoint that holds `random_states`.
        processes: how many there are now.
        others: name -> what else each process has its own of.
    """
    if load(path, at="processes") == processes:
        load_into(path, {"random": PerRank(RandomState()), **others}, unexpected="ignore")
