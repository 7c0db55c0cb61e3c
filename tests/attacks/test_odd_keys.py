"""Buckets that hold odd objects: markers of folders, a key that is the path itself, other versions.

A checkpoint beside them is saved, loaded, replaced and deleted as elsewhere, or the call is an
error of xckpt; what is not the checkpoint's stays.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import boto3
import numpy as np
import pytest

import xckpt
from tests.attacks.victim import outcome
from tests.storage.commit.test_each_request import s3 as counted_s3
from tests.support import counted_bucket, gcs_server
from tests.support.counted_bucket import CountedBucket
from tests.support.faulty_bucket import Altered, Fault, FaultyBucket, Request, never
from tests.support.servers import bucket, environment, faulty_gcs, gcs, s3
from tests.support.stored import keys
from xckpt.storage.location import Location, open_store

__all__ = ["bucket", "counted_s3", "environment", "faulty_gcs", "gcs", "s3"]

PLAIN, PACKED = xckpt.SaveOptions(pack_bytes=0), xckpt.SaveOptions(pack_bytes=1 << 16)
_numbers = itertools.count()
thorough = pytest.mark.thorough


def state(step: int) -> dict[str, object]:
    return {**{f"w{n}": np.full(30, step) for n in range(3)}, "step": step}


def step_at(url: str) -> int:
    """The step of the whole state at a URL; 0 for none."""
    try:
        opened = xckpt.open(url)
    except xckpt.NotACheckpointError:
        return 0
    assert opened.verify() == []
    loaded = xckpt.load(url)
    assert all(np.all(np.asarray(leaf) == loaded["step"]) for leaf in loaded.values())
    return int(loaded["step"])


def put(url: str, key: str, content: bytes = b"") -> None:
    """Write an object of the user's, by its whole key in the bucket."""
    kind, _, rest = url.partition("://")
    open_store(Location.parse(f"{kind}://{rest.partition('/')[0]}")).write(key, content).result()


def has(url: str, key: str) -> bool:
    kind, _, rest = url.partition("://")
    store = open_store(Location.parse(f"{kind}://{rest.partition('/')[0]}"))
    return store.read(key).result().state == "value"


@pytest.fixture(params=["s3", "gcs"])
def url(request: pytest.FixtureRequest) -> str:
    """A path in a bucket: of moto's S3, or of Google's storage."""
    return f"{request.getfixturevalue(request.param)}/odd-keys-{next(_numbers)}"


def folder_of(url: str) -> str:
    return url.partition("://")[2].partition("/")[2]


def life(url: str) -> None:
    """Saves, loads, an overwrite, a deletion: each works."""
    for step in (1, 2, 3):
        xckpt.save(url, state(step), overwrite=True, options=PLAIN)
        assert step_at(url) == step
    xckpt.copy(url, f"{url}-copy", overwrite=True)
    assert step_at(f"{url}-copy") == 3
    xckpt.delete(url)
    assert step_at(url) == 0 and not xckpt.exists(url)
    xckpt.gc(url, older_than=0)


@pytest.mark.parametrize(
    "where",
    ["/", *(pytest.param(e, marks=thorough) for e in ("", "-x/xckpt.json", "0/xckpt.json"))],
)
def test_a_key_that_is_the_path_itself(url: str, where: str) -> None:
    """Or the marker of its folder, or begins as it does: nothing of a checkpoint's."""
    key = f"{folder_of(url)}{where}"
    put(url, key, b"mine")
    xckpt.save(url, state(1))
    life(url)
    assert has(url, key)


@thorough
@pytest.mark.parametrize("marker", ["", "w1/", "w1/c/", "c/", "xckpt.packs/", ".generations/"])
def test_markers_of_folders(url: str, marker: str) -> None:
    """Consoles and file systems over buckets make empty objects whose keys end in a slash."""
    key = f"{folder_of(url)}/{marker}"
    put(url, key)
    life(url)
    if not marker.startswith((".generations", "xckpt.")):  # such names are xckpt's
        assert has(url, key)
    put(url, key)
    xckpt.save(url, state(4), overwrite=True, options=PACKED)
    assert step_at(url) == 4


@thorough
def test_a_marker_is_no_step_of_a_run(url: str) -> None:
    folder = folder_of(url)
    for name in ("", "step-00000001/", "step-00000002/", "step-00000002/w/"):
        put(url, f"{folder}/{name}")
    with xckpt.CheckpointManager(url) as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(1, state(1), force=True)
    assert [each.number for each in checkpoints.steps()] == [1]
    assert step_at(f"{url}/step-00000001") == 1


ODD = (
    "a b",
    "a+b",
    "a%2Fb",
    "a%",
    "ä ö",
    "\u202e",
    "a&b<c>'\"",
    "a?b#c=d;e",
    "a//b",
    "../a",
    "./a",
    "~",
    "*",
    "{x}",
    "日本",
)


@thorough
@pytest.mark.parametrize("number", range(len(ODD)))
def test_keys_of_odd_characters_stay(url: str, number: int) -> None:
    """Beside the checkpoint and above it; leaves may have such names, too."""
    name = ODD[number]
    key = f"{folder_of(url)}/{name}"
    put(url, key, b"mine")
    life(url)
    assert has(url, key)
    xckpt.save(url, {name: np.arange(3), "step": 1}, overwrite=True, options=PLAIN)
    assert np.array_equal(xckpt.load(url)[name], np.arange(3))
    xckpt.delete(url)
    assert has(url, key) and [each for each in keys(url) if each.startswith("xckpt")] == []


@thorough
def test_a_bucket_of_versions(s3: str) -> None:
    """What is deleted stays as an older version, which nothing reads."""
    client = boto3.client(
        "s3", region_name="us-east-1", endpoint_url=os.environ["AWS_ENDPOINT_URL"]
    )
    client.create_bucket(Bucket="versions")
    client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    life("s3://versions/run")
    assert keys("s3://versions/run") == []
    older = client.list_object_versions(Bucket="versions", Prefix="run/")
    assert older["Versions"] and older["DeleteMarkers"]
    life("s3://versions/run")


@pytest.mark.parametrize("options", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("content", [b"", b"x"], ids=["empty", "a byte"])
def test_objects_in_place_of_others(
    bucket: CountedBucket, options: xckpt.SaveOptions, content: bytes
) -> None:
    """Each object of a checkpoint, one after the other: nothing wrong is loaded."""
    url = "s3://bucket/replaced"
    xckpt.save(url, state(1), options=options)
    for key, whole in dict(bucket.objects).items():
        bucket.objects[key] = f'"{next(_numbers)}"', content
        loaded = outcome(xckpt.load, url)
        assert loaded.xckpt or loaded.value["step"] == 1, (key, loaded)
        assert loaded.xckpt or np.array_equal(loaded.value["w1"], np.full(30, 1)), (key, loaded)
        verified = outcome(lambda: xckpt.open(url).verify())
        is_claim = key.endswith("xckpt.saving")
        assert is_claim or verified.xckpt or verified.value, (key, verified)
        again = outcome(xckpt.save, url, state(2))
        assert again.kind in ("CheckpointExistsError", "ManifestError"), (key, again)
        bucket.objects[key] = whole
    assert step_at(url) == 1
    for key in list(bucket.objects):
        bucket.objects[key] = '"none"', content
    xckpt.save(url, state(2), overwrite=True, options=options)
    assert step_at(url) == 2


@pytest.fixture(params=["counted_s3", "faulty_gcs"])
def paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FaultyBucket:
    """A bucket whose listings have pages of few keys."""
    monkeypatch.setattr(counted_bucket, "PAGE", 3)
    monkeypatch.setattr(gcs_server, "PAGE", 3)
    found: FaultyBucket = request.getfixturevalue(request.param)
    found.fault = never
    return found


def between_pages(act: Callable[[int], object], server: FaultyBucket) -> None:
    """Have something done before each page of a listing."""
    pages = itertools.count()

    def fault(request: Request) -> Fault:
        if request.listing:
            server.fault = never
            act(next(pages))
            server.fault = fault
        return None

    server.fault = fault


def test_keys_that_vanish_between_pages(paged: FaultyBucket) -> None:
    """They are not missed: by an overwrite, a collection, a deletion, a list of steps."""
    url = f"{paged.url}/pages-{next(_numbers)}"
    xckpt.save(url, state(1), options=PLAIN)
    for number in range(20):
        put(paged.url, f"{folder_of(url)}/mine-{number:02}", b"mine")
    store = open_store(Location.parse(url))

    def vanish(page: int) -> None:
        store.write(f"mine-{page:02}", None).result()
        store.write(f"mine-{19 - page:02}", None).result()

    between_pages(vanish, paged)
    xckpt.save(url, state(2), overwrite=True, options=PLAIN)
    paged.fault = never
    assert step_at(url) == 2
    between_pages(vanish, paged)
    assert xckpt.gc(url, older_than=0) == []
    xckpt.delete(url)
    paged.fault = never
    assert step_at(url) == 0 and all(key.startswith("mine-") for key in keys(url))


def test_steps_that_vanish_between_pages(paged: FaultyBucket) -> None:
    root = f"{paged.url}/vanishing-{next(_numbers)}"
    for step in (1, 2, 3):
        xckpt.save(f"{root}/{step}", state(step), options=PLAIN)
    between_pages(lambda page: page == 2 and xckpt.delete(f"{root}/2"), paged)
    found = [record.number for record in xckpt.CheckpointManager(root).steps()]
    paged.fault = never
    assert {1, 3} <= set(found)
    assert [record.number for record in xckpt.CheckpointManager(root).steps()] == [1, 3]


def test_a_chunk_that_changes_between_two_ranges(paged: FaultyBucket) -> None:
    """A pack is read in ranges; another content in its place is seen by its digests."""
    url = f"{paged.url}/ranges-{next(_numbers)}"
    xckpt.save(url, state(1), options=PACKED)
    seen = itertools.count()
    paged.fault = lambda request: (
        Altered(headers={"ETag": f'"{next(seen):032x}"'}, content=lambda data: data[::-1])
        if "xckpt.packs/" in request.path and request.method == "GET"
        else None
    )
    done = outcome(xckpt.load, url, select=["w1"])
    paged.fault = never
    assert done.kind == "done" or (done.xckpt and "w1" in done.text), done
    assert done.value is None or np.array_equal(done.value["w1"], np.full(30, 1))
    assert step_at(url) == 1
