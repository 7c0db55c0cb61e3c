"""What the system refuses at a path is named, with what to do, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import xckpt
from xckpt.convert import convert


@pytest.mark.parametrize("form", ["xckpt", "safetensors"])
def test_a_loop_of_links(tmp_path: Path, form: str) -> None:
    os.symlink("loop2", tmp_path / "loop")
    os.symlink("loop", tmp_path / "loop2")
    xckpt.save(tmp_path / "whole", {"w": np.ones(3)})
    before = sorted(os.listdir(tmp_path))
    for call in (
        partial(xckpt.copy, tmp_path / "whole"),
        partial(convert, tmp_path / "whole", format=form),
    ):
        with pytest.raises(xckpt.StorageError, match=r"loop: .*; the link leads back to itself"):
            call(tmp_path / "loop")
        assert sorted(os.listdir(tmp_path)) == before


def test_the_limit_of_a_files_size(tmp_path: Path) -> None:
    code = """
import resource, signal, sys, numpy, xckpt
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
xckpt.save(sys.argv[1], {"w": numpy.ones(1 << 15)})
"""
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "w: File too large; files may not be as large here: raise the limit" in done.stderr
    assert list(tmp_path.iterdir()) == []
