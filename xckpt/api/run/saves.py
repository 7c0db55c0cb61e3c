"""The saves of a run: decided by all ranks together, one at a time in the background.

1. `RunSaves.decide`: the coordinator asks the save policies; its answer reaches every rank.
2. Where the save in the background has ended by then, every rank takes note of it: a failure is
   raised; a step that is committed becomes the last one, and what no policy keeps is deleted.
3. `RunSaves.begin`: the save before is waited for, then the next one begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import SupportsFloat

from xckpt.api.run.folder import RunFolder
from xckpt.api.save import save_async
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.run.names import step_name
from xckpt.core.run.policies import KeepPolicy, Moment, SavePolicy, is_due
from xckpt.core.run.record import StepRecord, run_metadata, tensor_bytes
from xckpt.engine.background import SaveFuture
from xckpt.engine.run.decision import Decision, agree
from xckpt.engine.run.preemption import Preemption
from xckpt.options import SaveOptions


class RunSaves:
    """What one rank knows of the saves of a run."""

    def __init__(
        self,
        folder: RunFolder,
        save: tuple[SavePolicy, ...],
        keep: tuple[KeepPolicy, ...],
        options: SaveOptions,
    ) -> None:
        self.folder = folder
        self.save_policies = save
        self.keep_policies = keep
        self.options = options
        self.signal = Preemption()
        self.preempted = False
        """Whether some rank was asked to end; the same on all ranks."""
        self.last: StepRecord | None = next(iter(folder.look()[-1:]), None)
        """The last step that was saved or restored."""
        self._began = time.time()
        self._going: tuple[SaveFuture, StepRecord] | None = None
        """The save in the background."""
        self._decided: tuple[int, Decision] | None = None
        """What `foresee` has found, for the `decide` that follows."""
        self._fault: Exception | None = None
        """What a keep policy raised on the coordinator, to be raised on all ranks."""
        self._answered = False
        """Whether a save was begun since the run was preempted."""

    def foresee(self, step: int) -> bool:
        """What `decide` will say at this step; collective."""
        decision = self.decide(step, force=False)
        self._decided = (step, decision)
        return decision.due

    def decide(self, step: int, *, force: bool) -> Decision:
        """Whether to save now; collective, once a step.

        Raises:
            XckptError: the save in the background has failed.
            Exception: what a policy raised.
        """
        known, self._decided = self._decided, None
        if known is not None and known[0] == step and (known[1].due or not force):
            return known[1]
        decision = agree(
            self.folder.group,
            step,
            self.signal.noted,
            lambda preempted: self._answer(step, force, preempted or self.preempted),
        )
        self.preempted = decision.preempted
        if decision.ended:
            self.settle()
        return decision

    def _answer(self, step: int, force: bool, preempted: bool) -> Decision:
        """The coordinator's decision."""
        self._raise_fault()
        now = time.time()
        ended = self._going is not None and self._going[0].done()
        last = self.last if self._going is None else self._going[1]
        busy = self._going is not None and not ended
        moment = Moment(step, now, self._began, last, busy, preempted and not self._answered)
        due = force or is_due(moment, self.save_policies)
        replaced = self.folder.name_of(step) if due else None
        return Decision(due, now, ended, preempted, replaced)

    def begin(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, SupportsFloat],
        decision: Decision,
    ) -> None:
        """Begin to save in the background, as was decided; collective.

        Raises:
            XckptError: the save before has failed; nothing was begun.
        """
        self.settle()
        numbers = {name: float(value) for name, value in metrics.items()}
        name = decision.replaced or step_name(step)
        record = StepRecord(step, decision.time, numbers, name=name)
        saving = save_async(
            self.folder.path(record.name),
            state,
            overwrite=decision.replaced is not None,
            metadata=run_metadata(record),
            group=self.folder.group,
            options=self.options,
        )
        self._going, self._answered = (saving, record), self.preempted

    def settle(self) -> None:
        """Wait for the save in the background, and take note of it.

        Raises:
            XckptError: it has failed.
        """
        if self._going is None:
            return
        (saving, record), self._going = self._going, None
        error = saving.exception()
        if error is not None:
            self._answered = False
            error.add_note(
                f"This is the failure of the save of step {record.number} in the background; it "
                f"does not count as the last save."
            )
            raise error
        self.last = replace(record, bytes=_bytes_of(saving.result()))
        self.folder.add(self.last)
        try:
            self.folder.keep(self.keep_policies, record.number)
        except Exception as fault:  # a policy's, on the coordinator alone
            self._fault = fault

    def wait(self) -> None:
        """Wait for the save in the background and for what is being deleted.

        Raises:
            XckptError: the save has failed.
            Exception: what a keep policy raised.
        """
        try:
            self.settle()
        finally:
            self.folder.remover.wait()
        self._raise_fault()

    def leave(self, error: BaseException | None) -> None:
        """The training loop has ended, perhaps by an error, which counts more than a save's.

        Raises:
            XckptError: the last save has failed, and there is no other error.
        """
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"The last save of the run failed as well: {failure}")
        finally:
            self.signal.rest()

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault


def _bytes_of(saved: Metadata) -> int:
    return tensor_bytes(
        (leaf.properties.dtype, leaf.size)
        for leaf in saved.values()
        if isinstance(leaf, TensorStorageMetadata)
    )
