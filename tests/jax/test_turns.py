"""Threads of a process that save in one JAX job take turns."""

from __future__ import annotations

from pathlib import Path

from tests.support.jax_jobs import run
from tests.support.turns import check_saved, save_in_threads


def saved(folder: str) -> list[str]:
    return save_in_threads(Path(folder))


def test_threads_of_one_job(tmp_path: Path) -> None:
    """Processes on which they come in another order refuse that call; the job goes on."""
    assert run(saved, 2, str(tmp_path)) == [[]] * 2
    check_saved(tmp_path)
