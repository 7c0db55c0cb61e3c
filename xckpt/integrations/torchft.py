"""torchft: a replica that comes back gets its state from another one through a folder or a bucket.

`XckptTransport` is a ``checkpoint_transport=`` of `torchft.Manager`. The sender saves, the receiver
waits for the commit and loads: contents are verified, nothing is unpickled, and a receiver that
comes late or again finds the same step.
"""

# torchft has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Final

from xckpt.api.load import load
from xckpt.api.places import exists
from xckpt.api.save import check_path, save
from xckpt.integrations.absent import absent
from xckpt.integrations.bases import bases_of
from xckpt.integrations.living import own_name, remove_of_dead
from xckpt.integrations.removal import remove, remove_empty
from xckpt.options import LoadOptions, SaveOptions
from xckpt.storage.location import Location

try:
    from torchft.checkpointing.transport import CheckpointTransport
except ImportError as error:
    CheckpointTransport = absent("torchft", error)

__all__ = ["XckptTransport"]

LOOK_SECONDS: Final = 0.1
"""How often a receiver looks whether the step is there."""


class XckptTransport(CheckpointTransport):
    """Sends a state to replicas that are behind, through a place that all of them see.

    Args:
        root: a folder, perhaps in memory, or a URL; each transport has a folder of its own in it.
        device: of the tensors that are received.
        options: for each save.
        load_options: for each load.

    Raises:
        PathError: xckpt cannot open such a root.
        TypeError: it is no path.

    Example:
        >>> import torch
        >>> from datetime import timedelta
        >>> sender, receiver = XckptTransport("states"), XckptTransport("states")
        >>> second = timedelta(seconds=1)
        >>> sender.send_checkpoint([1], 7, {"w": torch.ones(2), "step": 7}, second)
        >>> receiver.recv_checkpoint(0, sender.metadata(), 7, second)
        {'w': tensor([1., 1.]), 'step': 7}
        >>> sender.shutdown()
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        device: object = "cpu",
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        check_path(root, "XckptTransport(root)")
        self._place = str(Location.parse(root).within(own_name()))
        self._device, self._options, self._load_options = device, options, load_options
        self._sent: str | None = None

    def metadata(self) -> str:
        """What a receiver needs to know: where this transport saves."""
        return self._place

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Save a step; when it returns, the state may change. The step before is deleted.

        So is what killed replicas have sent: of this host at once, of others after a day.

        Raises:
            XckptError: as `xckpt.save`.
        """
        del dst_ranks, timeout
        remove_of_dead(self._place)
        path = f"{self._place}/{step}"
        base, options = bases_of(self).next(path), self._options
        save(path, state_dict, overwrite=True, base=base, no_dist=True, options=options)
        self._forget(path)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Load a step, once it is committed.

        Raises:
            TimeoutError: it is not in time.
            XckptError: as `xckpt.load`.
        """
        path, until = f"{metadata}/{step}", time.monotonic() + timeout.total_seconds()
        while not exists(path):
            if time.monotonic() > until:
                raise TimeoutError(f"rank {src_rank} has sent no step {step} to {path}")
            time.sleep(LOOK_SECONDS)
        options, device = self._load_options, self._device
        return load(path, framework="torch", device=device, no_dist=True, options=options)

    def shutdown(self, wait: bool = True) -> None:
        """Delete what was sent, and the folder of this transport."""
        del wait
        self._forget(None)
        remove_empty(self._place)

    def _forget(self, successor: str | None) -> None:
        if self._sent is not None and self._sent != successor:
            remove(self._sent)
        self._sent = successor
