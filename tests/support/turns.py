"""Threads of a rank that save at once, each to a path of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

import xckpt
from xckpt.engine.ranks.group import Group, TorchProcesses

THREADS = ("a", "b", "c")


def save_in_threads(folder: Path, group: Group | TorchProcesses | None = None) -> list[str]:
    """What went wrong in the threads of a rank, which may come in another order on each; and after
    them, a save of all."""
    wrong: list[str] = []

    def save_some(name: str) -> None:
        for step in range(4):
            try:
                xckpt.save(folder / name, {"w": np.full(64, step)}, group=group, overwrite=True)
            except xckpt.PlanError:
                pass  # another rank saves what another thread has
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=save_some, args=(name,)) for name in THREADS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    xckpt.save(folder / "after", {"w": np.zeros(3)}, group=group)
    return wrong


def check_saved(folder: Path) -> None:
    """What was committed is whole."""
    assert xckpt.exists(folder / "after")
    for path in folder.iterdir():
        assert xckpt.open(path).verify() == []
