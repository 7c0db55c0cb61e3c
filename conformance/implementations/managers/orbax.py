"""Orbax's `CheckpointManager`, with its defaults but for what is kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from conformance.runs.manager import Keep, Restored, Run, State

import orbax.checkpoint as ocp  # isort: skip
from orbax.checkpoint import checkpoint_managers as policies  # isort: skip

__all__ = ["MANAGER", "Orbax"]


class _Nothing(policies.PreservationPolicy):
    """Keeps nothing."""

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> list[bool]:
        return [False] * len(checkpoints)


class OrbaxRun:
    """A manager at work."""

    def __init__(self, root: Path, keep: Keep) -> None:
        kept: list[Any] = []
        if keep.latest:
            kept.append(policies.LatestN(keep.latest))
        if keep.best:
            best = policies.BestN(
                get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=keep.best
            )
            kept.append(best)
        policy = policies.AnyPreservationPolicy(kept) if kept else _Nothing()
        options = ocp.CheckpointManagerOptions(preservation_policy=policy)
        self.manager = ocp.CheckpointManager(root, options=options)

    def save(self, step: int, state: State, loss: float) -> bool:
        arguments = ocp.args.StandardSave(dict(state))
        return self.manager.save(step, args=arguments, metrics={"loss": loss})

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def restore(self) -> Restored | None:
        step = self.manager.latest_step()
        if step is None:
            return None
        state = self.manager.restore(step, args=ocp.args.StandardRestore())
        return Restored(step, _arrays(state), {})

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.manager.close()


class Orbax:
    """What a training loop in JAX has by default."""

    fewest = 1
    name = f"Orbax {version('orbax-checkpoint')}"

    def __init__(self) -> None:
        # A line for each checkpoint that a crash has cut off would bury the table.
        logging.getLogger("absl").setLevel(logging.CRITICAL)

    def open(self, root: Path, keep: Keep) -> Run:
        return OrbaxRun(root, keep)

    def begin(self, root: Path, step: int) -> Callable[[], State]:
        path = root / str(step) / "default"
        reader = ocp.StandardCheckpointer()
        found = reader.metadata(path).item_metadata
        assert found is not None
        like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in found.tree.items()}
        return lambda: _arrays(reader.restore(path, like))


def _arrays(state: Any) -> State:
    return {name: np.asarray(leaf) for name, leaf in state.items()}


MANAGER = Orbax()
