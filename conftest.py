"""Set-up for every test and doctest: environment, spawn, seeds, profiles, folder of doctests.

It stands at the root because the doctests of `xckpt/` need it as much as `tests/` does.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.support.examples import QUICK

# Doctests of the hooks need the trainers (`make test-integrations`).
collect_ignore = [] if find_spec("lightning") else ["xckpt/integrations"]

pytest_plugins = ["tests.support.time_limit"]

DEVICES_FLAG = "--xla_force_host_platform_device_count=8"

QUICK_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA compiles each function of a test, which runs once or twice."""


def set_environment() -> None:
    """Fix what frameworks read once, at import or first use; an explicit setting wins."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICES_FLAG} {QUICK_COMPILES}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Several processes share the cores: the workers, and the ranks that each one starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


MEMORY = Path("/dev/shm")
ROOM = 2 << 30
"""Bytes; the default tier has no more than some hundred MiB of files at a time."""


def keep_files_in_memory() -> None:
    """Have temporary folders in memory, where there is room: thousands of saves sync every file.

    Child processes and workers inherit it. The thorough tier runs the same tests on a disk.
    """
    with contextlib.suppress(OSError):
        if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
            os.environ.setdefault("TMPDIR", str(MEMORY))
            tempfile.tempdir = None


set_environment()
# A shell has its background jobs ignore SIGINT, and processes that they start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# TensorStore aborts in a forked child once its parent has used it.
multiprocessing.set_start_method("spawn", force=True)

# A fixed number of examples and no limit in seconds: a slow machine changes nothing. What was once
# found is tried first in every later run; `.hypothesis` may be kept and shared.
COMMON = {
    "deadline": None,
    "database": DirectoryBasedExampleDatabase(Path(__file__).parent / ".hypothesis" / "examples"),
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("quick", max_examples=QUICK, **COMMON)
settings.register_profile("thorough", max_examples=10 * QUICK, **COMMON)
settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw one hypothesis seed for the run, which xdist hands to its workers; place the files."""
    if config.getoption("hypothesis_profile") is None:
        keep_files_in_memory()
    if config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(secrets.randbelow(2**32))


def pytest_collection() -> None:
    """Look for no garbage among the modules that tests import: that takes seconds."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests only in files that show a prompt: most files of tests have none."""
    found = yield
    if b">>> " in file_path.read_bytes():
        return found
    return [each for each in found if type(each) is pytest.Module]


def pytest_collection_finish() -> None:
    """Have Hypothesis read the constants of all modules, which takes seconds, before any test."""

    @settings(database=None, phases=[Phase.generate])
    @given(st.tuples(*[st.integers()] * 10))
    def some_property(_: tuple[int, ...]) -> None:
        pass

    some_property()
    # Modules and tests stay to the end: no look for garbage goes through them.
    gc.freeze()
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"hypothesis seed: repeat this run with --hypothesis-seed={config.option.hypothesis_seed}"
    )


@pytest.fixture(autouse=True)
def _doctests_write_to_a_fresh_folder(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        # Not an argument: each of the other tests would have a folder made and removed.
        folder: Path = request.getfixturevalue("tmp_path")
        monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        monkeypatch.chdir(folder)
