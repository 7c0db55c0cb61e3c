"""What must be true of a run, kept beside it: which steps are whole, and what is in each.

Each rank has a `World` of its own, and all come to the same; that of rank 0 looks at the storage.

1. Every save has a tag, which is all its content; so a mixture of two saves is noticed.
2. `begin` and `commit` say what the manager was asked and has said. What was begun when a process
   was killed may be there or not (`World.begun`).
3. `look` compares with the storage, once nothing goes on in the background: what the policies keep
   of the whole steps is whole, what was saved last too; what does not load was damaged on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.sharded_arrays import cut
from xckpt.core.run.keeping import kept
from xckpt.core.run.policies import KeepPolicy
from xckpt.engine.ranks.group import LocalGroup
from xckpt.storage import run_steps
from xckpt.storage.location import Location, open_store

ROWS = 6


def state_of(tag: int, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """What a rank saves: rows of one array, all of another, one of its own, and the tag."""
    rows = ROWS // size
    whole = np.full((ROWS, 2), float(tag))
    mine = cut(whole, [((rank * rows, 0), (rows, 2))])
    own = xckpt.PerRank(np.full(3, own_of(tag, rank)))
    return {"rows": mine, "w": np.full(5, tag), "own": own, "tag": tag, "size": size}


def own_of(tag: int, rank: int) -> int:
    """What a rank has its own of."""
    return 10 * tag + rank


def tag_of(state: dict[str, Any]) -> int:
    """The tag of a state that was loaded as NumPy arrays; -1 if it is a mixture."""
    tag = int(state["tag"])
    whole = (np.asarray(state["rows"]) == tag).all() and (state["w"] == tag).all()
    own = {f"rank{rank}": [own_of(tag, rank)] * 3 for rank in range(state["size"])}
    found = {name: value.tolist() for name, value in state["own"].items()}
    return tag if whole and own == found else -1


@dataclass
class World:
    """A root, and what is known of it."""

    root: str
    keep: Sequence[KeepPolicy]
    good: dict[int, int] = field(default_factory=dict[int, int])
    """Step -> tag, of those that are committed and sound."""
    bad: set[int] = field(default_factory=set[int])
    """Steps that are there and damaged."""
    begun: dict[int, int] = field(default_factory=dict[int, int])
    """Step -> tag, of saves of which it is not known whether they are committed."""
    last: int | None = None
    """The step that was saved last, as far as is known, unless it was damaged or deleted."""

    def announce(self, step: int, tag: int) -> None:
        """A save is about to be asked for."""

    def begin(self, step: int, tag: int) -> None:
        """A save was begun, so those before it are committed."""
        self.commit()
        self.begun = {step: tag}

    def commit(self) -> None:
        """What was begun is committed."""
        for step, tag in self.begun.items():
            self.good[step], self.last = tag, step
            self.bad.discard(step)
        self.begun = {}

    def lose(self, step: int, *, damaged: bool) -> None:
        """A step was damaged or deleted on purpose."""
        self.good.pop(step, None)
        self.bad = self.bad | {step} if damaged else self.bad - {step}
        self.last = None if self.last == step else self.last

    @property
    def newest(self) -> int | None:
        return max(self.good, default=None)

    def there(self) -> dict[int, int]:
        """Step -> tag, of what is in the storage; -1 for what does not load."""
        return {step: self._tag(name) for step, name in self._names().items()}

    def _names(self) -> dict[int, str]:
        steps = run_steps.committed_steps(Location.parse(self.root))
        return {number: name for name, number in steps.items()}

    def _tag(self, name: str) -> int:
        try:
            return tag_of(xckpt.load(f"{self.root}/{name}", group=LocalGroup()))
        except (xckpt.CorruptCheckpointError, xckpt.ManifestError, xckpt.NotACheckpointError):
            return -1

    def look(self, records: Sequence[xckpt.StepRecord], latest: int | None) -> None:
        """Compare with the storage, when nothing goes on; what is gone by policy is forgotten.

        Args:
            records: what the manager lists.
            latest: what it says is the latest.
        """
        there = self.there()
        broken = {step for step, tag in there.items() if tag < 0}
        assert broken <= self.bad, f"steps {broken} are damaged, and {self.bad} may be"
        whole = {step: tag for step, tag in there.items() if tag >= 0}
        assert whole.items() <= self.good.items(), f"{whole} load, and {self.good} were saved"
        stays = kept(records, self.keep) & self.good.keys()
        assert stays <= whole.keys(), f"{stays} are to be kept, {whole} load, of {self.good}"
        assert self.last is None or self.last in whole, f"{self.last} was saved last, {whole} load"
        listed = {record.number for record in records}
        assert whole.keys() <= listed <= there.keys(), f"{listed} are listed, {there} are there"
        assert latest == max(listed, default=None)
        self.good = whole
        self.bad &= there.keys()

    def found(self) -> None:
        """After a kill: what was begun may be there, and what was kept must be."""
        there = self.there()
        for step, tag in self.begun.items():
            if there.get(step) == tag:
                self.good[step], self.last = tag, step
                self.bad.discard(step)
        self.begun = {}
        whole = {step: tag for step, tag in there.items() if tag >= 0}
        assert whole.items() <= self.good.items(), f"{whole} load, and {self.good} were saved"
        assert self.last is None or self.last in whole, f"{self.last} was saved last, {whole} load"
        assert not self.good or whole, f"nothing loads, and {self.good} were saved"
        self.good = whole
        self.bad &= there.keys()

    def damage(self, step: int, how: int) -> None:
        """Spoil a step in the storage: a chunk's bytes, its length, or the manifest."""
        name = self._names()[step]
        store = open_store(Location.parse(f"{self.root}/{name}"))
        if how % 3 == 2:
            store.write("xckpt.json", b'{"half": ').result()
            return
        keys = [key for key in store.list().result() if b"/c/" in key or key.endswith(b"/c")]
        key = sorted(key for key in keys if b"w/" in key)[-1]
        content = store.read(key).result().value
        store.write(key, bytes(b ^ 1 for b in content) if how % 3 else content[:-1]).result()


def restored(
    manager: xckpt.CheckpointManager, world: World, rank: int, size: int
) -> tuple[int | None, list[int]]:
    """Restore, and compare with what must be found: the newest good step, the bad ones skipped."""
    newest = world.newest
    try:
        state = manager.restore(default=None)
    except xckpt.CorruptCheckpointError:
        assert newest is None and world.bad, f"{world.good} are good"
        return None, sorted(world.bad)
    skipped = sorted(each.number for each in manager.skipped)
    if state is None:
        assert newest is None and not world.bad
        return None, []
    assert manager.restored is not None
    found = manager.restored.number
    assert found == newest and tag_of(state) == world.good[found], f"{found}, not {newest}"
    assert skipped == sorted(step for step in world.bad if step > found)
    assert all(str(each.error) for each in manager.skipped)
    like = {**state, "own": xckpt.PerRank(np.zeros(3, int))}
    if state["size"] == size:
        assert manager.restore(like)["own"].value.tolist() == [own_of(tag_of(state), rank)] * 3
    else:
        with pytest.raises(xckpt.TreeMismatchError, match="own/rank"):
            manager.restore(like)
    world.last = found
    return found, skipped
