"""A process that imports or exports a large state, for a parent that watches its memory.

``python -m tests.torch.dcp.memory import DCP_FOLDER PATH`` (or ``export PATH DCP_FOLDER``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import xckpt
from benchmarks.probe import serve
from xckpt.options import LoadOptions, SaveOptions
from xckpt.torch.dcp import export_checkpoint, import_checkpoint

BUDGET = 64 << 20
"""Bytes that both may take."""


def _warm(folder: Path) -> None:
    """Pay for imports and threads before the measurement."""
    xckpt.save(folder / "a", {"w": np.ones((1024, 1024), np.float32)})
    export_checkpoint(folder / "a", folder / "b")
    import_checkpoint(folder / "b", folder / "c")


def main(work: str, source: str, target: str) -> None:
    _warm(Path(target).with_name(f"{work}-warm"))

    def run() -> None:
        if work == "import":
            import_checkpoint(source, target, options=SaveOptions(memory_bytes=BUDGET))
        else:
            export_checkpoint(source, target, options=LoadOptions(memory_bytes=BUDGET))

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
