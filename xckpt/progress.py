"""Reports of a call: bytes or files as it goes, and a summary of a save or load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xckpt.core.text.shown import documented

__all__ = ["Metrics", "Progress"]


@documented
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a call is on this rank: most count the bytes that they have written or read.

    Example:
        >>> import numpy as np, xckpt
        >>> seen = []
        >>> options = xckpt.SaveOptions(progress=seen.append)
        >>> _ = xckpt.save("memory://example-progress", {"w": np.ones(4)}, options=options)
        >>> seen[-1]
        Progress(done=32, total=32, unit='bytes')
    """

    done: int
    """Bytes written, or read and verified; or how many of another unit."""
    total: int
    """How many there are to do."""
    unit: str = "bytes"
    """What is counted: ``"bytes"``; ``"files"`` (or keys) where a checkpoint is deleted;
    ``"leaves"`` while a conversion proves a mapping of very many, before it counts bytes."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a save, a load or another call took on one rank.

    Example:
        >>> took = Metrics(operation="save", path="run/7", bytes=3 << 30, seconds=2.0)
        >>> took.gibibytes_per_second
        1.5
        >>> took.line()
        'save run/7: rank 0 of 1 wrote 3.00 GiB in 2.00 s (1.50 GiB/s), 0.00 s waiting for other ranks'
    """  # noqa: E501  # a log message is one line

    operation: str
    """The call: ``"save"``, ``"save_async"``, ``"save_state_dict"``, ``"load"``, ``"load_into"``,
    ``"load_state_dict"``, ``"convert"``, ``"copy"``, ``"diff"``, ``"delete"`` or ``"gc"``;
    ``"dcp.save"`` and ``"dcp.load"`` by torch's DCP."""
    path: str
    """The path or URL."""
    rank: int = 0
    """This rank's number."""
    ranks: int = 1
    """How many ranks save or load together."""
    bytes: int
    """Bytes of tensors that this rank wrote or read; shared ones count. Bytes of the files that a
    copy has, of the tensors that `diff` compared; 0 for `delete` and `gc`."""
    shared: int = 0
    """Bytes that were not written because a save's ``base`` has them."""
    seconds: float
    """The time of the whole call; for an asynchronous save, from the end of the copy on."""
    waited_seconds: float = 0.0
    """The part of `seconds` spent waiting for other ranks."""
    steps: Mapping[str, float] = field(default_factory=dict[str, float])
    """Step -> seconds that this rank worked in it."""
    error: str = ""
    """The class of the error that ended it; empty after a success."""

    @property
    def gibibytes_per_second(self) -> float:
        """Bytes over seconds, in GiB/s."""
        return self.bytes / (1 << 30) / self.seconds if self.seconds else 0.0

    def line(self) -> str:
        """One line for a log."""
        about = f"{self.operation} {self.path}: rank {self.rank} of {self.ranks}"
        waited = f"{self.waited_seconds:.2f} s waiting for other ranks"
        if self.error:
            return f"{about} failed after {self.seconds:.2f} s ({self.error}), {waited}"
        if self.operation in ("delete", "gc"):
            return f"{about} took {self.seconds:.2f} s"
        done = "wrote"
        if self.operation == "diff" or self.operation.removeprefix("dcp.").startswith("load"):
            done = "read"
        size = f"{self.bytes / (1 << 30):.2f} GiB"
        if self.bytes < 1 << 30:
            size = f"{self.bytes / (1 << 20):.2f} MiB"
        if self.shared:
            size += f", {100 * self.shared / self.bytes:.1f}% of it shared,"
        return (
            f"{about} {done} {size} in {self.seconds:.2f} s "
            f"({self.gibibytes_per_second:.2f} GiB/s), {waited}"
        )
