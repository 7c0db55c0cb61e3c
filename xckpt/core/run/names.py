"""Names of the folders of a run's steps: one form is written, every usual one is read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

DIGITS: Final = 18
"""The most that a step's number has in a name: so it fits 64 bits."""
MOST_STEPS: Final = 10**DIGITS

_NUMBER: Final = rf"([0-9]{{1,{DIGITS}}})"
_WORDS: Final = r"(?:(?:(?:global[-_]?)?step|checkpoint|ckpt|iter)[-_]?)?"
_BEFORE: Final = r"(?:(?:[^/.][^/]*)?-|[^/.][^/]*=[^-_=/]+_|[^/.=-][^/=-]*_)?(?:global_)?"
_AFTER: Final = r"(?:[-_](?:[^/.]|\.[0-9])*)?"
_READ: Final = re.compile(
    rf"(?:{_WORDS}{_NUMBER}|{_BEFORE}step={_NUMBER}{_AFTER})(?:\.ckpt|\.pth?)?"
)
"""Two shapes: a usual word and the number; or fields such as ``epoch=1``, one of them ``step=``.

Fields are joined by a hyphen, or by an underscore behind a value or the first word: so ``step=`` is
one in ``model_step=5``, and ``val_step=3`` is another one in ``epoch=1-val_step=3``.
A dot stands only within a number and before a usual ending, so what is still being written has no
such name: ``5.orbax-checkpoint-tmp-1``, ``step=5-v1.ckpt.part``.
"""


def step_name(number: int) -> str:
    """The name that a new step gets: names sort as their numbers do.

    Example:
        >>> step_name(123)
        'step-00000123'
    """
    return f"step-{number:08d}"


def step_number(name: str) -> int | None:
    """The number of a step by the name of its folder or file; None if it is not a step's.

    Names by torchtitan, Orbax, Lightning, Hugging Face's trainer, Megatron and DeepSpeed are known.

    Example:
        >>> [step_number(name) for name in ("123", "step_000123", "checkpoint-123", "iter_0000123")]
        [123, 123, 123, 123]
        >>> step_number("epoch=1-step=5.ckpt"), step_number("epoch=2-loss=0.25-step=7-v1.ckpt")
        (5, 7)
        >>> step_number("global_step9"), step_number("global-step-9"), step_number("epoch=9.ckpt")
        (9, 9, None)
        >>> step_number("best"), step_number("step-1.tmp"), step_number(".step-1.saving-0")
        (None, None, None)
    """
    found = _READ.fullmatch(name)
    return None if found is None else int(found[1] or found[2])


def steps_in(names: Iterable[str]) -> dict[str, int]:
    """The steps among the names in a folder, in their order: name -> number.

    Example:
        >>> steps_in(["step-9", "10", "config", "9", "step-00000009"])
        {'9': 9, 'step-9': 9, 'step-00000009': 9, '10': 10}
    """
    found = {name: step_number(name) for name in names}
    steps = [(number, name) for name, number in found.items() if number is not None]
    return {name: number for number, name in sorted(steps, key=lambda step: in_order(*step))}


def in_order(number: int, name: str) -> tuple[int, bool, str]:
    """The place of a step among others; of those with one number the one that counts is the last.

    That is the one whose name `step_name` gives, else the last by name.

    Example:
        >>> max(["9", "step-00000009", "step-9"], key=lambda name: in_order(9, name))
        'step-00000009'
    """
    return number, name == step_name(number), name


class OptionalBase(os.PathLike[str]):
    """The path of a base that may be gone: then the save has none.

    Example:
        >>> os.fspath(OptionalBase("run/step-3"))
        'run/step-3'
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return repr(self.path)
