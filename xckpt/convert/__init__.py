"""Model conversion: leaves of one model become leaves of another, provably and box by box.

A `Mapping` is data: rules of anchored names and invertible operations. On shapes alone it resolves
to strided copies; see `xckpt.convert.copies` for that normal form.
"""

from xckpt.convert.copies import StridedCopy
from xckpt.convert.families import family
from xckpt.convert.mapping import Mapping, ResolvedMapping
from xckpt.convert.rules import Rule
from xckpt.convert.tensors import TensorSpec

__all__ = ["Mapping", "ResolvedMapping", "Rule", "StridedCopy", "TensorSpec", "family"]
