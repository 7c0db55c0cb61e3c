"""Which steps of a run are kept, and which may be deleted.

1. The policies are asked about all records; what one of them keeps is kept.
2. The newest record is kept whatever they say. So are steps that no manager wrote, and links.
3. The rest may be deleted, oldest first.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Final

from xckpt.core.run.numbers import whole
from xckpt.core.run.policies import KeepPolicy, Records, name_of
from xckpt.core.run.record import StepRecord


def kept(records: Records, policies: Iterable[KeepPolicy]) -> frozenset[int]:
    """The numbers of the steps that are kept.

    Args:
        records: the good checkpoints of a run, each number once.
        policies: a step is kept if one of them keeps it.

    Raises:
        TypeError: a policy has not returned numbers of steps.

    Example:
        >>> from xckpt.core.run.policies import Latest, OnSteps
        >>> run = [StepRecord(step, time=60.0 * step) for step in (1, 2, 3, 4)]
        >>> sorted(kept(run, [OnSteps([1]), Latest(2)])), sorted(kept(run, []))
        ([1, 3, 4], [4])
    """
    in_order = sorted(records, key=lambda record: record.number)
    there = {record.number for record in in_order}
    # Each policy has a list of its own: some sort theirs, or empty it.
    chosen = {number for policy in policies for number in _chosen(policy, [*in_order])}
    foreign = {record.number for record in in_order if not record.managed}
    return frozenset(chosen & there | foreign | {each.number for each in in_order[-1:]})


MOST_CHOSEN: Final = 10_000_000
"""Numbers of steps that are taken from a policy; a generator may have no end."""


def _chosen(policy: KeepPolicy, records: list[StepRecord]) -> list[int]:
    found = policy(records)
    try:
        chosen = [whole(number) for number in islice(found, MOST_CHOSEN + 1)]
        if len(chosen) > MOST_CHOSEN:
            raise TypeError(f"more than {MOST_CHOSEN:,}")
        if any(number < 0 for number in chosen):
            raise TypeError("no step has a number below 0")
        return chosen
    except TypeError as error:
        raise TypeError(
            f"the keep policy {name_of(policy)} has to return the numbers of the steps to keep, "
            f"such as [record.number for record in records], not {reprlib.repr(found)}"
        ) from error


def deletable(records: Records, policies: Iterable[KeepPolicy]) -> list[StepRecord]:
    """The records of steps that no policy keeps, oldest first; never all, never the newest.

    Example:
        >>> from xckpt.core.run.policies import Latest
        >>> run = [StepRecord(step, time=60.0 * step) for step in (1, 2, 3)]
        >>> [record.number for record in deletable(run, [Latest(2)])]
        [1]
    """
    stays = kept(records, policies)
    gone = [record for record in records if record.number not in stays]
    return sorted(gone, key=lambda record: record.number)
