"""Model conversion: leaves of one model become leaves of another, provably and box by box.

A `Mapping` is data: rules of anchored names and invertible operations. On shapes alone it resolves
to strided copies; see `xckpt.convert.copies` for that normal form.

`convert` writes a checkpoint of another model or format; TensorStore is loaded with it, and not
before.
"""

import importlib
from typing import TYPE_CHECKING

from xckpt.convert.copies import StridedCopy
from xckpt.convert.families import family
from xckpt.convert.inference import Inference, infer
from xckpt.convert.mapping import Mapping, ResolvedMapping
from xckpt.convert.optimizer import with_optimizer
from xckpt.convert.rules import Rule
from xckpt.convert.tensors import TensorSpec

if TYPE_CHECKING:
    from xckpt.convert.converting import convert

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
    """Load what reads and writes when somebody names it."""
    if name == "convert":
        return importlib.import_module("xckpt.convert.converting").convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
