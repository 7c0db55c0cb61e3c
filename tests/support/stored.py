"""What lies at a path or URL after a test has saved there."""

from __future__ import annotations

import xckpt
from xckpt.core.manifest.entries import Manifest, TensorEntry, documents
from xckpt.storage.location import Location, open_store

DOCUMENT = next(
    text for _, text in documents(Manifest((TensorEntry("w", "int8", (4,), (2,)),), ""))
)
"""A zarr.json of an array, as a save writes it."""


def keys(url: str) -> list[str]:
    """The keys at a URL, in order."""
    return sorted(key.decode() for key in open_store(Location.parse(url)).list().result())


def step_at(url: str) -> object:
    """The step of the whole and verified state at a URL."""
    checkpoint = xckpt.open(url)
    assert checkpoint.verify() == []
    return checkpoint["step"]
