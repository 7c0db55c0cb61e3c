"""Parts of a trainer's checkpoint, loaded in place: each whole, others left."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from xckpt.api.load import load_into
from xckpt.core.plan.mismatch import mismatch
from xckpt.core.targets.compare import unexpected
from xckpt.core.text.printable import in_few
from xckpt.errors import naming
from xckpt.options import LoadOptions


def load_parts(
    path: str, parts: Mapping[str, object], *, options: LoadOptions | None = None
) -> None:
    """Fill parts of a state; every process calls it.

    What the checkpoint has of a part that is filled, and the part does not take, is an error. If it
    has more parts of a list than the list, a warning names those that are left.

    Args:
        path: of the checkpoint.
        parts: name -> a part, or a list of parts.
        options: see `xckpt.load_into`.

    Raises:
        TreeMismatchError: a part does not fit the checkpoint.
        XckptError: as `xckpt.load_into`.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://parts", {"model": {"w": np.ones(2), "b": np.ones(1)}})
        >>> load_parts("memory://parts", {"model": {"w": np.zeros(2)}})
        Traceback (most recent call last):
        xckpt.errors.TreeMismatchError: memory://parts: the target does not fit the checkpoint: ...
          - model/b: in the checkpoint, but not wanted
    """
    report = load_into(path, parts, unexpected="ignore", options=options)
    lost: list[str] = []
    other: dict[str, None] = {}
    for name in report.left:
        part, *below = name.split("/")
        if part not in parts:
            continue
        there = parts[part]
        number = below[0] if below else ""
        if isinstance(there, list) and number.isdecimal() and int(number) >= len(there):
            other[f"{part}/{below[0]}"] = None
        else:
            lost.append(name)
    if lost:
        with naming(path):
            raise mismatch(unexpected(lost), "resume with the parts that were saved")
    if other:
        text = (
            f"{path} holds parts that this run lacks, and they were not loaded: {in_few([*other])}"
        )
        warnings.warn(text, UserWarning, stacklevel=2)
