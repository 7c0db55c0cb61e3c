"""A save that Orbax begins, and carries out in a thread of its own once it has made the folder.

It copies the memory that may change and returns a function that saves the copy. Each such call has
a group of its own, so that items of one checkpoint may be written side by side.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final

from xckpt.api.save import save
from xckpt.core.run.bases import Bases
from xckpt.engine.background import BackgroundGroup
from xckpt.engine.groups import find_group
from xckpt.engine.ranks.group import Group
from xckpt.engine.stager import BlockingAsyncStager
from xckpt.formats.orbax.step import UNFINISHED
from xckpt.options import SaveOptions

Folder = str | os.PathLike[str]

_UNFINISHED: Final = re.compile(rf"{re.escape(UNFINISHED)}[^/]*")
"""What Orbax adds to the name of a folder until the checkpoint is whole."""


def elsewhere() -> Group:
    """A group for a call in a thread of Orbax: its threads run in no common order on all ranks."""
    group = find_group()
    return group.in_background() if isinstance(group, BackgroundGroup) else group


def held(
    state: object, options: SaveOptions | None, bases: Bases | None = None
) -> Callable[[Folder], None]:
    """Copy what may change of a state; returns a function that saves the copy to a folder.

    Args:
        state: see `xckpt.save`.
        options: see `xckpt.save`.
        bases: of the saves of an item; None for a state that is saved once.
    """
    group, staged = elsewhere(), BlockingAsyncStager().stage(state)

    def write(folder: Folder) -> None:
        base = None if bases is None else bases.next(_UNFINISHED.sub("", os.fspath(folder)))
        # Orbax has made the folder, in a folder that no reader looks into.
        save(folder, staged, overwrite=True, base=base, group=group, options=options)

    return write
