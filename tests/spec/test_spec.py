"""The specification says what the code does: schemas, cases, worked bytes, tables and limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

import xckpt
from tests.spec.cases import NO_NAMES, NO_VALUES
from tests.spec.generate import SPEC, generated
from tests.support.examples import examples
from tests.support.manifests import digest, example, manifests
from tests.support.states import LAYOUTS, everything
from xckpt.core import tree
from xckpt.core.dtypes import DTYPES, item_size, numpy_dtype
from xckpt.core.manifest import codec as manifest_module
from xckpt.core.manifest import packs, rules
from xckpt.core.manifest.codec import encode
from xckpt.core.manifest.entries import Manifest, array_metadata, documents
from xckpt.core.names import join_keys, split_name
from xckpt.core.part.per_rank import KIND
from xckpt.core.values import decode_value
from xckpt.errors import ManifestError
from xckpt.storage.commit.folder import ClaimText

FORMAT = (SPEC / "format-1.md").read_text()


def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SPEC / "schemas" / f"{name}.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


MANIFEST, ARRAY, GROUP, CLAIM = map(
    validator, ("xckpt.json", "array.zarr.json", "group.zarr.json", "xckpt.saving")
)


def test_what_is_generated_is_current(tmp_path: Path) -> None:
    """If this fails: python -m tests.spec.generate."""
    for file, content in generated(tmp_path).items():
        assert file.read_text() == content, file


def test_the_example_spells_out_every_file(tmp_path: Path) -> None:
    from tests.spec import example as worked

    worked.save(tmp_path / "ckpt")
    shown = [match[1] for match in worked.BLOCK.finditer((SPEC / "example.md").read_text())]
    assert sorted(shown) == sorted(worked.blocks(tmp_path / "ckpt"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_documents_fit_their_schemas(tmp_path: Path, layout: str) -> None:
    xckpt.save(tmp_path / "ckpt", everything(), metadata=[1], options=LAYOUTS[layout])
    for file in (tmp_path / "ckpt").rglob("*.json"):
        document = json.loads(file.read_bytes())
        if file.name == "xckpt.json":
            MANIFEST.validate(document)
        else:
            (ARRAY if document["node_type"] == "array" else GROUP).validate(document)


@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "bfloat16"]])
def test_the_root_of_a_packed_checkpoint_fits_its_schema(tmp_path: Path, dtypes: list[str]) -> None:
    """It was refused: the schema knew of lacking data types alone."""
    state = {dtype: np.ones((2, 3), numpy_dtype(dtype)) for dtype in dtypes}
    xckpt.save(tmp_path / "ckpt", state, options=xckpt.SaveOptions(pack_bytes=64))
    root = json.loads((tmp_path / "ckpt" / "zarr.json").read_bytes())
    GROUP.validate(root)
    about = root["attributes"]["xckpt"]
    assert about.pop("packed_arrays") == len(dtypes)
    assert not GROUP.is_valid(root)  # one field without the other


def test_golden_documents_fit_their_schemas() -> None:
    found = (SPEC.parent / "conformance/golden").glob("1/*/ckpt/**/*.json")
    files = sorted(file for file in found if file.is_file())
    assert len(files) > 50
    for file in files:
        document = json.loads(file.read_bytes())
        if file.name == "xckpt.json":
            MANIFEST.validate(document)
        else:
            (ARRAY if document["node_type"] == "array" else GROUP).validate(document)


@given(manifests())
@examples(30)
def test_any_document_fits_its_schema(manifest: Manifest) -> None:
    MANIFEST.validate(json.loads(encode(manifest, digest)))
    for _, content in documents(manifest):
        document = json.loads(content)
        (ARRAY if document["node_type"] == "array" else GROUP).validate(document)


def test_every_dtype_fits_the_schema() -> None:
    for dtype in DTYPES:
        for codecs in ((), ("crc32c",)):
            for shard in (None, (4,)):
                ARRAY.validate(array_metadata(dtype, (5,), (2,), shard, codecs))


def test_a_claim_fits_its_schema() -> None:
    CLAIM.validate(json.loads(msgspec.json.encode(ClaimText.own("1f"))))
    with pytest.raises(ValidationError):
        CLAIM.validate({"host": 1, "process": "x"})


def altered(document: Any) -> Iterator[Any]:
    """A document with one field more, or one less, in each of its objects."""
    if isinstance(document, dict):
        yield {**document, "unheard_of": 1}
        for key, value in document.items():
            yield from ({**document, key: other} for other in altered(value))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            for other in altered(value):
                yield [*document[:number], other, *document[number + 1 :]]


def test_unknown_fields_fit_no_schema() -> None:
    document = json.loads(encode(example(), digest))
    for free in ("user", "planner", "containers"):
        document["checkpoint"].pop(free)
    twins = list(altered(document))
    assert len(twins) > 10
    for twin in twins:
        assert not MANIFEST.is_valid(twin), twin
    for _, content in list(documents(example()))[:-1]:
        metadata = json.loads(content)
        check = ARRAY if metadata["node_type"] == "array" else GROUP
        assert not any(check.is_valid(twin) for twin in altered(metadata))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_the_schema_is_of_version_1(version: object) -> None:
    document: Any = json.loads(encode(example(), digest))
    assert not MANIFEST.is_valid(document | {"version": version})


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_are_none_are_refused(name: str) -> None:
    assert join_keys(split_name(name)) != name or name.count("/") >= tree.DEEPEST


@pytest.mark.parametrize("kind, text", NO_VALUES)
def test_values_that_are_none_are_refused(kind: str, text: str) -> None:
    with pytest.raises(ManifestError):
        decode_value(kind, text)


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    below = FORMAT.split(heading, 1)[1].split("\n\n|", 1)[1].split("\n\n", 1)[0]
    rows = [row.strip("| ").split("|") for row in f"|{below}".splitlines()]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def test_the_dtype_table_is_the_code_s() -> None:
    rows = table("## 9. ")
    assert [row[0] for row in rows] == list(DTYPES)
    for name, size, fill, _ in rows:
        assert int(size) == item_size(name)
        zero = array_metadata(name, (), (), None, ())["fill_value"]
        assert json.dumps(zero) == fill


def test_the_limits_are_the_code_s() -> None:
    limits = {row[0]: row[1] for row in table("## 11. ")}
    assert limits == {
        "manifest": f"{manifest_module.MAX_BYTES:,} bytes",
        "dimensions of a tensor": f"{rules.MAX_RANK}",
        "pieces of a checkpoint, those of a cut counted for each leaf that has it": (
            f"{rules.MAX_PIECES:,}"
        ),
        "tensor, each size counted as 1 at least": f"{rules.MAX_TENSOR_BYTES:,} bytes",
        "one size of a shape": f"{rules.MAX_TENSOR_BYTES:,}",
        "chunk, zarr shard": f"{rules.MAX_CHUNK_BYTES:,} bytes",
        "chunks of a checkpoint": f"{rules.MAX_CHUNKS:,}",
        "packs of a checkpoint, and no more than packed chunks": f"{rules.MAX_CHUNKS:,}",
        "table of places in the manifest": f"{packs.INLINE_BYTES:,} bytes",
        "chunk of a packed array": f"{rules.MAX_PACK_BYTES:,} bytes",
        "components of a name": f"{tree.DEEPEST}",
    }


def test_the_kind_of_what_each_rank_has_is_the_code_s() -> None:
    assert f"`{KIND}`: its key `rank3`" in FORMAT


def test_every_link_leads_somewhere() -> None:
    for file in SPEC.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text()):
            assert (file.parent / target).exists(), (file, target)


def test_the_reader_s_sections_are_there() -> None:
    text = FORMAT + (SPEC / "algorithms-1.md").read_text()
    headings = set(re.findall(r"^##+ ([0-9.]+?)\.? ", text, re.MULTILINE))
    for module in ("reader", "strict_reader"):
        text = (SPEC.parent / "conformance" / f"{module}.py").read_text()
        for group in re.findall(
            r"\((\d+(?:\.\d+)?(?:, \d+(?:\.\d+)?)*)\)\.?(?:\"\"\"|$)", text, re.M
        ):
            assert {*group.split(", ")} <= headings, group


def test_every_decision_is_in_the_index() -> None:
    index = (SPEC / "README.md").read_text()
    records = sorted(file.name for file in (SPEC / "decisions").glob("*.md"))
    assert len(records) >= 8
    assert re.findall(r"decisions/(\d{4}-[a-z0-9-]+\.md)", index) == records
