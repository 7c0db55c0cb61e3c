"""Model conversion: leaves of one model become leaves of another, provably and box by box.

A `Mapping` is data: rules of anchored names and invertible operations. On shapes alone it resolves
to strided copies; see `xckpt.mapping.strided_copy` for that normal form.

`convert` writes a checkpoint of another model or format; only this name imports TensorStore.
"""

import importlib
from typing import TYPE_CHECKING

from xckpt.convert.family import family
from xckpt.mapping.infer.infer import Inference, infer
from xckpt.mapping.mapping import LeafMapping as Mapping
from xckpt.mapping.optimizer.rules import with_optimizer
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy

if TYPE_CHECKING:
    from xckpt.convert.run import convert

__all__ = [
    "Inference",
    "Mapping",
    "ResolvedMapping",
    "Rule",
    "StridedCopy",
    "TensorSpec",
    "convert",
    "family",
    "infer",
    "with_optimizer",
]


def __getattr__(name: str) -> object:
    """Import what reads and writes when it is first used."""
    if name == "convert":
        return importlib.import_module("xckpt.convert.run").convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a user may name, for completion: also what is not loaded yet."""
    return __all__
