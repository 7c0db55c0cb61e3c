"""Time is the caller's: silent, slow and overloaded buckets, for each call, and what is left."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from tests.support.faulty_bucket import (
    Answer,
    Faults,
    FaultyBucket,
    Request,
    Reset,
    Silence,
    Trickle,
    never,
)
from tests.support.servers import environment, faulty_gcs, faulty_s3, gcs, s3
from tests.support.stored import keys
from tests.support.time_limit import ALLOWANCE
from xckpt.cli.commands import commands
from xckpt.convert import convert
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "faulty_gcs", "faulty_s3", "gcs", "s3"]

STATE = {f"l{n}": np.full(100, n, np.float32) for n in range(20)} | {"big": np.ones(1 << 18)}
MORE = 2.0 * ALLOWANCE
"""Seconds beyond the timeout."""
ENOUGH = min(1.0, 0.5 * ALLOWANCE)
"""Seconds in which a bucket that answers opens a checkpoint, or reads a chunk."""


@pytest.fixture(params=["faulty_s3", "faulty_gcs"])
def bucket(request: pytest.FixtureRequest) -> Iterator[FaultyBucket]:
    found: FaultyBucket = request.getfixturevalue(request.param)
    found.fault = never
    found.name = re.sub(r"\W", "-", request.node.name)
    xckpt.save(f"{found.url}/there", STATE, overwrite=True)
    yield found
    found.fault = never


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    with pytest.raises(xckpt.StorageError, match=r"no answer for|has not answered within"):
        yield
    assert time.monotonic() - start < seconds + MORE


def after(count: int, fault: Silence | Answer) -> Faults:
    """A fault from some request on."""
    seen = iter(range(1 << 30))
    return lambda request: fault if next(seen) >= count else None


def requests_of(bucket: FaultyBucket, call: Callable[[], object]) -> int:
    """How many requests a call takes where nothing fails."""
    seen: list[str] = []
    bucket.fault = lambda request: seen.append(request.path)
    call()
    return len(seen)


def often(share: float, fault: Answer | Silence | Reset, seed: int = 1) -> Faults:
    """A fault of a share of the requests."""
    dice = random.Random(seed)
    return lambda request: fault if dice.random() < share else None


CALLS: dict[str, Callable[[FaultyBucket, Path], object]] = {
    "save": lambda b, p: xckpt.save(f"{b.url}/{b.name}", STATE),
    "overwrite": lambda b, p: xckpt.save(f"{b.url}/there", STATE, overwrite=True),
    "save_async": lambda b, p: xckpt.save_async(f"{b.url}/{b.name}", STATE).result(),
    "load": lambda b, p: xckpt.load(f"{b.url}/there"),
    "load_into": lambda b, p: xckpt.load_into(f"{b.url}/there", {"l1": np.zeros(100, "f4")}),
    "open": lambda b, p: xckpt.open(f"{b.url}/there"),
    "exists": lambda b, p: xckpt.exists(f"{b.url}/there"),
    "delete": lambda b, p: xckpt.delete(f"{b.url}/there"),
    "copy": lambda b, p: xckpt.copy(f"{b.url}/there", p / "copy"),
    "copy to": lambda b, p: xckpt.copy("memory://silence", f"{b.url}/{b.name}"),
    "gc": lambda b, p: xckpt.gc(b.url),
    "convert": lambda b, p: convert(f"{b.url}/there", p / "out", format="safetensors"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.thorough
def test_a_silent_bucket_ends_each_call(
    bucket: FaultyBucket, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    xckpt.save("memory://silence", STATE, overwrite=True)
    monkeypatch.setenv("XCKPT_TIMEOUT", "1.5")
    bucket.fault = lambda request: Silence()
    with within(1.5):
        CALLS[call](bucket, tmp_path)


@pytest.mark.parametrize("variable", ["XCKPT_TIMEOUT", "XCKPT_REQUEST_TIMEOUT"])
@pytest.mark.parametrize("arguments", [["verify"], ["info"], ["ls"], ["cat", "l1"]])
@pytest.mark.thorough
def test_a_silent_bucket_ends_each_command(
    bucket: FaultyBucket, variable: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1.5")
    bucket.fault = lambda request: Silence()
    start = time.monotonic()
    command, *rest = arguments
    done = CliRunner().invoke(commands, [command, f"{bucket.url}/there", *rest])
    assert done.exit_code == 2 and variable in done.output
    assert time.monotonic() - start < 1.5 + MORE


def at(key: str) -> Faults:
    """Silence from the first request on whose path contains a text."""
    seen: list[Request] = []

    def fault(request: Request) -> Silence | None:
        if seen or key in request.path:
            seen.append(request)
        return Silence() if seen else None

    return fault


THOROUGH = [pytest.param(key, marks=pytest.mark.thorough) for key in ("zarr.json", "digests")]


@pytest.mark.parametrize("key", ["l7/c/0", *THOROUGH])
def test_a_bucket_that_falls_silent_is_not_damaged(
    faulty_s3: FaultyBucket, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty_s3.fault = never
    url = f"{faulty_s3.url}/silent-verify"
    xckpt.save(url, STATE, overwrite=True)
    monkeypatch.setenv("XCKPT_TIMEOUT", f"{ENOUGH}")
    checkpoint = xckpt.open(url)
    faulty_s3.fault = at(key)
    with within(ENOUGH):
        checkpoint.verify()
    faulty_s3.fault = at(key)
    start = time.monotonic()
    done = CliRunner().invoke(commands, ["verify", url])
    faulty_s3.fault = never
    assert done.exit_code == 2 and "XCKPT_TIMEOUT" in done.output
    assert time.monotonic() - start < ENOUGH + MORE


def saving(limit: str, seconds: float) -> xckpt.SaveOptions:
    return replace(xckpt.SaveOptions(), **{limit: seconds})


@pytest.mark.parametrize("limit", ["timeout", "request_timeout"])
def test_a_silent_bucket_ends_a_save(faulty_s3: FaultyBucket, limit: str) -> None:
    faulty_s3.fault = lambda request: Silence()
    with within(0.5):
        xckpt.save(f"{faulty_s3.url}/{limit}", STATE, options=saving(limit, 0.5))
    faulty_s3.fault = never
    assert keys(f"{faulty_s3.url}/{limit}") == []
    # What is stuck holds up nobody.
    xckpt.save(f"{faulty_s3.url}/{limit}", STATE, options=xckpt.SaveOptions(timeout=4))


@pytest.mark.thorough
@pytest.mark.parametrize("limit", ["timeout", "request_timeout"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_bucket_that_falls_silent(bucket: FaultyBucket, limit: str, share: float) -> None:
    """The bucket answers a share of the requests that a call takes, and no more."""
    options: dict[str, Any] = {limit: 2.0}
    path, there = f"{bucket.url}/{bucket.name}", f"{bucket.url}/there"
    answered = int(share * requests_of(bucket, lambda: xckpt.save(f"{path}-whole", STATE)))
    bucket.fault = after(answered, Silence())
    with within(2.0):
        xckpt.save(path, STATE, options=saving(limit, 2.0))
    answered = int(share * requests_of(bucket, lambda: xckpt.load(there)))
    bucket.fault = after(answered, Silence())
    with within(2.0):
        xckpt.load(there, options=replace(xckpt.LoadOptions(), **options))
    bucket.fault = never
    again = xckpt.load(there, options=xckpt.LoadOptions(timeout=8))
    assert np.array_equal(again["big"], STATE["big"])


@pytest.mark.thorough
def test_a_slow_bucket_is_not_dead(bucket: FaultyBucket) -> None:
    """The large leaf takes ten seconds, and nothing else comes meanwhile."""
    bucket.fault = lambda request: Trickle(200_000) if request.path.endswith("big/c/0") else None
    options = xckpt.LoadOptions(request_timeout=2.0)
    assert np.array_equal(xckpt.load(f"{bucket.url}/there", options=options)["big"], STATE["big"])
    with within(2.0):
        xckpt.load(f"{bucket.url}/there", options=xckpt.LoadOptions(timeout=2.0))


def test_an_open_checkpoint_has_time_for_each_read(faulty_s3: FaultyBucket) -> None:
    faulty_s3.fault = never
    url = f"{faulty_s3.url}/open"
    xckpt.save(url, STATE)
    checkpoint = xckpt.open(url, options=xckpt.LoadOptions(timeout=ENOUGH))
    time.sleep(ENOUGH + 0.1)
    assert checkpoint.array("l3")[0] == 3
    faulty_s3.fault = lambda request: Silence()
    with within(ENOUGH):
        checkpoint.array("big")[:]


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_another_librarys_checkpoint_is_read_again_after_a_silence(
    faulty_s3: FaultyBucket, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty_s3.fault = never
    xckpt.save("memory://foreign", {"w": np.arange(9.0)}, overwrite=True)
    convert("memory://foreign", tmp_path / "it", format=format)
    store = open_store(Location.parse(f"{faulty_s3.url}/{format}"))
    for file in filter(Path.is_file, (tmp_path / "it").rglob("*")):
        store.write(file.relative_to(tmp_path / "it").as_posix(), file.read_bytes()).result()
    monkeypatch.setenv("XCKPT_REQUEST_TIMEOUT", "0.4")
    opened = xckpt.open(f"{faulty_s3.url}/{format}").array("w")
    faulty_s3.fault = lambda request: Silence()
    with within(0.4):
        opened[:]
    faulty_s3.fault = never
    assert opened[5] == 5


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_half_of_all_answers_are_503(bucket: FaultyBucket, seed: int) -> None:
    url = f"{bucket.url}/{bucket.name}"
    bucket.fault = often(0.5, Answer(503, "SlowDown"), seed)
    xckpt.save(url, STATE)
    assert np.array_equal(xckpt.load(url)["big"], STATE["big"])
    xckpt.save(url, STATE | {"l0": 7}, overwrite=True)
    assert xckpt.open(url).verify() == []
    bucket.fault = never
    root = xckpt.open(url).manifest.root
    assert [key for key in keys(url) if not key.startswith(f"{root}/")] == ["xckpt.json"]


@pytest.mark.parametrize("environment_says", [False, True])
def test_retries_are_the_callers(
    faulty_s3: FaultyBucket, environment_says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment_says:
        monkeypatch.setenv("XCKPT_RETRIES", "1")
    options = None if environment_says else xckpt.LoadOptions(retries=1)
    faulty_s3.fault = lambda request: Answer(503, "SlowDown")
    faulty_s3.seen.clear()
    with pytest.raises(xckpt.StorageError, match=r"overloaded.*XCKPT_RETRIES"):
        xckpt.load(f"{faulty_s3.url}/there", options=options)
    # A test before this one may have given up requests that are still repeated.
    assert len([request for request in faulty_s3.seen if "/there/" in request.path]) == 2
    faulty_s3.fault = never


LASTING = [
    Answer(500, "InternalError"),
    Answer(429, "TooManyRequests"),
    Answer(409, "OperationAborted"),
    Answer(403, "RequestTimeTooSkewed"),
    Answer(400, "RequestTimeout"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("answer", LASTING, ids=lambda answer: answer.code)
def test_what_lasts_is_an_error(faulty_s3: FaultyBucket, answer: Answer) -> None:
    url = f"{faulty_s3.url}/lasting"
    faulty_s3.fault = lambda request: answer
    with pytest.raises(xckpt.StorageError, match=answer.code) as caught:
        xckpt.save(url, STATE, options=xckpt.SaveOptions(retries=2))
    if "Skewed" in answer.code:
        assert "the clock of this machine is wrong" in str(caught.value)
    faulty_s3.fault = never
    assert keys(url) == []


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("fault", [Reset(), Reset(done=True), Reset(done=True, after=40)])
def test_lost_requests_and_answers(bucket: FaultyBucket, share: float, fault: Reset) -> None:
    url = f"{bucket.url}/{bucket.name}"
    bucket.fault = often(share, fault)
    for step in range(3):
        xckpt.save(url, STATE | {"step": step}, overwrite=step > 0)
        assert xckpt.load(url)["step"] == step
    bucket.fault = never
    assert xckpt.open(url).verify() == []
    root = xckpt.open(url).manifest.root
    assert [key for key in keys(url) if not key.startswith(f"{root}/")] == ["xckpt.json"]


@pytest.mark.thorough
def test_some_requests_stall(bucket: FaultyBucket) -> None:
    url = f"{bucket.url}/{bucket.name}"
    bucket.fault = often(0.02, Silence(15), seed=3)
    xckpt.save(url, STATE)
    assert np.array_equal(xckpt.load(url)["big"], STATE["big"])


@pytest.mark.thorough
def test_concurrency_is_the_callers(faulty_s3: FaultyBucket) -> None:
    under_way, most = [0], [0]

    def fault(request: Request) -> Silence:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.02)
        under_way[0] -= 1
        return Silence(0.0)

    faulty_s3.fault = never
    xckpt.save(f"{faulty_s3.url}/few", STATE)
    faulty_s3.fault = fault
    xckpt.load(f"{faulty_s3.url}/few", options=xckpt.LoadOptions(concurrency=3))
    faulty_s3.fault = never
    assert most[0] <= 3


@pytest.mark.parametrize(
    "name, text", [("RETRIES", "many"), ("TIMEOUT", "0"), ("CONCURRENCY", "-1"), ("TIMEOUT", "nan")]
)
def test_the_environment_is_checked(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"XCKPT_{name}", text)
    with pytest.raises(ValueError, match=f"XCKPT_{name} must be"):
        xckpt.save("memory://environment", {"w": 1})
