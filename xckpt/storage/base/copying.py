"""Sharing in a bucket: it copies the object of an equal chunk, and none of its bytes travel.

1. A copy is begun as soon as the digests are equal (`xckpt.storage.base.objects`); it goes on
   beside what is written, and holds none of the memory that writes share.
2. A copy that fails is followed by no other, unless only its object is missing.
3. In the end all copies are waited for. Then the base must still be what it was: a copy that was
   made before is one of its own object. What is missing or may be another's is written after all,
   from the caller's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import starmap

import numpy as np

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.plan.items import WriteItem
from xckpt.errors import StorageError
from xckpt.storage.array import plain_bools
from xckpt.storage.base.objects import BaseObjects
from xckpt.storage.base.packs import EqualPack, by_item
from xckpt.storage.base.sharing import SharingWrites, joined, unit_digests
from xckpt.storage.budget import Reservation
from xckpt.storage.chunks.orders import BaseOrders, Written
from xckpt.storage.chunks.units import Taken, Unit
from xckpt.storage.chunks.write_chunks import UnderWay, item_units
from xckpt.storage.location import REQUESTS, Location, answer, storage_errors


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A unit whose object is copied; its elements are not kept."""

    item: WriteItem
    array: ZarrArray
    number: int
    key: str
    nbytes: int
    asked: Future[None]


class CopyingWrites(SharingWrites[BaseObjects]):
    """The writes of one rank to a bucket that holds the base too."""

    def _open_base(self, base: BaseOrders, target: Location) -> BaseObjects:
        self._most = self.where.access.concurrency or REQUESTS
        self._copies: deque[_Copy] = deque()
        """Those under way."""
        self._copied: list[_Copy] = []
        self._failed: list[_Copy] = []
        self._refused = ""
        """Why no more copies are asked for."""
        there = replace(target, access=self.where.access)
        return BaseObjects(base, self._there.values(), there)

    def _elements(self, unit: Unit) -> object:
        assert self._base is not None
        return self._base.elements(unit, self.codecs)

    def _begin(self, unit: Unit, reservation: Reservation | None, taken: Taken = ()) -> UnderWay:
        """Have a unit's object copied, or begin to write it."""
        known = b"" if self._refused else self._known(unit)
        taken = unit_digests(unit) if known else taken
        is_equal = bool(known) and joined(taken) == known
        if not is_equal or (self._verify and not self._is_sound(unit, known)):
            return super()._begin(unit, reservation, taken)
        assert self._base is not None and unit.item is not None
        with storage_errors(f"{self.where}: {unit.array.leaf}"):
            documents = tuple(starmap(self._root.write, self._documents(unit)))
        key = unit.array.key(unit.box.offsets)
        about = unit.item, unit.array, unit.number, key, unit.data.nbytes
        self._copies.append(_Copy(*about, self._base.copy(key)))
        self._report.note(unit.array, taken)
        begun = UnderWay(unit.array.leaf, 0, documents, None)
        self._under_way.add(begun)
        if reservation is not None:
            reservation.unit_done()
        self._settle(self._most)
        return begun

    def _settle(self, most: int) -> None:
        """Wait until at most ``most`` copies are under way."""
        while len(self._copies) > most:
            try:
                copy = self._copies.popleft()
            except IndexError:  # another thread waits for it
                return
            problem = self._failure(copy.asked, f"{copy.array.leaf}: the base's chunk")
            if problem:
                self._note_problem(problem)
                self._failed.append(copy)
            else:
                self._copied.append(copy)
                self.progress.add(copy.nbytes)

    def _failure(self, asked: Future[None], what: str) -> str:
        """Wait for a copy; why it failed, or nothing."""
        try:
            answer(asked, self.where)
        except FileNotFoundError:
            return f"{what} is missing"
        except StorageError as error:
            self._refused = f"the bucket does not copy: {error}"
            return self._refused
        return ""

    def _share_each(self, packs: Sequence[EqualPack]) -> Iterable[str]:
        assert self._base is not None
        if self._refused:
            return [self._refused] * len(packs)
        asked = [self._base.copy(pack.key) for pack in packs]
        problems = [
            self._failure(each, f"{pack.leaf}: the base's pack")
            for pack, each in zip(packs, asked, strict=True)
        ]
        copied = [pack.key for pack, problem in zip(packs, problems, strict=True) if not problem]
        problem = self._base.problem(copied[0]) if copied else ""
        return [each or problem for each in problems]

    def finish(self) -> Written:
        """Wait for every copy, write what was not copied after all, and report."""
        self._share_packs()
        self._settle(0)
        if self._copied and self._base is not None:
            problem = self._base.problem(self._copied[-1].key)
            if problem:
                self._note_problem(problem)
                self._failed += self._copied
                self._copied = []
        self._write_again()
        self._note_shared(sum(copy.nbytes for copy in self._copied))
        return super().finish()

    def _write_again(self) -> None:
        """Begin to write the units whose copies failed; their digests are known."""
        under_way = 0
        failed = ((copy.item, copy.array, copy.number) for copy in self._failed)
        for item, array, numbers in by_item(failed):
            for unit in item_units(item, array, self.planner):
                if unit.number in numbers:
                    data = plain_bools(np.asarray(unit.data, order="C"))
                    with storage_errors(f"{self.where}: {array.leaf}"):
                        writing = UnderWay(
                            array.leaf, data.nbytes, (self._write(unit, data),), None
                        )
                    self._under_way.add(writing)
                    self._begun.append(writing)
                    under_way += data.nbytes
                while self._begun and under_way > self.memory_bytes:
                    first = self._begun.popleft()
                    self._wait(first)
                    under_way -= first.nbytes
