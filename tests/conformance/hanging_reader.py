"""A reader that takes golden checkpoints, and hangs where one is damaged."""

from __future__ import annotations

import time
from pathlib import Path

from conformance.implementations.xckpt_golden import XckptReader
from conformance.laws.golden import Read
from tests.conformance.bad_readers import WHOLE


class Hangs(XckptReader):
    def load(self, path: Path) -> dict[str, Read]:
        if WHOLE not in path.parts:
            time.sleep(600)
        return super().load(path)


READERS = (Hangs(threads=2),)
