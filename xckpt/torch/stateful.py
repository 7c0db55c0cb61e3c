"""Objects with ``state_dict`` and ``load_state_dict``: modules, optimizers, schedulers, your own.

1. Any object that has both methods is one (torch calls it `Stateful`), except tensors and classes.
2. `open_object` calls ``state_dict`` once. Saving, that dict takes the object's place in the tree.
3. Loading, the dict's tensors are filled in place, and then, when every rank has read its part,
   ``load_state_dict`` is called once with the loaded dict.
4. An optimizer before its first step has no moments. Those of the checkpoint that have the shape of
   their parameter are loaded as that parameter is: on its device, with its mesh and placements. One
   that torch's optimizers make in that shape (`AS_PARAMETER`) has to have it. Any other tensor that
   the object has no place for is loaded whole, on the CPU.
5. The extra state of a module (``get_extra_state``) is loaded as it was saved, whatever the module
   gives now. Tensors of a learning rate scheduler are replaced by new ones, as torch does it.
6. An optimizer takes the state of as many parameters as it has, in as many groups.
7. An optimizer that was saved before its first step has an empty ``state``. Loaded, it empties that
   of an optimizer that has stepped, as torch's own ``load_state_dict`` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np
import torch

from xckpt.core.names import KeyPath
from xckpt.core.plan.new_leaves import weightless
from xckpt.core.text.arguments import named
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.leaf import torch_dtype

AS_PARAMETER: Final = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "prev",
        "ax",
    ]
)
"""Of the states of `torch.optim`'s optimizers those that have the shape of their parameter."""


EXTRA_STATE: Final = "_extra_state"
"""Under which name torch's modules keep what their ``get_extra_state`` gives."""


class _Stateful(Protocol):
    def state_dict(self) -> Mapping[str | int, object]: ...
    def load_state_dict(self, state_dict: Mapping[str | int, object], /) -> object: ...


@dataclass(frozen=True, slots=True)
class DictState:
    """The state dict of an object."""

    owner: _Stateful
    tree: Mapping[str | int, object]

    @property
    def clears(self) -> Collection[str]:
        """The states of an optimizer's parameters."""
        return ("state",) if isinstance(self.owner, torch.optim.Optimizer) else ()

    @property
    def replaces(self) -> bool:
        """Whether this is a scheduler, which may keep one tensor of a rate under two names."""
        return isinstance(self.owner, torch.optim.lr_scheduler.LRScheduler)

    @property
    def opaque(self) -> Collection[str | int]:
        """What ``get_extra_state`` gave: its size may depend on what a module has seen."""
        if not isinstance(self.owner, torch.nn.Module):
            return ()
        return [key for key in self.tree if str(key).rpartition(".")[2] == EXTRA_STATE]

    @property
    def lengths(self) -> Mapping[KeyPath, tuple[int, str]]:
        """An optimizer's groups, and the parameters of each, as torch's own optimizers take them.

        One whose class loads in another way, or has a hook for it, may take others.
        """
        owner, base = self.owner, torch.optim.Optimizer
        if not isinstance(owner, base) or type(owner).load_state_dict is not base.load_state_dict:
            return {}
        if getattr(owner, "_optimizer_load_state_dict_pre_hooks", None):
            return {}
        top, groups = "param_groups", owner.param_groups
        each: dict[KeyPath, tuple[int, str]] = {
            (top, number, "params"): (len(group["params"]), "parameters")
            for number, group in enumerate(groups)
        }
        return {(top,): (len(groups), "parameter groups"), **each}

    def like(self, keys: KeyPath, shape: tuple[int, ...], dtype: str) -> object:
        """A target like the parameter of an optimizer's tensor; without one, a whole on the CPU."""
        wanted = torch_dtype(dtype)
        if wanted is None:
            return weightless(shape, dtype)
        parameter, given = self._parameter(keys), self.tree.get(keys[0])
        if isinstance(self.owner, torch.nn.Module) and isinstance(given, torch.Tensor):
            return torch.empty((), dtype=wanted, device=given.device).expand(shape)
        fixed = type(self.owner).__module__.startswith("torch.optim.") and keys[-1] in AS_PARAMETER
        if parameter is None or (tuple(parameter.shape) != shape and not fixed):
            return torch.empty(shape, dtype=wanted, device="meta")
        if parameter.dtype == wanted:
            return parameter.detach()
        return torch.empty_like(parameter, dtype=wanted, device="meta", requires_grad=False)

    def load(self, tree: object) -> None:
        """Call the object's ``load_state_dict``."""
        self.owner.load_state_dict(cast(Mapping[str | int, object], tree))

    def _parameter(self, keys: KeyPath) -> torch.Tensor | None:
        """The parameter whose state has a leaf at ``keys``; None if this is not an optimizer."""
        if (
            not isinstance(self.owner, torch.optim.Optimizer)
            or keys[:1] != ("state",)
            or len(keys) < 2
        ):
            return None
        groups = cast(Iterable[Mapping[str, object]], self.tree.get("param_groups", ()))
        # The dict numbers the parameters in the order in which the groups hold them.
        numbers = [key for group in groups for key in cast(Sequence[object], group["params"])]
        parameters = [tensor for group in self.owner.param_groups for tensor in group["params"]]
        return dict(zip(numbers, parameters, strict=False)).get(keys[1])


def keeps_state(node: object) -> bool:
    """Whether an object has a state of its own to give and to take.

    Example:
        >>> keeps_state(torch.nn.Linear(2, 2)), keeps_state(torch.nn.Linear), keeps_state({})
        (True, False, False)
    """
    if isinstance(node, torch.Tensor | np.ndarray | type):
        return False
    methods = (getattr(node, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in methods)


def open_object(node: object, name: str) -> DictState | None:
    """The state dict of an object that has one, or None.

    Raises:
        UnsupportedLeafError: ``state_dict`` gives something else than a dict; or it is that of an
            optimizer over FSDP1, which has only a part of each moment and does not say which.

    Example:
        >>> state = open_object(torch.nn.Linear(2, 3), "model")
        >>> list(state.tree), open_object(torch.ones(2), "w") is None
        (['weight', 'bias'], True)
    """
    if not keeps_state(node):
        return None
    owner = cast(_Stateful, node)
    if isinstance(node, torch.optim.Optimizer) and _is_flattened(node):
        raise UnsupportedLeafError(
            f"{name or 'the root'}: the state_dict() of an optimizer over FSDP1 is a part that "
            f"does not know its place: give get_optimizer_state_dict(model, optimizer) of "
            f"torch.distributed.checkpoint.state_dict, or shard by fully_shard (FSDP2)"
        )
    try:
        tree = owner.state_dict()
    except Exception as error:
        error.add_note(f"{name or 'the root'}: its state_dict() failed.")
        raise
    if not isinstance(tree, Mapping):
        raise UnsupportedLeafError(
            f"{name or 'the root'}: state_dict() of this {type(node).__name__} gives "
            f"{named(type(tree).__name__)}; it must be a dict"
        )
    return DictState(owner, tree)


def _is_flattened(optimizer: torch.optim.Optimizer) -> bool:
    """Whether FSDP1 has flattened its parameters, among several ranks."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    groups = cast(Iterable[Mapping[str, Iterable[torch.Tensor]]], optimizer.param_groups)
    flattened = (
        getattr(each, "_fsdp_flattened", False) for group in groups for each in group["params"]
    )
    return distributed.get_world_size() > 1 and any(flattened)
