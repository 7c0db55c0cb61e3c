"""What many ranks report, put together, against a dictionary of what each chunk has."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.steps import steps
from xckpt.core.manifest.entries import BytesEntry, Manifest, TensorEntry
from xckpt.core.manifest.write_counts import writers_in_words
from xckpt.engine.save import Reports
from xckpt.errors import PlanError
from xckpt.storage.chunks.columns import draft_name
from xckpt.storage.chunks.orders import Written, WrittenValue
from xckpt.storage.chunks.units import TOGETHER, merged_digests
from xckpt.storage.write_checkpoint import ZarrStorageWriter

A, B = (TensorEntry(name, "int8", (size,), chunk=(1,)) for name, size in (("a", 96), ("c", 70)))
DRAFT = Manifest((A, B), "")
WHOLE = Manifest((A, BytesEntry("b", "opaque", 5, 1), B), "")
"""The chunks of the long value lie between those of the tensors."""
NAME = draft_name(DRAFT)


def digest(number: int) -> bytes:
    """That of a chunk of the whole manifest."""
    return number.to_bytes(16, "big", signed=True)


def report(chunks: np.ndarray, *, with_value: bool = False, draft: bytes = NAME) -> Written:
    """The report of a rank that has written chunks of the draft, and perhaps the long value."""
    numbers = [n + 5 * (n >= 96) for n in chunks.tolist()]
    values = np.arange(5)[::-1]
    value = WrittenValue("b", values.tobytes(), b"".join(digest(96 + n) for n in values.tolist()))
    return Written(
        [value] if with_value else [],
        {},
        draft=draft,
        chunks=chunks.astype(np.int64).tobytes(),
        digests=b"".join(map(digest, numbers)),
    )


def reports(ranks: int, seed: int) -> list[Written]:
    """All chunks, dealt out at random; a rank in the middle has the long value too."""
    rng = np.random.default_rng(seed)
    writer = rng.integers(0, ranks, 166)
    dealt = [rng.permutation(np.flatnonzero(writer == rank)) for rank in range(ranks)]
    return [report(own, with_value=rank == ranks // 2) for rank, own in enumerate(dealt)]


@examples(25)
@given(st.integers(2, 2 * TOGETHER + 9), st.integers(0, 1 << 30))
def test_each_digest_is_in_its_place(ranks: int, seed: int):
    written = reports(ranks, seed)
    content, placing = merged_digests(WHOLE, DRAFT, written)
    assert content == b"".join(map(digest, range(171)))
    for rank, each in enumerate(written):
        taken = b"".join([each.digests, *(value.digests for value in each.long_values)])
        numbers = placing.numbers([each], rank).tolist()
        assert taken == b"".join(map(digest, numbers))


def test_the_coordinator_does_not_copy_what_ranks_report():
    """The digests of 10,240 ranks are long together."""
    reports = Reports(ZarrStorageWriter("memory://reports"))
    sent = report(np.arange(96))
    message = bytearray(reports.encode(sent))
    received = reports.decode(message)
    assert isinstance(received, Written) and received.digests == sent.digests
    message[message.index(sent.digests)] ^= 255
    assert received.digests != sent.digests


def test_a_chunk_that_is_missing_and_one_written_twice_are_named():
    written = reports(100, 7)
    # As many chunks as there are, all the same.
    written[70] = report(np.array([3]))
    (owner,) = (
        rank
        for rank, each in enumerate(written)
        if rank != 70 and 3 in np.frombuffer(each.chunks, np.int64)
    )
    with pytest.raises(PlanError, match="do not write every chunk exactly once") as caught:
        merged_digests(WHOLE, DRAFT, written)
    assert f"a: [3, 4) was written by {writers_in_words(sorted([owner, 70]))}" in str(caught.value)
    assert "was written by no rank" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        report(np.array([3]), draft=b"another"),
        report(np.array([166])),
        report(np.array([-1])),
        msgspec.structs.replace(report(np.array([3])), digests=b""),
    ],
    ids=["another draft", "too high", "negative", "no digest"],
)
def test_the_rank_of_a_report_that_does_not_fit_is_named(wrong: Written):
    written = reports(100, 7)
    written[81] = wrong
    with pytest.raises(PlanError, match=r"^rank 81 wrote by the orders of another plan"):
        merged_digests(WHOLE, DRAFT, written)


def test_a_rank_more_is_few_steps():
    few, many = (
        steps(partial(merged_digests, WHOLE, DRAFT, reports(ranks, 3)))
        for ranks in (TOGETHER, 3 * TOGETHER)
    )
    assert (many - few) / (2 * TOGETHER) < 15
