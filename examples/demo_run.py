"""A training run that is killed twice, damaged, and goes on elsewhere.

    python -m examples.demo_run [--keep FOLDER]

MiniLM learns through a LoRA adapter, on torch ranks with FSDP (`run_torch`). Its manager saves
every other step and keeps the newest three.

1. 2 ranks train to the end; nothing happens to them.
2. 2 ranks train in another folder, and get a SIGKILL while they do.
3. They are started again, and one of them gets a SIGTERM: both save the same step and stop.
4. A byte of the newest checkpoint is changed. 2 ranks go on to the end, from the one before it.
5. From the same files 3 ranks go on to the end, and after them JAX on 8 devices (`run_jax`).

The last checkpoint of 4. must equal that of 1. bit for bit; that of 5., where sums are made in
another order, within a tolerance. The exit code is 0 if so.
"""

import argparse
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import numpy as np
from rich.console import Console

import xckpt
from examples.phase import Check
from examples.record import leaves, same
from examples.tables import print_verdict

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300
"""Seconds after which a process is given up."""

KILLED_AFTER, ENDED_AFTER = 5, 8
"""The steps after which the signals are sent."""

TOLERANCE = 1e-4
"""Largest difference of two weights of the adapter; a step of AdamW moves one by up to 1e-3."""


FRAMEWORK = {"OMP_NUM_THREADS": "1", "USE_FLAX": "0"}
"""What torch and transformers are to see: one thread, and no JAX, which has a phase of its own."""


@cache
def server() -> ForkServerContext:
    """Where ranks are forked from: torch and transformers are imported once, not by each."""
    os.environ.update(FRAMEWORK)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["examples.run_torch"])
    return context


def be_rank(said: Connection, place: dict[str, str], root: str) -> None:
    """What a rank's process does; what it says goes into a pipe."""
    os.dup2(said.fileno(), sys.stdout.fileno())
    os.environ.update(place)
    from examples import run_torch  # the server has it; this module needs no torch

    run_torch.be_rank(root)


@dataclass(frozen=True, slots=True)
class Rank:
    """A process that trains, and what it says."""

    process: BaseProcess
    lines: TextIO


@contextmanager
def ranks(root: Path, count: int) -> Iterator[list[Rank]]:
    """Processes that train; at the end those that still live are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started: list[Rank] = []
    with ExitStack() as stack:
        for rank in range(count):
            heard, said = server().Pipe(duplex=False)
            process = server().Process(
                target=be_rank, args=(said, place | {"RANK": str(rank)}, str(root))
            )
            process.start()
            stack.callback(process.kill)
            said.close()
            lines = stack.enter_context(open(os.dup(heard.fileno()), encoding="utf-8"))
            heard.close()
            started.append(Rank(process, lines))
        yield started


def watch(console: Console, rank: Rank, step: int | None = None) -> None:
    """Show what a rank says, until it has done a step, or to its end."""
    for line in rank.lines:
        console.print(line.rstrip(), highlight=False)
        if step is not None and line.startswith(f"  step {step}:"):
            return


def train(console: Console, root: Path, count: int, *, kill: int = 0, end: int = 0) -> None:
    """Train on some ranks; kill all after a step, or ask the last one to end after a step.

    Raises:
        subprocess.SubprocessError: a rank failed or took too long.
    """
    with ranks(root, count) as started:
        watch(console, started[0], kill or end or None)
        for rank in started if kill else started[-1:] if end else ():
            assert rank.process.pid is not None
            os.kill(rank.process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        watch(console, started[0])
        for number, rank in enumerate(started):
            rank.process.join(TIMEOUT)
            if rank.process.exitcode != (-signal.SIGKILL if kill else 0):
                code = rank.process.exitcode
                raise subprocess.SubprocessError(f"rank {number} of {count} ended with {code}")


def damage_newest(root: Path) -> str:
    """Change a byte of the newest step, in a pack or chunk that no other step shares.

    Returns:
        What was done.
    """
    newest = max(root.glob("step-*"))
    data = [*newest.glob("xckpt.packs/*"), *newest.glob("**/c/**/*")]
    own = [path for path in data if path.is_file() and path.stat().st_nlink == 1]
    path = max(own, key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"a bit of {path.relative_to(root)} is flipped"


def last_step(root: Path) -> dict[str, object]:
    """The leaves of the newest step, read by NumPy."""
    return dict(leaves(xckpt.load(max(root.glob("step-*")))))


def differing(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """The names of leaves that are not equal bit for bit."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if not same(np.asarray(one.get(name)), np.asarray(other.get(name)))
    )


def furthest(one: dict[str, object], other: dict[str, object]) -> float:
    """The largest difference of two weights."""
    return max(
        float(np.abs(np.asarray(leaf) - np.asarray(other[name])).max())
        for name, leaf in one.items()
        if name.startswith("model/")
    )


def show(console: Console, title: str, root: Path) -> None:
    """What `xckpt ls` says of a root: what is kept by which rule, and what is shared."""
    listed = [sys.executable, "-m", "xckpt", "ls", str(root)]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [path.stat() for path in root.rglob("*") if path.is_file()]
    own = {file.st_ino: file.st_size for file in files}
    mib = 1 << 20
    console.print(f"[bold]{title}[/]\n{done.stdout.rstrip()}", highlight=False, soft_wrap=True)
    console.print(
        f"  {sum(file.st_size for file in files) / mib:.1f} MiB in all steps, "
        f"{sum(own.values()) / mib:.1f} MiB on disk: the frozen model is there once for each "
        "way of cutting it",
        highlight=False,
    )


def demo(console: Console, folder: Path) -> bool:
    """All of it; whether every check held."""
    straight, run, elsewhere = (folder / name for name in ("straight", "run", "elsewhere"))
    console.rule("[bold]1. 2 ranks, without interruption", align="left")
    train(console, straight, 2)
    console.rule(f"[bold]2. 2 ranks, SIGKILL after step {KILLED_AFTER}", align="left")
    train(console, run, 2, kill=KILLED_AFTER)
    console.rule(f"[bold]3. 2 ranks, SIGTERM to rank 1 after step {ENDED_AFTER}", align="left")
    train(console, run, 2, end=ENDED_AFTER)
    console.print(f"  {damage_newest(run)}", highlight=False)
    # With its hard links: what steps share stays shared.
    subprocess.run(["cp", "-a", str(run), str(elsewhere)], check=True)
    console.rule("[bold]4. 2 ranks go on to the end", align="left")
    train(console, run, 2)
    console.rule("[bold]5. 3 ranks go on to the end, then JAX", align="left")
    train(console, elsewhere, 3)
    three = last_step(elsewhere)
    jax = subprocess.run(
        [sys.executable, "-m", "examples.run_jax", str(elsewhere)], cwd=ROOT, timeout=TIMEOUT
    )
    console.rule("[bold]Results", align="left")
    show(console, "2 ranks throughout", run)
    show(console, "2 ranks, 3 ranks, JAX", elsewhere)
    whole, resumed = last_step(straight), last_step(run)
    wrong, far = differing(whole, resumed), furthest(whole, three)
    checks = [
        Check(
            "killed twice and damaged, 2 ranks end bit for bit where nothing had happened",
            not wrong,
            f"{len(wrong)} of {len(whole)} leaves differ",
        ),
        Check(
            f"3 ranks end within {TOLERANCE:g} of it",
            far <= TOLERANCE,
            f"the largest difference is {far:.1e}",
        ),
        Check("JAX holds what 3 ranks saved, bit for bit", jax.returncode == 0, "on 8 devices"),
    ]
    return print_verdict(console, checks)


def main() -> int:
    """Parse the command line, run the demo; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the checkpoints here")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="xckpt-run-") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            passed = demo(console, folder)
        except subprocess.SubprocessError as error:
            console.print(f"[bold red]FAIL[/]  {error}", soft_wrap=True)
            return 1
    verdict = "[bold green]PASS[/]" if passed else "[bold red]FAIL[/]"
    console.print(f"{verdict}  {time.perf_counter() - begin:.0f} s in all")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
