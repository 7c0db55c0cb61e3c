"""Ctrl-C while the command is still importing ends it without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
import xckpt
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.parametrize(
    "name, module, code, said",
    [
        ("xckpt", "numpy", -signal.SIGINT, ""),
        ("xckpt", "none", 0, ""),
        ("train", "numpy", -signal.SIGINT, "KeyboardInterrupt"),
        ("train", "none", 0, ""),
    ],
    ids=["command", "command-undisturbed", "library", "library-undisturbed"],
)
def test_an_interrupt_of_the_import(
    tmp_path: Path, name: str, module: str, code: int, said: str
) -> None:
    script = tmp_path / name
    script.write_text(SCRIPT.format(module=module))
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ran.returncode == code
    assert ran.stdout.strip() == ("True" if code == 0 else "")
    assert said in ran.stderr and bool(said) is bool(ran.stderr)
