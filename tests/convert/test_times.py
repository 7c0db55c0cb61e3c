"""The time of a conversion is the caller's, also where it waits for its source."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import xckpt
from tests.support.faulty_bucket import FaultyBucket, Silence
from tests.support.servers import environment, faulty_s3, s3
from tests.support.time_limit import ALLOWANCE
from xckpt.convert import convert
from xckpt.torch.dcp import export_checkpoint, import_checkpoint

__all__ = ["environment", "faulty_s3", "s3"]

pytestmark = pytest.mark.timeout(60)

TIMES: Final[dict[str, Any]] = {"timeout": 1.0, "retries": 0}
GRACE = 1.0 * ALLOWANCE
"""Seconds beyond the timeout."""


@pytest.mark.parametrize("format", [None, "xckpt", "safetensors", "orbax", "dcp", "torch"])
def test_a_bucket_that_never_answers(faulty_s3: FaultyBucket, format: str | None, tmp_path: Path):
    faulty_s3.fault = lambda request: Silence()
    source = f"{faulty_s3.url}/silent"
    began = time.monotonic()
    options = xckpt.SaveOptions(**TIMES)
    with pytest.raises(xckpt.StorageError, match="within the 1 s that the call may take"):
        convert(source, tmp_path / "new", source_format=format, options=options)
    assert time.monotonic() - began < TIMES["timeout"] + GRACE
    assert not list(tmp_path.iterdir())


def test_imports_and_exports(faulty_s3: FaultyBucket, tmp_path: Path):
    faulty_s3.fault = lambda request: Silence()
    source = f"{faulty_s3.url}/silent"
    began = time.monotonic()
    with pytest.raises(xckpt.StorageError, match="within the 1 s"):
        import_checkpoint(source, tmp_path / "new", options=xckpt.SaveOptions(**TIMES))
    with pytest.raises(xckpt.StorageError, match="within the 1 s"):
        export_checkpoint(source, tmp_path / "new", options=xckpt.LoadOptions(**TIMES))
    assert time.monotonic() - began < 2 * (TIMES["timeout"] + GRACE)


def test_the_time_is_of_the_whole_conversion(faulty_s3: FaultyBucket, tmp_path: Path):
    source = f"{faulty_s3.url}/slow"
    faulty_s3.fault = lambda request: None
    xckpt.save(source, {f"w{n}": np.ones((64, 64)) for n in range(8)})
    faulty_s3.fault = lambda request: Silence(0.4)
    began = time.monotonic()
    options = xckpt.SaveOptions(timeout=TIMES["timeout"], concurrency=1)
    with pytest.raises(xckpt.StorageError, match="within the 1 s"):
        convert(source, tmp_path / "new", options=options)
    assert time.monotonic() - began < TIMES["timeout"] + GRACE
