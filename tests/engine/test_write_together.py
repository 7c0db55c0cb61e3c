"""Ranks that report before their data is durable: no rank writes when another takes it back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

from hypothesis import example, given
from hypothesis import strategies as st

from conformance.implementations.threads import ThreadGroup, results
from tests.support.examples import examples
from xckpt.core.metadata import Metadata
from xckpt.core.storage import StorageWriter
from xckpt.engine.save import Reports
from xckpt.engine.write_together import write_together
from xckpt.errors import RanksFailedError, StorageError

RANKS = 3
METADATA = Metadata({})


@dataclass
class Bucket:
    """What all ranks do, in the order in which they do it."""

    done: list[str] = field(default_factory=list[str])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def do(self, what: str, failing: frozenset[str]) -> None:
        with self.lock:
            self.done.append(what)
        if what in failing:
            raise StorageError(f"{what} is refused")


@dataclass
class Writer:
    """A writer of which each hook of each rank may fail."""

    rank: int
    bucket: Bucket
    failing: frozenset[str]
    early: bool

    def report_early(self) -> bool:
        return self.early

    def write(self) -> object:
        self.bucket.do(f"write {self.rank}", self.failing)
        return self.rank

    def follow(self, metadata: Metadata, reports: Sequence[object]) -> None:
        assert reports == list(range(RANKS)) and metadata is METADATA
        self.bucket.do("follow", self.failing)

    def settle(self) -> None:
        self.bucket.do(f"settle {self.rank}", self.failing)

    def commit(self, reports: list[object]) -> bytes:
        assert reports == list(range(RANKS))
        self.bucket.do("commit", self.failing)
        return b"manifest"


HOOKS = [f"{hook} {rank}" for hook in ("write", "settle") for rank in range(RANKS)]


@given(st.frozensets(st.sampled_from([*HOOKS, "follow", "commit"]), max_size=3))
@examples(25)
@example(frozenset())
@example(frozenset({"write 1"}))
@example(frozenset({"write 0", "settle 2"}))
@example(frozenset({"follow"}))
def test_no_rank_raises_before_all_have_come_to_their_end(failing: frozenset[str]) -> None:
    bucket = Bucket()

    def save(group: ThreadGroup) -> bytes | str:
        writer = Writer(group.rank, bucket, failing, early=True)
        # It has the hooks that these steps call.
        about = cast("StorageWriter", writer), METADATA, writer.write, writer.commit
        try:
            return write_together(group, *about, Reports(writer), lambda _: nullcontext())
        except (RanksFailedError, StorageError) as error:
            bucket.do("raised", frozenset())
            return str(error)

    answers = results(RANKS, save)
    done = bucket.done
    assert len(set(answers)) == 1
    assert ("commit" in done) == (not failing - {"commit"})
    if not failing:
        assert answers[0] == b"manifest"
        return
    assert any(each in str(answers[0]) for each in failing)
    wrote = [rank for rank in range(RANKS) if f"write {rank}" not in failing]
    ends = [done.index(f"settle {rank}") for rank in wrote]
    assert max(ends, default=-1) < done.index("raised")
    assert ("follow" in done) == (len(wrote) == RANKS)


def test_a_writer_that_does_not_report_early_is_not_waited_for_again() -> None:
    bucket = Bucket()

    def save(group: ThreadGroup) -> bytes:
        writer = Writer(group.rank, bucket, frozenset(), early=False)
        about = cast("StorageWriter", writer), METADATA, writer.write, writer.commit
        return write_together(group, *about, Reports(writer), lambda _: nullcontext())

    assert results(RANKS, save) == [b"manifest"] * RANKS
    assert sorted(bucket.done) == ["commit", *(f"write {rank}" for rank in range(RANKS))]
