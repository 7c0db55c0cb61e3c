"""Faults put into runs: files that cannot grow, damage, and steps that others save and delete.

A full disk is a limit on the size of files (``RLIMIT_FSIZE``): a write past it fails with ``EFBIG``
in every thread and library of the process. Each case is one `str`: empty, or what was wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from conformance.implementation import Refused
from conformance.runs.manager import (
    EVERY,
    Keep,
    Manager,
    Run,
    loss_of,
    same,
    state_of,
    whole_steps,
)

__all__ = ["damaged", "failures", "files_of", "full_disk", "last_good", "stale"]

LIMIT = 20_000
"""Bytes: below the large leaf of a state, above all metadata."""


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process grows beyond `LIMIT`."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def saved(run: Run, *steps: int) -> None:
    """Save some steps, and wait for each."""
    for step in steps:
        run.save(step, state_of(step), loss_of(step))
        run.wait()


def error_of(call: Callable[[], object]) -> str:
    """What a call raises; empty if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def files_of(root: Path, run: Run, step: int) -> list[Path]:
    """Save a step; its files, found by what is there afterwards and was not before."""
    before = {path: path.stat().st_ino for path in root.rglob("*") if path.is_file()}
    saved(run, step)
    after = {path: path.stat().st_ino for path in root.rglob("*") if path.is_file()}
    return sorted(path for path, number in after.items() if before.get(path) != number)


# A failed save.

NEXT: dict[str, Callable[[Run], object]] = {
    "wait": lambda run: run.wait(),
    "the next save": lambda run: run.save(3, state_of(3), loss_of(3)),
}


def failures(manager: Manager, folder: Path) -> Iterator[str]:
    """Step 2 fails: raised at once, or by the next call; then step 2 or 3 is saved all the same."""
    cases = itertools.product(NEXT.items(), (2, 3), (manager.fewest, 2))
    for number, ((name, call), again, latest) in enumerate(cases):
        root = folder / str(number)
        run = manager.open(root, Keep(latest))
        try:
            yield from _failure(manager, root, run, name, call, again)
        finally:
            run.close()


def _failure(
    manager: Manager, root: Path, run: Run, name: str, call: Callable[[Run], object], again: int
) -> Iterator[str]:
    saved(run, 0, 1)
    with full_disk():
        raised = error_of(lambda: run.save(2, state_of(2), loss_of(2)))
        raised = raised or error_of(lambda: call(run))
        error_of(run.wait)
    yield "" if raised else f"save of step 2 failed; {name} raises nothing"
    said, whole = run.latest(), whole_steps(manager, root, (0, 1, 2, 3))
    newest = max(whole, default=None)
    yield (
        ""
        if said == newest == 1
        else (
            f"after the failure of step 2 latest says {said}, and {newest} is the newest that loads"
        )
    )
    raised = error_of(lambda: saved(run, again))
    loads = again in whole_steps(manager, root, (again,))
    yield (
        ""
        if loads and run.latest() == again
        else (
            f"step {again}, saved after the failure of step 2, is not there"
            f" ({raised or 'nothing was raised'})"
        )
    )


# Damage.


def _flip(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] if content else content


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit is flipped": _flip,
    "it is cut in half": lambda content: content[: len(content) // 2],
    "it is missing": lambda content: None,
}


def damaged(manager: Manager, folder: Path) -> Iterator[str]:
    """Each file of the newest step is damaged in each way; then those of the two newest steps."""
    root = folder / "whole"
    run = manager.open(root, EVERY)
    saved(run, 0)
    files = {step: files_of(root, run, step) for step in (1, 2)}
    run.close()
    for path in files[2]:
        for how, change in DAMAGE.items():
            content = path.read_bytes()
            if change(content) != content:
                place = _copy(root, folder / "damaged")
                _change(place / path.relative_to(root), change)
                yield _restored(manager, place, f"{path.relative_to(root)}: {how}", 1)
    place = _copy(root, folder / "damaged")
    for path in (*files[1], *files[2]):
        if path.stat().st_size > LIMIT:
            _change(place / path.relative_to(root), _flip)
    yield _restored(manager, place, "the large files of steps 1 and 2: a bit is flipped", 0)


def _copy(root: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(root, place))


def _change(path: Path, change: Callable[[bytes], bytes | None]) -> None:
    content = change(path.read_bytes())
    path.unlink()  # it may have a second name
    if content is not None:
        path.write_bytes(content)


def _restored(manager: Manager, root: Path, how: str, newest_good: int) -> str:
    """What is wrong with a restore where some of steps 0, 1, 2 are damaged; empty if nothing."""
    run = manager.open(root, EVERY)
    try:
        listed = run.latest()
        try:
            found = run.restore()
        except Exception as error:
            text = str(error).splitlines()[:1]
            return f"{how}: nothing is restored, {type(error).__name__}: {''.join(text)[:160]}"
        if found is None:
            return f"{how}: no step is restored"
        if not same(found.state, state_of(found.step)):
            return f"{how}: damaged data are restored as step {found.step}"
        if found.step < newest_good:
            return f"{how}: step {found.step} is restored, and step {newest_good} is good"
        unnamed = [
            step
            for step in range(found.step + 1, 3)
            if not found.skipped.get(step) and listed is not None and step <= listed
        ]
        return f"{how}: step {found.step} is restored, {unnamed} are not named" if unnamed else ""
    finally:
        run.close()


# What must be seen, and what must stay.


def stale(manager: Manager, folder: Path) -> Iterator[str]:
    """Others save and delete steps while a manager looks on."""
    root = folder / "run"
    run, other = manager.open(root, EVERY), manager.open(root, EVERY)
    try:
        saved(run, 0)
        said = other.latest()
        yield "" if said == 0 else f"step 0 was saved by another, and latest says {said}"
        files = files_of(root, run, 1)
        said = other.latest()
        yield "" if said == 1 else f"step 1 was saved by another, and latest says {said}"
        for path in files:
            path.unlink()
        for who, each in (("who saved it", run), ("another", other)):
            said = each.latest()
            yield "" if said == 0 else f"step 1 was deleted, and latest says {said} to {who}"
    finally:
        run.close()
        other.close()


def last_good(manager: Manager, folder: Path) -> Iterator[str]:
    """Keep nothing, only the best, only the newest, as far as it can; then beside damage."""
    for keep in (Keep(), Keep(best=1), Keep(latest=manager.fewest)):
        root = folder / f"{keep.latest}-{keep.best}"
        try:
            run = manager.open(root, keep)
        except Refused:
            continue
        for step in range(4):
            saved(run, step)
            whole = whole_steps(manager, root, range(4))
            yield (
                ""
                if step in whole
                else (f"{keep}: step {step} was saved last, and of all steps {whole} load")
            )
        run.close()
    yield from _good_beside_damage(manager, folder / "damaged")


def _good_beside_damage(manager: Manager, root: Path) -> Iterator[str]:
    """Step 1 is damaged; a run that keeps few steps goes on, and its first save fails."""
    run = manager.open(root, EVERY)
    saved(run, 0)
    for path in files_of(root, run, 1):
        if path.stat().st_size > LIMIT:
            _change(path, _flip)
    run.close()
    run = manager.open(root, Keep(latest=manager.fewest))
    error_of(run.restore)
    with full_disk():
        error_of(lambda: run.save(2, state_of(2), loss_of(2)))
        error_of(run.wait)
    whole = whole_steps(manager, root, range(4))
    yield "" if whole == [0] else f"step 1 is damaged, step 2 failed: of all steps {whole} load"
    error_of(lambda: saved(run, 3))
    whole = whole_steps(manager, root, range(4))
    yield "" if 3 in whole else f"step 3 was saved after that: of all steps {whole} load"
    run.close()
