"""Readers that take golden checkpoints, and die or eat memory where one is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from conformance.implementations.xckpt_golden import XckptReader
from conformance.laws.golden import Read

WHOLE = "golden"


class Dies(XckptReader):
    def load(self, path: Path) -> dict[str, Read]:
        if WHOLE not in path.parts:
            os._exit(9)
        return super().load(path)


class EatsMemory(XckptReader):
    def load(self, path: Path) -> dict[str, Read]:
        if WHOLE not in path.parts:
            np.ones(400 << 20, np.uint8)
        return super().load(path)


READERS = (Dies(threads=2), EatsMemory(threads=2))
