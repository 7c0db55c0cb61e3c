"""zarr-python's view of the types that NumPy lacks: bfloat16, float8, float4, int4, int2.

Importing this module registers the types; the entry-point group `zarr.data_type` names them, so
that zarr-python can do so by itself. (zarr-python up to 3.1.6 collects that group and never loads
it: there, write `import xckpt.zarr_dtypes` before you open such an array.) Each class wraps one
ml_dtypes type under the name that TensorStore writes into zarr.json, in Zarr format 3:

1. **Names**: a name in zarr.json, or a NumPy dtype, selects the class.
2. **Elements** are the little-endian bytes that both sides keep in memory; types below 8 bits
   take one byte each.
3. **Fill values** are numbers, `"NaN"`, `"Infinity"`, `"-Infinity"`, or the bits in hexadecimal
   (`"0x7fc1"`), as TensorStore spells them. (For float8_e8m0fnu, TensorStore 0.1.86 takes numbers
   other than 0 for something else; the number counts here.)

Reading is bit-exact. When *writing* with zarr-python, pass `config={"write_empty_chunks": True}`
to keep a chunk that holds nothing but -0.0: zarr-python compares these types by value, and would
drop it as equal to a fill value of 0.0.

Example:
    >>> import zarr
    >>> array = zarr.create_array({}, shape=(2,), dtype=ml_dtypes.bfloat16)
    >>> array[:] = [1.5, -2.0]
    >>> array.metadata.to_dict()["data_type"], array[:]
    ('bfloat16', array([1.5, -2], dtype=bfloat16))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.common import DTypeJSON, EndiannessStr

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _MlType(ZDType[np.dtype[np.generic], np.generic], HasItemSize):
    """The base of the types; `scalar` is the ml_dtypes class that a subclass wraps."""

    scalar: ClassVar[type[np.generic]]

    def __init_subclass__(cls, scalar: type[np.generic] | None = None) -> None:
        super().__init_subclass__()
        if scalar is not None:
            cls.scalar = scalar
            cls.dtype_cls = type(np.dtype(scalar))
            cls._zarr_v3_name = np.dtype(scalar).name
            data_type_registry.register(cls._zarr_v3_name, cls)

    @property
    def item_size(self) -> int:
        """Bytes an element takes."""
        return np.dtype(self.scalar).itemsize

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[np.generic]) -> Self:
        """The Zarr type of a NumPy dtype.

        Raises:
            DataTypeValidationError: the dtype is another one.
        """
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype."""
        return np.dtype(self.scalar)

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise DataTypeValidationError(f"{cls._zarr_v3_name} has no name in Zarr format 2")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: ZarrFormat) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The name in zarr.json.

        Raises:
            ValueError: the Zarr format is 2, which has no name for the type.
        """
        if zarr_format != 3:
            raise ValueError(f"{self._zarr_v3_name} needs Zarr format 3, not {zarr_format}")
        return self._zarr_v3_name

    def _from_bits(self, bits: int) -> np.generic:
        little = np.frombuffer(bits.to_bytes(self.item_size, "little"), f"<u{self.item_size}")
        return little.astype(f"=u{self.item_size}").view(self.scalar)[0]

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number | np.bool_ | self.scalar)

    def cast_scalar(self, data: object) -> np.generic:
        """A number as a scalar of this type.

        Raises:
            TypeError: `data` is not a number.
        """
        if isinstance(data, self.scalar):
            return data
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a number that {self._zarr_v3_name} could hold")
        return np.asarray([data]).astype(self.scalar)[0]

    def default_scalar(self) -> np.generic:
        """The value of all-zero bits: 0, and 2**-127 for float8_e8m0fnu, which has no zero."""
        return self._from_bits(0)


class _MlFloat(_MlType):
    """A float: its fill value may be special, or given by its bits."""

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """A fill value of zarr.json.

        Raises:
            ValueError: `data` does not encode a value of this type.
        """
        if isinstance(data, str) and data in _SPECIAL:
            return self.cast_scalar(_SPECIAL[data])
        if isinstance(data, str) and data.startswith("0x") and len(data) == 2 + 2 * self.item_size:
            return self._from_bits(int(data, 16))
        if isinstance(data, int | float) and not isinstance(data, bool):
            return self.cast_scalar(data)
        raise ValueError(f"{data!r} is not a fill value of {self._zarr_v3_name}")

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        """The fill value for zarr.json: a number, or a string for what JSON cannot hold."""
        scalar = self.cast_scalar(data)
        number = float(scalar)  # pyright: ignore[reportArgumentType]
        if math.isfinite(number):
            return number
        for name, value in _SPECIAL.items():
            if scalar.tobytes() == self.cast_scalar(value).tobytes():
                return name
        bits = int.from_bytes(scalar.tobytes(), "little")
        return f"0x{bits:0{2 * self.item_size}x}"


class _MlInt(_MlType):
    """A narrow integer, one byte an element."""

    def cast_scalar(self, data: object) -> np.generic:
        """An integer as a scalar of this type.

        Raises:
            TypeError: `data` is not a number.
            ValueError: `data` is not an integer, or out of the type's range.
        """
        scalar = super().cast_scalar(data)
        if int(scalar) != data:  # pyright: ignore[reportArgumentType]
            limits = ml_dtypes.iinfo(self.scalar)
            raise ValueError(
                f"{data!r} is not an integer in [{limits.min}, {limits.max}], the range of"
                f" {self._zarr_v3_name}"
            )
        return scalar

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """A fill value of zarr.json.

        Raises:
            ValueError: `data` is not an integer, or out of the type's range.
        """
        if not isinstance(data, int) or isinstance(data, bool):
            raise ValueError(f"{data!r} is not a fill value of {self._zarr_v3_name}")
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> int:
        """The fill value for zarr.json."""
        return int(self.cast_scalar(data))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlFloat, HasEndianness, scalar=ml_dtypes.bfloat16):
    """bfloat16, the one type here of more than one byte, and so with a byte order."""

    endianness: EndiannessStr = field(default="little")

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[np.generic]) -> Self:
        """The Zarr type of a NumPy dtype, with its byte order.

        Raises:
            DataTypeValidationError: the dtype is another one.
        """
        super().from_native_dtype(dtype)
        return cls(endianness="big" if dtype == dtype.newbyteorder(">") else "little")

    def to_native_dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype, in this byte order."""
        return super().to_native_dtype().newbyteorder(self.endianness)


class Float8E3M4(_MlFloat, scalar=ml_dtypes.float8_e3m4):
    """float8_e3m4."""


class Float8E4M3FN(_MlFloat, scalar=ml_dtypes.float8_e4m3fn):
    """float8_e4m3fn: no infinities."""


class Float8E4M3FNUZ(_MlFloat, scalar=ml_dtypes.float8_e4m3fnuz):
    """float8_e4m3fnuz: no infinities, one NaN, no negative zero."""


class Float8E4M3B11FNUZ(_MlFloat, scalar=ml_dtypes.float8_e4m3b11fnuz):
    """float8_e4m3b11fnuz: no infinities, one NaN, no negative zero."""


class Float8E5M2(_MlFloat, scalar=ml_dtypes.float8_e5m2):
    """float8_e5m2."""


class Float8E5M2FNUZ(_MlFloat, scalar=ml_dtypes.float8_e5m2fnuz):
    """float8_e5m2fnuz: no infinities, one NaN, no negative zero."""


class Float8E8M0FNU(_MlFloat, scalar=ml_dtypes.float8_e8m0fnu):
    """float8_e8m0fnu: powers of two, no sign, no zero, one NaN."""

    def cast_scalar(self, data: object) -> np.generic:
        """A number as a scalar; 0 is the smallest value, 2**-127, as TensorStore has it.

        Raises:
            TypeError: `data` is not a number.
        """
        is_zero = self._check_scalar(data) and data == 0
        return self._from_bits(0) if is_zero else super().cast_scalar(data)


class Float4E2M1FN(_MlFloat, scalar=ml_dtypes.float4_e2m1fn):
    """float4_e2m1fn, one byte an element: no infinities, no NaN."""


class Int2(_MlInt, scalar=ml_dtypes.int2):
    """Integers in [-2, 1], one byte an element."""


class Int4(_MlInt, scalar=ml_dtypes.int4):
    """Integers in [-8, 7], one byte an element."""
