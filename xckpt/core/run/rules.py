"""The rules by which a run keeps its steps, as texts stored with each step.

A step is written with the rules of its run, so that a listing can say later which of them keeps
what, without the program that trained::

    "keep": ["Latest(3)", "Best(\\"loss\\", 2, \\"min\\")", "my_function"]

1. `rule_texts` writes the policies of `xckpt.policies` with their arguments, in JSON; a function of
   the user's is its name.
2. `kept_by` makes policies of the texts again and asks them. What is not a policy of
   xckpt cannot be asked; nothing is ever imported or evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgspec

from xckpt.core.run.policies import (
    All,
    Best,
    EveryMinutes,
    EverySteps,
    KeepPolicy,
    Latest,
    OnSteps,
    name_of,
)
from xckpt.core.run.record import StepRecord

_KNOWN: Final[dict[str, type[Any]]] = {
    each.__name__: each for each in (All, Best, EveryMinutes, EverySteps, Latest, OnSteps)
}
_TEXT: Final = re.compile(r"(\w+)\((.*)\)", re.DOTALL)

NEWEST: Final = "newest"
"""Why a step is kept that no rule keeps: it is the newest."""
NOT_OURS: Final = "not the run's"
"""Why a step is kept that no manager wrote, or that is a symbolic link."""
UNREADABLE: Final = "unreadable"
"""The format, in a listing, of a step whose manifest cannot be read; it counts for no policy."""
WHY_UNREADABLE: Final = "see xckpt verify"
"""What a listing says of it in place of what keeps it."""


def rule_texts(policies: Iterable[KeepPolicy]) -> tuple[str, ...]:
    """The policies of a run as texts.

    Example:
        >>> rule_texts([Latest(3), Best("loss", 2), OnSteps([5, 1]), len])
        ('Latest(3)', 'Best("loss", 2, "min")', 'OnSteps([1,5])', 'len')
    """
    return tuple(map(_text, policies))


def _text(policy: KeepPolicy) -> str:
    name = name_of(policy)
    if _KNOWN.get(name) is not type(policy) or not is_dataclass(policy):
        return name
    values = (getattr(policy, each.name) for each in fields(policy))
    texts = (msgspec.json.encode(value, order="sorted").decode() for value in values)
    return f"{name}({', '.join(texts)})"


def _policy(text: str) -> KeepPolicy | None:
    """What a text says; None if it is a function of the user's."""
    found = _TEXT.fullmatch(text)
    if found is None or found[1] not in _KNOWN:
        return None
    try:
        arguments = msgspec.json.decode(f"[{found[2]}]", type=list[Any])
        policy: KeepPolicy = _KNOWN[found[1]](*arguments)
        policy([])
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return None
    return policy


def kept_by(records: Sequence[StepRecord]) -> dict[int, list[str]]:
    """Which rules keep each step of a root, by the rules of its newest step.

    A step that no rule keeps has no entry in its list; it goes after the next save. Rules that
    cannot be asked end in a question mark, at each step that no other keeps.

    Example:
        >>> run = [StepRecord(step, 60.0, keep=("Latest(1)", "EverySteps(2)")) for step in (1, 2)]
        >>> kept_by(run)
        {1: [], 2: ['Latest(1)', 'EverySteps(2)']}
    """
    sound = list({each.number: each for each in records if each.format != UNREADABLE}.values())
    ours = [record for record in sound if record.managed]
    texts = ours[-1].keep if ours else ()
    rules = {text: _policy(text) for text in texts}
    asked = {text: set(policy(sound)) for text, policy in rules.items() if policy is not None}
    unknown = [f"{text}?" for text, policy in rules.items() if policy is None]
    found: dict[int, list[str]] = {}
    for record in records:
        by = [text for text, numbers in asked.items() if record.number in numbers]
        if not record.managed:
            by = [WHY_UNREADABLE if record.format == UNREADABLE else NOT_OURS]
        elif not by:
            by = [NEWEST] if record is sound[-1] else unknown
        found[record.number] = by
    return found
