"""Planners for states on XLA devices, and their shards on the host.

`xckpt.save`, `load` and `load_into` take tensors on XLA devices with no planner named. These
planners are for code that names one, as torch_xla's own examples do, and for those who override a
step; they also tell the sharded leaves from the others. What a leaf is and how its elements move is
in `xckpt.torch.xla.adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping

from xckpt.core.leaf import SourceLeaf
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.torch.xla.cpu_shards import CpuShards

__all__ = ["CpuShards", "SPMDLoadPlanner", "SPMDSavePlanner"]


class SPMDSavePlanner(DefaultSavePlanner):
    """Saves a state whose tensors live on XLA devices, sharded or not.

    Each local shard is an item, replicas once; a tensor is transferred to the host once, and each
    shard is let go after its last use. ``resolve_data`` may be called again: then it transfers
    again. Takes `CpuShards`, the shards of a staged state, as well.

    Example:
        >>> import xckpt
        >>> planner = SPMDSavePlanner()
        >>> _ = xckpt.save("memory://spmd", {"step": 3}, planner=planner)
        >>> sorted(planner.sharded_state_dict), sorted(planner.unsharded_state_dict)
        ([], ['step'])
    """

    @property
    def sharded_state_dict(self) -> Mapping[str, SourceLeaf]:
        """Leaf name -> the leaves of which a device holds less than the whole."""
        sources = {
            name: leaf for name, leaf in self._leaves.items() if isinstance(leaf, SourceLeaf)
        }
        return {name: leaf for name, leaf in sources.items() if leaf.sharded}

    @property
    def unsharded_state_dict(self) -> Mapping[str, object]:
        """Leaf name -> the rest: replicated tensors, plain tensors and values."""
        sharded = self.sharded_state_dict
        return {name: leaf for name, leaf in self._leaves.items() if name not in sharded}


class SPMDLoadPlanner(DefaultLoadPlanner):
    """Loads into a state whose tensors are on XLA devices and sharded already, in place.

    A tensor's shards are collected on the host and go to its devices together, when the last
    element has come; until then the tensor is as it was. Padding is kept.

    Args:
        strict: refuse missing and unexpected leaves; otherwise load what is shared.
        cast: allow another dtype than the stored one.
    """

    def __init__(self, *, strict: bool = True, cast: bool = False) -> None:
        super().__init__(strict=strict, cast=cast, in_place=True)
