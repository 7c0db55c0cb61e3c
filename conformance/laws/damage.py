"""Damage to a checkpoint's files, whatever they are: an error, or exactly what was saved.

Each law saves a case, damages one file (or two), and loads everything. What the file is for is not
known, so a load may succeed, if it gives exactly what was saved. If it fails, verification must
find something too. Where nothing can be damaged so, the case is `Unfit`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from conformance import judge
from conformance.cases import Case, checksum
from conformance.implementation import Implementation, Refused
from conformance.laws.properties import check_loaded, everything, fresh_folder

__all__ = ["LAWS", "run"]

Damage = Callable[[list[Path], np.random.Generator], str]
"""Damages some of the files; says how, or nothing if that was not possible."""


def missing_file(implementation: Implementation, case: Case) -> None:
    """A file is gone."""
    _judge(implementation, case, _remove)


def flipped_bit(implementation: Implementation, case: Case) -> None:
    """One bit of a file is another one."""
    _judge(implementation, case, _flip)


def short_file(implementation: Implementation, case: Case) -> None:
    """A file ends too early."""
    _judge(implementation, case, _shorten)


def swapped_files(implementation: Implementation, case: Case) -> None:
    """Two files of one size have changed places."""
    _judge(implementation, case, _swap)


LAWS = {
    law.__name__.replace("_", "-"): law
    for law in (missing_file, flipped_bit, short_file, swapped_files)
}


def _judge(implementation: Implementation, case: Case, damage: Damage) -> None:
    random = np.random.default_rng(checksum(case))
    with fresh_folder() as folder:
        path = folder / "ckpt"
        implementation.save(path, case.held())
        found = path.rglob("*") if path.is_dir() else folder.rglob("*")
        # By their sizes first: some have random names, and a case is to be damaged alike each time.
        files = sorted(
            (file for file in found if file.is_file()), key=lambda file: (file.stat().st_size, file)
        )
        how = damage(files, random)
        if not how:
            raise judge.Unfit
        wanted = everything({leaf.name: leaf.array for leaf in case.leaves})
        try:
            loaded = implementation.load(path, wanted)
        except Refused:
            raise
        except Exception:
            _check_found(implementation, path, how)
            return
        try:
            check_loaded(case.whole(), wanted, loaded)
        except AssertionError as error:
            raise AssertionError(f"{how}: loaded without an error; {error}") from None


def _check_found(implementation: Implementation, path: Path, how: str) -> None:
    try:
        found = implementation.verify(path)
    except Exception:
        return
    assert found, f"{how}: not loaded, but verify finds nothing wrong"


def _remove(files: list[Path], random: np.random.Generator) -> str:
    file = files[random.integers(len(files))]
    file.unlink()
    return f"{file.name} was removed"


def _flip(files: list[Path], random: np.random.Generator) -> str:
    full = [file for file in files if file.stat().st_size]
    if not full:
        return ""
    file = full[random.integers(len(full))]
    content = bytearray(file.read_bytes())
    at, bit = int(random.integers(len(content))), int(random.integers(8))
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"{file.name}: bit {bit} of byte {at} was flipped"


def _shorten(files: list[Path], random: np.random.Generator) -> str:
    full = [file for file in files if file.stat().st_size]
    if not full:
        return ""
    file = full[random.integers(len(full))]
    content = file.read_bytes()
    length = int(random.integers(len(content)))
    file.write_bytes(content[:length])
    return f"{file.name} was cut from {len(content)} to {length} bytes"


def _swap(files: list[Path], random: np.random.Generator) -> str:
    contents = {file: file.read_bytes() for file in files}
    pairs = [
        (a, b)
        for a in files
        for b in files
        if a < b and len(contents[a]) == len(contents[b]) and contents[a] != contents[b]
    ]
    if not pairs:
        return ""
    one, other = pairs[random.integers(len(pairs))]
    one.write_bytes(contents[other])
    other.write_bytes(contents[one])
    return f"{one.name} and {other.name} have changed places"


run = partial(judge.judge_all, LAWS)
"""See `conformance.outcome.Part`."""
