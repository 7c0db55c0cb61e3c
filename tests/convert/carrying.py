"""Carry a mapping out on arrays in memory, whole leaf by whole leaf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xckpt.convert import TensorSpec
from xckpt.core.dtypes import numpy_dtype
from xckpt.mapping.copy_elements import copy_elements
from xckpt.mapping.mapping import LeafMapping

Arrays = dict[str, NDArray[Any]]


def carried(mapping: LeafMapping, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """The target's arrays by mapping name, made of the source's."""
    specs = {name: TensorSpec(array.shape, str(array.dtype)) for name, array in arrays.items()}
    resolved = mapping.resolve(specs)
    made: Arrays = {}
    for name, spec in resolved.targets.items():
        made[name] = np.empty(spec.shape, numpy_dtype(spec.dtype))
        for copy in resolved.copies[name]:
            copy_elements(copy, None if copy.is_constant else arrays[copy.source], made[name])
    return made


def numbered(specs: Mapping[str, TensorSpec]) -> Arrays:
    """Arrays of which no two elements are alike, as far as the dtype can tell them apart."""
    start = 0
    arrays: Arrays = {}
    for name, spec in specs.items():
        size = int(np.prod(spec.shape))
        values = np.arange(start, start + size).reshape(spec.shape)
        arrays[name] = values.astype(numpy_dtype(spec.dtype))
        start += size
    return arrays
