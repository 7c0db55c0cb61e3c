"""What every contender offers: one way to save, and one or more ways to load.

1. A contender works on the state in one ``form``: NumPy arrays, torch tensors or JAX arrays.
2. ``save(directory, state)`` returns when the contender calls the checkpoint saved.  What it
   leaves to the page cache is flushed, and timed, apart from it.
3. A ``Load`` is ``fresh`` where it returns new arrays; otherwise it fills the state it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from benchmarks import state

Form: TypeAlias = Literal["numpy", "torch", "jax"]

# The arrays of one framework or another: a contender knows which, by its form.
State: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """One way to load a checkpoint."""

    name: str
    """What the tables call it."""
    fresh: bool
    """Whether it returns new arrays instead of filling those it is given."""
    run: Callable[[Path, State], State]
    """Loads from a directory, like (fresh) or into (not fresh) a state; returns what it loaded."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One library, in one configuration."""

    name: str
    """What the tables call it."""
    form: Form
    """The arrays it saves and loads."""
    save: Callable[[Path, State], None]
    """Saves a state to a directory that exists and is empty."""
    loads: tuple[Load, ...]
    """The ways to load it, the first being the contender's usual one."""
    release: Callable[[], None] = lambda: None
    """Frees what the contender keeps between calls."""

    def load(self, name: str) -> Load:
        """The way to load that has this name."""
        return next(load for load in self.loads if load.name == name)


def in_form(arrays: state.Arrays, form: Form) -> State:
    """Return the arrays in a framework's form; torch shares their memory, JAX copies."""
    if form == "torch":
        return state.as_torch(arrays)
    if form == "jax":
        return state.as_jax(arrays)
    return arrays


def as_arrays(loaded: State) -> dict[str, np.ndarray]:
    """Return NumPy views of a loaded state; for JAX, wait until the data is there."""
    return {name: np.asarray(leaf) for name, leaf in loaded.items()}
