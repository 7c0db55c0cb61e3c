"""What a save and a load take: INFO and DEBUG in the log, and the metrics function."""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results

STATE = {"w": np.zeros((512, 256), np.float32), "step": 3}
MIBIBYTES = r"0\.50 MiB in \d+\.\d\d s \(\d+\.\d\d GiB/s\), \d+\.\d\d s waiting for other ranks"


def test_a_save_and_a_load_are_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ckpt"
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(path, STATE)
        xckpt.save_async(path, STATE, overwrite=True).result()
        xckpt.load(path)
        xckpt.load_into(path, {"w": np.zeros((512, 256), np.float32), "step": 0})
    lines = [record.getMessage() for record in caplog.records]
    done = [("save", "wrote"), ("save_async", "wrote"), ("load", "read"), ("load_into", "read")]
    for line, (operation, verb) in zip(lines, done, strict=True):
        about = f"{operation} {re.escape(str(path))}: rank 0 of 1 {verb} "
        assert re.fullmatch(about + MIBIBYTES, line)


def test_steps_are_in_the_log_for_debugging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "xckpt"):
        xckpt.save(tmp_path / "ckpt", STATE)
        xckpt.load(tmp_path / "ckpt")
    steps = re.findall(r"rank 0: (\w+) took", caplog.text)
    assert steps == ["describe", "plan", "write", "commit", "find", "plan", "share", "read"]


def test_nothing_is_timed_unasked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.api.save.Watch", None)
    with caplog.at_level(logging.WARNING, "xckpt"):
        xckpt.save(tmp_path / "ckpt", STATE)
        xckpt.load(tmp_path / "ckpt")
    assert caplog.records == []


def test_each_rank_has_its_metrics(tmp_path: Path) -> None:
    seen: dict[int, list[xckpt.Metrics]] = {0: [], 1: []}
    waits = threading.Event()

    class Waiting(ThreadGroup):
        def gather(self, data: bytes) -> list[bytes] | None:
            waits.set()
            return super().gather(data)

    def save(group: ThreadGroup) -> None:
        if group.rank == 0:
            group = Waiting(group.rank, group.table)
        else:
            assert waits.wait(30)
            time.sleep(0.3)
        metrics = seen[group.rank].append
        xckpt.save(
            tmp_path / "ckpt", STATE, group=group, options=xckpt.SaveOptions(metrics=metrics)
        )
        xckpt.load(tmp_path / "ckpt", group=group, options=xckpt.LoadOptions(metrics=metrics))

    results(2, save)
    for rank, (saved, loaded) in seen.items():
        assert (saved.operation, saved.rank, saved.ranks) == ("save", rank, 2)
        assert (loaded.operation, loaded.bytes, loaded.error) == ("load", 1 << 19, "")
        assert 0 < saved.waited_seconds < saved.seconds
    assert seen[0][0].bytes + seen[1][0].bytes == 1 << 19
    assert seen[0][0].waited_seconds > 0.25  # for rank 1


def test_a_failure_has_its_metrics(tmp_path: Path) -> None:
    seen: list[xckpt.Metrics] = []
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.load(tmp_path / "none", options=xckpt.LoadOptions(metrics=seen.append))
    assert [took.error for took in seen] == ["NotACheckpointError"]
    assert "failed after" in seen[0].line()


def test_calls_of_one_rank_have_their_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`copy`, `diff`, `delete` and `gc` took the function, and never called it."""
    caplog.set_level(logging.INFO, logger="xckpt")
    seen: list[xckpt.Metrics] = []
    counted: list[xckpt.Progress] = []
    options = xckpt.LoadOptions(metrics=seen.append, progress=counted.append)
    one, two = tmp_path / "one", tmp_path / "two"
    xckpt.save(one, STATE)
    xckpt.copy(one, two, options=options)
    copied = counted[-1].done
    assert xckpt.diff(one, two, values=True, options=options) == []
    compared = counted[-1].done
    xckpt.delete(two, options=options)
    xckpt.gc(tmp_path, options=options)
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.delete(two, options=options)
    took = [(each.operation, Path(each.path), each.bytes, each.error) for each in seen]
    failed = ("delete", two, 0, "NotACheckpointError")
    assert took == [
        ("copy", one, copied, ""),
        ("diff", one, compared, ""),
        ("delete", two, 0, ""),
        ("gc", tmp_path, 0, ""),
        failed,
    ]
    assert 0 < compared < copied
    lines = [line.split(" of 1 ")[1].split()[0] for line in caplog.messages]
    assert lines == ["wrote", "wrote", "read", "took", "took", "failed"]


def test_a_failing_metrics_function_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(took: xckpt.Metrics) -> None:
        raise RuntimeError("no collector")

    xckpt.save(tmp_path / "ckpt", STATE, options=xckpt.SaveOptions(metrics=fail))
    assert "the metrics function failed" in caplog.text and "no collector" in caplog.text
    assert xckpt.load(tmp_path / "ckpt")["step"] == 3
