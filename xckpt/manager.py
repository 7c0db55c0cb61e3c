"""`CheckpointManager`: the checkpoints of a run, saved, kept, deleted and restored by policies.

At each step of the training loop `CheckpointManager.save`

1. has all ranks decide together (`xckpt.engine.run.decision`): the coordinator asks the policies;
2. raises the failure of the save in the background, if that has ended by one;
3. records a save that has succeeded, and deletes what no policy keeps;
4. begins a save in the background, if one is due (`xckpt.save_async`).

`xckpt.api.run` carries these out. What the manager looks at and restores is in
`xckpt.api.run.reading`.

Everything known about a step is in its checkpoint's metadata (`xckpt.core.run.record`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NoReturn, Self, SupportsFloat, SupportsIndex

from xckpt.api.run.folder import RunFolder
from xckpt.api.run.reading import RunReading
from xckpt.api.run.root import RunRoot
from xckpt.api.run.saves import Rules, RunSaves
from xckpt.api.save import Path, check_path, names_limits, raised_on_all_ranks
from xckpt.core.metadata import JSONValue
from xckpt.core.run.bases import FULL_EVERY, Bases
from xckpt.core.run.numbers import checked_step, whole
from xckpt.core.run.policies import BY_DEFAULT, KEEP_BY_DEFAULT, KeepPolicy, SavePolicy
from xckpt.core.run.temporary import Temporary, keep_policies, save_policies
from xckpt.core.text.arguments import as_float, named
from xckpt.engine.groups import GroupFinder
from xckpt.engine.ranks.group import Group, TorchProcesses, operation
from xckpt.engine.run.agreement import agreed_step
from xckpt.options import LoadOptions, SaveOptions, checked_options

__all__ = ["CheckpointManager"]

DELETE_RATE: Final = 1000.0
"""Files a second: 10,000 take ten seconds, and a save beside them is hardly slowed."""


class CheckpointManager(RunReading):
    """The checkpoints of a training run, each in a folder of a root.

    Every rank makes one, and calls it at the same steps; the coordinator's policies, clock, metrics
    and listings decide. As a context manager it also notes SIGTERM, and at the end waits for the
    last save.

    Args:
        root: a folder or URL, as for `xckpt.save`; made by the first save.
        save: when to save: policies of `xckpt.policies`, or functions from a `Moment` to a bool. By
            default at the first step, then whenever the last save has finished, and on preemption.
        keep: which steps to keep: policies, or functions from the records of the run, oldest first,
            to step numbers. By default all. The newest step is always kept, and so are steps that
            no manager wrote.
        temporary: a second root, a path or a `xckpt.policies.Temporary`, for steps that only its
            policies save: on a fast disk, or in a bucket that forgets old files. All ranks must see
            it; losing it, or steps in it, is not an error.
        delete_rate: most files, or keys, that are deleted a second while training goes on; None for
            no limit. While a caller waits for the end, there is no limit either.
        full_every: a save shares what did not change with the step before, see ``base`` of
            `xckpt.save`; one save in ``full_every`` writes everything, so that damage to a shared
            file does not last. 1: all do; None: only the first.
        group: the ranks of the run; see `xckpt.save`.
        timeout: see `xckpt.save`.
        options: for each save.
        load_options: for each `restore` and `restore_into`; ``retries``, ``timeout`` and the like
            hold for listings and deletions too, and so does ``memory_bytes``: a step whose manifest
            takes more is neither listed nor deleted.

    Raises:
        StorageError: the root cannot be listed, is a checkpoint itself, or lies below a file.
        PlanError: the ranks name different roots, or other options that have to be equal.
        TypeError, ValueError: an argument makes no sense; it is named. As any other error, every
            rank raises it, with the rank on which it was wrong.

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

    @names_limits
    def __init__(
        self,
        root: Path,
        *,
        save: SavePolicy | Iterable[SavePolicy] = BY_DEFAULT,
        keep: KeepPolicy | Iterable[KeepPolicy] = KEEP_BY_DEFAULT,
        temporary: Temporary | Path | None = None,
        delete_rate: SupportsFloat | None = DELETE_RATE,
        full_every: SupportsIndex | None = FULL_EVERY,
        group: Group | TorchProcesses | None = None,
        timeout: float | None = None,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        find = GroupFinder(group, timeout=timeout)
        with raised_on_all_ranks(find):
            check_path(root, "CheckpointManager(root)")
            rules = [
                Rules(
                    save_policies("CheckpointManager(save=)", save),
                    keep_policies("CheckpointManager(keep=)", keep),
                )
            ]
            load_options = checked_options(
                load_options, LoadOptions, "CheckpointManager", "load_options"
            )
            rate = _rate(delete_rate)
            first, second = RunRoot(root, rate, load_options), None
            if temporary is not None:
                if not isinstance(temporary, Temporary):
                    temporary = Temporary(temporary)
                check_path(temporary.root, "CheckpointManager(temporary=)")
                second = RunRoot(temporary.root, rate, load_options, temporary=True)
                rules.append(Rules(*temporary.policies))
            options = checked_options(options, SaveOptions, "CheckpointManager")
            bases = Bases(_count(full_every))
            ranks = find()
        _check_alike(ranks, first, second, full_every, options)
        folder = RunFolder(ranks, first, second)
        super().__init__(folder, RunSaves(folder, rules, options, bases), load_options)

    def __repr__(self) -> str:
        kept, *others = self._folder.roots
        beside = "".join(f", temporary steps in {each.location}" for each in others)
        last = self._saves.last
        number = "" if last is None else f", last step {last.number}"
        return f"<CheckpointManager {kept.location}{beside}{number}>"

    @property
    def preempted(self) -> bool:
        """Whether a rank was asked to end (SIGTERM): the run should stop.

        `save` and `should_save` ask all ranks; all have the same answer.
        """
        return self._saves.preempted

    @property
    def next_step(self) -> int:
        """The step after the one that was restored, or saved last; 0 if there is none."""
        last = self._saves.last
        return 0 if last is None else last.number + 1

    @names_limits
    def should_save(self, step: SupportsIndex) -> bool:
        """Whether `save` would save at this step; collective, and decided once for both.

        Raises:
            XckptError: the save in the background has failed.
        """
        return self._saves.preview(step)

    @names_limits
    def save(
        self,
        step: SupportsIndex,
        state: object,
        metrics: Mapping[str, SupportsFloat] | None = None,
        *,
        metadata: JSONValue = None,
        force: bool = False,
    ) -> bool:
        """Save in the background if a policy says so; every rank calls it at every step.

        A save that fails is raised by the next call, here or elsewhere, and does not count as the
        last save. Nothing is deleted before its successor is committed.

        Args:
            step: the number of the finished step, from 0 on.
            state: see `xckpt.save_async`; it may be changed when this returns.
            metrics: numbers of this step, for policies and records; the coordinator's are stored.
            metadata: further data to keep with the step: a dict that JSON can express; see
                `xckpt.save`. The key ``"run"`` is the manager's.
            force: save whatever the policies say.

        Returns:
            Whether a save was begun. A step that is there already is replaced.

        Raises:
            XckptError: the save before has failed; nothing was begun.
            PlanError: the ranks are at different steps.
            ManifestError: JSON cannot express ``metadata``; nothing was begun.
            StorageError: this user may not write to the root; nothing was begun.
            PathError: the step's folder is a symbolic link; nothing was begun.
            TypeError, ValueError: on some rank ``step`` is not a step, a metric is not a number,
                ``metadata`` is not a dict or has a key ``"run"``, or the coordinator's ``force``
                is neither True nor False; nothing was begun.
        """
        decision = self._saves.decide(step, force=force, metrics=metrics)
        if decision.due:
            self._saves.begin(step, state, metrics, metadata, decision)
        return decision.due

    @names_limits
    def delete(self, step: SupportsIndex) -> None:
        """Delete a step, whatever the policies say; collective.

        Raises:
            NotACheckpointError: there is no such step.
            ValueError: it is the only good one.
            StorageError: the storage refused.
        """
        what = "delete a step; nothing was deleted"
        number = agreed_step(self._folder.group, what, lambda: checked_step(step))
        self._saves.settle()
        assert number is not None
        self._folder.delete(number)
        self._saves.forget(number)

    @names_limits
    def wait(self) -> None:
        """Wait for the save in the background, and for what is being deleted.

        Raises:
            XckptError: the save has failed.
        """
        self._saves.wait()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self!r} belongs to its process and cannot be pickled or copied: pass its root on, "
            f"and make a CheckpointManager there"
        )

    @names_limits
    def __enter__(self) -> Self:
        self._saves.enter()
        return self

    @names_limits
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._saves.leave(error)


def _check_alike(
    ranks: Group,
    root: RunRoot,
    temporary: RunRoot | None,
    full_every: SupportsIndex | None,
    options: SaveOptions,
) -> None:
    """Refuse a run whose ranks would save to other places or in other ways.

    Policies are not compared: the coordinator's decide.

    Raises:
        PlanError: they would.
        XckptError: some ranks have wrong arguments.
    """
    if ranks.size > 1:
        # A run of one process does not need it.
        from xckpt.engine.ranks.compare import CALL, compare_ranks, options_of

        with operation(ranks, "CheckpointManager"):
            second = "None" if temporary is None else str(temporary.location)
            arguments = {"root": str(root.location), "temporary": second}
            arguments |= {"full_every": str(full_every)} | options_of(options)
            compare_ranks(ranks, {CALL: "CheckpointManager"} | arguments)


def _rate(rate: SupportsFloat | None) -> float | None:
    """Files a second.

    Raises:
        TypeError, ValueError: it is not a rate.
    """
    if rate is None:
        return None
    if (found := as_float(rate)) is None:
        raise TypeError(
            f"delete_rate is a number of files a second, not {named(type(rate).__name__)}"
        )
    if not found > 0:
        raise ValueError(f"delete_rate is more than 0 files a second, not {found:g}")
    return found


def _count(full_every: SupportsIndex | None) -> int | None:
    """A number of saves.

    Raises:
        TypeError, ValueError: it is not a number of saves.
    """
    if full_every is None:
        return None
    try:
        count = whole(full_every)
    except TypeError:
        kind = named(type(full_every).__name__)
        raise TypeError(f"full_every is a number of saves, not {kind}") from None
    if count < 1:
        raise ValueError(f"full_every is 1 or more saves, not {count}")
    return count
