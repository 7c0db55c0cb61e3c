"""Calls in processes that lack open files, threads or memory: `python -m tests.attacks.scarce`.

The process imports xckpt and uses nothing. For each call and each amount it forks a child that has
so much and no more, so that what is imported late is imported there. It prints, as JSON, what came
of each call: "done", the class and text of an error of xckpt, or anything else.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import xckpt
from xckpt.cli import main
from xckpt.policies import EverySteps, Latest

public: Any = xckpt
"""Whose modules are imported when they are first named."""
SECONDS = 60
"""A call that takes longer hangs."""


def state(step: int) -> dict[str, Any]:
    return {**{f"w{n}": np.full((64, 64), step, np.int32) for n in range(6)}, "step": step}


def manager(root: str) -> xckpt.CheckpointManager:
    return xckpt.CheckpointManager(f"{root}/run", save=[EverySteps(1)], keep=[Latest(1)])


def managed_save(root: str) -> None:
    with manager(root) as run:
        run.save(2, state(2))


def managed_restore(root: str) -> None:
    with manager(root) as run:
        assert run.restore()["step"] == 1


def loads(root: str) -> None:
    loaded = xckpt.load(f"{root}/old")
    assert loaded["step"] == 1 and np.all(loaded["w5"] == 1)


def loads_into(root: str) -> None:
    into = state(0)
    xckpt.load_into(f"{root}/old", into)
    assert into["step"] == 1 and np.all(into["w5"] == 1)


def save(root: str) -> None:
    xckpt.save(f"{root}/new", state(2))


def converts(root: str) -> None:
    """To another library's format, and from it."""
    public.convert.convert(f"{root}/old", f"{root}/new.safetensors")
    public.convert.convert(f"{root}/new.safetensors", f"{root}/new")


def converts_on_the_command_line(root: str) -> None:
    sys.argv = ["xckpt", "convert", f"{root}/old", f"{root}/new.safetensors", "--overwrite"]
    ended: object = 0
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(errors):
        try:
            main()
        except SystemExit as end:
            ended = end.code
    said = errors.getvalue()
    if ended == 2 and "Traceback" not in said:
        raise xckpt.XckptError(said)
    assert not ended, f"{ended}: {said}"


CALLS: dict[str, Callable[[str], object]] = {
    "save": save,
    "overwrite": lambda root: xckpt.save(f"{root}/old", state(2), overwrite=True),
    "save_async": lambda root: xckpt.save_async(f"{root}/new", state(2)).result(),
    "load": loads,
    "load_into": loads_into,
    "open": lambda root: xckpt.open(f"{root}/old").array("w1")[3:5],
    "verify": lambda root: xckpt.open(f"{root}/old").verify(),
    "delete": lambda root: xckpt.delete(f"{root}/other"),
    "copy": lambda root: xckpt.copy(f"{root}/old", f"{root}/new"),
    "gc": lambda root: xckpt.gc(root),
    "convert": converts,
    "xckpt convert": converts_on_the_command_line,
    "diff": lambda root: xckpt.diff(f"{root}/old", f"{root}/other", values=True),
    "manager.save": managed_save,
    "manager.restore": managed_restore,
}


def few_files(amount: int) -> None:
    """Leave room for so many open files below the limit."""
    used = len(os.listdir("/proc/self/fd"))  # with the one that lists them
    limit = max(used, max(map(int, os.listdir("/proc/self/fd")))) + amount
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    opened: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.dup(2))
    for number in opened[:amount]:
        os.close(number)


def few_threads(amount: int) -> None:
    """Let Python start so many threads."""
    start, left = threading.Thread.start, iter(range(amount))

    def limited(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = limited  # type: ignore[method-assign]


def little_memory(amount: int) -> None:
    """Let the address space grow by so many mebibytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (amount << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


KINDS = {"files": few_files, "threads": few_threads, "memory": little_memory}


def outcomes(kind: str, names: Iterable[str], amounts: Sequence[int]) -> Iterator[list[Any]]:
    """What came of each call with each amount: `[call, amount, class, text]`.

    A child that saves or loads imports all anew, so one prepares for all, and one checks for each
    call.
    """
    with tempfile.TemporaryDirectory(prefix="scarce-") as folder:
        assert forked(lambda: prepare(f"{folder}/prepared")) == ["done", ""]
        for name in names:
            roots = [f"{folder}/{name}-{amount}" for amount in amounts]
            for amount, root in zip(amounts, roots, strict=True):
                shutil.copytree(f"{folder}/prepared", root)
                outcome = forked(lambda name=name, root=root: CALLS[name](root), kind, amount)
                yield [name, amount, *outcome]
            afterwards = begun(lambda roots=roots: [made(partial(check, root)) for root in roots])()
            if afterwards != [["done", ""]] * len(roots):
                yield [name, list(amounts), "afterwards", str(afterwards)]
            for root in roots:
                shutil.rmtree(root)


def prepare(root: str) -> None:
    for name in ("old", "other"):
        xckpt.save(f"{root}/{name}", state(1))
    with manager(root) as run:
        run.save(1, state(1))


def check(root: str) -> None:
    """What was there is there, whole; a save removes what is left of another."""
    for path in (f"{root}/old", f"{root}/new"):
        if path.endswith("old") or xckpt.exists(path):
            assert xckpt.open(path).verify() == []
    xckpt.save(f"{root}/last", {"step": 3})
    for left in xckpt.gc(root, dry_run=True):
        # A conversion keeps what it has written, for the next call; a run's next save removes this.
        kept = "saving-conversion" in left.path and os.path.exists(left.path)
        assert kept or (left.path.startswith(f"{root}/run/") and left.owner == "dead"), left
    xckpt.gc(root)
    stays = set(os.listdir(root)) - {"old", "other", "run", "new", "last", "new.safetensors"}
    assert not stays, stays
    assert manager(root).restore()["step"] in (1, 2)
    gone = not xckpt.exists(f"{root}/other")
    assert not (gone and os.path.exists(f"{root}/other")), os.listdir(f"{root}/other")


def forked(call: Callable[[], object], kind: str = "", amount: int = 0) -> list[Any]:
    """Make a call in a child of this process."""
    return begun(lambda: made(call, kind, amount))()


def begun(
    call: Callable[[], list[Any]], last: Callable[[], object] = lambda: None
) -> Callable[[], list[Any]]:
    """Begin a call in a child of this process; what is returned waits for its answer.

    The child does ``last`` before it ends.
    """
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.write(there, json.dumps(call()).encode()[:60_000])
        os.close(there)
        last()
        os._exit(0)
    os.close(there)

    def wait() -> list[Any]:
        with open(here, "rb") as pipe:
            said = pipe.read()
        status = os.waitpid(child, 0)[1]
        return json.loads(said) if said else ["died", str(os.waitstatus_to_exitcode(status))]

    return wait


def made(call: Callable[[], object], kind: str = "", amount: int = 0) -> list[str]:
    try:
        if kind:
            KINDS[kind](amount)
        call()
    except xckpt.XckptError as error:
        notes = getattr(error, "__notes__", [])
        return ["xckpt", "\n".join([f"{type(error).__name__}: {error}", *notes])]
    except BaseException as error:
        places, trace = [], error.__traceback__
        while trace is not None:
            places.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
            trace = trace.tb_next
        return [type(error).__name__, f"{error} at {' < '.join(reversed(places))}"]
    return ["done", ""]


if __name__ == "__main__":
    kind, names, amounts = sys.argv[1:]
    chosen = names.split(",") if names else list(CALLS)
    for each in outcomes(kind, chosen, [int(each) for each in amounts.split(",")]):
        print(json.dumps(each), flush=True)
