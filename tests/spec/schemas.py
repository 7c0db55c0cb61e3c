"""The JSON schemas in spec/schemas, made from the types that the code reads documents with."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from xckpt.core.dtypes import DTYPES, EXTENDED
from xckpt.core.manifest.codec import FORMAT, VERSION
from xckpt.core.manifest.decode import ManifestText
from xckpt.core.manifest.entries import LACKING, LITTLE_ENDIAN
from xckpt.core.manifest.packs import PACKED
from xckpt.storage.commit.folder import ClaimText
from xckpt.viewer.model import Page, ProgressShown, TextShown
from xckpt.viewer.values import PlaneValues

DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """File name -> schema."""
    return {
        "xckpt.json.schema.json": _manifest(),
        "array.zarr.json.schema.json": _array(),
        "group.zarr.json.schema.json": _group(),
        "xckpt.saving.schema.json": _claim(),
    }


def page_schema() -> Schema:
    """What a page of `xckpt view` holds, with the answers of its server among the definitions."""
    body, parts = _components(Page)
    kinds = (PlaneValues, ProgressShown, TextShown)
    answers = {name: part for kind in kinds for name, part in _components(kind)[1].items()}
    return {
        "$schema": DRAFT,
        "$id": "xckpt/viewer/schema.json",
        "title": "What a page of `xckpt view` shows, and what `xckpt view --json` prints",
        **body,
        "$defs": {**parts, **answers},
    }


def _components(struct: type[msgspec.Struct]) -> tuple[Schema, dict[str, Schema]]:
    """The schema of a type, and of the types that it refers to."""
    (body,), parts = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    for part in parts.values():
        if "description" in part:
            # A docstring is indented up to Python 3.12 and not from 3.13 on.
            part["description"] = inspect.cleandoc(part["description"])
    return body, parts


def _manifest() -> Schema:
    body, parts = _components(ManifestText)
    return {
        "$schema": DRAFT,
        "title": "xckpt.json, the manifest",
        **_object(
            format={"const": FORMAT},
            version={"const": VERSION},
            digest={"type": "string", "pattern": "^[0-9a-f]{32}$"},
            checkpoint=body,
        ),
        "$defs": parts,
    }


def _claim() -> Schema:
    body, parts = _components(ClaimText)
    return {"$schema": DRAFT, "title": "xckpt.saving, a claim", **body, "$defs": parts}


def _array() -> Schema:
    names: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
    schema = _array_without_names()
    schema["properties"]["dimension_names"] = names
    return schema


def _array_without_names() -> Schema:
    """The schema of the first edition, whose fields all are required."""
    chain = {"oneOf": [{"const": [LITTLE_ENDIAN, *more]} for more in ([], [{"name": "crc32c"}])]}
    inner = _object(
        chunk_shape={"$ref": "#/$defs/sizes"},
        codecs=chain,
        index_codecs={"const": [LITTLE_ENDIAN, {"name": "crc32c"}]},
        index_location={"const": "end"},
    )
    sharded = _object(name={"const": "sharding_indexed"}, configuration=inner)
    keys = {"name": "default", "configuration": {"separator": "/"}}
    return {
        "$schema": DRAFT,
        "title": "zarr.json of an array",
        **_object(
            zarr_format={"const": 3},
            node_type={"const": "array"},
            shape={"$ref": "#/$defs/sizes"},
            data_type={"enum": list(DTYPES)},
            chunk_grid=_object(
                name={"const": "regular"},
                configuration=_object(chunk_shape={"$ref": "#/$defs/sizes"}),
            ),
            chunk_key_encoding={"const": keys},
            fill_value={"enum": [0, 1, False, [0, 0]]},
            codecs={"oneOf": [chain, {"type": "array", "prefixItems": [sharded], "maxItems": 1}]},
            attributes={
                "type": "object",
                "properties": {"offset": {"$ref": "#/$defs/sizes"}},
                "additionalProperties": False,
            },
            storage_transformers={"const": []},
        ),
        "$defs": {"sizes": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    }


def _group() -> Schema:
    sizes = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    consolidated = _object(
        kind={"const": "inline"},
        must_understand={"const": False},
        metadata={"type": "object", "additionalProperties": {"type": "object"}},
    )
    count, types = {"type": "integer", "minimum": 1}, {"enum": list(EXTENDED)}
    packed: Schema = {"packed_arrays": count, "packed": {"const": PACKED}}
    lacking: Schema = {"data_types": {"type": "array", "items": types}, "note": {"const": LACKING}}
    about = [_object(**packed), _object(**lacking), _object(**packed, **lacking)]
    schema = _object(
        zarr_format={"const": 3},
        node_type={"const": "group"},
        attributes={
            "type": "object",
            "properties": {
                "shape": sizes,
                "dimension_names": {"type": "array", "items": {"type": "string"}},
                "xckpt": {"oneOf": about},
            },
            "additionalProperties": False,
        },
    )
    schema["properties"]["consolidated_metadata"] = consolidated
    return {"$schema": DRAFT, "title": "zarr.json of a group", **schema}


def _object(**properties: Schema) -> Schema:
    """An object that has all of these fields and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
