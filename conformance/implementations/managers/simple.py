"""The smallest manager that keeps every promise, on files; it shows how one is written.

A step is a folder ``step-N`` with a file a leaf and ``done.json``, which has their digests and is
written last. Every move is a method, so that `faulty` can get one wrong at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from conformance.implementations.durable import put, sync
from conformance.implementations.threads import ThreadGroup, results
from conformance.runs.manager import Keep, Restored, Run, State

__all__ = ["MANAGER", "DeletedError", "Simple", "SimpleRun"]

Result = TypeVar("Result")

DONE = "done.json"


class DeletedError(Exception):
    """The step was deleted."""


class SimpleRun:
    """A manager at work; with a group, one rank's, of which the first does everything."""

    def __init__(self, root: Path, keep: Keep, group: ThreadGroup | None = None) -> None:
        self.root, self.keep, self.group = root, keep, group
        self.failure: Exception | None = None
        self.saving: threading.Thread | None = None

    # What a manager is asked.

    def save(self, step: int, state: State, loss: float) -> bool:
        self.wait()
        if self.is_first():
            copied = {name: np.array(leaf) for name, leaf in state.items()}
            self.saving = threading.Thread(target=self.carry_out, args=(step, copied, loss))
            self.saving.start()
        return True

    def wait(self) -> None:
        if self.saving is not None:
            self.saving.join()
        self.saving = None
        failure, self.failure = self.failure, None
        failure = self.shared(failure)
        if failure is not None:
            raise failure

    def latest(self) -> int | None:
        return self.shared(max(self.steps(), default=None))

    def restore(self) -> Restored | None:
        self.wait()
        return self.shared(self.restored())

    def close(self) -> None:
        if self.saving is not None:
            self.saving.join()

    # What it does.

    def is_first(self) -> bool:
        return self.group is None or self.group.rank == 0

    def shared(self, mine: Any) -> Any:
        """What the first rank has, on every rank."""
        return mine if self.group is None else self.group.table.meet(self.group.rank, mine)[0]

    def steps(self) -> list[int]:
        """The committed steps, as they are listed now."""
        return sorted(number(path.parent) for path in self.root.glob(f"step-*/{DONE}"))

    def carry_out(self, step: int, state: State, loss: float) -> None:
        try:
            self.write(step, state, loss)
            self.delete_others(step)
        except Exception as error:
            self.failure = error

    def write(self, step: int, state: State, loss: float) -> None:
        folder = self.root / f"step-{step}"
        if folder.exists():
            self.delete(step)
        folder.mkdir(parents=True)
        for name, leaf in state.items():
            put(folder / name, leaf.tobytes())
        document = {"loss": loss, "leaves": leaves_of(state)}
        put(folder / f"{DONE}.new", json.dumps(document).encode())
        sync(folder)
        sync(self.root)
        sync(self.root.parent)
        (folder / f"{DONE}.new").rename(folder / DONE)
        sync(folder)

    def delete_others(self, last: int) -> None:
        for step in self.steps():
            if step != last and step not in self.kept():
                self.delete(step)

    def kept(self) -> set[int]:
        """What is kept: good steps are asked for, so that no damaged one takes their place."""
        good = [step for step in self.steps() if self.is_good(step)]
        kept = set(good[-self.keep.latest :] if self.keep.latest else ())
        if self.keep.best:
            kept |= set(sorted(good, key=lambda step: (self.loss(step), -step))[: self.keep.best])
        return kept | set(good[-1:])

    def is_good(self, step: int) -> bool:
        try:
            begin(self.root, step)()
        except Exception:
            return False
        return True

    def loss(self, step: int) -> float:
        return json.loads((self.root / f"step-{step}" / DONE).read_bytes())["loss"]

    def delete(self, step: int) -> None:
        """What says that it is whole goes first."""
        folder = self.root / f"step-{step}"
        (folder / DONE).unlink(missing_ok=True)
        shutil.rmtree(folder)

    def restored(self) -> Restored | None:
        skipped: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                return Restored(step, begin(self.root, step)(), skipped)
            except Exception as error:
                skipped[step] = str(error)
        if skipped:
            raise ValueError(f"no step is good: {skipped}")
        return None


def begin(root: Path, step: int) -> Callable[[], State]:
    """Begin to read a step."""
    folder = root / f"step-{step}"
    try:
        leaves = json.loads((folder / DONE).read_bytes())["leaves"]
    except FileNotFoundError as error:
        raise DeletedError(f"{folder} does not exist") from error

    def rest() -> State:
        state: dict[str, Any] = {}
        for name, (dtype, shape, digest) in leaves.items():
            try:
                content = (folder / name).read_bytes()
            except FileNotFoundError as error:
                if (folder / DONE).exists():
                    raise ValueError(f"{folder}: {name} is missing") from error
                raise DeletedError(f"{folder} was deleted while it was read") from error
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError(f"{folder}: {name} was altered")
            state[name] = np.frombuffer(content, dtype).reshape(shape)
        return state

    return rest


def leaves_of(state: State) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Of each leaf its dtype, shape and digest."""
    return {
        name: (leaf.dtype.str, leaf.shape, hashlib.sha256(leaf.tobytes()).hexdigest())
        for name, leaf in state.items()
    }


def number(folder: Path) -> int:
    """The step of a folder."""
    return int(folder.name.removeprefix("step-"))


class Simple:
    """Files and threads."""

    fewest = 1
    name = "simple"
    run: type[SimpleRun] = SimpleRun

    def open(self, root: Path, keep: Keep) -> Run:
        return self.run(root, keep)

    def begin(self, root: Path, step: int) -> Callable[[], State]:
        return begin(root, step)

    def on_ranks(
        self, size: int, root: Path, keep: Keep, function: Callable[[int, Run], Result]
    ) -> list[Result]:
        return results(size, lambda group: function(group.rank, self.run(root, keep, group)))


MANAGER = Simple()
