"""Staging: a state that training may change becomes one that it cannot.

`AsyncStager` is the protocol that ``save_async`` works with. `BlockingAsyncStager` copies:

1. Flatten the state. Each leaf's adapter says which memory may change and how to build the same
   kind of leaf over copies (`Copyable`); a leaf that stands at several places is
   asked once.
2. Copy all that memory at once (`xckpt.engine.host_copy`): into new memory, or, cached, into the
   memory of the stage before.
3. Build the tree again with the new leaves.

JAX arrays cannot change, so they are not copied on the host; they are kept alive, so that donation
takes other memory.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from math import prod
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapters
from xckpt.core.leaf import Copyable, Part
from xckpt.core.names import split_name
from xckpt.core.problem import Problem
from xckpt.core.text.arguments import named
from xckpt.core.text.shown import readable_bytes
from xckpt.core.tree import FlatTree, flatten, rebuild
from xckpt.core.values import value_kind
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.fresh_memory import fresh
from xckpt.engine.host_copy import HostCopies
from xckpt.engine.limits import MEMORY
from xckpt.errors import LeafTooLargeError, UnsupportedLeafError
from xckpt.options import check_flags


@runtime_checkable
class AsyncStager(Protocol):
    """Makes a state that no longer changes while it is saved.

    ``save_async`` calls `stage` in the caller's thread and then saves what it returned in another.
    A subclass needs `stage` only.

    Example:
        >>> class Nothing(AsyncStager):
        ...     def stage(self, state_dict):
        ...         return state_dict
        >>> isinstance(Nothing(), AsyncStager), Nothing().should_synchronize_after_execute
        (True, True)
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``save_async`` calls `synchronize_staging` before it returns.

        If not, then either `stage` returns when all is copied, or the caller waits, with
        ``SaveFuture.staged`` or `synchronize_staging`, before changing the state.
        """
        return self._synchronize_after_execute

    @abc.abstractmethod
    def stage(self, state_dict: Any) -> Any:  # noqa: ANN401  # any tree, or a future of one
        """The same tree over memory that later changes do not reach.

        Returns the staged tree, or a `concurrent.futures.Future` of it if the copying goes on after
        the call.
        """
        ...

    def synchronize_staging(self) -> None:
        """Return when the state that was given to `stage` may be changed."""

    def close(self) -> None:
        """Release what is kept between stages."""


class BlockingAsyncStager(AsyncStager):
    """Copies the state into host memory and returns when that is done.

    The staged tree has the same containers and kinds of leaves: tensors, parameters and DTensors
    (0-d ones too) over copied memory, NumPy arrays, Python values. What shares memory in the state,
    tied weights or views of one buffer, shares it in the copy and is copied once. An object with a
    ``state_dict`` is asked for it once and becomes that dict. JAX arrays of the CPU back end are
    not copied, but kept alive, so that donation spares them; they become descriptions with NumPy
    views.

    Args:
        cache_staged_state_dict: keep the memory, and have the next `stage` overwrite it; the stager
            then holds one copy of the state for as long as it lives. Otherwise each stage takes new
            memory, which goes when the staged state does.
        type_check: refuse leaves that are neither tensors nor plain Python values, by name.
            Otherwise they are deep-copied.
        pin_memory: page-locked memory, which accelerators copy to faster. None: if the memory is
            cached and there is an accelerator.

    Raises:
        RuntimeError: pinned memory was asked for, and there is no accelerator.
        TypeError: an argument is neither True nor False.

    Example:
        >>> import numpy as np, xckpt
        >>> weights = np.ones(3)
        >>> staged = BlockingAsyncStager().stage({"w": weights, "tied": weights, "step": 1})
        >>> weights[:] = 0
        >>> staged
        {'w': array([1., 1., 1.]), 'tied': array([1., 1., 1.]), 'step': 1}
        >>> staged["w"] is staged["tied"]
        True
    """

    _synchronize_after_execute: bool = False

    def __init__(
        self,
        cache_staged_state_dict: bool = False,
        type_check: bool = False,
        pin_memory: bool | None = None,
    ) -> None:
        flags = {"cache_staged_state_dict": cache_staged_state_dict, "type_check": type_check}
        flags["pin_memory"] = False if pin_memory is None else pin_memory
        check_flags("BlockingAsyncStager", **flags)
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self.pin_memory = pin_memory
        if pin_memory and loaded_adapters().pinned_memory(0) is None:
            raise RuntimeError(
                "pinned memory was asked for, but no framework that is imported has an accelerator "
                "here; leave pin_memory out"
            )
        self.turn: Final = threading.RLock()
        """Held from `stage` until the memory is lent to the save: threads may share a stager."""
        self._copies = HostCopies(self._new, keep=cache_staged_state_dict)
        self._in_use: Future[Any] | None = None

    def stage(self, state_dict: Any) -> Any:  # noqa: ANN401  # any tree
        """A copy of the state on the host.

        While a save of what this stager has staged is in flight, a cached stager waits for it.

        Raises:
            UnsupportedLeafError: leaves that cannot be saved; all are listed by name.
            LeafTooLargeError: there is no memory for the copy; the largest leaf is named.
        """
        with self.turn:
            self._wait_until_free()
            return self._staged(state_dict, loaded_adapters(saves=True))

    def _staged(self, state_dict: object, adapters: Adapters) -> object:
        flat, copyables = self._look(state_dict, adapters)

        def build(copies: list[NDArray[np.generic]]) -> object:
            remaining = iter(copies)
            rebuilt = {
                identity: leaf.rebuild([next(remaining) for _ in leaf.parts])
                for identity, leaf in copyables.items()
            }

            def replace(name: str, leaf: object) -> object:
                return rebuilt.get(id(flat.leaves[name]), leaf)

            # Objects that keep their own state were asked for it already.
            states = {
                name: rebuild(state.tree, replace, adapters, at=split_name(name))
                for name, state in flat.objects.items()
            }
            return rebuild(state_dict, replace, adapters, finished=states)

        with _naming_largest(flat, copyables):
            return self._copies.copy(_parts(copyables), build)

    def prepare(self, state_dict: Any) -> None:  # noqa: ANN401  # any tree
        """Get the memory for a state like this one now, so that the first stage is as fast as any.

        Nothing is copied.

        Raises:
            UnsupportedLeafError: leaves that cannot be saved; all are listed by name.
            LeafTooLargeError: there is no memory for the copy; the largest leaf is named.
            ValueError: this stager does not keep its memory.
        """
        if not self.cache_staged_state_dict:
            raise ValueError("prepare is for BlockingAsyncStager(cache_staged_state_dict=True)")
        with self.turn:
            self._wait_until_free()
            flat, copyables = self._look(state_dict, loaded_adapters(saves=True))
            with _naming_largest(flat, copyables):
                self._copies.prepare(_parts(copyables))

    def lend(self, until: Future[Any]) -> None:
        """Keep cached memory as it is until a future is done: a save reads what is in it."""
        self._in_use = until

    def close(self) -> None:
        """Release the cached memory as soon as nothing uses it."""
        self._copies.release()

    def rest(self) -> None:
        """Let the system take the cached memory if it needs it; what was staged in it is void."""
        self._copies.offer()

    def _wait_until_free(self) -> None:
        if self.cache_staged_state_dict and self._in_use is not None:
            self._in_use.exception()
        self._in_use = None

    def _look(self, state: object, adapters: Adapters) -> tuple[FlatTree, dict[int, Copyable]]:
        """The state's leaves by name, and what must be done for those that can change, by id."""
        flat = flatten(state, adapters)
        copyables: dict[int, Copyable] = {}
        problems: list[str] = []
        for name, leaf in flat.leaves.items():
            if id(leaf) in copyables or value_kind(leaf) is not None:
                continue
            try:
                copyables[id(leaf)] = self._copyable(leaf, name, adapters)
            except UnsupportedLeafError as error:
                problems.append(Problem.about(name, str(error)))
        if problems:
            raise UnsupportedLeafError.leaves("cannot be saved", problems)
        return flat, copyables

    def _copyable(self, leaf: object, name: str, adapters: Adapters) -> Copyable:
        copyable = adapters.copyable(leaf, name)
        if copyable is not None:
            return copyable
        if self.type_check:
            from xckpt.core.text.advice import no_value  # few saves need it

            otherwise = "or stage without type_check"
            raise UnsupportedLeafError(f"{name or 'the root'}: {no_value(leaf, otherwise)}")
        try:
            copied = copy.deepcopy(leaf)
        except Exception as error:
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise UnsupportedLeafError(
                f"{name or 'the root'}: {named(kind)} cannot be copied ({error}); "
                f"remove it or convert it"
            ) from error
        return Copyable((), lambda copies: copied)

    def _new(self, size: int) -> NDArray[np.uint8]:
        pinned = self.pin_memory or (self.pin_memory is None and self.cache_staged_state_dict)
        memory = loaded_adapters().pinned_memory(size) if pinned else None
        return fresh(size) if memory is None else memory


@contextlib.contextmanager
def _naming_largest(flat: FlatTree, copyables: Mapping[int, Copyable]) -> Generator[None]:
    """Name the largest leaf of a state that there is no memory to copy."""
    try:
        yield
    except MemoryError as error:
        sizes = {
            name: sum(part.dtype.itemsize * prod(part.shape) for part in found.parts)
            for name, leaf in flat.leaves.items()
            if (found := copyables.get(id(leaf))) is not None
        }
        largest = max(sizes, key=sizes.__getitem__)
        raise LeafTooLargeError(
            f"not enough memory to copy the state, {readable_bytes(sum(sizes.values()))} on this "
            f"rank; its largest leaf is {largest or 'the root'}, {readable_bytes(sizes[largest])}: "
            f"{MEMORY}, or use xckpt.save, which copies nothing"
        ) from error


def _parts(copyables: Mapping[int, Copyable]) -> list[Part]:
    return [part for leaf in copyables.values() for part in leaf.parts]
