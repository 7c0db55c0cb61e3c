"""Which of two readers a load from a URL takes."""

from __future__ import annotations

import numpy as np
import pytest

import xckpt
from xckpt.core.storage import StorageReader
from xckpt.formats.either import EitherReader
from xckpt.storage import ZarrStorageReader


def never() -> StorageReader:
    raise AssertionError("nothing else was to be looked for")


def test_ours_is_enough() -> None:
    xckpt.save("memory://either-ours", {"w": np.arange(3)})
    reader = EitherReader(ZarrStorageReader("memory://either-ours"), never)
    state = {"w": np.zeros(3, int)}
    xckpt.load_state_dict(state, reader)
    assert state["w"].tolist() == [0, 1, 2]


def test_each_rank_takes_what_the_coordinator_found() -> None:
    """Whatever it would have found itself; here both are checkpoints of ours."""
    xckpt.save("memory://either-other", {"w": np.arange(3)})
    found: list[StorageReader] = []

    def find() -> StorageReader:
        found.append(ZarrStorageReader("memory://either-other"))
        return found[-1]

    coordinator, rank = (EitherReader(ZarrStorageReader("memory://none"), find) for _ in range(2))
    manifest = coordinator.read_metadata()
    for reader in (coordinator, rank):
        assert list(reader.set_up_storage_reader(manifest, 2).state_dict_metadata) == ["w"]
        reader.close()
    assert len(found) == 2
    blind = EitherReader(ZarrStorageReader("memory://none"), lambda: None)
    with pytest.raises(xckpt.StorageError, match="does not find what the coordinator found"):
        blind.set_up_storage_reader(manifest, 2)
    with pytest.raises(xckpt.NotACheckpointError, match="memory://none"):
        blind.read_metadata()
