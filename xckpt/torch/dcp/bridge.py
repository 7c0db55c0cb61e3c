"""xckpt's planner protocol, answered by a DCP planner.

xckpt's storage asks a planner for data and for places to put data. `SaveBridge` and `LoadBridge`
pass these questions on, so that DCP's planners work with xckpt's own writer and reader:

1. An item is passed on as the DCP item that it came from.
2. What a planner hands out is checked as every tensor is: sparse, quantised and freed
   ones are refused by name.
3. DCP's protocol promises a load no concurrency, so its planner is called by one thread at a time.
4. What a planner raises is raised as it is, though the storage takes it for its own failure.
5. A target that NumPy cannot fill with the stored elements as they are (another dtype or device, a
   tensor subclass) is filled by `Tensor.copy_`, as DCP does it, from memory of the stored dtype.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadItemType

from xckpt.core.adapter import Adapters
from xckpt.core.geometry.box import Box
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from xckpt.core.plan.items import ReadItem, WriteItem
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.save import SavePlanner
from xckpt.core.plan.wanted import Countdown
from xckpt.core.values import ValueText, decode_content, value_kind
from xckpt.errors import PlanError, XckptError
from xckpt.formats.dcp.keys import StoredObject
from xckpt.formats.torch_save.archive import value_in
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.leaf import (
    check_readable,
    fillable,
    plain,
    reachable,
    torch_dtype,
)
from xckpt.torch.target import mark_changed

SMALL_BYTES = 1 << 16
"""Longest bytes of an object that are looked into for a plain value."""


def _planned_by_dcp(*_: object) -> NoReturn:
    """The hooks of a planner that are not called here."""
    raise AssertionError("torch's planner has planned already")


class _Bridge:
    """Remembers what the planner has raised."""

    set_up_planner: Any = _planned_by_dcp
    create_local_plan: Any = _planned_by_dcp
    create_global_plan: Any = _planned_by_dcp
    finish_plan: Any = _planned_by_dcp
    adapters = Adapters((ADAPTER,))
    failure: BaseException | None = None

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around every call of the planner's hooks."""
        try:
            yield
        except BaseException as error:
            self.failure = self.failure or error
            raise

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Around the storage's work: raise the planner's error, if there is one, as it was."""
        try:
            yield
        except Exception:
            if self.failure is not None:
                raise self.failure from None
            raise


class SaveBridge(_Bridge, SavePlanner):
    """Gives data from a DCP planner."""

    def __init__(
        self, planner: dcp.SavePlanner, items: Mapping[tuple[str, object], dcp.WriteItem]
    ) -> None:
        self.planner = planner
        self.items = items
        """(leaf name, offsets of the box, or None for bytes) -> DCP's item."""

    def resolve_data(self, write_item: WriteItem) -> object:
        """What the planner has for the item: a tensor at rest, or BytesIO.

        Raises:
            UnsupportedLeafError: its elements cannot be read as they are.
            PlanError: it is not a tensor.
        """
        index = write_item.index
        item = self.items[index.fqn, index.offset]
        with self.asking():
            data = self.planner.resolve_data(item)
        if write_item.tensor_data is None:
            return _spelled_out(data)
        if not isinstance(data, torch.Tensor):
            raise PlanError(
                f"{item.index.fqn}: resolve_data must return a tensor, not {type(data).__name__}"
            )
        local = plain(data, item.index.fqn)
        check_readable(local, item.index.fqn)
        return local


def _on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """New host memory, whatever device is the user's default."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _spelled_out(data: object) -> object:
    """A small plain value in place of the bytes that `torch.save` made of it; else these bytes.

    So any load gets the value.
    """
    if isinstance(data, io.BytesIO) and data.getbuffer().nbytes <= SMALL_BYTES:
        with contextlib.suppress(XckptError):
            value = value_in(data.getvalue())
            if value_kind(value) is not None:
                return ValueText(value)
    return data


@dataclass(slots=True)
class Wanted:
    """Something that a DCP read item asks for, and how much of it is still to come."""

    item: dcp.ReadItem
    stored: StoredObject
    target: torch.Tensor | None = None
    """The planner's own tensor, where what is read goes elsewhere first."""
    values: dict[str, object] = field(default_factory=dict[str, object])
    """For an object: leaf name -> value or tensor, as far as they have been read."""
    missing: Countdown = field(default_factory=lambda: Countdown(0))
    """For an object: how many values, and elements of tensors, are still to be read."""


class LoadBridge(_Bridge, LoadPlanner):
    """Gives what is read to a DCP planner.

    The index of an xckpt item's destination is the number of the `Wanted` that it is for.
    """

    def __init__(
        self, planner: dcp.LoadPlanner, metadata: Metadata, wanted: Sequence[Wanted]
    ) -> None:
        self.planner = planner
        self.metadata = metadata
        self.wanted = wanted
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Hand over what needs no reading: boxes and objects without elements."""
        for wanted in self.wanted:
            if wanted.item.type is LoadItemType.TENSOR:
                if prod(wanted.item.lengths) == 0:
                    self._commit(wanted, self._resolve(wanted))
                continue
            missing = 0
            for name in wanted.stored.leaves:
                stored = self.metadata.state_dict_metadata[name]
                if isinstance(stored, TensorStorageMetadata):
                    wanted.values[name] = _on_host(stored.size, self._dtype(name))
                    missing += prod(stored.size)
                else:
                    missing += 1
            wanted.missing = Countdown(missing)
            if not missing:
                self._hand_over(wanted)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Pass bytes on as they were saved; a Python value as `torch.save` would write it."""
        wanted, name = self._wanted(read_item), read_item.storage_index.fqn
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, BytesStorageMetadata)
        content = value.getvalue()
        if stored.kind != "opaque":
            decoded = decode_content(name, stored.kind, content)
            self._arrived(wanted, name, 1, decoded)
        elif wanted.stored.leaf is None:
            self._arrived(wanted, name, 1, content)
        else:
            with self._lock, self.asking():
                self.planner.load_bytes(wanted.item, io.BytesIO(content))

    def resolve_tensor(self, read_item: ReadItem) -> object:
        """The planner's own tensor, or memory of the stored dtype where that is to be copied.

        Raises:
            PlanError: the planner's tensor is not of the item's sizes.
        """
        wanted, name = self._wanted(read_item), read_item.storage_index.fqn
        if wanted.item.type is not LoadItemType.TENSOR:
            whole = wanted.values[name]
            assert isinstance(whole, torch.Tensor)
            return whole[Box(read_item.dest_offsets, read_item.lengths).slices()]
        target = self._resolve(wanted)
        stored = self._dtype(name)
        if target.dtype == stored and fillable(target) is not None and reachable(target):
            return target
        wanted.target = target
        return _on_host(target.shape, stored)

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        """Copy where that is due, and tell the planner."""
        assert isinstance(tensor, torch.Tensor)
        wanted, name = self._wanted(read_item), read_item.storage_index.fqn
        if wanted.item.type is not LoadItemType.TENSOR:
            self._arrived(wanted, name, tensor.numel(), wanted.values[name])
            return
        target = wanted.target
        if target is not None:
            with torch.inference_mode(target.is_inference()):
                target.copy_(tensor)
            tensor, wanted.target = target, None
        else:
            mark_changed([tensor])
        self._commit(wanted, tensor)

    def _wanted(self, item: ReadItem) -> Wanted:
        assert item.dest_index.index is not None
        return self.wanted[item.dest_index.index]

    def _resolve(self, wanted: Wanted) -> torch.Tensor:
        item = wanted.item
        with self._lock, self.asking():
            target = self.planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            raise PlanError(
                f"{item.dest_index.fqn}: resolve_tensor must return {tuple(item.lengths)} "
                f"elements, got {tuple(target.shape)}"
            )
        return target

    def _commit(self, wanted: Wanted, tensor: torch.Tensor) -> None:
        with self._lock, self.asking():
            self.planner.commit_tensor(wanted.item, tensor)

    def _arrived(self, wanted: Wanted, name: str, count: int, value: object) -> None:
        """Note a part of an object; the last one completes it."""
        with self._lock:
            wanted.values[name] = value
        if wanted.missing.land(count) == 0:
            self._hand_over(wanted)

    def _hand_over(self, wanted: Wanted) -> None:
        content = io.BytesIO()
        torch.save(wanted.stored.build(wanted.values), content)
        content.seek(0)
        wanted.values.clear()
        with self._lock, self.asking():
            self.planner.load_bytes(wanted.item, content)

    def _dtype(self, name: str) -> torch.dtype:
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        dtype = torch_dtype(stored.properties.dtype)
        assert dtype is not None
        return dtype
