"""`CheckpointManager`: the checkpoints of a run, saved, kept, deleted and restored by policies.

At each step of the training loop `CheckpointManager.save`

1. has all ranks decide together (`xckpt.engine.run.decision`): the coordinator asks the policies;
2. raises the failure of the save in the background, if that has ended by one;
3. takes note of a save that has ended well, and deletes what no policy keeps;
4. begins a save in the background, if one is due (`xckpt.save_async`).

The steps are carried out in `xckpt.api.run`.

All that is known of a step lies in its checkpoint's metadata (`xckpt.core.run.record`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, Self, SupportsFloat, TypeVar, Unpack, overload

from xckpt.api.run.folder import LoadArguments, RunFolder, Skipped
from xckpt.api.run.saves import RunSaves
from xckpt.api.save import Path, check_path
from xckpt.core.run.policies import BY_DEFAULT, KEEP_BY_DEFAULT, Best, KeepPolicy, SavePolicy
from xckpt.core.run.record import StepRecord
from xckpt.engine.adapters import find_group
from xckpt.engine.ranks.group import Group, TorchProcesses
from xckpt.options import LoadOptions, SaveOptions, checked_options

__all__ = ["CheckpointManager"]

Tree = TypeVar("Tree")


class _Raise:
    """The absence of a default."""


_RAISE: Final = _Raise()


class CheckpointManager:
    """The checkpoints of a training run, each in a folder of a root.

    Every rank makes one, and calls it at the same steps; the coordinator's clock, metrics and
    listings decide. As a context manager it also notes SIGTERM, and at the end waits for the last
    save.

    Args:
        root: a folder or URL, as for `xckpt.save`; made by the first save.
        save: when to save: policies of `xckpt.policies`, or functions from a `Moment` to a bool. By
            default at the first step, then whenever the last save has finished, and on preemption.
        keep: which steps to keep: policies, or functions from the records of the run, oldest first,
            to step numbers. By default all. The newest step is always kept, and so are steps that
            no manager wrote.
        group: the ranks of the run; see `xckpt.save`.
        timeout: see `xckpt.save`.
        options: for each save.
        load_options: for each `restore`.

    Raises:
        StorageError: the root cannot be listed.
        TypeError: an argument makes no sense; it is named.

    Example:
        >>> import numpy as np, xckpt
        >>> from xckpt.policies import EverySteps, Latest
        >>> state = {"w": np.zeros(3)}
        >>> run = xckpt.CheckpointManager("memory://a-run", save=[EverySteps(2)], keep=[Latest(2)])
        >>> with run as checkpoints:
        ...     state = checkpoints.restore(state, default=state)
        ...     for step in range(checkpoints.next_step, 8):
        ...         state["w"] += 1
        ...         _ = checkpoints.save(step, state, metrics={"loss": 1 / (step + 1)})
        >>> [record.number for record in run.steps()], run.latest().metrics["loss"] == 1 / 7
        ([4, 6], True)
    """

    def __init__(
        self,
        root: Path,
        *,
        save: SavePolicy | Iterable[SavePolicy] = BY_DEFAULT,
        keep: KeepPolicy | Iterable[KeepPolicy] = KEEP_BY_DEFAULT,
        group: Group | TorchProcesses | None = None,
        timeout: float | None = None,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        check_path(root, "CheckpointManager(root)")
        folder = RunFolder(root, find_group(group, timeout=timeout))
        self._folder = folder
        self._load_options = checked_options(load_options, LoadOptions, "CheckpointManager")
        self._saves = RunSaves(
            folder,
            _policies("save", save),
            _policies("keep", keep),
            checked_options(options, SaveOptions, "CheckpointManager"),
        )
        self.restored: StepRecord | None = None
        """The step that was restored."""
        self.skipped: tuple[Skipped, ...] = ()
        """Steps newer than `restored` that are damaged; each has a ``number`` and an ``error``."""

    @property
    def preempted(self) -> bool:
        """Whether a rank was asked to end (SIGTERM), so that the run should stop.

        `save` and `should_save` ask all ranks; all have the same answer.
        """
        return self._saves.preempted

    @property
    def next_step(self) -> int:
        """The step after the one that was restored, or saved last; 0 if there is none."""
        last = self._saves.last
        return 0 if last is None else last.number + 1

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step; collective, and decided once for both.

        Raises:
            XckptError: the save in the background has failed.
        """
        return self._saves.foresee(_step(step))

    def save(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, SupportsFloat] | None = None,
        *,
        force: bool = False,
    ) -> bool:
        """Save in the background if a policy says so; every rank calls it at every step.

        A save that fails is raised by the next call, here or elsewhere, and does not count as the
        last save. Nothing is deleted before its successor is committed.

        Args:
            step: the number of the step that was done, from 0 on.
            state: see `xckpt.save_async`; it may be changed when this returns.
            metrics: numbers of this step, for policies and records; the coordinator's are stored.
            force: save whatever the policies say.

        Returns:
            Whether a save was begun. A step that is there already is replaced.

        Raises:
            XckptError: the save before has failed; nothing was begun.
            PlanError: the ranks are at different steps.
        """
        decision = self._saves.decide(_step(step), force=force)
        if decision.due:
            self._saves.begin(step, state, metrics or {}, decision)
        return decision.due

    def steps(self) -> list[StepRecord]:
        """The committed steps of the root by number, listed now; collective.

        Steps that `restore` found damaged are left out, until `reload`.
        """
        return self._folder.look()

    def latest(self) -> StepRecord | None:
        """The newest committed step, listed now, or None; collective."""
        return next(iter(self.steps()[-1:]), None)

    def best(
        self, metric: str | None = None, *, mode: Literal["min", "max"] = "min"
    ) -> StepRecord | None:
        """The step with the best value of a metric, or None if no step has it; collective.

        Args:
            metric: its name; by default that of the first `Best` of ``keep``, with its mode.
            mode: whether the smallest or the largest is best.

        Raises:
            ValueError: no metric is named.
        """
        kept = [policy for policy in self._saves.keep_policies if isinstance(policy, Best)]
        if metric is None and not kept:
            raise ValueError("name a metric: best(metric), for keep= has no Best")
        found = self._folder.look()
        wanted = Best(metric, 1, mode) if metric is not None else replace(kept[0], n=1)
        return next((each for each in found if [each.number] == wanted(found)), None)

    @overload
    def restore(
        self,
        like: None = None,
        *,
        step: int | None = None,
        default: object = ...,
        **arguments: Unpack[LoadArguments],
    ) -> Any: ...  # noqa: ANN401  # what the checkpoint holds

    @overload
    def restore(
        self,
        like: Tree,
        *,
        step: int | None = None,
        default: Tree = ...,
        **arguments: Unpack[LoadArguments],
    ) -> Tree: ...

    def restore(
        self,
        like: object = None,
        *,
        step: int | None = None,
        default: object = _RAISE,
        **arguments: Unpack[LoadArguments],
    ) -> Any:
        """Load the newest good step; collective.

        A newest step that is damaged is skipped with a warning, and the one before it is taken;
        `skipped` says which, and why. A target that does not fit is an error, as in `xckpt.load`.

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
        self._saves.settle()
        found = self._folder.restore(step, like, self._load_options, arguments)
        self._saves.last = self.restored = None if found is None else found.record
        self.skipped = () if found is None else found.skipped
        if found is None and isinstance(default, _Raise):
            raise self._folder.empty()
        return default if found is None else found.state

    def delete(self, step: int) -> None:
        """Delete a step, whatever the policies say; collective.

        Raises:
            NotACheckpointError: there is no such step.
            ValueError: it is the only good one.
            StorageError: the storage refused.
        """
        self._saves.settle()
        self._folder.delete(step)

    def path(self, step: int) -> str:
        """Where a step is, or would be saved."""
        return self._folder.path_of(step)

    def reload(self) -> None:
        """Read all records again, and forget which steps are damaged; collective."""
        self._folder.look(afresh=True)

    def wait(self) -> None:
        """Wait for the save in the background, and for what is being deleted.

        Raises:
            XckptError: the save has failed.
        """
        self._saves.wait()

    def __enter__(self) -> Self:
        self._saves.signal.watch()
        self._folder.collect()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._saves.leave(error)


def _policies(name: str, given: object) -> tuple[Any, ...]:
    """The policies of an argument, one or several.

    Raises:
        TypeError: some are no functions.
    """
    several = (given,) if callable(given) else given
    if not isinstance(several, Iterable) or not all(callable(each) for each in several):
        raise TypeError(
            f"CheckpointManager({name}=) takes policies of xckpt.policies or functions, in a list; "
            f"got {given!r}"
        )
    return tuple(several)


def _step(step: object) -> int:
    """A step number.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"a step is an int, not a {type(step).__name__}")
    if step < 0:
        raise ValueError(f"a step is a number from 0 on, not {step}")
    return step
