"""zarr-python and TensorStore agree, bit for bit, on the types that NumPy lacks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore as ts
import zarr
from zarr.dtype import data_type_registry, parse_dtype

import xckpt.zarr_dtypes  # noqa: F401  (registers the types)
from xckpt.core.dtypes import DTYPES

EXTENDED = [name for name, dtype in DTYPES.items() if dtype.isbuiltin != 1]
FLOATS = [name for name in EXTENDED if "float" in name]
INTS = [name for name in EXTENDED if name not in FLOATS]
# TensorStore 0.1.86 takes a fill value of 1.0 for 2**-64 in this type; only 0 and NaN are safe.
ONLY_SAFE_FILL = {"float8_e8m0fnu": (0x00, 0xFF)}
LITTLE = [{"name": "bytes", "configuration": {"endian": "little"}}]


def every_value(name: str) -> npt.NDArray[np.generic]:
    """Each bit pattern of the type once, in a 2-d array."""
    dtype = DTYPES[name]
    if name in INTS:
        limits = ml_dtypes.iinfo(dtype)
        return np.arange(limits.min, limits.max + 1).astype(dtype).reshape(2, -1)
    count = 16 if name == "float4_e2m1fn" else 256**dtype.itemsize
    return np.arange(count).astype(f"u{dtype.itemsize}").view(dtype).reshape(4, -1)


def tensorstore(path: Path, **metadata: object) -> ts.TensorStore:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    if metadata:
        spec |= {"metadata": metadata, "create": True, "delete_existing": True}
    return ts.open(spec).result()


def sharded(shape: Sequence[int]) -> list[dict[str, object]]:
    inner = {"chunk_shape": list(shape), "codecs": LITTLE}
    return [{"name": "sharding_indexed", "configuration": inner}]


def as_read(path: Path) -> zarr.Array:
    return zarr.open_array(path, mode="r", zarr_format=3)


def bits(array: object) -> bytes:
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def significant_bits(array: npt.ArrayLike) -> bytes:
    """As `bits`, less the upper bits of a narrow integer's byte: TensorStore extends the sign."""
    array = np.asarray(array)
    return bits(array.astype(np.int8) if array.dtype.name in INTS else array)


def test_every_type_that_numpy_lacks_is_covered() -> None:
    found = {entry.name for entry in entry_points(group="zarr.data_type")}
    assert found >= set(EXTENDED)
    assert len(EXTENDED) == 11


@pytest.mark.parametrize("name", EXTENDED)
@pytest.mark.parametrize("inner", [False, True], ids=["plain", "sharded"])
def test_zarr_reads_what_tensorstore_wrote(name: str, inner: bool, tmp_path: Path) -> None:
    values = every_value(name)
    rows, columns = values.shape
    chunk = (rows // 2, max(columns // 3, 1))
    outer = (rows, chunk[1] * 4)
    store = tensorstore(
        tmp_path,
        shape=values.shape,
        data_type=name,
        chunk_grid={
            "name": "regular",
            "configuration": {"chunk_shape": outer if inner else chunk},
        },
        codecs=sharded(chunk) if inner else LITTLE,
    )
    store.write(values).result()
    array = as_read(tmp_path)
    assert array.dtype == values.dtype
    assert bits(array[:]) == bits(values)
    assert bits(array[1:, 1:2]) == bits(values[1:, 1:2])


@pytest.mark.parametrize("name", EXTENDED)
def test_tensorstore_reads_what_zarr_wrote(name: str, tmp_path: Path) -> None:
    values = every_value(name)
    array = zarr.create_array(
        tmp_path,
        shape=values.shape,
        chunks=(1, values.shape[1] // 2),
        dtype=values.dtype,
        config={"write_empty_chunks": True},
    )
    array[:] = values
    assert bits(tensorstore(tmp_path).read().result()) == bits(values)
    assert json.loads((tmp_path / "zarr.json").read_text())["data_type"] == name


@pytest.mark.parametrize("name", EXTENDED)
def test_both_spell_every_fill_value_alike(name: str) -> None:
    kind = parse_dtype(name, zarr_format=3)
    dtype = DTYPES[name]
    patterns = every_value(name).ravel().view(f"u{dtype.itemsize}")[::37]
    for pattern in ONLY_SAFE_FILL.get(name, patterns):
        scalar = np.asarray(pattern, f"u{dtype.itemsize}").view(dtype)[()]
        spelt = kind.to_json_scalar(scalar, zarr_format=3)
        assert bits(kind.from_json_scalar(spelt, zarr_format=3)) == bits(scalar)
        spec = {"driver": "zarr3", "kvstore": "memory://"}
        metadata = {"shape": [1], "data_type": name, "fill_value": spelt}
        store = ts.open({**spec, "metadata": metadata, "create": True}).result()
        assert significant_bits(store.read().result()) == significant_bits(scalar)
        respelt = store.spec().to_json()["metadata"]["fill_value"]
        assert significant_bits(kind.from_json_scalar(respelt, zarr_format=3)) == significant_bits(
            scalar
        )


@pytest.mark.parametrize("fill", ["NaN", "Infinity", "-Infinity", 0.0, 1.0, 0.3])
@pytest.mark.parametrize("name", FLOATS)
def test_missing_chunks_read_as_tensorstore_reads_them(
    name: str, fill: str | float, tmp_path: Path
) -> None:
    if name in ONLY_SAFE_FILL and fill in (1.0, 0.3):
        fill = 0.0
    store = tensorstore(tmp_path, shape=[3], data_type=name, fill_value=fill)
    assert bits(as_read(tmp_path)[:]) == bits(store.read().result())


@pytest.mark.parametrize("name", EXTENDED)
def test_every_value_is_spelt_so_that_it_comes_back(name: str) -> None:
    kind = parse_dtype(name, zarr_format=3)
    for scalar in every_value(name).ravel():
        spelt = json.loads(json.dumps(kind.to_json_scalar(scalar, zarr_format=3), allow_nan=False))
        assert bits(kind.from_json_scalar(spelt, zarr_format=3)) == bits(scalar)


@pytest.mark.parametrize("name", FLOATS)
def test_negative_zero_survives_where_empty_chunks_are_written(name: str, tmp_path: Path) -> None:
    values = (-np.zeros(4)).astype(DTYPES[name])
    array = zarr.create_array(
        tmp_path, shape=4, dtype=values.dtype, config={"write_empty_chunks": True}
    )
    array[:] = values
    assert bits(tensorstore(tmp_path).read().result()) == bits(values)


def test_bfloat16_may_be_stored_big_endian(tmp_path: Path) -> None:
    values = every_value("bfloat16")
    big = [{"name": "bytes", "configuration": {"endian": "big"}}]
    store = tensorstore(tmp_path, shape=values.shape, data_type="bfloat16", codecs=big)
    store.write(values).result()
    assert bits(np.asarray(as_read(tmp_path)[:]).astype(ml_dtypes.bfloat16)) == bits(values)


@pytest.mark.parametrize(
    "name, fill",
    [
        ("int4", 8),
        ("int4", -9),
        ("int4", 0.5),
        ("int4", True),
        ("int2", "NaN"),
        ("bfloat16", "nan"),
        ("bfloat16", "0x7"),
        ("bfloat16", "0xzzzz"),
        ("float8_e5m2", "0x7fc1"),
        ("float8_e5m2", None),
        ("float8_e5m2", True),
    ],
)
def test_a_fill_value_of_another_type_is_refused(name: str, fill: object) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parse_dtype(name, zarr_format=3).from_json_scalar(fill, zarr_format=3)  # pyright: ignore[reportArgumentType]


def test_names_and_dtypes_select_one_class_each() -> None:
    for name in EXTENDED:
        by_dtype = data_type_registry.match_dtype(DTYPES[name])
        assert by_dtype == data_type_registry.match_json(name, zarr_format=3)
        assert by_dtype.to_json(zarr_format=3) == name
    for plain in ("float32", "int8", "V2", "S3"):
        assert (
            type(data_type_registry.match_dtype(np.dtype(plain))).__module__ != "xckpt.zarr_dtypes"
        )


def test_zarr_format_2_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="bfloat16 needs Zarr format 3"):
        data_type_registry.match_dtype(DTYPES["bfloat16"]).to_json(zarr_format=2)


@pytest.mark.parametrize("name", FLOATS)
def test_a_number_becomes_the_nearest_value(name: str) -> None:
    kind = data_type_registry.match_dtype(DTYPES[name])
    assert bits(kind.cast_scalar(1)) == bits(np.ones((), DTYPES[name]))
    with pytest.raises(TypeError, match="not a number"):
        kind.cast_scalar("one")
    spelt = kind.to_json_scalar(math.nan, zarr_format=3)
    assert spelt == (-0.0 if name == "float4_e2m1fn" else "NaN")


def read_in_fresh_interpreter(path: Path, before: str) -> subprocess.CompletedProcess[str]:
    code = f"import zarr; {before}; print(zarr.open_array({str(path)!r}, mode='r')[:].tolist())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_one_import_or_the_entry_points_register_the_types(tmp_path: Path) -> None:
    store = tensorstore(tmp_path, shape=[2], data_type="bfloat16")
    store.write(np.asarray([1.5, -2.0], ml_dtypes.bfloat16)).result()
    for before in ("import xckpt.zarr_dtypes", "zarr.dtype.data_type_registry._lazy_load()"):
        assert read_in_fresh_interpreter(tmp_path, before).stdout == "[1.5, -2.0]\n"
    # Once this reads too, zarr-python loads the group by itself: say so in the documentation.
    alone = read_in_fresh_interpreter(tmp_path, "pass")
    assert "No Zarr data type found that matches 'bfloat16'" in alone.stderr
