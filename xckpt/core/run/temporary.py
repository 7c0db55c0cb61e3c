"""The second root of a run, with policies of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final, cast

from xckpt.core.run.policies import (
    All,
    Best,
    EveryMinutes,
    FirstStep,
    KeepPolicy,
    Latest,
    OnPreemption,
    SavePolicy,
    WhenIdle,
)
from xckpt.core.text.arguments import wrong_argument

_OFTEN: Final = EveryMinutes(10)
_NEWEST: Final = Latest(1)


@dataclass(frozen=True, slots=True)
class Temporary:
    """A second root for checkpoints that may be lost: a fast disk, a bucket that forgets old files.

    A step that no policy of the run itself saves is saved there if one of these says so. Steps of
    both roots are listed and restored; what these policies do not keep is deleted there.

    Args:
        root: a folder or URL that all ranks see.
        save: when to save there; to these policies the last save is that in either root.
        keep: which of the steps there to keep. The newest always stays.

    Raises:
        TypeError: an argument is of another type.

    Example:
        >>> Temporary("/local/run", save=EveryMinutes(5)).keep
        (Latest(n=1),)
    """

    root: str | PathLike[str]
    save: SavePolicy | Iterable[SavePolicy] = _OFTEN
    keep: KeepPolicy | Iterable[KeepPolicy] = _NEWEST

    def __post_init__(self) -> None:
        if not isinstance(self.root, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_argument("Temporary", "root", "a path or URL", self.root)
        object.__setattr__(self, "save", save_policies("Temporary(save=)", self.save))
        object.__setattr__(self, "keep", keep_policies("Temporary(keep=)", self.keep))

    @property
    def policies(self) -> tuple[tuple[SavePolicy, ...], tuple[KeepPolicy, ...]]:
        """When to save there, and what to keep."""
        save: Any = self.save
        keep: Any = self.keep
        return save, keep


def save_policies(name: str, given: object) -> tuple[SavePolicy, ...]:
    """The save policies of an argument, one or several.

    Raises:
        TypeError: some are not save policies.

    Example:
        >>> save_policies("save=", Latest(3))
        Traceback (most recent call last):
        TypeError: save= takes policies that say when to save, or functions; got Latest(n=3)
    """
    return _checked(f"{name} takes policies that say when to save", given, (All, Best, Latest))


def keep_policies(name: str, given: object) -> tuple[KeepPolicy, ...]:
    """The keep policies of an argument, one or several.

    Raises:
        TypeError: some are not keep policies.
    """
    others = (FirstStep, OnPreemption, WhenIdle)
    return _checked(f"{name} takes policies that say what to keep", given, others)


def _checked(what: str, given: object, others: tuple[type, ...]) -> tuple[Any, ...]:
    several = (given,) if callable(given) else given
    is_one = isinstance(several, str) or not isinstance(several, Iterable)
    found = (given,) if is_one else tuple(cast(Iterable[Any], several))
    for each in found:
        # A class is callable as well: Latest for Latest(3).
        if not callable(each) or isinstance(each, (type, *others)):
            raise TypeError(f"{what}, or functions; got {each!r}")
    return found
