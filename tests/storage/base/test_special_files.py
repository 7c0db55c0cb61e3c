"""A base one of whose files is a pipe: what it holds is written anew, and nobody waits for it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import xckpt
from xckpt.options import SaveOptions

pytestmark = pytest.mark.timeout(60)

STATE = {
    "a": np.arange(3000, dtype=np.float32).reshape(30, 100),
    "w": np.ones((64, 64), np.float32),
    "n": 3,
}
LAYOUTS = {
    "plain": SaveOptions(chunk_bytes=4096, pack_bytes=0),
    "packs": SaveOptions(chunk_bytes=4096, pack_bytes=1 << 20),
    "shards": SaveOptions(chunk_bytes=1024, shard_bytes=1 << 20, pack_bytes=0),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_file_of_a_base_is_waited_for(layout: str, verify: bool, tmp_path: Path) -> None:
    base, options = tmp_path / "base", LAYOUTS[layout]
    xckpt.save(base, STATE, options=options)
    for number, file in enumerate(sorted(each for each in base.rglob("*") if each.is_file())):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        new = tmp_path / f"new{number}"
        again = replace(options, verify_base=verify)
        xckpt.save(new, STATE, base=base, options=again)
        assert xckpt.open(new).verify() == []
        assert np.array_equal(xckpt.load(new)["a"], STATE["a"])
        file.unlink()
        file.write_bytes(content)
