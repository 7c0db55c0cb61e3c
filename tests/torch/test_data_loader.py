"""Workers of torch's DataLoader that read from an open checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import xckpt

ROWS = 12


class Rows(Dataset[Any]):
    """Reads a row of a checkpoint at a time."""

    def __init__(self, path: Path, *, opened: bool) -> None:
        self.path = path
        self.stored: Any = xckpt.open(path)["rows"] if opened else None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        stored: Any = xckpt.open(self.path)["rows"] if self.stored is None else self.stored
        return torch.from_numpy(np.asarray(stored[row]))


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # from JAX, if imported
def test_workers_forked_after_a_read_say_how_to_start_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long torch waits for each worker of a loader that has failed, whatever the dataset is.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    xckpt.save(tmp_path / "a", {"rows": np.arange(24.0).reshape(ROWS, 2)})
    rows = DataLoader(
        Rows(tmp_path / "a", opened=True), num_workers=2, multiprocessing_context="fork"
    )
    batches: Any = iter(rows)
    with pytest.raises(Exception, match="multiprocessing_context='spawn'") as caught:
        next(batches)
    batches._shutdown_workers()
    assert "Aborted" not in str(caught.value)


@pytest.mark.thorough
def test_spawned_workers_read(tmp_path: Path) -> None:
    state = {"rows": np.arange(24.0).reshape(ROWS, 2)}
    xckpt.save(tmp_path / "a", state)
    dataset = Rows(tmp_path / "a", opened=False)
    found = list(DataLoader(dataset, num_workers=2, multiprocessing_context="spawn"))
    assert (torch.cat(found).numpy() == state["rows"]).all()
