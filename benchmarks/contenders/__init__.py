"""The contenders, one file each.

``all_contenders`` lists them.  The order says nothing: it rotates from round to round.
"""

from __future__ import annotations

from benchmarks.contender import Contender
from benchmarks.contenders import dcp, memcpy, orbax, plain, raw_tensorstore, safetensors, xckpt


def all_contenders() -> tuple[Contender, ...]:
    """Every contender; xckpt with torch tensors and with JAX arrays."""
    return (
        memcpy.MEMCPY,
        plain.ONE_THREAD,
        plain.TWO_THREADS,
        plain.DIGESTED,
        dcp.ONE_THREAD,
        dcp.TWO_THREADS,
        dcp.THROUGH_XCKPT,
        safetensors.SAFETENSORS,
        orbax.ORBAX,
        raw_tensorstore.LEADING_CHUNKS,
        raw_tensorstore.WHOLE_CHUNKS,
        xckpt.WITH_TORCH,
        xckpt.WITH_JAX,
    )


def named(name: str) -> Contender:
    """The contender that has this name."""
    return next(found for found in all_contenders() if found.name == name)
