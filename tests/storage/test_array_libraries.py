"""zarr-python, dask and xarray, in a process that never imports xckpt, open what they know."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import xckpt
from tests.support.sharded_arrays import rows

PREAMBLE = """
import sys, warnings
import numpy as np, zarr
path = sys.argv[1]
"""

TABLE = np.arange(303.0).reshape(101, 3)
KNOWN = np.arange(12, dtype=np.float32).reshape(3, 4)


def alone(script: str, path: Path) -> str:
    """What a script prints in a fresh interpreter, in which it does not import xckpt."""
    ended = "\nassert not any(name.split('.')[0] == 'xckpt' for name in sys.modules)"
    command = [sys.executable, "-c", PREAMBLE + script + ended, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with types that zarr-python lacks, beside some that it has."""
    path = tmp_path_factory.mktemp("mixed") / "ckpt"
    half = {name: KNOWN.astype(name) for name in ("bfloat16", "float8_e4m3fn", "int4")}
    state = {
        "model": {"known": KNOWN, **half},
        "opt": {"mu": KNOWN + 1, "nu": rows(TABLE, 7, 20, 51)},
    }
    xckpt.save(path, state)
    return path


def test_zarr_python_opens_what_it_knows_beside_what_it_lacks(mixed: Path) -> None:
    script = """
root = zarr.open_group(path, mode="r")
assert np.array_equal(root["model/known"][:], np.arange(12, dtype="f4").reshape(3, 4))
assert np.array_equal(root["opt/mu"][:], root["model"]["known"][:] + 1)
assert sorted(root["opt"]) == ["mu", "nu"]
assert root["opt/nu"].attrs["shape"] == [101, 3]
try:
    root["model/bfloat16"]
except ValueError as error:
    print(error)
print(root.attrs["xckpt"])
"""
    shown = alone(script, mixed)
    assert "bfloat16" in shown.splitlines()[0]
    assert "'data_types': ['bfloat16', 'float8_e4m3fn', 'int4']" in shown
    assert "import xckpt.zarr_dtypes" in shown


def test_the_attributes_cure_works(mixed: Path) -> None:
    import zarr

    import xckpt.zarr_dtypes  # noqa: F401  (as the attributes say)

    root = zarr.open_group(mixed, mode="r")
    found = root["model/bfloat16"]
    assert isinstance(found, zarr.Array)
    half = np.asarray(found[:])
    assert half.dtype == ml_dtypes.bfloat16 and np.array_equal(half, KNOWN.astype(half.dtype))
    with pytest.warns(UserWarning, match="xckpt"):  # What is not zarr: the manifest, the digests.
        names = {name for name, _ in root.members(max_depth=None)}
    assert names >= {"model/known", "model/int4", "opt/nu/2"}


@pytest.mark.thorough
def test_dask_opens_arrays(mixed: Path) -> None:
    script = """
import dask.array as da
assert da.from_zarr(path + "/model/known").sum().compute() == 66
assert da.from_zarr(path, component="opt/mu").sum().compute() == 78
"""
    alone(script, mixed)


def test_xarray_opens_groups_of_what_it_knows_and_whole_trees(mixed: Path, tmp_path: Path) -> None:
    """Square, scalar and empty arrays, pieces, and arrays of several sizes in one group."""
    state = {
        "model": {"square": np.ones((4, 4)), "kernel": np.ones((4, 3, 3, 8)), "step": np.array(7)},
        "pieces": rows(TABLE, 7, 20, 51),
        "none": np.zeros((0, 3)),
    }
    named = {"model/kernel": ("out", "height", "width", "in")}
    xckpt.save(tmp_path / "ckpt", state, options=xckpt.SaveOptions(dimension_names=named))
    script = f"""
import xarray
found = xarray.open_zarr({str(mixed)!r}, group="opt", consolidated=False)
assert np.array_equal(found.mu, np.arange(1, 13, dtype="f4").reshape(3, 4))
assert found.mu.dims == ("d3", "d4")
warnings.simplefilter("error")
tree = xarray.open_datatree(path, engine="zarr")
assert tree["model/square"].dims == ("d4", "d4_1") and float(tree["model/square"].sum()) == 16
assert tree["model/kernel"].sizes == {{"out": 4, "height": 3, "width": 3, "in": 8}}
assert int(tree["model/step"]) == 7 and tree["none"].shape == (0, 3)
assert [tree["pieces"][name].shape for name in "0123"] == [(7, 3), (13, 3), (31, 3), (50, 3)]
flat = xarray.open_zarr(path, group="model", consolidated=False)
assert sorted(flat) == ["kernel", "square", "step"]
"""
    alone(script, tmp_path / "ckpt")


@pytest.mark.thorough
def test_the_page_about_zarr_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/zarr.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    strictly = "import warnings\nwarnings.simplefilter('error')\n"
    command = [sys.executable, "-c", strictly + code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_names_of_dimensions_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    for names, said in [
        ({"w": ("a", "a")}, "w: dimension_names"),
        ({"w": ("a",)}, "2 different, non-empty strings"),
        ({"v": ("a", "b")}, "v: no tensor of the state has this name"),
        ({"n": ()}, "n: no tensor of the state has this name"),
    ]:
        options = xckpt.SaveOptions(dimension_names=names)
        with pytest.raises(ValueError, match=said):
            xckpt.save(tmp_path / "ckpt", {"w": KNOWN, "n": 1}, options=options)
    assert not list(tmp_path.iterdir())


def test_named_dimensions_come_back_in_the_metadata(tmp_path: Path) -> None:
    options = xckpt.SaveOptions(dimension_names={"w": ("batch", "embed")})
    saved = xckpt.save(tmp_path / "ckpt", {"w": KNOWN, "v": KNOWN}, options=options)
    for metadata in (saved, xckpt.open(tmp_path / "ckpt").metadata):
        described = metadata.state_dict_metadata
        assert getattr(described["w"], "dimension_names", ()) == ("batch", "embed")
        assert getattr(described["v"], "dimension_names", ()) is None
    assert not xckpt.open(tmp_path / "ckpt").verify()
