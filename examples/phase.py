"""What the demo's processes pass to each other: checkpoints, records, and a report per phase."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

FROM_TORCH = "saved-by-torch"
"""The checkpoint that 4 torch ranks save."""

FROM_JAX = "saved-by-jax"
"""The checkpoint that JAX saves."""

RECORD_AT_SAVE = "record-at-save"
"""The record of the state when torch saved it."""

RECORD_AT_END = "record-at-end"
"""The record of the weights after the last step of the run that nothing interrupted."""

STEPS_BEFORE = range(3)
"""Optimizer steps before the checkpoint."""

STEPS_AFTER = range(3, 6)
"""Optimizer steps after it: once uninterrupted, once from what came back through JAX."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor in one phase."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the whole tensor, each element counted once."""
    sharding: str
    """As its framework writes it."""
    shards: tuple[tuple[int, ...], ...]
    """The shapes that occur among its shards."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that the demo claims, and whether it held."""

    claim: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one phase found."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    """By key path."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds: "save", "load"."""
    losses: dict[int, float] = field(default_factory=dict)
    """The global batch's loss, by optimizer step."""
    checks: list[Check] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Read what `write` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
