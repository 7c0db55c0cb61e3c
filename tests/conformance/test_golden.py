"""Golden checkpoints are read, written the same today, and their corrupt twins are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import xckpt
from conformance.implementations import reader_golden, xckpt_golden
from conformance.implementations.xckpt_golden import checkpoints, describe, tree_of, write
from conformance.laws.golden import FormatReader, Golden, Read, goldens
from conformance.twins import confined
from conformance.twins.confined import Report, all_twins, judge, run
from conformance.twins.twins import Bar, Twin, chunk_files, files
from xckpt.storage.chunks.chunk import allocate

READERS = [*xckpt_golden.READERS, *reader_golden.READERS, reader_golden.ALONE]
GOLDENS = {golden.name: golden for golden in goldens()}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@pytest.mark.parametrize("golden", GOLDENS.values(), ids=lambda golden: golden.name)
def test_a_golden_checkpoint_is_read_and_whole(reader: FormatReader, golden: Golden) -> None:
    assert reader.load(golden.path) == golden.expected
    assert not reader.verify(golden.path)


@pytest.mark.parametrize("golden", GOLDENS.values(), ids=lambda golden: golden.name)
def test_containers_and_metadata_are_read(golden: Golden) -> None:
    checkpoint = xckpt.open(golden.path)
    found = json.loads(json.dumps(tree_of(xckpt.load(golden.path))))
    assert found == golden.document["tree"]
    assert checkpoint.user_metadata == golden.document["user"]
    assert checkpoint.metadata.planner_data == golden.document["planner"]


def test_golden_checkpoints_are_written_the_same_today(tmp_path: Path) -> None:
    recipes = checkpoints()
    assert set(recipes) == set(GOLDENS)
    for name, recipe in recipes.items():
        golden = GOLDENS[name]
        write(recipe, tmp_path / name)
        assert files(tmp_path / name) == files(golden.path), name
        for file in files(golden.path):
            written = (tmp_path / name / file).read_bytes()
            assert written == (golden.path / file).read_bytes(), f"{name}: {file}"
        assert json.loads(json.dumps(describe(recipe))) == golden.document, name


def test_golden_checkpoints_show_every_part_of_the_format() -> None:
    manifests = {name: xckpt.open(golden.path).manifest for name, golden in GOLDENS.items()}
    leaves = [leaf for manifest in manifests.values() for leaf in manifest.leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, xckpt_golden.manifests.TensorEntry)]
    kinds = {read.type for golden in GOLDENS.values() for read in golden.expected.values()}
    assert set(xckpt_golden.DTYPES) <= kinds
    assert {"None", "bool", "int", "float", "complex", "str", "bytes"} <= kinds
    assert any(tensor.pieces for tensor in tensors)
    assert any(tensor.shard for tensor in tensors)
    assert any(tensor.pieces.shard for tensor in tensors if tensor.pieces is not None)
    assert any(tensor.shape == () for tensor in tensors)
    assert any(0 in tensor.shape for tensor in tensors)
    assert any(tensor.sharding and tensor.sharding.spec for tensor in tensors)
    assert any(tensor.sharding and tensor.sharding.placements for tensor in tensors)
    assert any(isinstance(leaf, xckpt_golden.manifests.BytesEntry) for leaf in leaves)
    assert {manifest.codecs for manifest in manifests.values()} == {(), ("crc32c",)}
    assert {manifest.zarr_json for manifest in manifests.values()} == {1, 2}
    assert any(tensor.dimension_names for tensor in tensors)
    assert manifests["generation"].root
    assert len({len(tensor.shape) for tensor in tensors}) >= 5


def check(reports: list[Report], atleast: int) -> None:
    for report in reports:
        assert report.passed, str(report)
        assert report.twins >= atleast
        assert report.most_memory < confined.MEMORY
        assert report.outcomes["refused"] > report.twins // 2
        assert report.outcomes["found"] > 0


@pytest.mark.parametrize(
    "only, every", [("packed", 59), pytest.param("", 1201, marks=pytest.mark.thorough)]
)
def test_some_corrupt_twins_are_refused(only: str, every: int) -> None:
    check(run("conformance.implementations.xckpt_golden", every=every, only=only), 10)


@pytest.mark.thorough  # `test_reader.py` and `tests/fuzz` have it refuse what is corrupt
def test_the_independent_reader_refuses_some_corrupt_twins() -> None:
    check(run("conformance.implementations.reader_golden", every=1201), 10)


def test_there_are_twins_of_every_file_and_every_kind() -> None:
    every = list(all_twins(READERS[0], 24))
    for golden in GOLDENS.values():
        names = [twin.name for owner, twin in every if owner.name == golden.name]
        assert len(set(names)) == len(names)
        for file in files(golden.path):
            of_file = [name for name in names if name.startswith(f"{file}: ")]
            assert len(of_file) >= 7
    kinds = {twin.name.rpartition(": ")[2] for _, twin in every}
    wanted = {
        "deleted", "a giant", "a pipe", "a link to itself", "2 GiB long", "2^60 elements", "a gap",
        "an overlap", "the root ../decoy, which exists", "an unknown field", "version 2",
        "nested 100,000 deep",
    }  # fmt: skip
    assert wanted <= kinds
    assert len(every) > 10_000


class Careless:
    """A reader that is wrong in a given way."""

    name = "careless"
    errors: tuple[type[Exception], ...] = (ValueError,)

    def __init__(self, loads: object, verifies: object) -> None:
        self.loads, self.verifies = loads, verifies

    def load(self, path: Path) -> dict[str, Read]:
        if isinstance(self.loads, Exception):
            raise self.loads
        assert isinstance(self.loads, dict)
        return self.loads

    def verify(self, path: Path) -> list[str]:
        if isinstance(self.verifies, Exception):
            raise self.verifies
        assert isinstance(self.verifies, list)
        return self.verifies

    def digest(self, data: bytes) -> str:
        return ""


RIGHT = GOLDENS["leaf"].expected
NO = ValueError("no")


@pytest.mark.parametrize(
    "loads, verifies, bar, outcome",
    [
        (NO, ["damaged"], Bar.REFUSE, "refused"),
        (NO, NO, Bar.REFUSE, "refused"),
        (NO, [], Bar.REFUSE, "missed"),
        (NO, KeyError(), Bar.REFUSE, "wrong error"),
        (RIGHT, ["damaged"], Bar.REFUSE, "silent"),
        (RIGHT, ["damaged"], Bar.FIND, "found"),
        (RIGHT, [], Bar.FIND, "missed"),
        (RIGHT, [], Bar.PADDING, "padding"),
        ({}, ["damaged"], Bar.PADDING, "silent"),
        ({}, ["damaged"], Bar.FIND, "silent"),
        (KeyError("x"), ["damaged"], Bar.REFUSE, "wrong error"),
        (MemoryError(), ["damaged"], Bar.REFUSE, "wrong error"),
    ],
)
def test_careless_readers_are_found_out(
    loads: object, verifies: object, bar: Bar, outcome: str, tmp_path: Path
) -> None:
    twin = Twin("none", lambda path: None, bar)
    assert judge(Careless(loads, verifies), GOLDENS["leaf"], twin, tmp_path)[0] == outcome


def test_readers_that_die_or_eat_memory_are_found_out() -> None:
    died, hungry = run("tests.conformance.bad_readers", every=1000, only="leaf")
    assert died.twins == hungry.twins == 1
    assert set(died.outcomes) == {"crashed"} and "crashed: code 9" in died.failures[0]
    assert set(hungry.outcomes) == {"memory"} and hungry.most_memory > confined.MEMORY


@pytest.mark.thorough
def test_readers_that_hang_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "SECONDS", 8)
    (hung,) = run("tests.conformance.hanging_reader", every=20_000, only="empty")
    assert hung.outcomes == {"crashed": 1} and "crashed: code -9" in hung.failures[0]


def test_chunks_are_distinguished_from_other_files() -> None:
    found = chunk_files(GOLDENS["generation"].path)
    root = Path(".generations/0123456789ab/w")
    assert set(found) == {root / "c/0/0", root / "c/1/0"}


@pytest.mark.parametrize(
    "golden, name, said",
    [
        ("leaf", "xckpt.json: of empty", "xckpt.digests: altered"),
        ("leaf", "manifest: 2^40 elements, with digests", "the root: "),
        ("values", "manifest: 2^45 bytes, with digests", "long text: |zarr.json: edited"),
        ("crc32c", "even/c/0/0: extended by a zero byte", r"even: \[0, .* bytes long"),
    ],
)
def test_twins_are_refused_for_what_they_are(
    golden: str, name: str, said: str, tmp_path: Path
) -> None:
    reader = READERS[0]
    (twin,) = [twin for _, twin in all_twins(reader, 1, golden) if twin.name == name]
    shutil.copytree(GOLDENS[golden].path, tmp_path / "ckpt")
    twin.damage(tmp_path / "ckpt")
    outcome, detail = judge(reader, GOLDENS[golden], twin, tmp_path / "ckpt")
    assert outcome == "refused" and re.search(said, detail), (outcome, detail)


def test_memory_that_is_not_there_is_an_error_of_the_tree() -> None:
    with pytest.raises(xckpt.LeafTooLargeError, match="w: no memory for"):
        allocate((1 << 55,), np.dtype(np.int8), "w")
