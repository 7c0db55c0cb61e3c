"""Steps that another library wrote into a run's root, recognised by the names below them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from xckpt.core.manifest.own_keys import MANIFEST, ORBAX

COMMITTED: Final = "commit_success.txt"
"""What Orbax writes last into a step of a bucket, where no folder can be renamed."""
JSON_FILES: Final = ("metadata", "metrics", "data.json")
"""Orbax's name for the file of an item of JSON, the metrics of a step among them."""
_FILES: Final = (".ckpt", ".pt", ".pth")


def foreign_format(name: str, below: Iterable[str], *, renamed: bool) -> str | None:
    """The format of a step without a manifest, as `xckpt.open` calls it; None if it is not a step.

    A folder that its library has not committed is not a step: DCP writes ``.metadata`` last, Orbax
    renames a folder, or marks it in a bucket.

    Args:
        name: of the folder or file in the root.
        below: what lies below, with slashes, two levels deep or more; nothing for a file.
        renamed: whether the storage renames folders.

    Example:
        >>> foreign_format("step-5", [".metadata", "__0_0.distcp"], renamed=True)
        'dcp'
        >>> foreign_format("5", ["default/_METADATA"], renamed=True)
        'orbax'
        >>> foreign_format("5", ["default/_METADATA"], renamed=False) is None
        True
        >>> foreign_format("epoch=1-step=5.ckpt", [], renamed=True)
        'torch'
    """
    found = set(below)
    if not found:
        return "torch" if name.endswith(_FILES) else None
    if ".metadata" in found:
        return "dcp"
    tails = {path.partition("/")[2] for path in found}
    if found.isdisjoint(ORBAX) and ORBAX[0] not in tails:
        return None
    return "orbax" if renamed or COMMITTED in found else None


def items_held(below: Iterable[str]) -> list[str]:
    """The items of a step of Orbax, without those of JSON; none unless xckpt wrote all of them.

    Args:
        below: what lies below the step, as `foreign_format` takes it.

    Example:
        >>> items_held(["_CHECKPOINT_METADATA", "default/", "default/xckpt.json"])
        ['default']
        >>> items_held(["default/xckpt.json", "metrics/metrics", "metrics/commit_success.txt"])
        ['default']
        >>> items_held(["default/xckpt.json", "other/_METADATA"])
        []
    """
    found = set(below)
    parts = [path.partition("/") for path in found if "/" in path]
    items = {item for item, _, name in parts if name not in ("", COMMITTED, *JSON_FILES)}
    held = [item for item in sorted(items) if f"{item}/{MANIFEST}" in found]
    return held if len(held) == len(items) else []
