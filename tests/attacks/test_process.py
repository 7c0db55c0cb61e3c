"""Processes in which little works: limits, signals, clocks, locales, exits, closed files.

Each attack runs in a process of its own (`victim.attempt`), saves over an old checkpoint, loads,
and says what it saw; then the checkpoint is looked at from here: it is whole, old or new.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import locale
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.attacks.victim import Outcome, attempt
from xckpt.convert import convert

pytestmark = pytest.mark.thorough


def state(step: int, leaves: int = 12) -> dict[str, Any]:
    return {**{f"w{n}": np.full((256, 256), step, np.int32) for n in range(leaves)}, "step": step}


OPTIONS = xckpt.SaveOptions(chunk_bytes=1 << 16)


def save_and_load(path: str) -> list[Any]:
    """An overwrite, a load, a verify, an asynchronous save: the steps that were seen."""
    xckpt.save(path, state(2), overwrite=True, options=OPTIONS)
    first = xckpt.load(path)["step"]
    assert xckpt.open(path).verify() == []
    xckpt.save_async(path, state(3), overwrite=True, options=OPTIONS).result()
    into = state(0)
    xckpt.load_into(path, into)
    return [first, into["step"], int(into["w5"][7, 7])]


SEEN = [2, 3, 3]


def few_files(path: str) -> list[Any]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (28, 28))
    return save_and_load(path)


def closed_streams(path: str) -> list[Any]:
    for number in (0, 1, 2):
        os.close(number)
    sys.stdout = sys.stderr = sys.stdin = None  # type: ignore[assignment]
    return save_and_load(path)


def full_stdout(path: str) -> list[Any]:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    return save_and_load(path)


def alarms(path: str) -> list[Any]:
    """A signal each millisecond: system calls are interrupted."""
    rung: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    seen = save_and_load(path)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(rung) > 3
    return seen


def children_die(path: str) -> list[Any]:
    """SIGCHLD with a handler, as a data loader's."""
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    children = [subprocess.Popen(["sleep", f"0.{n:02}"]) for n in range(10)]
    seen = save_and_load(path)
    for child in children:
        child.wait()
    return seen


def other_locale(path: str) -> list[Any]:
    for name in ("tr_TR.UTF-8", "C"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, name)
    os.environ.update(TZ="Pacific/Kiritimati", LC_ALL="C", LANG="C")
    time.tzset()
    return save_and_load(path)


def masked(path: str) -> list[Any]:
    """The umask changes during an asynchronous save."""
    saving = xckpt.save_async(path, state(9), overwrite=True, options=OPTIONS)
    os.umask(0o277)
    saving.result()
    os.umask(0o022)
    return save_and_load(path)


def elsewhere(path: str) -> list[Any]:
    """The working folder changes during an asynchronous save to a relative path."""
    os.chdir(os.path.dirname(path))
    name = os.path.basename(path)
    saving = xckpt.save_async(name, state(9), overwrite=True, options=OPTIONS)
    os.chdir("/")
    saving.result()
    assert xckpt.load(path)["step"] == 9 and not os.path.exists(f"/{name}")
    return save_and_load(path)


def nowhere(path: str) -> list[Any]:
    """The working folder is deleted."""
    gone = f"{path}-gone"
    os.mkdir(gone)
    os.chdir(gone)
    os.rmdir(gone)
    for call in (
        lambda: xckpt.save("relative", state(1)),
        lambda: xckpt.load("relative"),
        lambda: convert("relative", path),
        lambda: convert(path, "relative"),
    ):
        try:
            call()
        except (xckpt.XckptError, ValueError):
            continue
        raise AssertionError("no error")
    return save_and_load(path)


def no_homes(path: str) -> list[Any]:
    for name in ("HOME", "TMPDIR", "USER", "PATH"):
        os.environ[name] = "/nonexistent"
    return save_and_load(path)


def shallow(path: str) -> list[Any]:
    """Little recursion is left."""
    sys.setrecursionlimit(140)
    return save_and_load(path)


def collected(path: str) -> list[Any]:
    """A future that is not kept, in a cycle, while the collector runs all the time."""
    gc.set_threshold(1, 1, 1)
    ring: list[Any] = [xckpt.save_async(path, state(8), overwrite=True, options=OPTIONS)]
    ring.append(ring)
    dropped = weakref.ref(ring[0])
    del ring
    gc.collect()
    assert dropped() is None or dropped() is not None
    return save_and_load(path)


def no_collector(path: str) -> list[Any]:
    gc.disable()
    return save_and_load(path)


def impatient(path: str) -> list[Any]:
    """Waits for a save that end too early change nothing."""
    saving = xckpt.save_async(path, state(8), overwrite=True, options=OPTIONS)
    for _ in range(20):
        with contextlib.suppress(TimeoutError):
            saving.result(timeout=0)
    saving.result()
    return save_and_load(path)


def in_a_loop(path: str) -> list[Any]:
    """Within asyncio; and a task that waits is cancelled."""

    async def run() -> list[Any]:
        saving = xckpt.save_async(path, state(8), overwrite=True, options=OPTIONS)
        task = asyncio.create_task(asyncio.to_thread(saving.result))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert saving.exception() is None
        return save_and_load(path)

    return asyncio.run(run())


def in_a_generator(path: str) -> list[Any]:
    """A generator that saves is closed in the middle."""

    def steps() -> Generator[int, None, None]:
        try:
            yield 1
        finally:
            xckpt.save(path, state(8), overwrite=True)

    running = steps()
    next(running)
    running.close()
    return save_and_load(path)


def in_threads(path: str) -> list[Any]:
    """Saves by threads, daemons among them, to paths of their own."""
    threads = [
        threading.Thread(target=xckpt.save, args=(f"{path}-{n}", state(n)), daemon=n % 2 == 0)
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [xckpt.load(f"{path}-{n}")["step"] for n in range(8)] == list(range(8))
    return save_and_load(path)


def traced(path: str) -> list[Any]:
    """A profiler and a debugger look on."""
    seen: list[int] = []
    threading.setprofile(lambda frame, event, argument: None)
    sys.setprofile(lambda frame, event, argument: seen.append(1) if len(seen) < 9 else None)
    try:
        return save_and_load(path)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def decimal_digits(path: str) -> list[Any]:
    sys.set_int_max_str_digits(640)
    xckpt.save(path, {"n": 1 << 100_000}, overwrite=True)
    assert xckpt.load(path)["n"] == 1 << 100_000
    return save_and_load(path)


def strict_floats(path: str) -> list[Any]:
    np.seterr(all="raise")
    xckpt.save(path, {"w": np.array([np.nan, np.inf, 5e-324])}, overwrite=True)
    xckpt.load(path)
    return save_and_load(path)


def no_leaks(path: str) -> list[Any]:
    """50 rounds, refused ones among them: files, threads and memory stay as they are."""
    seen: list[list[int]] = []
    for number in range(50):
        save_and_load(path)
        for call in (lambda: xckpt.save(path, {"w": {1}}), lambda: xckpt.load(f"{path}-none")):
            with contextlib.suppress(xckpt.XckptError):
                call()
        if number in (19, 49):
            fields = Path("/proc/self/status").read_text()
            memory = int(fields.partition("VmRSS:")[2].split()[0])
            threads = int(fields.partition("Threads:")[2].split()[0])
            seen.append([len(os.listdir("/proc/self/fd")), threads, memory])
    # One thread or file a round would be 30. A busy machine has TensorStore start some of its own.
    assert seen[1][0] <= seen[0][0] + 1 and seen[1][1] < seen[0][1] + 15, seen
    assert seen[1][2] < seen[0][2] + (24 << 10), seen
    return save_and_load(path)


def interrupted_once_staged(path: str) -> list[Any]:
    """SIGINT after save_async has returned: the save goes on."""
    saving = xckpt.save_async(path, state(8), overwrite=True, options=OPTIONS)
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:
        pass
    saving.result()
    assert xckpt.load(path)["step"] == 8
    return save_and_load(path)


def own_handlers(path: str) -> list[Any]:
    """Handlers of SIGINT and SIGTERM are called once, and the call goes on."""
    heard: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: heard.append(number))
    sent: list[int] = []

    def progress(seen: object) -> None:
        if len(sent) < 2:
            sent.append((signal.SIGINT, signal.SIGTERM)[len(sent)])
            os.kill(os.getpid(), sent[-1])

    options = xckpt.SaveOptions(chunk_bytes=1 << 16, progress=progress)
    xckpt.save(path, state(5), overwrite=True, options=options)
    seen = save_and_load(path)
    assert sorted(heard) == [2, 15]
    return seen


QUIET: list[Callable[[str], list[Any]]] = [
    few_files,
    closed_streams,
    full_stdout,
    alarms,
    children_die,
    other_locale,
    masked,
    elsewhere,
    nowhere,
    no_homes,
    shallow,
    collected,
    no_collector,
    impatient,
    in_a_loop,
    in_a_generator,
    in_threads,
    traced,
    decimal_digits,
    strict_floats,
    interrupted_once_staged,
    own_handlers,
]


def check(done: Outcome, path: Path) -> None:
    assert done.kind == "done" and done.code == 0, (done.kind, done.code, done.text)
    assert xckpt.open(path).verify() == []


@pytest.mark.parametrize("attack", QUIET, ids=lambda attack: attack.__name__)
def test_it_works_all_the_same(tmp_path: Path, attack: Callable[[str], list[Any]]) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1))
    done = attempt(attack, str(path))
    check(done, path)
    assert done.value == SEEN
    assert not [name for name in os.listdir(tmp_path) if ".saving-" in name]


@pytest.mark.timeout(400)
def test_no_leaks(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1))
    done = attempt(no_leaks, str(path), seconds=300)
    check(done, path)
    assert os.listdir(tmp_path) == ["ckpt"]


def no_space_for_files(path: str) -> list[Any]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))
    return save_and_load(path)


def no_files(path: str) -> list[Any]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))
    return save_and_load(path)


def confined_to(path: str, mebibytes: int) -> list[Any]:
    """So much address space above what is there."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return save_and_load(path)


@pytest.mark.parametrize("mebibytes", [100, 300, 600, 1500])
def test_little_address_space(tmp_path: Path, mebibytes: int) -> None:
    """TensorStore would end a process that can start no thread: it is not started."""
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1))
    done = attempt(confined_to, str(path), mebibytes)
    if mebibytes < 1000:
        assert done.kind == "StorageError" and "ulimit -v" in done.text, (done.kind, done.text)
    assert done.kind in ("done", "MemoryError") or done.xckpt, (done.kind, done.text)
    assert xckpt.open(path).verify() == []
    xckpt.save(tmp_path / "another", state(2))
    assert sorted(os.listdir(tmp_path)) == ["another", "ckpt"]


@pytest.mark.parametrize(
    "attack", [no_space_for_files, no_files], ids=lambda attack: attack.__name__
)
def test_it_works_or_is_refused_by_name(tmp_path: Path, attack: Callable[[str], list[Any]]) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1))
    done = attempt(attack, str(path))
    assert done.kind == "done" or done.xckpt, (done.kind, done.code, done.text)
    assert xckpt.open(path).verify() == []
    assert os.listdir(tmp_path) == ["ckpt"]


def endless(path: str) -> None:
    """Saves until a signal comes."""
    for number in range(10_000):
        xckpt.save(path, state(number), overwrite=True, options=OPTIONS)


ENDS = {"SIGTERM": -15, "SIGHUP": -1, "SIGQUIT": -3, "SIGKILL": -9, "SIGINT": 1, "SIGUSR1": -10}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("moment", [0.3, 0.8])
def test_a_signal_ends_it(tmp_path: Path, name: str, moment: float) -> None:
    """Old or new; the next save leaves nothing of it, on whatever path below the folder."""
    from tests.support.fork_server import context

    path = tmp_path / "ckpt"
    xckpt.save(path, state(1))
    process = context().Process(target=endless, args=(str(path),))
    process.start()
    time.sleep(moment)
    os.kill(process.pid or 0, getattr(signal, name))
    process.join(20)
    assert process.exitcode == ENDS[name]
    assert xckpt.open(path).verify() == []
    xckpt.save(tmp_path / "another", state(2))
    assert sorted(os.listdir(tmp_path)) == ["another", "ckpt"]


def leaves_by(how: str, path: str) -> None:
    """Ends while an asynchronous save goes on."""
    xckpt.save_async(path, state(2, 40), overwrite=True, options=OPTIONS)
    if how == "handler":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    elif how == "os._exit":
        os._exit(7)
    elif how == "exec":
        os.execv("/bin/sh", ["sh", "-c", "exit 7"])
    raise SystemExit(7)


@pytest.mark.parametrize("how", ["handler", "os._exit", "exec", "return"])
def test_a_process_ends_while_it_saves(tmp_path: Path, how: str) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1))
    code = f"from tests.attacks.test_process import leaves_by; leaves_by({how!r}, {str(path)!r})"
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ended.returncode == 7
    opened = xckpt.open(path)
    assert opened.verify() == []
    if how in ("handler", "return"):
        assert opened["step"] == 2
    xckpt.save(tmp_path / "another", state(3))
    assert sorted(os.listdir(tmp_path)) == ["another", "ckpt"]


def source_shrinks(path: str) -> list[Any]:
    """The file behind an array is cut off, by another process, before it is saved."""
    source = f"{path}.source"
    np.zeros(1 << 20, np.uint8).tofile(source)
    array = np.memmap(source, np.uint8, mode="r")
    os.truncate(source, 100)
    xckpt.save(path, {"w": array}, overwrite=True)
    return []


def test_the_callers_own_mapped_file_shrinks(tmp_path: Path) -> None:
    """The one death that is left: the caller's memory is gone. The old checkpoint stays."""
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1))
    done = attempt(source_shrinks, str(path))
    assert (done.kind, done.code) == ("died", -signal.SIGBUS) or done.xckpt
    assert xckpt.open(path).verify() == [] and xckpt.load(path)["step"] == 1


ASCII = """
import os, sys
import numpy as np
import xckpt
path = os.path.join(sys.argv[1], "caf\\u00e9")
xckpt.save(path, {"w\\u00fc\\u202e": np.ones(3)})
assert list(xckpt.open(path)) == ["w\\u00fc\\u202e"] and xckpt.open(path).verify() == []
print(xckpt.open(path))
try:
    xckpt.load(path, {"other\\u00fc": np.ones(3)})
except xckpt.TreeMismatchError as error:
    print(error)
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_streams_of_another_encoding(tmp_path: Path, encoding: str) -> None:
    """What prints may be replaced; the files have their names."""
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONIOENCODING": f"{encoding}:backslashreplace",
    }
    command = [sys.executable, "-c", ASCII, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr.decode("latin-1")[-2000:]
    assert len(os.listdir(tmp_path)) == 1
