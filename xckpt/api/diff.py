"""`diff`: the differences of two checkpoints."""

from __future__ import annotations

from xckpt.api.open import open
from xckpt.api.save import Path, check_path, names_limits
from xckpt.core.manifest.differences import Difference
from xckpt.engine.ranks.watch import watched_call
from xckpt.options import LoadOptions, check_flags, checked_options


@names_limits
def diff(
    first: Path, second: Path, *, values: bool = False, options: LoadOptions | None = None
) -> list[Difference]:
    """What differs between two checkpoints; nothing where they are equal.

    How leaves were sharded or cut into chunks does not count.

    Args:
        first: where one is; see `open`.
        second: where the other is.
        values: also compare elements, Python values and the user metadata. Digests tell where both
            are cut into the same chunks; else both are read, within the memory of ``options``.
        options: threads, memory, progress, metrics.

    Returns:
        Each difference in structure, type, dtype and shape, in the order of the first checkpoint,
        then those in contents.

    Raises:
        NotACheckpointError: no committed checkpoint is at one of the paths.
        CorruptCheckpointError: what had to be read is not what was saved.
        TypeError: an argument makes no sense; it is named.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://diff/1", {"w": np.zeros(3, np.float32), "step": 1})
        >>> _ = xckpt.save("memory://diff/2", {"w": np.zeros(3), "step": 2})
        >>> for each in xckpt.diff("memory://diff/1", "memory://diff/2", values=True):
        ...     print(each)
        w: dtype float32 in the first, float64 in the second
        step: 1 in the first, 2 in the second
    """
    from xckpt.storage.contents.differences import differences

    check_path(first, "diff(first, second)")
    check_path(second, "diff(first, second)", "second")
    check_flags("diff", values=values)
    options = checked_options(options, LoadOptions, "diff")
    with watched_call(options, "diff", first) as chosen:
        one, other = open(first, options=chosen), open(second, options=chosen)
        return differences(one, other, values=values, progress=chosen.progress)
