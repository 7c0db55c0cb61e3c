"""What the next save of a trainer shares unchanged chunks with, such as those of a frozen model."""

from __future__ import annotations

from typing import Any

from xckpt.core.run.bases import Bases


def bases_of(owner: Any) -> Bases:
    """The bases of the saves of an object, which remembers them.

    Example:
        >>> import argparse
        >>> trainer = argparse.Namespace()
        >>> bases_of(trainer).next("run/1"), bases_of(trainer).next("run/2")
        (None, 'run/1')
    """
    return vars(owner).setdefault("_xckpt_bases", Bases())
