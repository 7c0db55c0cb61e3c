"""Readers of one safetensors file in a bucket that packages offer, each as its own page says.

All bring the tensors to memory of the host, as torch tensors. A package that is not installed is
left out: none of them is needed for anything else (`absent`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

KEY = "model/model.safetensors"
URL = f"s3://bucket/{KEY}"

Loaded = Mapping[str, Any]


def environment() -> dict[str, str]:
    """Variables by which some of them find a bucket that is not Amazon's."""
    return {
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_ENDPOINT": os.environ["AWS_ENDPOINT_URL"],
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


def _run_ai() -> Loaded:
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_file(URL, device="cpu")
        return dict(streamer.get_tensors())


def _s3torchconnector() -> Loaded:
    connector = import_module("s3torchconnector")
    config = connector.S3ClientConfig(force_path_style=True)
    region, endpoint = os.environ["AWS_REGION"], os.environ["AWS_ENDPOINT_URL"]
    checkpoint = connector.S3Checkpoint(region, endpoint=endpoint, s3client_config=config)
    with checkpoint.reader(URL) as reader:
        return import_module("safetensors.torch").load(reader.read())


def _s3fs() -> Loaded:
    files = import_module("s3fs").S3FileSystem(skip_instance_cache=True)
    return import_module("safetensors.torch").load(files.cat_file(URL))


def _s3fs_ranges() -> Loaded:
    """A request a tensor, all at once."""
    files, torch = (
        import_module("s3fs").S3FileSystem(skip_instance_cache=True),
        import_module("torch"),
    )
    first = 8 + int.from_bytes(files.cat_file(URL, start=0, end=8), "little")
    header: dict[str, Any] = json.loads(files.cat_file(URL, start=8, end=first))
    header.pop("__metadata__", None)
    starts, ends = (
        [first + entry["data_offsets"][side] for entry in header.values()] for side in (0, 1)
    )
    parts = files.cat_ranges([URL] * len(header), starts, ends)
    return {
        name: torch.frombuffer(part, dtype=torch.float32).reshape(entry["shape"])
        for (name, entry), part in zip(header.items(), parts, strict=True)
    }


def _safetensors_streaming() -> Loaded:
    place = f"{os.environ['AWS_ENDPOINT_URL']}/bucket/{KEY}"
    return import_module("safetensors_streaming").load_file(place)


_ALL: dict[str, tuple[Callable[[], Loaded], tuple[str, ...]]] = {
    "Run:ai Model Streamer": (_run_ai, ("runai_model_streamer", "humanize")),
    "s3torchconnector": (_s3torchconnector, ("s3torchconnector",)),
    "s3fs, the file": (_s3fs, ("s3fs",)),
    "s3fs, a range a tensor": (_s3fs_ranges, ("s3fs",)),
    "safetensors-streaming": (_safetensors_streaming, ("safetensors_streaming",)),
}
"""Reader -> how it reads, and the packages that it needs."""


def absent() -> list[str]:
    """The readers whose packages are not installed."""
    return [name for name, (_, needs) in _ALL.items() if not all(map(find_spec, needs))]


def installed() -> dict[str, Callable[[], Loaded]]:
    """The others."""
    missing = absent()
    return {name: read for name, (read, _) in _ALL.items() if name not in missing}
