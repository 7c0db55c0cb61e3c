"""The table of element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from xckpt.core.dtypes import DTYPES, dtype_name, item_size, numpy_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_a_name_is_numpys_own_and_leads_back(name):
    dtype = numpy_dtype(name)
    assert dtype.name == name and dtype_name(dtype) == name
    assert item_size(name) == dtype.itemsize == np.zeros(3, dtype).nbytes // 3


@pytest.mark.parametrize("spelling", ["<f4", ">f4", "=i8", ">c16", "longlong", "intc", "?"])
def test_any_spelling_of_a_type_has_the_one_name(spelling):
    dtype = np.dtype(spelling)
    assert dtype_name(dtype) == dtype.newbyteorder("=").name


@pytest.mark.parametrize(
    "dtype", ["O", "S3", "U2", "V4", "M8[s]", "m8[ns]", "f4,i4", "longdouble", "clongdouble"]
)
def test_types_that_the_format_lacks_have_no_name(dtype):
    assert dtype_name(np.dtype(dtype)) is None


def test_ml_dtypes_that_the_format_lacks_have_no_name():
    assert dtype_name(np.dtype(ml_dtypes.uint4)) is None


def test_an_unknown_name_is_a_key_error():
    for look_up in (numpy_dtype, item_size):
        with pytest.raises(KeyError):
            look_up("float7")
