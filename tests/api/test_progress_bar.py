"""`progress=True`: a bar on a terminal, on rank 0, and an error where rich is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import xckpt
import xckpt.options
from conformance.implementations.threads import ThreadGroup, results
from xckpt.cli.commands import commands
from xckpt.convert import convert
from xckpt.progress_bar import ProgressBar

STATE = {"w": np.zeros((512, 256), np.float32)}


@pytest.fixture(autouse=True, scope="module")
def _as_users_have_it() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("xckpt.progress_bar.PATIENCE", 2.0)
        yield


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    path = tmp_path / "[red]ckpt"
    xckpt.save(path, STATE, options=xckpt.SaveOptions(progress=True))
    xckpt.load(path, options=xckpt.LoadOptions(progress=True))
    drawn = terminal.getvalue()
    assert "save" in drawn and "load" in drawn and "KiB" in drawn


@pytest.mark.parametrize("end", ["", "/"])
def test_a_call_is_shown_with_the_last_name_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    path, copied = f"{tmp_path}/one{end}", f"{tmp_path}/two{end}"
    watched = xckpt.LoadOptions(progress=True)
    xckpt.save(path, STATE, options=xckpt.SaveOptions(progress=True))
    xckpt.load(path, options=watched)
    convert(path, copied, options=xckpt.SaveOptions(progress=True))
    xckpt.copy(path, f"{tmp_path}/three{end}", options=watched)
    xckpt.delete(copied, options=watched)
    drawn = terminal.getvalue()
    for title in ("save one", "load one", "convert two", "copy one", "delete two"):
        assert title in drawn


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(
    capsys: pytest.CaptureFixture[str], steps: list[tuple[float, int]], total: int = 100
) -> list[str]:
    """What a log holds of work whose bytes come at some seconds."""
    clock = Clock()
    with ProgressBar("save run/[red]7", clock) as bar:
        for seconds, done in steps:
            clock.now = seconds
            bar(xckpt.Progress(done, total))
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    each_tenth = [(n / 10, n) for n in range(1, 401)]
    assert lines_of(capsys, each_tenth, total=400) == [
        "save run/[red]7: 5%, 20 B of 400 B, 10 B/s, 0:00:38 left",
        "save run/[red]7: 30%, 120 B of 400 B, 10 B/s, 0:00:28 left",
        "save run/[red]7: 55%, 220 B of 400 B, 10 B/s, 0:00:18 left",
        "save run/[red]7: 80%, 320 B of 400 B, 10 B/s, 0:00:08 left",
        "save run/[red]7: 100%, 400 B of 400 B, 10 B/s, after 0:00:40",
    ]


def test_a_log_on_a_full_disk_ends_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    log = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    monkeypatch.setattr(sys, "stderr", log)
    with log, ProgressBar("save run", clock) as bar:
        for seconds in (10, 20, 30):
            clock.now = seconds
            bar(xckpt.Progress(seconds, 30))


def test_short_work_writes_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(capsys, [(n / 100, n) for n in range(101)]) == []


def test_nothing_done_yet_has_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(capsys, [(3, 0)]) == [
        "save run/[red]7: 0%, 0 B of 100 B, 0 B/s, time left unknown"
    ]


def test_another_unit_has_a_speed_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion proves its mapping leaf by leaf, then it moves bytes."""
    clock = Clock()
    with ProgressBar("convert", clock) as bar:
        for seconds, now in (
            (10.0, xckpt.Progress(50, 100, "leaves")),
            (20.0, xckpt.Progress(0, 400)),
            (30.0, xckpt.Progress(100, 400)),
        ):
            clock.now = seconds
            bar(now)
    assert capsys.readouterr().err.splitlines() == [
        "convert: 50%, 50 of 100 leaves, 5/s, 0:00:10 left",
        "convert: 0%, 0 B of 400 B, 0 B/s, time left unknown",
        "convert: 25%, 100 B of 400 B, 10 B/s, 0:00:30 left",
    ]


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 1 << 40)), max_size=30))
def test_lines_of_a_log_are_ten_seconds_apart(steps: list[tuple[float, int]]) -> None:
    """And the last byte may have one more."""
    clock, said = Clock(), io.StringIO()
    times = sorted(at for at, _ in steps)
    dones = [done + n for n, done in enumerate(sorted(done for _, done in steps))]
    written: list[float] = []
    with contextlib.redirect_stderr(said), ProgressBar("x", clock) as bar:
        for clock.now, done in zip(times, dones, strict=True):
            before = said.tell()
            bar(xckpt.Progress(done, dones[-1]))
            if said.tell() > before:
                written.append(clock.now)
    assert all(at >= 2 for at in written)
    assert all(b - a >= 10 for a, b in pairwise(written[:-1]))
    assert len(said.getvalue().splitlines()) == len(written)


def test_a_bar_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    with ProgressBar("save") as bar:
        bar(xckpt.Progress(1, 2))
    assert "1 B of 2 B" in terminal.getvalue()
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38|48)", terminal.getvalue())


def test_a_comparison_of_contents_has_progress() -> None:
    first, second = "memory://progress-diff/1", "memory://progress-diff/2"
    for place, value in ((first, 0), (second, 1)):
        xckpt.save(place, {"w": np.full(1000, value), "v": np.zeros(10), "n": 3})
    seen: list[xckpt.Progress] = []
    options = xckpt.LoadOptions(progress=seen.append)
    assert len(xckpt.diff(first, second, values=True, options=options)) == 1
    assert seen[-1] == xckpt.Progress(8080, 8080)
    assert [each.done for each in seen] == sorted(each.done for each in seen)


def test_a_comparison_that_reads_has_progress_within_a_leaf() -> None:
    """Where digests cannot tell: the chunks differ."""
    first, second = "memory://progress-reads/1", "memory://progress-reads/2"
    for place, chunk_bytes in ((first, 1 << 16), (second, 1 << 17)):
        large = np.arange(1 << 20, dtype=np.float32)
        options = xckpt.SaveOptions(chunk_bytes=chunk_bytes)
        xckpt.save(place, {"w": large, "v": large + (place == second)}, options=options)
    seen: list[xckpt.Progress] = []
    options = xckpt.LoadOptions(progress=seen.append, memory_bytes=8 << 20)
    [found] = xckpt.diff(first, second, values=True, options=options)
    assert found.name == "v"
    assert len(seen) > 4
    assert seen[-1] == xckpt.Progress(8 << 20, 8 << 20)


def test_the_view_of_a_pair_has_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.progress_bar.PATIENCE", 0.0)
    first, second = "memory://progress-view/1", "memory://progress-view/2"
    for place, value in ((first, 0), (second, 1)):
        xckpt.save(place, {"w": np.full(1000, value), "v": np.zeros(10)})
    arguments = ["view", first, "--diff", second, "--json"]
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 0
    assert done.stderr.splitlines()[0].startswith("comparing: ")
    assert "8080 B of 8080 B" in done.stderr.splitlines()[-1].replace("7.9 KiB", "8080 B")
    seen: list[xckpt.Progress] = []
    xckpt.view(first, diff=second, options=xckpt.LoadOptions(progress=seen.append))
    assert seen[-1] == xckpt.Progress(8080, 8080)
    capsys.readouterr()
    xckpt.view(first, diff=second, options=xckpt.LoadOptions(progress=True))
    assert capsys.readouterr().err.startswith("compare: ")


def test_deletions_count_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state = {f"w{number}": np.ones(3) for number in range(40)}
    xckpt.save(tmp_path / "ckpt", state, options=xckpt.SaveOptions(pack_bytes=0))
    seen: list[xckpt.Progress] = []
    xckpt.delete(tmp_path / "ckpt", options=xckpt.LoadOptions(progress=seen.append))
    # Of each leaf its chunk, its zarr.json and two folders; then the digests and the root's.
    assert seen[-1] == xckpt.Progress(40 * 4 + 2, 40 * 4 + 2, "files")
    assert len(seen) == 6
    for kind in ("dead", "later"):
        generation = tmp_path / kind / ".generations" / "0123456789abcdef"
        xckpt.save(tmp_path / kind, state)
        generation.mkdir(parents=True)
        for name in "abc":
            (generation / name).write_bytes(b"left")
    seen.clear()
    options = xckpt.LoadOptions(progress=seen.append)
    assert len(xckpt.gc(tmp_path, dry_run=True, options=options)) == 2
    assert not seen
    assert all(left.removed for left in xckpt.gc(tmp_path, older_than=0, options=options))
    assert seen == [xckpt.Progress(3, 6, "files"), xckpt.Progress(6, 6, "files")]


def test_the_commands_that_delete_have_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("xckpt.progress_bar.PATIENCE", 0.0)
    xckpt.save(tmp_path / "ckpt", STATE)
    done = CliRunner().invoke(commands, ["rm", "-y", str(tmp_path / "ckpt")])
    assert re.fullmatch(
        r"deleting: 100%, (\d+) of \1 files, [\d,]+/s, after 0:00:00\n", done.stderr
    )


def test_only_one_rank_draws() -> None:
    drawing: list[int] = []

    def save(group: ThreadGroup) -> None:
        options = xckpt.SaveOptions(progress=True)
        with xckpt.options.with_progress(options, "save", group.rank) as shown:
            if shown.progress is not None:
                drawing.append(group.rank)

    results(3, save)
    assert drawing == [0]


def test_nothing_is_drawn_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xckpt.save(tmp_path / "ckpt", STATE, options=xckpt.SaveOptions(progress=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", [xckpt.SaveOptions, xckpt.LoadOptions])
def test_without_rich_the_error_says_what_to_install(
    kind: type[xckpt.SaveOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        xckpt.options, "find_spec", lambda name: None if name == "rich" else found(name)
    )
    with pytest.raises(ImportError, match=r'progress=True needs rich: pip install "xckpt\[prog'):
        kind(progress=True)
    assert kind(progress=False).progress is False
