"""The first calls of a process, made by several threads at once: each imports what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import xckpt

AT_ONCE = """
import sys, threading
import xckpt

sys.setswitchinterval(1e-5)
folder = sys.argv[1]
calls = {
    "gc": lambda: xckpt.gc(folder),
    "load": lambda: xckpt.load(f"{folder}/saved"),
    "save": lambda: xckpt.save(f"{folder}/new", {"w": 1}),
    "steps": lambda: xckpt.CheckpointManager(f"{folder}/run").steps(),
    "verify": lambda: xckpt.open(f"{folder}/saved").verify(),
}
together = threading.Barrier(len(sys.argv) - 2)

def call(name):
    together.wait()
    calls[name]()
    print(name)

for name in sys.argv[2:]:
    threading.Thread(target=call, args=[name]).start()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "calls", [("gc", "save"), ("load", "save"), ("gc", "load", "save", "steps", "verify")]
)
def test_threads_that_make_the_first_calls_of_a_process(
    tmp_path: Path, calls: tuple[str, ...]
) -> None:
    """A save beside a gc ended by an ImportError or a KeyError, most times."""
    xckpt.save(tmp_path / "saved", {"w": 1})
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path), *calls]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (sorted(done.stdout.split()), done.stderr) == (list(calls), "")


def test_the_package_that_loads_tensorstore_imports_none_of_its_modules() -> None:
    """Else threads that import different ones of them at once wait for each other."""
    code = "import sys, xckpt.storage; print([m for m in sys.modules if 'xckpt.storage.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
