"""Two checkpoints side by side, as a page shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xckpt.core.manifest.differences import Difference
from xckpt.core.text.printable import printable
from xckpt.viewer.model import CheckpointPage, DifferenceShown, DiffPage


def diff_page(
    other: str, found: Sequence[Difference], first: CheckpointPage, second: CheckpointPage
) -> DiffPage:
    """What differs between two checkpoints, contents included.

    Args:
        other: where the second is.
        found: all that differs.
        first: the page of the first.
        second: that of the second.

    Example:
        >>> import numpy as np, xckpt
        >>> from xckpt.viewer.leaves import checkpoint_page
        >>> places = ["memory://diff-page/1", "memory://diff-page/2"]
        >>> for number, place in enumerate(places):
        ...     _ = xckpt.save(place, {"w": np.full(4, number), "v": np.zeros(2)})
        >>> pages = [checkpoint_page(xckpt.open(place).manifest) for place in places]
        >>> page = diff_page("2", xckpt.diff(*places, values=True), *pages)
        >>> [(each.name, each.kind, each.bytes) for each in page.differences], page.equal_bytes
        ([('w', 'content', 32)], 16)
    """
    sizes = {**_sizes(second), **_sizes(first)}
    shown = tuple(
        DifferenceShown(
            printable(each.name),
            each.kind,
            printable(each.first),
            printable(each.second),
            sizes.get(printable(each.name), 0) if each.kind != "metadata" else 0,
        )
        for each in found
    )
    changed = {each.name for each in shown if each.kind not in ("container", "metadata")}
    equal = {name: size for name, size in _sizes(first).items() if name not in changed}
    return DiffPage(printable(other), shown, len(equal), sum(equal.values()))


def _sizes(page: CheckpointPage) -> Mapping[str, int]:
    """Leaf name -> bytes."""
    return {name: page.kinds[kind].bytes for name, kind in zip(page.names, page.kind, strict=True)}
