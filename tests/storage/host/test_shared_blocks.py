"""Small tensors in packs are read once for all ranks that want them, whichever each one wants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from conformance.implementations.threads import ThreadGroup, results, run_ranks
from tests.support.altered_parcels import altered_parcels
from tests.support.counted_bucket import CountedBucket
from tests.support.examples import examples
from tests.support.servers import bucket
from xckpt.storage.host import shared_blocks

__all__ = ["altered_parcels", "bucket"]

pytestmark = pytest.mark.timeout(60)

URL = "s3://bucket/small"
STATE = {f"w{n:03}": np.full((16, 64), n, np.float32) for n in range(320)}
NAMES = sorted(STATE)
NBYTES = sum(array.nbytes for array in STATE.values())
PACKED = xckpt.SaveOptions(pack_bytes=1 << 18)


def options(group: ThreadGroup, a_host: int = 1, **more: Any) -> xckpt.LoadOptions:
    return xckpt.LoadOptions(host=f"host {group.rank // a_host}", **more)


def read_of_packs(bucket: CountedBucket) -> int:
    """Bytes of packs that were asked for since the last look."""
    return sum(each.answered for each in bucket.taken() if each.kind == "GET pack")


@pytest.mark.parametrize("block_bytes", [1 << 14, 1 << 22])
@pytest.mark.parametrize("a_host", [1, 2, 4])
def test_replicas(
    bucket: CountedBucket, a_host: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "BLOCK_BYTES", block_bytes)
    xckpt.save(URL, STATE, options=PACKED)
    bucket.taken()

    def load(group: ThreadGroup) -> Any:
        return xckpt.load(URL, group=group, options=options(group, a_host, memory_bytes=1 << 20))

    for state in results(4, load):
        assert all(np.array_equal(state[name], STATE[name]) for name in NAMES)
    assert read_of_packs(bucket) == NBYTES


def test_without_sharing_each_rank_reads_all(bucket: CountedBucket) -> None:
    xckpt.save(URL, STATE, options=PACKED)
    bucket.taken()

    def load(group: ThreadGroup) -> Any:
        return xckpt.load(URL, group=group, options=options(group, share_reads=False))

    results(3, load)
    assert read_of_packs(bucket) == 3 * NBYTES


def test_a_few_of_many_are_read_alone(bucket: CountedBucket) -> None:
    """A whole block, for two ranks that want two tensors of it, would be more than these twice."""
    xckpt.save(URL, STATE, options=PACKED)
    bucket.taken()
    few = [NAMES[0], NAMES[-1]]

    def load(group: ThreadGroup) -> Any:
        return xckpt.load(URL, select=few, group=group, options=options(group))

    for state in results(2, load):
        assert all(np.array_equal(state[name], STATE[name]) for name in few)
    assert read_of_packs(bucket) == 4 * STATE[NAMES[0]].nbytes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = str(tmp_path_factory.mktemp("blocks") / "ckpt")
    xckpt.save(where, STATE, options=PACKED)
    return where


_RUN = st.tuples(st.integers(0, 320), st.integers(0, 320)).map(sorted)


@examples(15)
@given(
    wanted=st.lists(st.lists(_RUN, min_size=1, max_size=3), min_size=2, max_size=4),
    a_host=st.integers(1, 2),
    block=st.integers(13, 18),
)
def test_whatever_each_rank_wants(path: str, wanted: list[Any], a_host: int, block: int) -> None:
    names = [sorted({n for low, high in runs for n in NAMES[low:high]}) for runs in wanted]

    def load(group: ThreadGroup) -> Any:
        like = {name: np.zeros((16, 64), np.float32) for name in names[group.rank]}
        about = {"unexpected": "ignore", "options": options(group, a_host, share_reads="job")}
        return xckpt.load(path, like, group=group, **about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_blocks, "BLOCK_BYTES", 1 << block)
        for rank, state in enumerate(results(len(names), load)):
            assert sorted(state) == names[rank]
            assert all(np.array_equal(state[name], STATE[name]) for name in names[rank])


@pytest.mark.parametrize("a_host", [1, 2])
@pytest.mark.parametrize("cut", [False, True])
def test_damage_is_named_on_every_rank(bucket: CountedBucket, a_host: int, cut: bool) -> None:
    xckpt.save(URL, STATE, options=PACKED)
    for name in [name for name in bucket.objects if "xckpt.packs/" in name]:
        tag, content = bucket.objects[name]
        content = content[:-1] if cut else content[:-1] + bytes([content[-1] ^ 1])
        bucket.objects[name] = tag, content

    def load(group: ThreadGroup) -> Any:
        return xckpt.load(URL, group=group, options=options(group, a_host))

    for outcome in run_ranks(4, load):
        assert isinstance(outcome.error, xckpt.CorruptCheckpointError)
        assert "w319: [0, 16) x [0, 64)" in str(outcome.error)


@pytest.mark.usefixtures("altered_parcels")
def test_what_a_host_sends_is_verified_by_the_taker(path: str) -> None:
    def load(group: ThreadGroup) -> Any:
        return xckpt.load(path, group=group, options=options(group, share_reads="job"))

    for outcome in run_ranks(2, load):
        assert isinstance(outcome.error, xckpt.CorruptCheckpointError)
        assert "w319: [0, 16) x [0, 64)" in str(outcome.error)
