"""What no such storage answers to a read is no word on the object: not that it is missing or short.

A cache that answers as to a condition made runs look empty and checkpoints missing; a proxy that
sent another range, or a page to sign in, made whole steps look damaged, and a run restore an older.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.faulty_bucket import Altered, Answer, Fault, Faults, FaultyBucket, Request, never
from tests.support.servers import environment, faulty_bucket, faulty_gcs, faulty_s3, gcs, s3
from xckpt.policies import EverySteps

__all__ = ["environment", "faulty_bucket", "faulty_gcs", "faulty_s3", "gcs", "s3"]

PACKED = xckpt.SaveOptions(pack_bytes=1 << 16)
PLAIN = xckpt.SaveOptions(pack_bytes=0)
SAID = "no answer of such a storage: check what is in between"


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(3000, step), "v": np.full(2000, step), "step": step}


def run_at(root: str) -> xckpt.CheckpointManager:
    return xckpt.CheckpointManager(root, save=EverySteps(1))


CALLS: dict[str, Callable[[str], Any]] = {
    "load": lambda root: xckpt.load(f"{root}/step-00000002"),
    "open": lambda root: xckpt.open(f"{root}/step-00000002"),
    "delete": lambda root: xckpt.delete(f"{root}/step-00000002"),
    "copy": lambda root: xckpt.copy(f"{root}/step-00000002", f"{root}/copy"),
    "diff": lambda root: xckpt.diff(f"{root}/step-00000001", f"{root}/step-00000002"),
    "save": lambda root: xckpt.save(f"{root}/step-00000002", state(3), overwrite=True),
    "steps": lambda root: run_at(root).steps(),
    "latest": lambda root: run_at(root).latest(),
    "restore": lambda root: run_at(root).restore(default=state(0)),
}


def to_reads(of: str, fault: Fault) -> Faults:
    def answer(request: Request) -> Fault:
        is_read = request.method == "GET" and not request.listing
        return fault if is_read and of in request.path else None

    return answer


def saved(faulty_bucket: FaultyBucket, name: str, options: xckpt.SaveOptions) -> str:
    """A run of two steps."""
    root = f"{faulty_bucket.url}/{name}"
    for step in (1, 2):
        xckpt.save(f"{root}/step-{step:08}", state(step), options=options)
    return root


LATER = pytest.mark.thorough
OTHERS = ("412", "page")
ODD = {
    "304": Answer(304),
    "412": Answer(412, "PreconditionFailed"),
    "page": Answer(200, "SignIn"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", ["304", *(pytest.param(each, marks=LATER) for each in OTHERS)])
def test_odd_answers_hide_no_checkpoint(faulty_bucket: FaultyBucket, what: str, call: str) -> None:
    root = saved(faulty_bucket, f"odd-{what}-{call}", PLAIN)
    faulty_bucket.fault = to_reads("xckpt.json", ODD[what])
    with pytest.raises(xckpt.StorageError, match=f"{root}.*{SAID}"):
        CALLS[call](root)
    faulty_bucket.fault = never
    assert run_at(root).restore()["step"] == 2


@pytest.mark.parametrize(
    ("of", "options"),
    [("/c/", PLAIN), ("xckpt.packs", PACKED), ("xckpt.digests", PLAIN)],
    ids=["chunks", "packs", "digests"],
)
@pytest.mark.parametrize("what", [pytest.param("412", marks=LATER), "another range", "another end"])
def test_odd_answers_make_no_step_look_damaged(
    faulty_bucket: FaultyBucket, what: str, of: str, options: xckpt.SaveOptions
) -> None:
    root = saved(
        faulty_bucket, f"sound-{what}-{options.pack_bytes}-{of[-3:]}".replace("/", ""), options
    )
    size = 1_000_000 if what == "another range" else 10
    other = Altered({"Content-Range": f"bytes 5-9/{size}"}, status=206)
    faulty_bucket.fault = to_reads(of, ODD.get(what, other))
    with pytest.raises(xckpt.StorageError, match=SAID):
        run_at(root).restore()
    faulty_bucket.fault = never
    assert run_at(root).restore()["step"] == 2


def test_an_object_that_is_short_is_damaged(faulty_bucket: FaultyBucket) -> None:
    """The range ends where the object does."""
    root = saved(faulty_bucket, "short", PACKED)
    cut = Altered({"Content-Range": "bytes 0-9/10"}, status=206, content=lambda data: data[:10])
    faulty_bucket.fault = to_reads("step-00000002/xckpt.packs", cut)
    with pytest.raises(xckpt.CorruptCheckpointError, match="step-00000002"):
        xckpt.load(f"{root}/step-00000002")
    with pytest.warns(UserWarning, match="step 1 was restored"):
        assert run_at(root).restore()["step"] == 1


@pytest.mark.parametrize("call", ["load", "steps"])
def test_a_proxy_that_wants_a_password_is_named(faulty_bucket: FaultyBucket, call: str) -> None:
    """A listing of Google's storage shows no status: its error names the proxy among others."""
    root = saved(faulty_bucket, f"wall-{call}", PLAIN)
    faulty_bucket.fault = lambda request: Answer(407)
    with pytest.raises(xckpt.StorageError, match=r"check .*(HTTPS_PROXY|the proxy)"):
        CALLS[call](root)
