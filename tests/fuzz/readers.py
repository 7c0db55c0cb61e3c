"""Two readers of one format: xckpt and the independent one must refuse the same manifests.

Where they differ, one of them is wrong, or the specification leaves something open.
"""

from __future__ import annotations

from conformance.strict_reader import Broken, StrictCheckpoint
from tests.fuzz.checkpoints import home
from tests.fuzz.choices import Choices
from tests.fuzz.manifests import ORIGINALS, changed_manifest
from xckpt.core.manifest.codec import parse
from xckpt.errors import XckptError
from xckpt.storage.array import digest_bytes

__all__ = ["readers"]


def readers(data: bytes) -> str:
    """Have both readers look at a changed manifest, in a folder without anything else."""
    choices = Choices(data)
    changed = changed_manifest(ORIGINALS[choices.below(len(ORIGINALS))], choices)
    refused = _refused_by_xckpt(changed)
    independently = _refused_independently(changed)
    assert bool(refused) == bool(independently), (
        f"xckpt: {refused[:300] or 'takes it'}; the independent reader: "
        f"{independently[:300] or 'takes it'}"
    )
    return "refused" if refused else "read"


def _refused_by_xckpt(manifest: bytes) -> str:
    try:
        parse(manifest, digest_bytes)
    except XckptError as error:
        return str(error)
    return ""


def _refused_independently(manifest: bytes) -> str:
    folder = home() / "manifest"
    folder.mkdir(exist_ok=True)
    (folder / "xckpt.json").write_bytes(manifest)
    try:
        StrictCheckpoint(folder)
    except Broken as error:
        # The digests are looked for only once the manifest is taken.
        return "" if str(error).endswith("xckpt.digests: missing, or too long") else str(error)
    return ""
