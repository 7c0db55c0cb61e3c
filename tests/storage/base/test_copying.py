"""In a bucket, a save with a base has unchanged objects copied there, and uploads the rest."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.counted_bucket import (
    CountedBucket,
    SeenRequest,
    counted_in_thread,
    environment_of,
    without_obstore,
)
from tests.support.examples import examples
from tests.support.faulty_bucket import Answer, Fault, FaultyBucket, Request, Silence, never
from tests.support.ranks import Ranks
from tests.support.servers import bucket, environment, faulty_gcs, faulty_s3, gcs, new_place, s3
from xckpt import SaveOptions
from xckpt.policies import EverySteps, Latest
from xckpt.storage.base import sharing
from xckpt.storage.buckets import server_side
from xckpt.storage.chunks import units

__all__ = ["bucket", "environment", "faulty_gcs", "faulty_s3", "gcs", "s3"]

SMALL = SaveOptions(chunk_bytes=1 << 14, pack_bytes=0)
SHARDS = SaveOptions(chunk_bytes=1 << 16, readers=8)
PACKED = SaveOptions(pack_bytes=1 << 18)
IN_THREADS = SaveOptions(chunk_bytes=1 << 14, pack_bytes=0, threads=4)

State = dict[str, Any]


def a_state() -> State:
    draw = np.random.default_rng(0)
    return {
        "model": {"w": draw.standard_normal((256, 128), np.float32), "b": np.arange(9)},
        "flag": np.array([True, False]),
        "none": np.zeros((0, 3)),
        "text": "x" * 5000,
        "step": 3,
    }


def check(url: str, state: State) -> None:
    assert xckpt.open(url).verify() == []
    loaded = xckpt.load(url)
    assert np.array_equal(loaded["model"]["w"], state["model"]["w"])
    assert np.array_equal(loaded["flag"], state["flag"]) and loaded["text"] == state["text"]


def uploaded(requests: list[SeenRequest]) -> int:
    return sum(request.sent for request in requests)


@pytest.fixture(params=["s3", "gcs"])
def place(request: pytest.FixtureRequest) -> str:
    return new_place(request)


@pytest.fixture(params=["faulty_s3", pytest.param("faulty_gcs", marks=pytest.mark.thorough)])
def server(request: pytest.FixtureRequest) -> Iterator[FaultyBucket]:
    """A bucket with faults; where it is called `url`, nothing is."""
    server: FaultyBucket = request.getfixturevalue(request.param)
    server.seen.clear()
    server.name = f"{server.url}/{random.randrange(1 << 40)}"
    yield server
    server.fault = never
    server.released.set()
    server.released = threading.Event()


@pytest.mark.parametrize("options", [SMALL, IN_THREADS, SaveOptions(crc32c=True), SHARDS, PACKED])
def test_an_unchanged_state_is_copied(place: str, options: SaveOptions) -> None:
    state, taken = a_state(), list[xckpt.Metrics]()
    xckpt.save(f"{place}/a", state, options=options)
    again = replace(options, metrics=taken.append)
    xckpt.save(f"{place}/b", state, base=f"{place}/a", options=again)
    assert taken[0].shared == 256 * 128 * 4 + 9 * 8 + 2
    check(f"{place}/b", state)
    xckpt.delete(f"{place}/a")
    check(f"{place}/b", state)


def test_the_bytes_and_requests_of_an_unchanged_state(bucket: CountedBucket) -> None:
    state = {"w": np.random.default_rng(0).standard_normal((1024, 1024), np.float32)}
    xckpt.save("s3://bucket/a", state)
    first = bucket.taken()
    xckpt.save("s3://bucket/b", state, base="s3://bucket/a")
    second = bucket.taken()
    assert uploaded(first) > state["w"].nbytes and uploaded(second) < 0.01 * state["w"].nbytes
    copies = [request for request in second if request.copy]
    # The base's manifest, claim and digests, the last two by the rank too; what was copied.
    assert len(copies) == 1 and len(second) - len(first) <= 7


def test_an_adapter_beside_a_frozen_model(bucket: CountedBucket) -> None:
    draw = np.random.default_rng(0)
    frozen = {"w": draw.standard_normal((1024, 2048), np.float32)}
    lora = {name: draw.standard_normal((2048, 8), np.float32) for name in "ab"}
    xckpt.save("s3://bucket/a", {"model": frozen, "lora": lora})
    trained = {name: array + 1 for name, array in lora.items()}
    bucket.taken()
    xckpt.save("s3://bucket/b", {"model": frozen, "lora": trained}, base="s3://bucket/a")
    trainable = sum(array.nbytes for array in trained.values())
    assert trainable <= uploaded(bucket.taken()) < trainable + 0.01 * frozen["w"].nbytes
    assert np.array_equal(xckpt.load("s3://bucket/b")["lora"]["a"], trained["a"])


def test_packs_are_copied_as_a_whole(bucket: CountedBucket) -> None:
    state = {f"l{number}": np.full(3000, number) for number in range(300)}
    xckpt.save("s3://bucket/a", state)
    bucket.taken()
    xckpt.save("s3://bucket/b", state, base="s3://bucket/a")
    requests = bucket.taken()
    assert uploaded(requests) < 0.01 * 300 * 24000
    assert [request.kind for request in requests if request.copy] == ["COPY pack"]
    changed = {**state, "l7": state["l7"] + 1}
    xckpt.save("s3://bucket/c", changed, base="s3://bucket/b")
    assert 24000 < uploaded(bucket.taken()) < 24000 + 0.01 * 300 * 24000
    assert xckpt.open("s3://bucket/c").verify() == []
    assert xckpt.load("s3://bucket/c")["l7"][0] == 8


def test_a_pack_of_which_little_is_used_is_packed_anew(bucket: CountedBucket) -> None:
    state = {f"l{number}": np.full(3000, number) for number in range(300)}
    xckpt.save("s3://bucket/a", state)
    changed = {name: array + (name > "l2") for name, array in state.items()}
    xckpt.save("s3://bucket/b", changed, base="s3://bucket/a")
    assert not any(request.copy for request in bucket.taken())
    assert xckpt.open("s3://bucket/b").verify() == []


def test_a_base_is_replaced_by_what_shares_with_it(place: str) -> None:
    state = a_state()
    xckpt.save(place, state, options=SMALL)
    for number in (1, 2):  # a base in place, and one in a generation
        state["model"]["b"] = np.arange(9) + number
        xckpt.save(place, state, base=place, overwrite=True, options=SMALL)
        check(place, state)


def test_a_run_in_a_bucket_copies_what_is_frozen(bucket: CountedBucket) -> None:
    frozen = np.random.default_rng(0).standard_normal(1 << 16)
    with xckpt.CheckpointManager(
        "s3://bucket/run", save=[EverySteps(1)], keep=[Latest(2)], full_every=4
    ) as run:
        sent: list[int] = []
        for step in range(6):
            run.save(step, {"frozen": frozen, "lora": np.full(8, step)})
            run.wait()
            sent.append(uploaded(bucket.taken()))
    assert [size > frozen.nbytes for size in sent] == [True, False, False, False, True, False]
    assert max(size for size in sent if size < frozen.nbytes) < 0.02 * frozen.nbytes
    for record in run.steps():
        assert xckpt.open(run.path(record.number)).verify() == []


def test_without_the_package_all_is_uploaded_and_the_log_says_so(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = a_state()
    xckpt.save("s3://bucket/a", state)
    without_obstore(monkeypatch)
    bucket.taken()
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save("s3://bucket/b", state, base="s3://bucket/a")
    assert uploaded(bucket.taken()) > state["model"]["w"].nbytes
    assert caplog.text.count('pip install "xckpt[buckets]"') == 1
    check("s3://bucket/b", state)


def test_a_profile_has_the_credentials(
    bucket: CountedBucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TensorStore reads profiles itself; for obstore boto3 does."""
    profiles = tmp_path / "credentials"
    profiles.write_text("[default]\naws_access_key_id = some\naws_secret_access_key = secret\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
    state = a_state()
    xckpt.save("s3://bucket/a", state)
    xckpt.save("s3://bucket/b", state, base="s3://bucket/a")
    assert any(request.copy for request in bucket.taken())
    for name in ("boto3", "obstore.auth.boto3"):
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save("s3://bucket/c", state, base="s3://bucket/b")
    assert "pip install boto3" in caplog.text
    assert not any(request.copy for request in bucket.taken())


def saved_by_rank(rank: int, port: int) -> None:
    os.environ.update(environment_of(port))
    draw = np.random.default_rng(0)
    frozen = {f"w{number}": draw.standard_normal((256, 256), np.float32) for number in range(4)}
    own = {f"own{rank}": np.full((128, 256), rank, np.float32)}
    xckpt.save("s3://bucket/a", {**frozen, **own, "lora": np.zeros(9)}, options=SMALL)
    xckpt.save(
        "s3://bucket/b",
        {**frozen, **own, "lora": np.ones(9)},
        base="s3://bucket/a",
        options=SMALL,
    )


@pytest.mark.thorough
def test_ranks_have_their_own_shares_copied(bucket: CountedBucket) -> None:
    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    with Ranks(2) as ranks:
        ranks.run(saved_by_rank, port)
    requests = bucket.taken()
    assert sum(request.copy for request in requests) == 4 * 16 + 2 * 8
    later = [request for request in requests if request.key.startswith("b/")]
    assert uploaded(later) < 0.02 * (4 * 256 * 256 + 2 * 128 * 256) * 4
    assert xckpt.open("s3://bucket/b").verify() == []
    assert xckpt.load("s3://bucket/b")["lora"].sum() == 9


@examples(4, 60)
@given(
    st.lists(st.lists(st.integers(0, 15), max_size=12), min_size=1, max_size=5),
    st.sampled_from([0, 64, 128]),
    st.data(),
)
def test_a_chain_of_saves(edits: list[list[int]], pack_bytes: int, data: st.DataObject) -> None:
    """Whatever changes, whatever is deleted or replaced, each checkpoint holds what was saved."""
    state = {"w": np.arange(256.0).reshape(16, 16), "v": np.arange(3), "b": np.zeros(9, np.int8)}
    saved: dict[int, dict[str, Any]] = {}
    options = SaveOptions(chunk_bytes=128, pack_bytes=pack_bytes)
    with counted_in_thread() as (_, port), pytest.MonkeyPatch.context() as patch:
        for name, value in environment_of(port).items():
            patch.setenv(name, value)
        for rows in edits:
            state = {name: array.copy() for name, array in state.items()}
            state["w"][rows] += 1
            number = data.draw(st.integers(0, 2))
            chosen = data.draw(st.sampled_from([None, *saved]))
            base = None if chosen is None else f"s3://bucket/{chosen}"
            path = f"s3://bucket/{number}"
            xckpt.save(path, state, base=base, options=options, overwrite=True)
            saved[number] = state
            gone = data.draw(st.sampled_from([None, *saved]))
            if gone is not None:
                xckpt.delete(f"s3://bucket/{gone}")
                del saved[gone]
        for number, expected in saved.items():
            assert xckpt.open(f"s3://bucket/{number}").verify() == []
            loaded = xckpt.load(f"s3://bucket/{number}")
            assert all(np.array_equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("base", ["s3://other/a", "memory://base-elsewhere", "folder"])
def test_a_base_elsewhere_is_written_again(
    base: str, bucket: CountedBucket, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    base = str(tmp_path / "a") if base == "folder" else base
    state = a_state()
    xckpt.save(base, state)
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save("s3://bucket/b", state, base=base)
    assert "objects of one bucket" in caplog.text
    check("s3://bucket/b", state)
    assert not any(request.copy for request in bucket.taken())


def copies(server: FaultyBucket) -> int:
    return sum(bool(request.source) for request in server.seen)


@pytest.mark.parametrize(
    "answer", [Answer(403, "AccessDenied"), Answer(501, "NotImplemented"), Answer(400, "X")]
)
def test_what_may_not_be_copied_is_written(
    server: FaultyBucket, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    state = a_state()
    xckpt.save(f"{server.name}/a", state, options=SMALL)
    server.fault = lambda request: answer if request.source else None
    server.seen.clear()
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(f"{server.name}/b", state, base=f"{server.name}/a", options=SMALL)
    server.fault = never
    # Only the first; what is not for ever is asked again, what the bucket does not know is not.
    assert copies(server) == (1 if answer.status == 501 else 2)
    check(f"{server.name}/b", state)
    assert caplog.text.count("the bucket does not copy") == 1 and str(answer.status) in caplog.text
    assert "0 B shared" in caplog.text


def test_a_busy_bucket_is_asked_again(server: FaultyBucket) -> None:
    """Half of all copies are refused."""
    state, taken, coin = a_state(), list[xckpt.Metrics](), random.Random(0)
    xckpt.save(f"{server.name}/a", state, options=SMALL)

    def busy(request: Request) -> Fault:
        return Answer(503, "SlowDown") if request.source and coin.random() < 0.5 else None

    server.fault = busy
    options = replace(SMALL, metrics=taken.append)
    xckpt.save(f"{server.name}/b", state, base=f"{server.name}/a", options=options)
    server.fault = never
    check(f"{server.name}/b", state)
    assert taken[0].shared >= state["model"]["w"].nbytes


def test_a_missing_object_is_written_and_others_are_copied(
    server: FaultyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    state, taken = a_state(), list[xckpt.Metrics]()
    xckpt.save(f"{server.name}/a", state, options=SMALL)
    server.fault = lambda request: (
        Answer(404, "NoSuchKey") if request.source.endswith("w/c/3/0") else None
    )
    options = replace(SMALL, metrics=taken.append)
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(f"{server.name}/b", state, base=f"{server.name}/a", options=options)
    server.fault = never
    check(f"{server.name}/b", state)
    assert "model/w: the base's chunk is missing" in caplog.text
    assert 0 < taken[0].shared < state["model"]["w"].nbytes


def test_a_copy_without_an_answer_is_written(server: FaultyBucket) -> None:
    state = a_state()
    xckpt.save(f"{server.name}/a", state, options=SMALL)
    server.fault = lambda request: Silence() if request.source else None
    options = replace(SMALL, retries=0, request_timeout=0.5)
    xckpt.save(f"{server.name}/b", state, base=f"{server.name}/a", options=options)
    server.fault = never
    check(f"{server.name}/b", state)


def test_the_time_of_a_save_is_that_of_its_copies_too(server: FaultyBucket) -> None:
    state = a_state()
    xckpt.save(f"{server.name}/a", state, options=SMALL)
    server.fault = lambda request: Silence() if request.source else None
    options = replace(SMALL, timeout=1.0)
    with pytest.raises(xckpt.StorageError, match="the time is over"):
        xckpt.save(f"{server.name}/b", state, base=f"{server.name}/a", options=options)
    server.fault = never
    assert not xckpt.exists(f"{server.name}/b")


@pytest.mark.parametrize("saved", [0, 1, 2])
def test_a_base_that_goes_away_between_copies(
    server: FaultyBucket, saved: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Another save in place gives its keys other contents, and perhaps a third its first manifest
    again: what was copied meanwhile may be another's.
    """
    state, other = a_state(), a_state()
    other["model"]["w"] = other["model"]["w"] + 1
    xckpt.save(f"{server.name}/a", state, options=SMALL)
    two = replace(SMALL, concurrency=2)  # not all are under way before the first is answered
    lock, asked = threading.Lock(), list[str]()

    def amid(request: Request) -> Fault:
        if request.source:
            with lock:
                asked.append(request.source)
                if len(asked) in (1, 5)[: max(saved, 1)]:
                    xckpt.delete(f"{server.name}/a")
                if saved >= 1 and len(asked) == 1:
                    xckpt.save(f"{server.name}/a", other, options=SMALL)
                if saved == 2 and len(asked) == 5:
                    xckpt.save(f"{server.name}/a", state, options=SMALL)
        return None

    server.fault = amid
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(f"{server.name}/b", state, base=f"{server.name}/a", options=two)
    server.fault = never
    assert len(asked) >= 5
    check(f"{server.name}/b", state)
    assert ("replaced or deleted meanwhile" if saved else "is missing") in caplog.text


def test_copies_that_go_elsewhere_are_noticed(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bucket says that it has copied, and this save does not find it."""
    state = a_state()
    xckpt.save("s3://bucket/a", state, options=SMALL)
    monkeypatch.setattr(server_side, "_store", lambda where: None)

    async def copied(*_: object) -> None:
        return None

    monkeypatch.setattr("obstore.copy_async", copied)
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save("s3://bucket/b", state, base="s3://bucket/a", options=SMALL)
    assert "is not there; the endpoints may differ" in caplog.text
    check("s3://bucket/b", state)


@pytest.mark.parametrize("options", [SMALL, SaveOptions(pack_bytes=1 << 18)])
def test_a_damaged_object_is_found_where_the_base_is_verified(
    options: SaveOptions, bucket: CountedBucket, caplog: pytest.LogCaptureFixture
) -> None:
    state = {f"l{number}": np.full(3000, number) for number in range(20)}
    xckpt.save("s3://bucket/a", state, options=options)
    keys = [key for key in bucket.objects if "/c/" in key or "xckpt.packs/" in key]
    tag, content = bucket.objects[keys[0]]
    bucket.objects[keys[0]] = tag, content[:100] + b"x" + content[101:]
    again = replace(options, verify_base=True)
    xckpt.save("s3://bucket/b", state, base="s3://bucket/a", options=again)
    assert xckpt.open("s3://bucket/b").verify() == []
    assert caplog.text.count("is damaged; it is written anew") == 1


def test_an_aborted_save_leaves_no_copy(bucket: CountedBucket) -> None:
    state = a_state()
    xckpt.save("s3://bucket/a", state, options=SMALL)
    before = set(bucket.objects)
    bucket.refused = "text/c/0"
    with pytest.raises(xckpt.StorageError):
        xckpt.save("s3://bucket/b", state, base="s3://bucket/a", options=SMALL)
    assert set(bucket.objects) == before and any(request.copy for request in bucket.taken())


def test_a_digest_is_taken_once(bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what has changed as of what has not: the memory is read in one pass."""
    state = {"frozen": np.arange(20_000.0), "own": np.zeros(20_000)}
    xckpt.save("s3://bucket/a", state)
    hashed: list[int] = []

    def noted(digest: Any, data: Any) -> bytes:
        hashed.append(data.nbytes)
        return digest(data)

    for module, name in ((sharing, "_digest"), (units, "digest_array")):
        monkeypatch.setattr(module, name, partial(noted, getattr(module, name)))
    xckpt.save("s3://bucket/b", {**state, "own": np.ones(20_000)}, base="s3://bucket/a")
    assert hashed == [160_000] * 2
    assert xckpt.open("s3://bucket/b").verify() == []


@pytest.mark.parametrize("concurrency", [2, 128])
def test_copies_are_made_at_a_time_as_requests_are(bucket: CountedBucket, concurrency: int) -> None:
    state = {"w": np.arange(1 << 16, dtype=np.float64)}
    xckpt.save("s3://bucket/a", state, options=SMALL)
    bucket.taken()
    bucket.delay = 0.05
    options = replace(SMALL, concurrency=concurrency)
    xckpt.save("s3://bucket/b", state, base="s3://bucket/a", options=options)
    copies = [request for request in bucket.taken() if request.copy]
    assert len(copies) == 32
    together = max(sum(one.began <= each.began < one.ended for one in copies) for each in copies)
    assert 2 <= together <= concurrency and (concurrency == 2 or together > 8)
