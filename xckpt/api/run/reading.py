"""The calls of a `xckpt.CheckpointManager` that do not save: they look at its run and restore
steps.

1. `steps`, `latest` and `best` list the roots when they are called, on the coordinator.
2. `restore` and `restore_into` wait for the save in the background and load the newest good step
   (`xckpt.api.run.restore`), from which the run goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    SupportsIndex,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from xckpt.api.load import load, load_into
from xckpt.api.parts import Patterns
from xckpt.api.run.folder import RunFolder, no_steps
from xckpt.api.run.restore import Restored, Skipped, restore_step
from xckpt.api.run.saves import RunSaves
from xckpt.api.save import Path, names_limits
from xckpt.core.near_names import no_such_name
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.report import LoadReport, Severity
from xckpt.core.run.numbers import checked_step
from xckpt.core.run.policies import Best
from xckpt.core.run.record import StepRecord
from xckpt.core.text.arguments import wrong_argument
from xckpt.engine.run.agreement import Metric, agreed_flag, agreed_metric, agreed_step
from xckpt.errors import CorruptCheckpointError
from xckpt.options import LoadOptions

if TYPE_CHECKING:
    from xckpt.mapping.mapping import LeafMapping


class IntoArguments(TypedDict, total=False):
    """Further arguments of `xckpt.CheckpointManager.restore_into`: see `xckpt.load_into`."""

    at: str
    select: Patterns | None
    strict: bool
    missing: Severity | None
    unexpected: Severity | None
    cast: bool
    planner: LoadPlanner | None
    mapping: LeafMapping | None
    allow_lossy: bool


class LoadArguments(IntoArguments, total=False):
    """Further arguments of `xckpt.CheckpointManager.restore`: see `xckpt.load`."""

    framework: str | None
    device: object
    report: Callable[[LoadReport], object] | None


Tree = TypeVar("Tree")


class _Raise:
    """The absence of a default."""


_RAISE: Final = _Raise()


class RunReading:
    """The calls of a manager that write nothing."""

    def __init__(
        self, folder: RunFolder, saves: RunSaves, load_options: LoadOptions | None
    ) -> None:
        self._folder = folder
        self._saves = saves
        self._load_options = load_options
        self.restored: StepRecord | None = None
        """The step that was restored."""
        self.skipped: tuple[Skipped, ...] = ()
        """Steps newer than `restored` that are damaged; each has a ``number`` and an ``error``."""

    def steps(self) -> list[StepRecord]:
        """The committed steps, listed now; those found damaged only after `reload`; collective."""
        return self._folder.look()

    def latest(self) -> StepRecord | None:
        """The newest committed step, listed now, or None; collective."""
        return next(iter(self.steps()[-1:]), None)

    def best(
        self, metric: str | None = None, *, mode: Literal["min", "max"] = "min"
    ) -> StepRecord | None:
        """The step with the best value of a metric, or None if no step has it; collective.

        Of equal values the newest step counts; NaN, and a step without the metric, never.

        Args:
            metric: its name; by default that of the first `Best` of the coordinator's ``keep``,
                with its mode.
            mode: whether the smallest or the largest is best.

        Raises:
            TypeError, ValueError: no metric is named, or the mode is neither.
            PlanError: the ranks name different ones.
        """
        own = partial(_metric, self._folder, self._saves, metric, mode)
        wanted = agreed_metric(self._folder.group, own)
        found = self._folder.look()
        numbers = Best(wanted[0], 1, wanted[1])(found)
        return next((each for each in found if [each.number] == numbers), None)

    @overload
    def restore(
        self,
        like: None = None,
        *,
        step: SupportsIndex | None = None,
        default: object = ...,
        **arguments: Unpack[LoadArguments],
    ) -> Any: ...  # noqa: ANN401  # what the checkpoint holds

    @overload
    def restore(
        self,
        like: Tree,
        *,
        step: SupportsIndex | None = None,
        default: Tree = ...,
        **arguments: Unpack[LoadArguments],
    ) -> Tree: ...

    def restore(
        self,
        like: object = None,
        *,
        step: SupportsIndex | None = None,
        default: object = _RAISE,
        **arguments: Unpack[LoadArguments],
    ) -> Any:
        """Load the newest good step; collective.

        A newest step that is damaged is skipped with a warning, and the one before it is taken;
        `skipped` says which, and why. A target that does not fit the newest good one is an error.

        Args:
            like: the tree of targets; see `xckpt.load`.
            step: load this one and no other.
            default: what to return where the root holds no step at all.
            arguments: ``at``, ``select``, ``framework``, ``device``, ``strict``, ``missing``,
                ``unexpected``, ``cast``, ``planner``, ``mapping``, ``allow_lossy`` and ``report``,
                as for `xckpt.load`.

        Raises:
            NotACheckpointError: there is no such step, or none at all and no default.
            CorruptCheckpointError: every step is damaged, or the one that was named.
            XckptError: as `xckpt.load`.
        """
        target, group, options = cast(Any, like), self._folder.group, self._load_options
        found = self._restored(
            step,
            lambda path: load(path, target, group=group, options=options, **arguments),
            lambda: _check_names("restore", arguments, LoadArguments),
        )
        given = not isinstance(default, _Raise)
        # Else a rank with one would begin, and wait for the others.
        if found is None and not agreed_flag(group, "restore a step; none is there", given):
            raise no_steps(self._folder)
        return default if found is None else found.state

    def restore_into(
        self,
        state: object,
        *,
        step: SupportsIndex | None = None,
        **arguments: Unpack[IntoArguments],
    ) -> LoadReport | None:
        """Load the newest good step into the tensors of a state, in place; collective.

        As `restore`, through `xckpt.load_into`: for modules and optimizers of torch. A damaged step
        may have filled some of it before the next one fills all.

        Args:
            state: what to fill; see `xckpt.load_into`.
            step: load this one and no other.
            arguments: ``at``, ``select``, ``strict``, ``missing``, ``unexpected``, ``cast``,
                ``planner``, ``mapping`` and ``allow_lossy``, as for `xckpt.load_into`.

        Returns:
            What was loaded; None where the root holds no step at all, and nothing was changed.

        Raises:
            NotACheckpointError, CorruptCheckpointError: as `restore`.
            XckptError: as `xckpt.load_into`.

        Example:
            >>> import numpy as np, xckpt
            >>> checkpoints = xckpt.CheckpointManager("memory://restored-into")
            >>> state = {"w": np.zeros(2)}
            >>> checkpoints.restore_into(state) is None
            True
            >>> checkpoints.save(0, {"w": np.ones(2)}), checkpoints.restore_into(state)
            (True, LoadReport(1 loaded, 0 cast, 0 kept, 0 left))
            >>> state["w"]
            array([1., 1.])
        """
        group, options = self._folder.group, self._load_options
        found = self._restored(
            step,
            lambda path: load_into(path, state, group=group, options=options, **arguments),
            lambda: _check_names("restore_into", arguments, IntoArguments),
        )
        return None if found is None else found.state

    def restore_with(
        self, load: Callable[[str], Tree], *, step: SupportsIndex | None = None
    ) -> Tree | None:
        """Load the newest good step by a function of its path; collective.

        As `restore`, for a load in several parts, or one that depends on the step.

        Args:
            load: called on every rank, with the path of a step as `xckpt.load` takes it. Of a
                damaged step it may fill a part; the next call has to fill all.
            step: load this one and no other.

        Returns:
            What ``load`` returned; None where the root holds no step at all.

        Raises:
            NotACheckpointError, CorruptCheckpointError: as `restore`.
            Exception: what else ``load`` raised; a TypeError if it is no function.

        Example:
            >>> import xckpt
            >>> checkpoints = xckpt.CheckpointManager("memory://restored-with")
            >>> checkpoints.save(3, {"w": 1, "lr": 0.5}), checkpoints.restore_with(xckpt.load)
            (True, {'w': 1, 'lr': 0.5})
        """
        found = self._restored(step, lambda path: load(os.fspath(path)), lambda: _check_load(load))
        return None if found is None else found.state

    @names_limits
    def _restored(
        self, step: SupportsIndex | None, load: Callable[[Path], Tree], check: Callable[[], None]
    ) -> Restored[Tree] | None:
        """Load a step and go on from there; see `restore_step`."""
        what = "restore a step; nothing was loaded"
        number = agreed_step(self._folder.group, what, lambda: _asked(step, check))
        self._saves.settle()
        try:
            found = restore_step(self._folder, number, load, self._load_options)
        except CorruptCheckpointError:
            if number is None:
                self._saves.resume(None)  # no step is good, so every policy applies again
            raise
        self.restored, self.skipped = (found.record, found.skipped) if found else (None, ())
        _go_on(self._saves, self.restored)
        return found

    def path(self, step: SupportsIndex) -> str:
        """Where a step is, or would be saved."""
        return self._folder.path_of(checked_step(step))

    def reload(self) -> None:
        """Read all records again, and forget which steps are damaged; collective."""
        self._folder.look(reread=True)


def _metric(
    folder: RunFolder, saves: RunSaves, metric: str | None, mode: Literal["min", "max"]
) -> Metric | None:
    """What a rank wants the best of; None: whatever the coordinator does."""
    if metric is not None:
        asked = Best(metric, 1, mode)
        return asked.metric, asked.mode
    if not folder.is_coordinator:
        return None
    for policy in (policy for rules in saves.rules for policy in rules.keep):
        if isinstance(policy, Best):
            return policy.metric, policy.mode
    raise ValueError("name a metric, best(metric): keep= has no Best")


def _asked(step: SupportsIndex | None, check: Callable[[], None]) -> int | None:
    check()
    return None if step is None else checked_step(step)


def _go_on(saves: RunSaves, restored: StepRecord | None) -> None:
    """The next saves follow the step that was restored, and share chunks with it."""
    saves.resume(restored)
    path = None if restored is None else saves.folder.path(restored)
    saves.bases.restored(path, root=restored is not None and restored.temporary)


def _check_load(load: object) -> None:
    if not callable(load):
        raise wrong_argument("restore_with", "load", "a function of a step's path", load)


def _check_names(call: str, arguments: Collection[str], known: type[IntoArguments]) -> None:
    """Refuse an argument that a load lacks before other ranks begin it."""
    for name in arguments:
        if name not in known.__optional_keys__:
            raise TypeError(no_such_name(name, known.__optional_keys__, call, what="argument"))
