"""Every MUST of the specification names the tests that show it, and the tests are there.

`SHOWN` has the beginning of each sentence with a MUST. The tests at the end of this file show those
that no test of a module does.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

import xckpt
from conformance.reader import Broken
from conformance.strict_reader import StrictCheckpoint
from conformance.strict_reader import parse as parse_strictly
from tests.spec.generate import SPEC
from tests.support.manifests import example
from xckpt.core.manifest.codec import encode, parse
from xckpt.errors import ManifestError
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks import plain_files

ROOT = SPEC.parent
HERE = "tests/spec/test_requirements.py"
CORE, STORAGE, READER = "tests/core", "tests/storage", "tests/conformance/test_reader.py"
MANIFEST = f"{CORE}/manifest/test_codec.py"
COMMIT, DAMAGE = f"{STORAGE}/commit/test_staging.py", f"{STORAGE}/test_corruption.py"
BOTH = f"{READER}::test_a_manifest_that_breaks_a_rule_is_refused_by_both"
SHARING = f"{STORAGE}/base/test_sharing.py"
GOLDEN = "tests/conformance/test_golden.py"
ODD = f"{STORAGE}/commit/test_odd_file_systems.py"
LOST = "tests/conformance/crash/test_lost_answers.py"
TWINS = f"{GOLDEN}::test_some_corrupt_twins_are_refused"

SHOWN: dict[str, tuple[str, ...]] = {
    "The words MUST, MUST NOT": (),
    # What stores promise, and the tests' own stores keep.
    "Both MUST see every write": ("tests/storage/test_buckets.py::test_overwrite",),
    "3. to write an object as a whole": ("tests/storage/test_buckets.py::test_overwrite",),
    "- It MUST have compared the base's": (f"{SHARING}::test_a_damaged_base_is_not_shared",),
    "- It MUST have made sure, after an object was copied": (
        "tests/storage/base/test_copying.py::test_a_base_that_goes_away_between_copies",
    ),
    "- It MUST NOT share what is not a plain": (f"{SHARING}::test_a_damaged_base_is_not_shared",),
    "- Whatever writes, replaces or deletes": (
        f"{SHARING}::test_what_changed_is_written",
        f"{STORAGE}/base/test_packs.py::test_a_chain_of_saves",
        f"{SHARING}::test_no_write_goes_through_a_shared_file",
        "tests/conformance/crash/test_bases.py::test_every_kill_and_some_power_cuts",
    ),
    "A reader MUST refuse a place whose": (
        f"{STORAGE}/packs/test_packs.py::test_forged_places_are_refused",
    ),
    "A reader MUST refuse a manifest with a longer table": (
        f"{STORAGE}/packs/test_packs.py::"
        "test_places_in_a_manifest_that_are_not_those_of_its_chunks_are_refused",
    ),
    "A reader MUST ignore objects": (f"{HERE}::test_other_objects_are_ignored",),
    "A reader MUST 1. refuse a document": (
        f"{MANIFEST}::test_a_manifest_that_is_too_long_is_refused",
        f"{MANIFEST}::test_another_format_is_refused",
        f"{MANIFEST}::test_the_envelope_has_one_spelling",
        f"{MANIFEST}::test_every_flipped_bit_is_refused",
    ),
    "A reader MUST refuse a field": (f"{MANIFEST}::test_an_unknown_field_anywhere_is_refused",),
    "A writer MUST NOT repeat a name": (
        f"{HERE}::test_no_name_is_repeated",
        f"{HERE}::test_null_is_absence",
        f"{HERE}::test_a_repeated_name_is_refused",
    ),
    "A writer MUST keep `user` and `planner`": (
        f"{CORE}/test_json_values.py::test_depth_is_bounded",
        f"{CORE}/test_json_values.py::test_every_problem_is_listed_with_its_place",
    ),
    "A writer whose condition fails": (f"{LOST}::test_a_save_whose_answer_is_lost_asks_again",),
    "A writer that gets no answer": (f"{LOST}::test_a_commit_that_may_come_yet_finds_its_data",),
    "Names MUST be unique": (BOTH,),
    "A writer MUST keep to 64 bits": (f"{CORE}/test_tree.py::test_every_bad_key_is_listed",),
    "A reader MUST refuse a name that differs": (
        f"{READER}::test_what_the_specification_calls_no_name_is_refused",
        BOTH,
    ),
    "A reader MUST take a word": (f"{HERE}::test_an_unknown_container_is_a_dict",),
    "A reader MUST refuse a manifest where a leaf's": (
        f"{CORE}/test_tree.py::test_contradictions_are_refused",
        BOTH,
    ),
    "A reader MUST refuse content that is not UTF-8": (
        f"{CORE}/test_values.py::test_stored_content_that_is_no_value_is_refused_by_name",
    ),
    "What opaque bytes mean": (
        f"{CORE}/plan/test_load.py::test_opaque_bytes_come_as_they_are",
        "tests/torch/dcp/test_reading.py::test_bytes_are_never_unpickled_by_xckpt",
    ),
    "A reader MUST refuse other texts": (
        f"{CORE}/test_values.py::test_any_text_is_a_value_or_refused",
        f"{READER}::test_what_the_specification_calls_no_value_is_refused",
    ),
    "In a `str`, a backslash MUST": (
        f"{READER}::test_what_the_specification_calls_no_value_is_refused",
    ),
    "A reader MUST refuse a cut": (BOTH, TWINS),
    "A reader MUST refuse pieces": (BOTH, TWINS),
    "Elements are stored in C order": (TWINS, f"{HERE}::test_padding_has_no_meaning"),
    "A writer MUST store every chunk": (f"{HERE}::test_a_chunk_of_zeros_is_stored",),
    "A reader MUST refuse a missing object": (
        f"{HERE}::test_a_chunk_of_zeros_is_stored",
        f"{READER}::test_alone_it_refuses_a_missing_chunk_of_zeros",
    ),
    "A writer MUST write edition 2": (
        f"{GOLDEN}::test_golden_checkpoints_are_written_the_same_today",
        f"{GOLDEN}::test_a_golden_checkpoint_is_read_and_whole",
    ),
    "`dimension_names` are the entry's": (
        f"{MANIFEST}::test_an_absurd_leaf_is_refused_before_anything_is_allocated",
        BOTH,
    ),
    "A reader MUST NOT let a zarr.json": (f"{DAMAGE}::test_edited_zarr_json",),
    "It MUST compare that of each array": (
        f"{DAMAGE}::test_edited_zarr_json",
        f"{DAMAGE}::test_zarr_json_in_another_spelling_is_refused_too",
        f"{STORAGE}/test_round_trips.py"
        "::test_no_zarr_json_is_read_by_a_load_and_each_by_a_verification",
    ),
    "Neither changes which bytes are read": (f"{HERE}::test_any_annotation_and_placement_is_read",),
    "A reader MUST refuse a chunk whose digest": (
        f"{DAMAGE}::test_bytes_flipped_all_over",
        f"{DAMAGE}::test_swapped_chunks",
        f"{READER}::test_alone_it_refuses_what_its_digests_do_not_say",
    ),
    "It MUST refuse a digest file": (TWINS, f"{DAMAGE}::test_damaged_files"),
    "It SHOULD compare the file with `digests`": (f"{DAMAGE}::test_verify_lists_everything",),
    "An element below 8 bits": (f"{HERE}::test_bytes_of_small_types_are_as_they_were",),
    "A reader MUST refuse what is above": (
        f"{MANIFEST}::test_an_absurd_leaf_is_refused_before_anything_is_allocated",
        f"{MANIFEST}::test_an_absurd_manifest_is_refused",
    ),
    "- A reader that finds a greater version": (f"{MANIFEST}::test_a_newer_version_is_named",),
    "- A reader of a later version": (f"{GOLDEN}::test_a_golden_checkpoint_is_read_and_whole",),
    "- A writer MUST NOT overwrite": (f"{HERE}::test_a_later_version_is_a_checkpoint",),
    "Kinds of containers name classes": (f"{HERE}::test_an_unknown_container_is_a_dict",),
    "A reader MAY follow them": (
        f"{DAMAGE}::test_files_that_would_kill_a_careless_reader",
        f"{DAMAGE}::test_linked_files",
    ),
    "Two boxes that overlap": (
        f"{CORE}/plan/test_save.py::test_gaps_and_overlaps_of_all_leaves_are_listed",
        f"{COMMIT}::test_a_refused_save_makes_nothing",
    ),
    "It MUST NOT be where a reader": (f"{COMMIT}::test_the_old_one_is_readable_until_the_commit",),
    "A digest MUST be taken of the memory": (f"{HERE}::test_digests_are_of_the_memory",),
    "Each chunk MUST have exactly one": (
        "tests/planners/test_faulty_planners.py::test_a_faulty_share_is_refused",
    ),
    "Before it is there": (
        f"{COMMIT}::test_save_refuse_overwrite",
        "tests/conformance/crash/test_crash.py::test_every_kill_and_some_power_cuts",
    ),
    "Without locks, or where files are forced": (
        f"{ODD}::test_an_overwrite_that_cannot_be_safe_is_refused",
    ),
    "9. to tell names apart": (f"{ODD}::test_names_that_differ_in_case",),
    "All else may live": (f"{COMMIT}::test_remains_of_another_host_are_kept",),
    "Several ranks MUST do the same": ("tests/engine/test_load.py::test_all_ranks_alike",),
    "A file that is replaced by a rename": (
        f"{COMMIT}::test_a_lock_that_a_killed_save_left_spoils_no_manifest",
    ),
    "A writer MUST NOT remove or change one": (
        "tests/storage/commit/test_carry.py::test_an_overwrite_keeps_the_files_of_the_user",
        "tests/conformance/crash/test_files_of_the_user.py"
        "::test_every_kill_and_some_power_cuts_keep_them",
        "tests/storage/commit/test_carry.py::test_the_next_save_rescues_what_a_killed_one_left",
        "tests/storage/test_buckets.py::test_an_overwrite_keeps_the_keys_of_the_user",
    ),
    "Where a checkpoint, an unfinished save": (
        "tests/core/test_commit.py::test_each_cell",
        f"{COMMIT}::test_save_refuse_overwrite",
        f"{COMMIT}::test_a_refused_save_makes_nothing",
    ),
    "The old checkpoint MUST stay readable": (
        "tests/conformance/crash/test_crash.py::test_every_kill_and_some_power_cuts",
        "tests/conformance/crash/test_bucket.py::test_a_crash_leaves_old_or_new",
    ),
    "All of this MUST come before": (f"{HERE}::test_the_manifest_is_checked_before_all_else",),
    "A reader MUST NOT return an element": (
        f"{DAMAGE}::test_values_and_slices_are_verified_too",
        TWINS,
    ),
}


def sentences() -> Iterator[str]:
    """Those of the specification that have a MUST."""
    for file in ("format-1.md", "algorithms-1.md"):
        text = (SPEC / file).read_text()
        # A numbered list belongs to the words that introduce it.
        for paragraph in re.split(
            r"\n\s*\n|\n(?=[-|#]|\d+\. )", re.sub(r"MUST\n\n", "MUST ", text)
        ):
            flat = re.sub(r"\s+", " ", paragraph)
            yield from (s for s in re.split(r"(?<=[.:;]) (?=[A-Z*])", flat) if "MUST" in s)


def test_every_must_is_shown() -> None:
    left = list(SHOWN)
    for sentence in sentences():
        found = [begin for begin in SHOWN if sentence.startswith(begin)]
        assert len(found) == 1, f"{len(found)} entries for: {sentence}"
        left.remove(found[0])
    assert left == []


def test_the_tests_are_there() -> None:
    named = {test for tests in SHOWN.values() for test in tests}
    for test in named:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, test


def sealed(body: str) -> bytes:
    digest = xxhash.xxh3_128_hexdigest(body.encode())
    return f'{{"format":"xckpt","version":1,"digest":"{digest}","checkpoint":{body}}}'.encode()


def body_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "xckpt.json").read_bytes())["checkpoint"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def test_other_objects_are_ignored(path: Path) -> None:
    xckpt.save(path, {"w": np.arange(4)})
    (path / "notes.txt").write_text("mine")
    (path / "w/c/7").write_bytes(b"not a chunk")
    (path / "x/c").mkdir(parents=True)
    assert np.array_equal(xckpt.load(path)["w"], np.arange(4))
    assert xckpt.open(path).verify() == StrictCheckpoint(path).verify() == []


def test_no_name_is_repeated() -> None:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    json.loads(encode(example(), digest_bytes), object_pairs_hook=once)


def test_null_is_absence() -> None:
    body = json.loads(encode(example(), digest_bytes))["checkpoint"]
    for leaf in body["leaves"]:
        if leaf["kind"] == "tensor":
            for field in ("chunk", "shard", "pieces", "sharding"):
                leaf.setdefault(field, None)
    data = sealed(json.dumps(body))
    assert b"null" in data
    assert parse(data, digest_bytes).leaves == example().leaves
    parse_strictly(data)


@pytest.mark.parametrize("member", ['"root":"a/../b"', '"root":7', '"root":"good"', '"digests":""'])
def test_a_repeated_name_is_refused(member: str) -> None:
    body = json.loads(encode(example(), digest_bytes))["checkpoint"]
    text = json.dumps(body | {"root": "good"})
    assert parse(sealed(text), digest_bytes).root == parse_strictly(sealed(text))["root"] == "good"
    data = sealed("{" + member + "," + text[1:])
    with pytest.raises(ManifestError):
        parse(data, digest_bytes)
    with pytest.raises(Broken, match="comes twice"):
        parse_strictly(data)


def test_an_unknown_container_is_a_dict(path: Path) -> None:
    xckpt.save(path, {"made": {"x": 1}, "named": {"y": 2}})
    body = body_of(path)
    kinds = {"made": "unheard-of:this.module", "named": "pytree:antigravity.Class"}
    (path / "xckpt.json").write_bytes(sealed(json.dumps(body | {"containers": kinds})))
    assert xckpt.load(path) == {"made": {"x": 1}, "named": {"y": 2}}
    assert StrictCheckpoint(path).value("made/x") == 1
    assert not {"antigravity", "this"} & set(sys.modules)


def test_padding_has_no_meaning(path: Path) -> None:
    xckpt.save(path, {"w": np.arange(7, dtype=np.int8)}, options=xckpt.SaveOptions(chunk_bytes=4))
    body = body_of(path)
    size = body["leaves"][0]["chunk"][0]
    padded = path / f"w/c/{7 // size}"
    content = bytearray(padded.read_bytes())
    assert len(content) == size and 7 % size, "this edge chunk is padded"
    content[7 % size :] = b"\x55" * (size - 7 % size)
    padded.write_bytes(content)
    assert np.array_equal(xckpt.load(path)["w"], np.arange(7))
    assert np.array_equal(StrictCheckpoint(path).read("w"), np.arange(7))
    assert xckpt.open(path).verify() == []


@pytest.mark.parametrize("crc32c", [False, True])
def test_a_chunk_of_zeros_is_stored(path: Path, crc32c: bool) -> None:
    xckpt.save(path, {"w": np.zeros(8)}, options=xckpt.SaveOptions(crc32c=crc32c))
    (path / "w/c/0").unlink()
    with pytest.raises(xckpt.CorruptCheckpointError):
        xckpt.load(path)
    with pytest.raises(Broken):
        StrictCheckpoint(path).read("w")


def test_any_annotation_and_placement_is_read(path: Path) -> None:
    xckpt.save(path, {"w": np.arange(4)})
    body = body_of(path)
    sharding = {"axes": [["x\u0000", -3]], "placements": ["Sharded at (?)"]}
    body["leaves"][0] |= {"annotation": "anything: at all", "sharding": sharding}
    (path / "xckpt.json").write_bytes(sealed(json.dumps(body)))
    assert np.array_equal(xckpt.load(path)["w"], np.arange(4))
    assert np.array_equal(StrictCheckpoint(path).read("w"), np.arange(4))


@pytest.mark.parametrize("dtype", ["int2", "int4", "float4_e2m1fn"])
def test_bytes_of_small_types_are_as_they_were(path: Path, dtype: str) -> None:
    every = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    xckpt.save(path, {"w": every})
    assert xckpt.load(path)["w"].tobytes() == every.tobytes() == bytes(range(256))
    assert StrictCheckpoint(path).read("w").tobytes() == bytes(range(256))


def test_a_later_version_is_a_checkpoint(path: Path) -> None:
    path.mkdir()
    later = b'{"format":"xckpt","version":2,"new":[]}'
    (path / "xckpt.json").write_bytes(later)
    with pytest.raises(xckpt.CheckpointExistsError):
        xckpt.save(path, {"w": 1})
    assert (path / "xckpt.json").read_bytes() == later
    xckpt.save(path, {"w": 1}, overwrite=True)
    assert xckpt.load(path) == {"w": 1}


def test_digests_are_of_the_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong between the memory and the store is found."""
    write = plain_files.write_at

    def wrong(descriptor: int, part: bytes | memoryview, position: int) -> int:
        chunk = isinstance(part, memoryview)  # documents are bytes
        changed = (~np.frombuffer(part, np.uint8)).tobytes() if chunk else part
        return write(descriptor, changed, position)

    monkeypatch.setattr(plain_files, "write_at", wrong)
    xckpt.save(path, {"w": np.arange(64)})
    assert xckpt.open(path).verify()
    with pytest.raises(xckpt.CorruptCheckpointError):
        xckpt.load(path)


@pytest.mark.parametrize("edit", [{"root": "../up"}, {"extra": 1}, {"codecs": ["gzip"]}])
def test_the_manifest_is_checked_before_all_else(path: Path, edit: dict[str, Any]) -> None:
    """Nothing besides the manifest is there, and that is not what is complained of."""
    body = json.loads(encode(example(), digest_bytes))["checkpoint"]
    path.mkdir()
    (path / "xckpt.json").write_bytes(sealed(json.dumps(body | edit)))
    with pytest.raises(ManifestError):
        xckpt.load(path)
    with pytest.raises(Broken, match=r"root|fields|codecs"):
        StrictCheckpoint(path)
