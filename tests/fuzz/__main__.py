"""Coverage-guided fuzzing with a saved corpus: ``make fuzz``.

    python -m tests.fuzz                                # every target, a million inputs in all
    python -m tests.fuzz --target manifest --runs 1000  # one target
    python -m tests.fuzz --save                         # and keep what reached anything new

1. libFuzzer runs each target (`tests.fuzz.targets`) in processes of 100,000 inputs each, on a
   corpus that begins with the saved one. A target gets a share of the inputs that suits its speed.
2. The first finding ends the run: its input is printed in base64, with the error, as a line for the
   corpus. An input that ends the process, hangs it or takes too much of it is a finding too.
3. ``--save`` minimises the corpus (libFuzzer's ``-merge``) and writes it back. Without atheris,
   ``tests/fuzz/test_fuzz.py`` replays what is saved.
"""

from __future__ import annotations

import argparse
import base64
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.corpus import pack, unpack
from tests.fuzz.targets import SHARES

__all__ = ["main"]

AT_ONCE = 100_000
"""Inputs of one process."""
HANGS = 60
"""Seconds after which an input hangs."""
LONGEST = 1024
"""Bytes of an input: a row of choices, or a document that is put for another."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=SHARES, action="append", help="all by default")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--work", type=Path, help="where the growing corpus is kept between runs")
    parser.add_argument("--save", action="store_true", help="minimise and save the corpus")
    chosen = parser.parse_args(arguments)
    targets = chosen.target or list(SHARES)
    whole = sum(SHARES[target] for target in targets)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        work = chosen.work or Path(temporary)
        total = 0
        for target in targets:
            done = _fuzz(target, work, round(chosen.runs * SHARES[target] / whole))
            if done is None:
                return 1
            total += done
            if chosen.save:
                print(f"{target}: {_save(target, work / target)} inputs saved", flush=True)
    print(f"{total:,} inputs, no finding")
    return 0


def _fuzz(target: str, work: Path, runs: int) -> int | None:
    """Run a target so many times; how often it ran, or None if there was a finding."""
    corpus, findings = work / target, work / f"{target}-findings"
    unpack(target, corpus)
    findings.mkdir(exist_ok=True)
    begun, done = time.monotonic(), 0
    reached = ""
    while done < runs:
        command = [
            *(sys.executable, "-m", "tests.fuzz.engine", target, str(corpus)),
            f"-runs={min(AT_ONCE, runs - done)}",
            f"-timeout={HANGS}",
            f"-max_len={LONGEST}",
            "-len_control=10",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
            f"-artifact_prefix={findings}/",
        ]
        child = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        ran = re.search(r"stat::number_of_executed_units:\s*(\d+)", child.stderr)
        done += int(ran[1]) if ran else 0
        if child.returncode or not ran:
            _tell(target, child, findings)
            return None
        reached = next(iter(re.findall(r"DONE +(cov: \d+ ft: \d+ corp: \d+)", child.stderr)), "")
        print(f"  {target}: {done:,} inputs, {reached}", flush=True)
    seconds = time.monotonic() - begun
    print(f"{target}: {done:,} inputs in {seconds:.0f} s, {reached}", flush=True)
    return done


def _save(target: str, folder: Path) -> int:
    """Save as few inputs of a folder as reach all that they all reach; how many those are."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as few:
        command = [sys.executable, "-m", "tests.fuzz.engine", target, "-merge=1", few, str(folder)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        contents = [file.read_bytes() for file in Path(few).iterdir()]
    assert contents, "nothing was kept"
    pack(target, contents)
    return len(contents)


def _tell(target: str, child: subprocess.CompletedProcess[str], findings: Path) -> None:
    """What was found."""
    print(f"{target}: a finding; the process ended with {child.returncode}")
    print(child.stderr[-6000:])
    for file in findings.iterdir():
        print(f"{file.name}: {base64.b64encode(file.read_bytes()).decode()}")


if __name__ == "__main__":
    sys.exit(main())
