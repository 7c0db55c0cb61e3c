"""Planning a save: the protocol with its five hooks, the default planner, and what it does.

The default planner is thin. Each hook calls a pure function over plans:

1. ``set_up_planner``: flatten the state (`xckpt.core.tree`) and have adapters describe each leaf.
2. ``create_local_plan``: `local_plan` turns descriptions into columns.
3. ``create_global_plan``: `xckpt.core.plan.merge.global_plan` lays out each leaf, shares the work.
4. ``finish_plan``: leaves that transfer their data learn which boxes are theirs to write.
5. ``resolve_data``: the local shard's view that an item asks for.
"""

from __future__ import annotations

import abc
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import NO_ADAPTERS, Adapters
from xckpt.core.geometry.box import Block, Box, Boxes
from xckpt.core.geometry.box_lookup import BoxLookup
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.leaf import SourceLeaf, TransferringLeaf
from xckpt.core.manifest.rules import shape_fault
from xckpt.core.metadata import Metadata
from xckpt.core.part.replicas import all_replicas, small_replicas
from xckpt.core.plan.items import LeafRow, SavePlan, WriteItem, WriteItems
from xckpt.core.plan.merge import global_plan
from xckpt.core.problem import Problem
from xckpt.core.targets.find import is_code
from xckpt.core.text.arguments import wrong_argument
from xckpt.core.tree import flatten
from xckpt.core.values import encode_content, value_kind
from xckpt.errors import PlanError, UnsupportedLeafError

if TYPE_CHECKING:
    from xckpt.core.geometry.spread import Processes
    from xckpt.core.plan.alone.known import KnownPlans


class SavePlanner(abc.ABC):
    """How a save is planned; subclass `DefaultSavePlanner` to change one step.

    One planner serves one save at a time. The hooks are called in this order: `set_up_planner` and
    `create_local_plan` on every rank, `create_global_plan` on the coordinator, `finish_plan` on
    every rank, then `resolve_data` for each item, from several threads. Before the first of them
    the engine hands over the adapters, with `use_adapters`.
    """

    adapters: Adapters = NO_ADAPTERS
    """What knows the frameworks' tensors."""

    storage_meta: object = None
    """What the storage says (`StorageWriter.storage_meta`); the engine sets it before the hooks."""

    def use_adapters(self, adapters: Adapters) -> None:
        """Take the adapters of the frameworks whose tensors the state may hold."""
        self.adapters = adapters

    @abc.abstractmethod
    def set_up_planner(
        self,
        state_dict: Mapping[str, object],
        storage_meta: object = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state to save; it is not passed again.

        A planner may also take two arguments, ``state_dict`` and ``is_coordinator``.
        """

    def replicas(self) -> Iterable[tuple[str, str, object]]:
        """Name, type and data of each small leaf that ranks of the same type must have alike.

        The data are a tensor of any framework or a NumPy array. Called on every rank of a group of
        several, after `set_up_planner`. By default there are none, and nothing is compared.
        """
        return ()

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """What this rank could write: an item for each box that it holds."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each rank's share of the writing, and what the checkpoint will say about itself.

        Raises:
            PlanError: the ranks' boxes do not make up whole tensors, or the ranks disagree.
        """

    def lasting_key(self) -> str | None:
        """What the global plan depends on besides the local plans; None if that is not known.

        If it is known, ranks whose local plans are those of an earlier save keep their shares.
        """
        return None

    def known_plans(self, plan: SavePlan, rank: int, processes: Processes) -> KnownPlans | None:
        """All ranks' plans, if this rank (which made ``plan``) knows them; by default None."""
        return None

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Accept the coordinator's plan for this rank, perhaps adjusted."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> object:
        """The data of an item: a tensor of exactly its box (any framework), or an `io.BytesIO`.

        Must be lazy, idempotent and thread-safe.
        """


@dataclass(frozen=True, slots=True)
class _PlainValue:
    """A leaf that is a Python value."""

    kind: str
    value: object


class DefaultSavePlanner(SavePlanner):
    """Writes every element exactly once, spreading replicated boxes over their holders.

    Args:
        grid: target sizes of chunks and zarr shards; None for those that the storage asks for.
        compare_replicas: compare all that several ranks hold, large tensors and shards too; costs a
            pass over the state.
        serialise: turns a leaf that no adapter knows into bytes; by default it is refused by name.

    Raises:
        TypeError: an argument is of another type.

    Example:
        >>> planner = DefaultSavePlanner()
        >>> planner.set_up_planner({"w": np.arange(6.0).reshape(2, 3), "step": 7})
        >>> plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        >>> [item.index.fqn for item in plans[0].items]
        ['w', 'step']
        >>> metadata.state_dict_metadata["w"].size
        (2, 3)
    """

    def __init__(
        self,
        *,
        grid: GridOptions | None = None,
        compare_replicas: bool = False,
        serialise: Callable[[object], bytes] | None = None,
    ) -> None:
        if not isinstance(grid, GridOptions | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_argument("DefaultSavePlanner", "grid", "an xckpt.planner.GridOptions", grid)
        if compare_replicas not in (True, False):
            takes = "True or False"
            raise wrong_argument("DefaultSavePlanner", "compare_replicas", takes, compare_replicas)
        if serialise is not None and not callable(serialise):
            raise wrong_argument("DefaultSavePlanner", "serialise", "a function", serialise)
        self.grid, self.compare_replicas, self.serialise = grid, compare_replicas, serialise
        self._leaves: dict[str, SourceLeaf | _PlainValue] = {}
        self._containers: Mapping[str, str] = {}
        self._storage_grid: GridOptions | None = None
        self._lookups: dict[str, BoxLookup] = {}

    def set_up_planner(
        self,
        state_dict: Mapping[str, object],
        storage_meta: object = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state and describe each leaf.

        Raises:
            UnsupportedLeafError: leaves that cannot be saved; all are listed by name.
        """
        given = storage_meta if isinstance(storage_meta, GridOptions) else self.storage_meta
        self._storage_grid = given if isinstance(given, GridOptions) else None
        flat = flatten(state_dict, self.adapters)
        self._containers, self._leaves, self._lookups = flat.containers, {}, {}
        problems: list[str] = []
        for name, leaf in flat.leaves.items():
            try:
                self._leaves[name] = self._describe(leaf, name)
            except UnsupportedLeafError as error:
                problems.append(Problem.about(name, str(error)))
        if problems:
            raise UnsupportedLeafError.leaves("cannot be saved", problems)

    def _describe(self, leaf: object, name: str) -> SourceLeaf | _PlainValue:
        source = self.adapters.describe(leaf, name)
        if source is not None:
            if fault := shape_fault(tuple(source.shape), 1):  # an adapter may give a list
                raise UnsupportedLeafError(f"{name}: {fault}: reshape it first, or save less of it")
            return source
        if kind := value_kind(leaf) or ("" if self.serialise is None else "opaque"):
            return _PlainValue(kind, leaf)
        if is_code(leaf, name, self._containers):
            return _PlainValue("None", None)
        from xckpt.core.text.advice import no_value  # few saves need it

        otherwise = "or turn it into bytes by options=xckpt.SaveOptions(serialise=...)"
        raise UnsupportedLeafError(f"{name or 'the root'}: {no_value(leaf, otherwise)}")

    def replicas(self) -> Iterable[tuple[str, str, object]]:
        """The Python values and tensors that are compared; see `xckpt.core.part.replicas`."""
        values = {n: leaf for n, leaf in self._leaves.items() if isinstance(leaf, _PlainValue)}
        tensors = {n: leaf for n, leaf in self._leaves.items() if not isinstance(leaf, _PlainValue)}
        given = tensors, values, self._bytes, self._containers
        return (
            all_replicas(*given, self.adapters) if self.compare_replicas else small_replicas(*given)
        )

    def create_local_plan(self) -> SavePlan:
        """An item for each local shard and value."""
        return local_plan(self._leaves, self._containers)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Deduplicate, check the cover, choose grids and share the work."""
        return global_plan(all_plans, self.grid or self._storage_grid)

    def lasting_key(self) -> str | None:
        """The sizes of chunks, unless a subclass makes the global plan, or grids are kept."""
        grid = self.grid or self._storage_grid
        ours = self.create_global_plan == MethodType(DefaultSavePlanner.create_global_plan, self)
        return repr(grid) if ours and (grid is None or grid.kept is None) else None

    def known_plans(self, plan: SavePlan, rank: int, processes: Processes) -> KnownPlans | None:
        """What the leaves say of all ranks, unless a subclass makes the plans."""
        from xckpt.core.plan.alone.known import known_plans

        ours = self.create_local_plan == MethodType(DefaultSavePlanner.create_local_plan, self)
        if not ours or self.lasting_key() is None:
            return None
        return known_plans(plan, self._leaves, rank, processes, self.grid or self._storage_grid)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The coordinator's plan as it is; leaves that transfer their data learn of it."""
        transferring = {
            name: leaf
            for name, leaf in self._leaves.items()
            if hasattr(leaf, "expect") and isinstance(leaf, TransferringLeaf)
        }
        if not transferring:
            return new_plan
        uses = {name: [0] * len(leaf.boxes) for name, leaf in transferring.items()}
        for item in new_plan.items:
            leaf = transferring.get(item.index.fqn)
            if leaf is not None and item.tensor_data is not None:
                number = self._holder(item.index.fqn, leaf, item.tensor_data.chunk)
                if number is not None:
                    uses[item.index.fqn][number] += 1
        for name, leaf in transferring.items():
            leaf.expect(uses[name])
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> object:
        """The view of the local shard that holds the item's box, or the value's bytes.

        Raises:
            PlanError: this rank has no such leaf, or no local shard holds the box.
            UnsupportedLeafError: ``serialise`` failed.
        """
        name = write_item.index.fqn
        leaf = self._leaves.get(name)
        if leaf is None:
            fault = f"{name}: this rank has to write it, but has no leaf of this name"
            raise PlanError(f"{fault}; a planner that renames or moves items must resolve them too")
        if isinstance(leaf, _PlainValue) != (write_item.tensor_data is None):
            what = f"Python {leaf.kind}" if isinstance(leaf, _PlainValue) else "tensor"
            raise PlanError(f"{name}: planned as {write_item.type.name}, but it is a {what}")
        if isinstance(leaf, _PlainValue):
            return io.BytesIO(self._bytes(leaf, name))
        return self._view(leaf, write_item)

    def _view(self, leaf: SourceLeaf, item: WriteItem) -> object:
        """The part of a local shard that an item asks for; the shard itself if that is all."""
        assert item.tensor_data is not None
        name, box = item.index.fqn, item.tensor_data.chunk
        if not leaf.sharded and box.sizes == leaf.shape and not any(box.offsets):
            return leaf.data(0)  # as of most leaves
        number = self._holder(name, leaf, box)
        if number is None:
            raise PlanError(f"{name}: this rank has to write {box}, but does not hold it")
        # Every framework's shard has a shape and slices like NumPy's.
        shard: NDArray[np.generic] = leaf.data(number)  # type: ignore[assignment]
        is_all = tuple(shard.shape) == box.sizes  # as of most pieces
        return shard if is_all else shard[box.slices(leaf.boxes[number].offsets)]

    def _holder(self, name: str, leaf: SourceLeaf, box: Box) -> int | None:
        """The number of the local shard that holds a box."""
        if len(leaf.boxes) == 1:
            return 0 if leaf.boxes[0].holds(box) else None
        if name not in self._lookups:
            self._lookups[name] = BoxLookup(leaf.boxes)
        return self._lookups[name].holder(box)

    def _bytes(self, leaf: _PlainValue, name: str) -> bytes:
        return encode_content(name, leaf.kind, leaf.value, self.serialise)


def local_plan(
    leaves: Mapping[str, SourceLeaf | _PlainValue],
    containers: Mapping[str, str],
) -> SavePlan:
    """The plan of a rank that holds these leaves: a row for each leaf, an item for each box.

    Leaves are of one kind if they have one shape and dtype and the rank holds the same boxes.
    """
    numbers: dict[object, int] = {}
    by_rank: dict[int, list[tuple[int, Boxes]]] = {}
    rows: list[LeafRow] = []
    kinds: list[int] = []
    columns: dict[int, tuple[Boxes, int, bytes, bytes]] = {}
    for name, leaf in leaves.items():
        boxes, kind = Boxes.whole(()), None
        if isinstance(leaf, _PlainValue):
            rows.append(LeafRow(name, leaf.kind))
        else:
            boxes, shape = leaf.boxes, tuple(leaf.shape)
            if not len(boxes) and 0 in shape:  # without an item, a planner's own list would lose it
                boxes = Boxes.whole(shape)
            described = (bool(leaf.sharded), leaf.sharding, leaf.annotation)
            rows.append(LeafRow(name, "", leaf.dtype, shape, *described))
            if id(boxes) not in columns:  # leaves that lie alike have one object
                said = len(boxes), boxes.offsets.tobytes(), boxes.sizes.tobytes()
                columns[id(boxes)] = boxes, *said
            kind = leaf.dtype, shape, *columns[id(boxes)][1:]
        number = numbers.get(kind)
        if number is None:
            number = numbers[kind] = len(numbers)
            by_rank.setdefault(boxes.rank, []).append((number, boxes))
        kinds.append(number)
    blocks = [Block.of(numbered) for _, numbered in sorted(by_rank.items())]
    items = WriteItems(tuple(rows), blocks, np.array(kinds, np.int32))
    return SavePlan(items, containers=containers)
