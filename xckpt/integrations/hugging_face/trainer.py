"""Hugging Face's `Trainer`: its checkpoints are checkpoints of xckpt.

A callback is given no trainer and cannot say where in the data a run resumes. So this is a class
to put before `Trainer`, and the trainer goes on deciding when to save, what to keep and which
batches to skip:

1. `_save_checkpoint` saves model, optimizer, schedule, the generators of each rank, and in
   the metadata the trainer's own state as text, on all ranks, in one step.
2. `train` has the newest checkpoint verified, and takes the one before if that is damaged. It
   writes that text to the file that the trainer looks for, and the trainer's calls to load a part
   of the checkpoint load that part.
3. `save_total_limit` removes older checkpoints after the new one is committed, manifest first.
"""

# The trainer has an environment of its own; where the types are checked, it may be another release.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from typing import Any

from xckpt.api.save import save
from xckpt.integrations.absent import absent
from xckpt.integrations.bases import bases_of
from xckpt.integrations.hugging_face.resume import load_moments, resumable
from xckpt.integrations.hugging_face.state import notes, write_state_file
from xckpt.integrations.newest import is_ours
from xckpt.integrations.parts import load_parts
from xckpt.integrations.random_state import load_random_states, random_states
from xckpt.integrations.removal import remove_outdated

try:
    from transformers import Trainer
    from transformers.trainer_utils import sort_checkpoints
except ImportError as error:
    Trainer = sort_checkpoints = absent("transformers", error)

__all__ = ["XckptTrainer"]


class XckptTrainer(Trainer):  # pyright: ignore[reportGeneralTypeIssues]
    """A `transformers.Trainer` whose checkpoints are of xckpt; for your own trainer, a mixin.

    ``class MyTrainer(XckptTrainer, SFTTrainer)`` puts it before another trainer. ``output_dir``
    is a local folder; checkpoints of the plain `Trainer` in it are resumed from too.

    Example:
        >>> from transformers import TrainingArguments
        >>> from xckpt.integrations.hugging_face import XckptTrainer
        >>> import torch
        >>> arguments = TrainingArguments("run", save_steps=50, save_total_limit=2, use_cpu=True)
        >>> trainer = XckptTrainer(torch.nn.Linear(2, 2), arguments, train_dataset=[])
    """

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does; True resumes from the newest good checkpoint.

        For that one process reads the newest one to verify it; a damaged one is passed over with a
        warning. A path is resumed from as it is.

        Raises:
            PathError: ``output_dir`` is a URL.
            CorruptCheckpointError: all checkpoints are damaged, or the one that was named.
        """
        path = resumable(resume_from_checkpoint, self.args.output_dir)
        return super().train(path, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # DeepSpeed and FSDP1 do not tell where in the model a rank's part of their state belongs.
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.accelerator.is_fsdp2):
            return super()._save_checkpoint(model, trial)
        self.store_flos()
        root = self._get_output_dir(trial=trial)
        path = os.path.join(root, f"checkpoint-{self.state.global_step}")
        state = {"model": self.model}
        if not self.args.save_only_model:
            state |= self._moments() | random_states(self.args.world_size)
        base = bases_of(self).next(path)
        save(path, state, overwrite=True, base=base, metadata=notes(self, path))
        if self.args.should_save:
            write_state_file(path)
            # A run that has gone back is behind newer ones, which may be damaged.
            kept = path, self.state.best_model_checkpoint
            remove_outdated(sort_checkpoints(root), self.args.save_total_limit, *kept)

    def _moments(self) -> dict[str, Any]:
        """What is saved of optimizer, schedule and scaler."""
        parts = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        scaler = self.accelerator.scaler
        return parts if scaler is None else parts | {"scaler": scaler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not is_ours(resume_from_checkpoint):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        # The trainer's model is the sharded one, where it is sharded, and else without wraps.
        load_parts(resume_from_checkpoint, {"model": self.model})
        bases_of(self).restored(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if not is_ours(self.state.best_model_checkpoint):
            return super()._load_best_model()
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not is_ours(checkpoint):
            return super()._load_optimizer_and_scheduler(checkpoint)
        load_moments(checkpoint, self._moments())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not is_ours(checkpoint):
            return super()._load_rng_state(checkpoint)
        load_random_states(checkpoint, self.args.world_size)
