"""What a load does about leaves that one side lacks, and what it reports when it is done.

1. `Strictness` holds the caller's two rules: for leaves of the target that the checkpoint lacks
   (missing), and for leaves of the checkpoint that no rank asks for (unexpected).
2. `LoadReport` says what became of each leaf, on one rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from xckpt.core.leaf import TargetLeaf
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.targets.numbers import NumberTarget
from xckpt.core.text.arguments import any_repr
from xckpt.core.text.printable import in_few
from xckpt.core.text.shown import documented
from xckpt.errors import SHOWN_PROBLEMS

Severity = Literal["error", "warn", "ignore"]
"""What to do about a leaf that one side lacks."""


@dataclass(frozen=True, slots=True)
class Strictness:
    """What to do about leaves that one side lacks.

    Example:
        >>> Strictness.of(strict=False, missing="warn", unexpected=None)
        Strictness(missing='warn', unexpected='ignore')
    """

    missing: Severity = "error"
    unexpected: Severity = "error"

    @classmethod
    def of(cls, strict: bool, missing: Severity | None, unexpected: Severity | None) -> Strictness:
        """The rules that a caller gave; ``strict`` speaks for those that are None.

        Raises:
            ValueError: a rule is not one of the three.
        """
        for name, rule in (("missing", missing), ("unexpected", unexpected)):
            if not _is_rule(rule):
                shown = any_repr(rule)
                raise ValueError(f'{name} must be "error", "warn" or "ignore", not {shown}')
        usual: Severity = "error" if strict else "ignore"
        return cls(missing or usual, unexpected or usual)

    def arguments(self) -> dict[str, str]:
        """The rules in words; all ranks must have the same."""
        return {"missing": repr(self.missing), "unexpected": repr(self.unexpected)}

    def warn(self, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Warn where a rule says so."""
        if missing and self.missing == "warn":
            kept = f"{_counted(missing)} kept as before, not in the checkpoint"
            warnings.warn(f"{kept}: {_listed(missing)}", UserWarning, stacklevel=2)
        if unexpected and self.unexpected == "warn":
            left = f"{_counted(unexpected)} left in the checkpoint, not wanted"
            warnings.warn(f"{left}: {_listed(unexpected)}", UserWarning, stacklevel=2)


@documented
@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of each leaf in a load, as this rank sees it.

    Example:
        >>> report = LoadReport(("w", "b"), {"w": ("float32", "bfloat16")}, left=("opt/mu",))
        >>> print(report)
        loaded 2 leaves
        cast 1 leaf: w (float32 to bfloat16)
        left 1 leaf: opt/mu
        >>> report.complete
        False
    """

    loaded: tuple[str, ...] = ()
    """The leaves that were loaded, in the target's order. One that the checkpoint lacks, and that a
    leaf that it is tied to has filled, comes behind that one."""
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Those that changed their type -> the stored one and the target's: dtypes, or types of
    Python numbers."""
    kept: tuple[str, ...] = ()
    """Leaves of the target that the checkpoint lacks; they are as they were."""
    left: tuple[str, ...] = ()
    """Leaves of the checkpoint that no rank asked for."""
    cleared: tuple[str, ...] = ()
    """Leaves of the target that are gone: the checkpoint holds an empty dict in their place."""

    @property
    def complete(self) -> bool:
        """Whether the target now has the checkpoint's leaves, and no others."""
        return not self.kept and not self.left

    def __str__(self) -> str:
        cast = [f"{name} ({before} to {after})" for name, (before, after) in self.cast.items()]
        lines = [f"loaded {_counted(self.loaded)}"]
        named = ("cast", cast), ("kept", self.kept), ("left", self.left), ("cleared", self.cleared)
        lines += [f"{verb} {_counted(names)}: {_listed(names)}" for verb, names in named if names]
        return "\n".join(lines)

    def __repr__(self) -> str:
        counts = ("loaded", self.loaded), ("cast", self.cast), ("kept", self.kept)
        gone = [("cleared", self.cleared)] if self.cleared else []
        named = (*counts, ("left", self.left), *gone)
        words = ", ".join(f"{len(names)} {verb}" for verb, names in named)
        return f"LoadReport({words})"


def reported(
    targets: Mapping[str, TargetLeaf | None],
    metadata: Metadata,
    left: tuple[str, ...],
    tied: Mapping[str, str] | None = None,
    cleared: Sequence[str] = (),
) -> LoadReport:
    """The report of a load into these targets.

    Args:
        targets: leaf name -> target; None for a Python value.
        metadata: the checkpoint's.
        left: leaves of the checkpoint that no rank asked for.
        tied: leaf that the checkpoint lacks -> the target that has filled both.
        cleared: leaves that are gone.
    """
    filled: dict[str, list[str]] = {}
    for name, by in (tied or {}).items():
        filled.setdefault(by, []).append(name)
    loaded: list[str] = []
    kept: list[str] = []
    cast: dict[str, tuple[str, str]] = {}
    for name, target in targets.items():
        stored = metadata.state_dict_metadata.get(name)
        if stored is None:
            kept.append(name)
            continue
        names = [name, *filled.get(name, ())]
        loaded += names
        if target is not None:
            tensor = isinstance(stored, TensorStorageMetadata)
            before = stored.properties.dtype if tensor else stored.kind
            after = target.kind if isinstance(target, NumberTarget) else target.dtype or before
            if before != after:
                cast |= dict.fromkeys(names, (before, after))
    return LoadReport(tuple(loaded), cast, tuple(kept), left, tuple(cleared))


def _counted(names: Sequence[str]) -> str:
    return "1 leaf" if len(names) == 1 else f"{len(names):,} leaves"


def _listed(names: Sequence[str]) -> str:
    return in_few([name or "the root" for name in names], SHOWN_PROBLEMS)


def _is_rule(given: object) -> bool:
    return given is None or (isinstance(given, str) and given in get_args(Severity))
