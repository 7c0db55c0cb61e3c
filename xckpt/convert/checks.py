"""The proof that a mapping fits: on shapes alone, before a byte is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from xckpt.convert.resolved import ResolvedMapping
from xckpt.convert.tensors import TensorSpec
from xckpt.core.boxes import interval

__all__ = ["problems_with"]


def problems_with(resolved: ResolvedMapping, target: Mapping[str, TensorSpec]) -> list[str]:
    """All that keeps a resolved mapping from making just these leaves of all of its source."""
    return [*_unused(resolved), *_unmade(resolved, target), *_misfits(resolved, target)]


def _whole(spec: TensorSpec) -> str:
    return interval((0,) * len(spec.shape), spec.shape)


def _unused(resolved: ResolvedMapping) -> Iterator[str]:
    for name in resolved.unused:
        yield f"source {name!r}: no rule uses {_whole(resolved.sources[name])}"


def _unmade(resolved: ResolvedMapping, target: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name, spec in target.items():
        if name not in resolved.targets:
            yield f"target {name!r}: no rule makes {_whole(spec)}"


def _misfits(resolved: ResolvedMapping, target: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name, made in resolved.targets.items():
        if name not in target:
            yield f"target {name!r} is not wanted; rule {resolved.makers[name]} makes it"
        elif made != target[name]:
            yield f"target {name!r} is {target[name]}; rule {resolved.makers[name]} makes {made}"
