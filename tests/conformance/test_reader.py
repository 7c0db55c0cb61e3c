"""The independent reader finds what xckpt saved, of every kind, and refuses what was altered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xckpt
from conformance import reader
from conformance import strict_reader as rules
from conformance.reader import Broken, arrays_of
from conformance.strict_reader import StrictCheckpoint as Checkpoint
from conformance.twins.pieces import Row, cut_of, rows_of
from tests.support.sharded_arrays import Sharded
from tests.support.states import LAYOUTS, everything, random_array, same
from xckpt.core.dtypes import DTYPES
from xckpt.core.manifest.codec import parse
from xckpt.core.tree import flatten
from xckpt.errors import ManifestError
from xckpt.storage.array import digest_bytes
from xckpt.storage.commit import staging

ROOT = Path(__file__).parent.parent.parent

ODD_KEYS = {"a/b": 1, "zarr.json": 2, "..": 3, "ü": 4, "": 5, "__x": 6, "a.b": 7, 0: 8, "0": 9,
            "%": 10, "x" * 161: 11, "ü" * 60: 12, "end.": 13, "xckpt.saving": 14}  # fmt: skip


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "ckpt"
    xckpt.save(path, everything(), metadata={"run": "ü"}, options=LAYOUTS[request.param])
    return path


def leaves() -> dict[str, object]:
    """The leaves of the saved state, arrays for those in pieces."""
    flat = flatten(everything()).leaves
    return {k: leaf.array if isinstance(leaf, Sharded) else leaf for k, leaf in flat.items()}


def as_saved(checkpoint: reader.Checkpoint, name: str) -> np.ndarray:
    """A tensor in its own dtype; the reader gives integers for those that NumPy lacks."""
    return checkpoint.read(name).view(DTYPES[checkpoint.leaves[name]["dtype"]])


def test_every_kind_of_leaf_is_read(saved: Path) -> None:
    checkpoint = Checkpoint(saved)
    assert list(checkpoint.leaves) == list(leaves())
    for name, leaf in leaves().items():
        tensor = checkpoint.leaves[name]["kind"] == "tensor"
        found = as_saved(checkpoint, name) if tensor else checkpoint.value(name)
        assert same(found, leaf), name
    assert checkpoint.manifest["user"] == {"run": "ü"}
    assert checkpoint.verify() == []


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_box_is_what_numpy_slices(saved: Path, data: st.DataObject) -> None:
    arrays = {name: leaf for name, leaf in leaves().items() if isinstance(leaf, np.ndarray)}
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    low = [data.draw(st.integers(0, size)) for size in array.shape]
    sizes = [data.draw(st.integers(0, size - a)) for size, a in zip(array.shape, low, strict=True)]
    wanted = array[tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))]
    found = Checkpoint(saved).read(name, low, sizes).view(array.dtype)
    assert same(found, np.asarray(wanted))


def test_a_piece_that_ends_inside_a_chunk_before_the_box(saved: Path) -> None:
    """Its last chunk reaches, with its padding, into the box; its elements do not."""
    pieces = np.asarray(leaves()["pieces"])
    for low in range(pieces.shape[0] - 1):
        assert same(Checkpoint(saved).read("pieces", [low, 0], [2, 1]), pieces[low : low + 2, :1])


def test_every_dtype_is_read_bit_for_bit(tmp_path: Path) -> None:
    shapes = [(), (7,), (5, 11)]
    state = {f"{d}{len(s)}": random_array(s, DTYPES[d]) for d in DTYPES for s in shapes}
    xckpt.save(tmp_path / "ckpt", state, options=LAYOUTS["sharded crc32c"])
    checkpoint = Checkpoint(tmp_path / "ckpt")
    assert all(same(as_saved(checkpoint, name), array) for name, array in state.items())


def test_chunks_for_other_readers_are_read(tmp_path: Path) -> None:
    """A column's chunks of each shard, as well as all of it."""
    array = random_array((264, 2048), np.dtype(np.uint8))
    options = xckpt.SaveOptions(chunk_bytes=1 << 19, readers=8)
    xckpt.save(tmp_path / "ckpt", {"w": array}, options=options)
    checkpoint = Checkpoint(tmp_path / "ckpt")
    leaf = checkpoint.leaves["w"]
    assert all(c < s for c, s in zip(leaf["chunk"], leaf["shard"], strict=True)), leaf
    assert same(checkpoint.read("w"), array)
    assert same(checkpoint.read("w", [3, 1100], [259, 40]), array[3:262, 1100:1140])
    assert checkpoint.verify() == []


def test_odd_names_are_found_where_they_lie(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {key: np.full(2, n) for key, n in ODD_KEYS.items()})
    checkpoint = Checkpoint(tmp_path / "ckpt")
    assert [int(checkpoint.read(name)[0]) for name in checkpoint.leaves] == [*ODD_KEYS.values()]
    assert checkpoint.verify() == []


def test_a_root_that_is_an_array(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", np.arange(5))
    assert same(Checkpoint(tmp_path / "ckpt").read(""), np.arange(5))


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_overwritten_checkpoint_is_read_where_its_root_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(staging, "can_exchange", lambda folder: False)
    xckpt.save(tmp_path / "ckpt", {"w": np.arange(5), "old": np.arange(3)})
    xckpt.save(tmp_path / "ckpt", {"w": np.arange(9)}, overwrite=True)
    checkpoint = Checkpoint(tmp_path / "ckpt")
    assert bool(checkpoint.manifest.get("root")) is not exchanges
    assert list(checkpoint.leaves) == ["w"] and same(checkpoint.read("w"), np.arange(9))
    assert checkpoint.verify() == []


VALUES = [None, True, False, 0, -255, 1 << 5000, 0.1, -0.0, 1e300, 5e-324, float("inf"),
          float("nan"), 1 - 2j, complex("-inf+nanj"), "", "a\\u0041\n\ud800", "ü" * 3000, b"",
          bytes(range(256)), b"x" * 5000]  # fmt: skip


def test_every_python_value_is_read(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", dict(enumerate(VALUES)))
    checkpoint = Checkpoint(tmp_path / "ckpt")
    for number, value in enumerate(VALUES):
        assert same(checkpoint.value(str(number)), value)


def test_every_flipped_bit_of_a_file_is_noticed(tmp_path: Path) -> None:
    """But for padding of edge chunks, of which there is none here."""
    path = tmp_path / "ckpt"
    xckpt.save(path, {"a": np.arange(6, dtype=np.int8), "n": 1})
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"xckpt.json", "xckpt.digests", "zarr.json", "0"}
    for file in files:
        content = file.read_bytes()
        for position in range(0, len(content), 7):
            altered = bytearray(content)
            altered[position] ^= 1 << position % 8
            file.write_bytes(altered)
            with pytest.raises(Broken):
                refuse(path)
        file.unlink()
        with pytest.raises(Broken):
            refuse(path)
        file.write_bytes(content)
    refuse(path)


def refuse(path: Path) -> None:
    """Raise if anything is wrong."""
    problems = Checkpoint(path).verify()
    if problems:
        raise Broken("\n".join(problems))


def sealed(path: Path, edit: Callable[[dict], object]) -> None:
    """Change what a manifest says and seal it again."""
    body = json.loads((path / "xckpt.json").read_bytes())["checkpoint"]
    edit(body)
    raw = json.dumps(body).encode()
    head = b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}'
    (path / "xckpt.json").write_bytes(head % (xxhash.xxh3_128_hexdigest(raw).encode(), raw))


EDITS: dict[str, Callable[[dict], object]] = {
    "an unknown field": lambda b: b.update(extra=1),
    "an unknown field of a leaf": lambda b: b["leaves"][0].update(extra=1),
    "an unknown field of a cut": lambda b: b["cuts"][0].update(extra=1),
    "a missing field": lambda b: b.pop("digests"),
    "an unknown kind": lambda b: b["leaves"][0].update(kind="pickle"),
    "an unknown dtype": lambda b: b["leaves"][0].update(dtype="object"),
    "two leaves of one name": lambda b: b["leaves"].append(b["leaves"][0]),
    "a leaf in a leaf": lambda b: b["leaves"][1].update(name="even/x"),
    "a name spelled otherwise": lambda b: b["leaves"][0].update(name="%41"),
    "a name with an empty part": lambda b: b["leaves"][0].update(name="a//b"),
    "a root that climbs": lambda b: b.update(root="a/../.."),
    "an absolute root": lambda b: b.update(root="/tmp"),
    "names of other dimensions": lambda b: b["leaves"][0].update(dimension_names=["x"]),
    "a name of two dimensions": lambda b: b["leaves"][0].update(dimension_names=["x", "x"]),
    "a dimension without a name": lambda b: b["leaves"][0].update(dimension_names=["x", ""]),
    "an unknown edition": lambda b: b.update(zarr_json=3),
    "no edition": lambda b: b.update(zarr_json=0),
    "an unknown codec": lambda b: b.update(codecs=["gzip"]),
    "a shard beside pieces": lambda b: next(
        leaf for leaf in b["leaves"] if "pieces" in leaf
    ).update(shard=[1, 1]),
    "a gap": lambda b: edit_pieces(b, lambda rows: rows.pop()),
    "an overlap": lambda b: edit_pieces(b, lambda rows: rows[0]["shape"].__setitem__(0, 8)),
    "a piece outside": lambda b: edit_pieces(b, lambda rows: rows[0]["offset"].__setitem__(0, 100)),
    "a cut of no dimensions": lambda b: b["cuts"][0].update(rank=0),
    "a cut without a column": lambda b: b["cuts"][0].pop("chunk"),
    "a cut that is not there": lambda b: next(
        leaf for leaf in b["leaves"] if "pieces" in leaf
    ).update(pieces=9),
    "an absurd shape": lambda b: b["leaves"][0].update(shape=[1 << 50, 1 << 50]),
    "an absurd chunk": lambda b: b["leaves"][0].update(chunk=[1 << 20, 1 << 20]),
    "too many chunks": lambda b: b["leaves"][0].update(shape=[1 << 40, 16], chunk=[1, 1]),
    "a chunk of nothing": lambda b: b["leaves"][0].update(chunk=[0, 0]),
    "a negative shape": lambda b: b["leaves"][0].update(shape=[-1, 16]),
    "a shape of bools": lambda b: b["leaves"][0].update(shape=[True, 16]),
    "other chunks": lambda b: b["leaves"][0].update(chunk=[3, 5]),
    "a list without its items": lambda b: b.update(containers={"nested": "list"}),
    "a container where a leaf is": lambda b: b.update(containers={"even": "list"}),
    "no such value": lambda b: value(b).update(value="three"),
    "no such type": lambda b: value(b).update(type="set"),
}


def edit_pieces(body: dict, edit: Callable[[list[Row]], object]) -> None:
    rows = rows_of(body["cuts"][0])
    edit(rows)
    body["cuts"][0] = cut_of(rows, body["cuts"][0]["rank"])


def value(body: dict) -> dict:
    return next(leaf for leaf in body["leaves"] if leaf["name"] == "step")


@pytest.mark.parametrize("what", EDITS)
def test_a_manifest_that_breaks_a_rule_is_refused_by_both(tmp_path: Path, what: str) -> None:
    """Whatever xckpt refuses in a manifest, the independent reader refuses too."""
    xckpt.save(tmp_path / "ckpt", everything(), options=LAYOUTS["plain"])
    sealed(tmp_path / "ckpt", EDITS[what])
    with pytest.raises(Broken):
        Checkpoint(tmp_path / "ckpt")
    data = (tmp_path / "ckpt/xckpt.json").read_bytes()
    if what != "other chunks":  # the digest file tells
        with pytest.raises(ManifestError):
            parse(data, digest_bytes)


@pytest.mark.parametrize(
    "head", [b'{"format":"xckpt","version":2}', b'{"format":"zarr","version":1}', b"[]", b"", b"{"]
)
def test_another_document_is_refused(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "xckpt.json").write_bytes(head)
    with pytest.raises(Broken):
        Checkpoint(tmp_path)


def run(module: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_commands_read_and_verify(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.zeros((2, 3), np.int8), "step": 1})
    done = run("conformance.reader", path)
    assert (done.returncode, done.stdout) == (0, "w int8 (2, 3)\nstep int \n")
    assert run("conformance.strict_reader", path).returncode == 0
    (path / "w/c/0/0").write_bytes(b"\1" * 6)
    for module in ("conformance.reader", "conformance.strict_reader"):
        broken = run(module, path)
        assert broken.returncode == 1
        assert re.search("w/c/0/0: not what was saved", broken.stderr)


def test_it_is_short_and_stands_alone() -> None:
    """Under 250 lines, and nothing of xckpt: not even behind the entry points of zarr-python."""
    text = (ROOT / "conformance/reader.py").read_text()
    assert len(text.splitlines()) < 250
    assert max(map(len, text.splitlines())) <= 100
    for module in ("reader", "strict_reader"):
        text = (ROOT / "conformance" / f"{module}.py").read_text()
        assert not re.search("^ *(import|from) xckpt", text, re.MULTILINE)
    code = (
        "import sys, conformance.reader\n"
        "others = {m for m in sys.modules if m.startswith(('xckpt', 'conformance.'))}\n"
        "assert others == {'conformance.reader'}, others\n"
        "assert 'ml_dtypes' not in sys.modules and 'tensorstore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("position", [0, 60, 200, -2])
def test_alone_it_refuses_what_its_digests_do_not_say(tmp_path: Path, position: int) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, {"a": np.arange(6, dtype=np.int8), "b": np.arange(40)})
    for file in ("xckpt.json", "xckpt.digests", "a/c/0", "b/c/0"):
        content = (path / file).read_bytes()
        altered = bytearray(content)
        altered[position % len(content)] ^= 1
        (path / file).write_bytes(altered)
        with pytest.raises(Broken):
            read_all(path)
        (path / file).write_bytes(content)
    read_all(path)


@pytest.mark.parametrize("sharded", [False, True])
def test_alone_it_refuses_a_missing_chunk_of_zeros(tmp_path: Path, sharded: bool) -> None:
    path = tmp_path / "ckpt"
    options = xckpt.SaveOptions(chunk_bytes=16, shard_bytes=64 if sharded else 0)
    xckpt.save(path, {"zeros": np.zeros(32, np.int8)}, options=options)
    read_all(path)
    (path / "zeros/c/0").unlink()
    with pytest.raises(Broken, match="zeros/c/0: missing"):
        read_all(path)


def read_all(path: Path) -> None:
    checkpoint = reader.Checkpoint(path)
    for name in checkpoint.leaves:
        checkpoint.read(name)


def cases(name: str) -> Any:
    return json.loads((ROOT / "spec/cases" / f"{name}.json").read_text())


@pytest.mark.parametrize("case", cases("names")["names"], ids=str)
def test_names_lead_to_the_paths_of_the_specification(case: dict[str, Any]) -> None:
    assert reader.path_of(case["name"]) == case["path"]
    rules.check_names([case["name"]], {})


@pytest.mark.parametrize("name", cases("names")["no_names"])
def test_what_the_specification_calls_no_name_is_refused(name: str) -> None:
    with pytest.raises(Broken):
        rules.check_names([name], {})


@pytest.mark.parametrize("case", cases("values")["values"], ids=str)
def test_texts_mean_the_values_of_the_specification(case: dict[str, Any]) -> None:
    assert ascii(rules.value_of(case["type"], case["text"])) == case["python"]


@pytest.mark.parametrize("case", cases("values")["no_values"], ids=str)
def test_what_the_specification_calls_no_value_is_refused(case: dict[str, str]) -> None:
    with pytest.raises(Broken):
        rules.value_of(case["type"], case["text"])


class Recording(reader.Checkpoint):
    """A checkpoint of one leaf without data, which notes the chunks that are read."""

    def __init__(self, leaf: dict[str, Any]) -> None:
        self.leaves = {leaf["name"]: leaf}
        self.arrays = {leaf["name"]: list(arrays_of(leaf, [], 0))}
        self.read_cells: list[tuple[dict[str, Any], tuple[int, ...]]] = []

    def read_chunk(self, array: dict[str, Any], cell: Sequence[int]) -> np.ndarray:
        self.read_cells.append((array, tuple(cell)))
        axes = zip(cell, array["chunk"], array["shape"], strict=True)
        return np.zeros([min(c, n - k * c) for k, c, n in axes], np.int16)


def test_boxes_need_the_chunks_of_the_specification() -> None:
    for case in cases("reads"):
        leaf = {"kind": "tensor", "name": "t", "dtype": "int16", "shape": case["shape"]}
        regular = [array["shape"] for array in case["arrays"]] == [case["shape"]]
        leaf |= case["arrays"][0] if regular else {"pieces": case["arrays"]}
        checkpoint = Recording(leaf)
        checkpoint.read("t", *case["wanted"])
        arrays = checkpoint.arrays["t"]
        found = []
        for array, cell in checkpoint.read_cells:
            fields = (array["chunk"], rules.unit_of(array), array["offset"], array["shape"])
            axes = list(zip(cell, *fields, strict=True))
            chunk = int(np.ravel_multi_index(cell, array["counts"])) if cell else 0
            key = "/".join([array["path"], "c", *(str(k * c // u) for k, c, u, _, _ in axes)])
            box = [
                [k * c + o for k, c, _, o, _ in axes],
                [min(c, n - k * c) for k, c, _, _, n in axes],
            ]
            number = array["first"] + chunk
            places = {"array": arrays.index(array), "chunk": chunk, "digest": number}
            found.append({**places, "key": key.removeprefix("t/"), "box": box})
        assert found == case["reads"], case
