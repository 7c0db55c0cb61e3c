"""What a process has left that was killed while it saved in the background, or deleted.

`ModelCheckpoint` gives no name again that is taken, so it goes once the run has resumed.
"""

from __future__ import annotations

import os
from pathlib import Path

from xckpt.integrations.removal import finish_deletion
from xckpt.storage.commit.collect import beside
from xckpt.storage.commit.leftovers import OwnerState


def clear_away(asked: Path, found: Path) -> None:
    """Remove the folders of saves that were never committed, and what half deletions have left.

    `xckpt.integrations.lightning.last.make_way` has made those folders.

    Args:
        asked: what Lightning has found; perhaps a link to one of them.
        found: what was loaded.

    Raises:
        OSError: the folder cannot be read or written.
    """
    folder, unread = asked.absolute().parent, list[str]()
    lefts = beside(folder, os.listdir(folder), unread)
    going = {Path(left.target).name for left in lefts if left.owner != OwnerState.DEAD.value}
    for each in folder.glob("*.ckpt"):
        finish_deletion(each)
        # Those that begin with "last" are looked for: without them a run would begin anew.
        stays = unread or each.name in going or each.name.startswith("last") or each.is_symlink()
        if stays or not each.is_dir() or any(each.iterdir()):
            continue
        if asked.is_symlink() and asked.samefile(each):
            new = asked.with_name(f".{asked.name}.new")
            new.symlink_to(found.name)
            new.replace(asked)
        each.rmdir()
