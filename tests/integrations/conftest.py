"""Two processes that the tests share; the trainers warn of much, xckpt of nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import xckpt
from tests.support.ranks import Ranks

# Other jobs may fill this machine's memory: for that Ray would kill workers of the tests.
os.environ |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}

PLACES = [Path(__file__).parent, Path(__file__).parents[2] / "xckpt" / "integrations"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent in PLACES:
            item.add_marker(pytest.mark.filterwarnings("error:::xckpt"))
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def torchrun(rank: int) -> None:
    """Set what torchrun would set for this one of two ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
    # The compiler's pool of processes would outlive the rank, and keep its pipe open.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def own_bytes(checkpoint: Path) -> int:
    """Bytes of the files of a checkpoint that no other one shares."""
    found = [file.stat() for file in checkpoint.rglob("*") if file.is_file()]
    return sum(each.st_size for each in found if each.st_nlink == 1)


DELETION = """
import os, sys
from xckpt.storage.commit.remove import hide_checkpoint
from xckpt.storage.location import Location
hide_checkpoint(Location.parse(sys.argv[1]))
os.kill(os.getpid(), 9)
"""


def kill_a_deletion(checkpoint: Path) -> None:
    """Delete a checkpoint by a process that is killed once it is hidden."""
    subprocess.run([sys.executable, "-c", DELETION, str(checkpoint)], check=False)


def damage(checkpoint: Path) -> None:
    """Flip a bit of its longest chunk, or of the pack that has it; others that share it stay."""
    files = [file for file in checkpoint.rglob("*") if file.is_file() and file.suffix == ""]
    longest = max(files, key=lambda file: file.stat().st_size)
    contents = bytearray(longest.read_bytes())
    contents[len(contents) // 2] ^= 1
    longest.unlink()
    longest.write_bytes(contents)
    assert {problem.kind for problem in xckpt.open(checkpoint).verify()} == {"chunk"}
