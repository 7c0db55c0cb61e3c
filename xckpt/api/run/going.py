"""A save of a run in the background, and what is known of its step when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.run.record import StepRecord, tensor_bytes
from xckpt.engine.background import SaveFuture


@dataclass(frozen=True, slots=True, eq=False)
class Going:
    """A save in the background."""

    saving: SaveFuture
    record: StepRecord
    """What is known of its step before it has ended."""
    shares: bool
    """Whether it has a base."""

    def failure(self) -> BaseException | None:
        """Wait for its end; why it has failed, if it has."""
        return self.saving.exception()

    def saved(self) -> StepRecord:
        """Its step, with its size, once it has succeeded."""
        return replace(self.record, bytes=_bytes_of(self.saving.result()))

    def named(self, error: BaseException) -> BaseException:
        """Its failure, with a note that names the step."""
        error.add_note(
            f"This is the failure of the save of step {self.record.number} in the background; "
            f"it does not count as the last save."
        )
        return error


def _bytes_of(saved: Metadata) -> int:
    return tensor_bytes(
        (leaf.properties.dtype, leaf.size)
        for leaf in saved.values()
        if isinstance(leaf, TensorStorageMetadata)
    )
