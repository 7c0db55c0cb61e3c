"""Checkpoints in S3 (moto's server) and GCS (`GCSServer`), through TensorStore's drivers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import xckpt
from tests.support.servers import environment, gcs, s3
from tests.support.states import LAYOUTS, everything, expected, same
from tests.support.stored import keys, step_at
from tests.support.time_limit import ALLOWANCE
from xckpt.core.commit import Step
from xckpt.storage.commit.staging import begin
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "gcs", "s3"]

OFTEN = ("plain", "sharded crc32c")
NEW = {"w": np.arange(20), "step": 2}


@pytest.fixture(params=["s3", "gcs"])
def url(request: pytest.FixtureRequest) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return f"{request.getfixturevalue(request.param)}/{name}"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout in OFTEN else pytest.mark.thorough)
        for layout in LAYOUTS
    ],
)
def test_everything_comes_back(url: str, layout: str) -> None:
    state = everything()
    xckpt.save(url, state, metadata={"run": 1}, options=LAYOUTS[layout])
    assert same(xckpt.load(url), expected(state))
    checkpoint = xckpt.open(url)
    assert checkpoint.verify() == [] and checkpoint.user_metadata == {"run": 1}
    stored = checkpoint["pieces"]
    assert isinstance(stored, xckpt.StoredArray)
    pieces = expected(state)["pieces"]
    assert isinstance(pieces, np.ndarray) and same(stored[5:60, 1], pieces[5:60, 1])
    assert "xckpt.saving" in keys(url)


def test_names_that_urls_would_quote(url: str) -> None:
    state = {"a b": {"ü%/?#": np.arange(3)}, "+&=": np.ones(2), "@(,)": np.zeros(1)}
    xckpt.save(f"{url}/a b%20+é", state)
    assert same(xckpt.load(f"{url}/a b%20+é"), state)


def test_overwrite(url: str) -> None:
    xckpt.save(url, everything())
    with pytest.raises(xckpt.CheckpointExistsError, match="overwrite=True"):
        xckpt.save(url, NEW)
    for step in (2, 3):
        xckpt.save(url, NEW | {"step": step}, overwrite=True)
        assert step_at(url) == step
    left = keys(url)
    root = xckpt.open(url).manifest.root
    assert [key for key in left if not key.startswith(f"{root}/")] == ["xckpt.json"]
    assert len([key for key in left if "/c/" in key]) == 1


def test_a_base_that_is_not_there_is_an_error(url: str) -> None:
    with pytest.raises(xckpt.NotACheckpointError, match="base: "):
        xckpt.save(f"{url}/other", {"w": np.arange(100)}, base=f"{url}/base")


def test_what_is_no_checkpoint_is_never_overwritten(url: str) -> None:
    store = open_store(Location.parse(url))
    store.write("notes.txt", b"mine").result()
    with pytest.raises(xckpt.CheckpointExistsError, match="holds no checkpoint"):
        xckpt.save(url, NEW)
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.load(url)
    assert keys(url) == ["notes.txt"]
    for step in (2, 3):
        xckpt.save(url, NEW | {"step": step}, overwrite=True)
        assert step_at(url) == step
        assert store.read("notes.txt").result().value == b"mine"


def test_an_overwrite_keeps_the_keys_of_the_user(url: str) -> None:
    xckpt.save(url, everything())
    store = open_store(Location.parse(url))
    store.write("own/c/0", b"mine").result()
    store.write("w.zarr/zarr.json", b"{}").result()
    for step in (2, 3):
        xckpt.save(url, NEW | {"step": step}, overwrite=True)
    root = xckpt.open(url).manifest.root
    others = [key for key in keys(url) if not key.startswith(f"{root}/")]
    assert others == ["own/c/0", "w.zarr/zarr.json", "xckpt.json"]


def test_only_one_of_two_fresh_saves_begins(url: str) -> None:
    first = begin(Location.parse(url), overwrite=False)
    assert first.step is Step.IN_PLACE
    with pytest.raises(xckpt.CheckpointExistsError, match="claimed by a save"):
        xckpt.save(url, NEW)
    first.abort()
    xckpt.save(url, NEW)
    assert step_at(url) == 2


def test_only_one_of_two_overwrites_commits(url: str) -> None:
    """The manifest is replaced only if it is still the one that the save has seen."""
    xckpt.save(url, NEW)
    slow = begin(Location.parse(url), overwrite=True)
    assert slow.step is Step.GENERATION
    open_store(slow.location).write("w/c/0", b"half").result()
    xckpt.save(url, NEW | {"step": 3}, overwrite=True)
    with pytest.raises(xckpt.CheckpointExistsError, match="another save committed here"):
        slow.publish(b"{}")
    slow.abort()
    assert step_at(url) == 3
    root = xckpt.open(url).manifest.root
    assert [key for key in keys(url) if not key.startswith(f"{root}/")] == ["xckpt.json"]


def test_an_unfinished_save_is_replaced_only_on_request(url: str) -> None:
    dead = begin(Location.parse(url), overwrite=False)
    open_store(dead.location).write("w/c/0", b"half").result()
    with pytest.raises(xckpt.CheckpointExistsError, match="if that save is dead"):
        xckpt.save(url, NEW)
    xckpt.save(url, NEW, overwrite=True)
    assert step_at(url) == 2 and "w/c/0" not in keys(url)
    with pytest.raises(xckpt.CheckpointExistsError, match="another save committed here"):
        dead.publish(b"{}")


def test_damage_is_named(url: str) -> None:
    xckpt.save(url, everything(), options=LAYOUTS["plain"])
    store = open_store(Location.parse(url))
    chunk = next(key for key in keys(url) if key.startswith("even/c/"))
    content = store.read(chunk).result().value
    store.write(chunk, content[:-1] + b"?").result()
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"even: \[0, "):
        xckpt.load(url)
    store.write(chunk, None).result()
    with pytest.raises(xckpt.CorruptCheckpointError, match="the chunk is missing"):
        xckpt.load(url)
    assert len(xckpt.open(url).verify()) == 1


@pytest.mark.parametrize("scheme", ["s3", "gcs"])
def test_a_bucket_that_is_not_there(scheme: str, request: pytest.FixtureRequest) -> None:
    """Neither a place for a checkpoint, nor one without: a training must not begin anew."""
    url = request.getfixturevalue(scheme).replace("bucket", "nowhere") + "/ckpt"
    with pytest.raises(xckpt.StorageError, match=f"{url}.*there is no such bucket"):
        xckpt.save(url, NEW)
    for read in (xckpt.load, xckpt.open, xckpt.exists):
        with pytest.raises(xckpt.StorageError, match=url):
            read(url)


DEAD = """
import sys, xckpt
try:
    xckpt.load(sys.argv[1])
except xckpt.StorageError as error:
    print(error)
"""


@pytest.mark.thorough
def test_an_endpoint_that_does_not_answer() -> None:
    """A clear error in half a minute, not in the quarter of an hour of TensorStore's defaults."""
    before = time.monotonic()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        nowhere = f"http://127.0.0.1:{held.getsockname()[1]}"
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": nowhere,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_REGION": "us-east-1",
            "TENSORSTORE_GCS_HTTP_URL": nowhere,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }
        urls = ["s3://bucket/ckpt", "gs://bucket/ckpt"]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", DEAD, url],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for url in urls
        ]
        outputs = [process.communicate(timeout=90) for process in processes]
    for url, process, (output, errors) in zip(urls, processes, outputs, strict=True):
        assert process.returncode == 0, errors
        assert output.startswith(f"{url}: ") and "Could not connect to server" in output
    assert time.monotonic() - before < 60 * ALLOWANCE
