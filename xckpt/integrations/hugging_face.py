"""Hugging Face's `Trainer`: its checkpoints are checkpoints of xckpt.

A callback is given no trainer and cannot say where in the data a run resumes. So this is a class
to put before `Trainer`, and the trainer goes on deciding when to save, what to keep and which
batches to skip:

1. `_save_checkpoint` saves model, optimizer, schedule, the generators of each rank, and in
   the metadata the trainer's own state as text, on all ranks, in one step.
2. `train` writes that text to the file that the trainer looks for, and the trainer's calls to load
   a part of the checkpoint load that part.
3. `save_total_limit` removes older checkpoints after the new one is committed, manifest first.
"""

# The trainer has an environment of its own; where the types are checked, it may be another release.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

from xckpt.api.load import load_into
from xckpt.api.open import open as open_checkpoint
from xckpt.api.places import delete, exists
from xckpt.api.save import save
from xckpt.convert import Mapping, Rule, convert
from xckpt.integrations.absent import absent
from xckpt.integrations.random_state import load_random_states, random_states
from xckpt.mapping.operations import Drop

try:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints
except ImportError as error:
    Trainer = absent("transformers", error)
    get_last_checkpoint = sort_checkpoints = Trainer

__all__ = ["XckptTrainer", "save_pretrained"]

STATE_FILE = "trainer_state.json"


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
        """Train as `Trainer.train` does; True resumes from the newest checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if _is_ours(resume_from_checkpoint):
            file = Path(resume_from_checkpoint, STATE_FILE)
            if not file.exists() and self.args.should_save:
                file.write_text(_notes(resume_from_checkpoint)["trainer_state"], encoding="utf-8")
            self.accelerator.wait_for_everyone()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        del model
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        root = self._get_output_dir(trial=trial)
        if self.state.best_global_step:
            best = os.path.join(root, f"checkpoint-{self.state.best_global_step}")
            self.state.best_model_checkpoint = best
        path = os.path.join(root, f"checkpoint-{self.state.global_step}")
        self.state.stateful_callbacks["TrainerControl"] = self.control.state()
        own = json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)
        config = getattr(self.model, "config", None)
        notes = {"trainer_state": own, "config": config and config.to_json_string(use_diff=False)}
        state = {"model": self._trained()}
        if not self.args.save_only_model:
            state |= self._moments() | random_states(self.args.world_size)
        save(path, state, overwrite=True, metadata=notes)
        if self.args.should_save:
            Path(path, STATE_FILE).write_text(own, encoding="utf-8")
            self._remove_outdated(root)

    def _trained(self) -> Any:
        return self.model_wrapped if self.is_fsdp_enabled else self.model

    def _moments(self) -> dict[str, Any]:
        """What is saved of optimizer, schedule and scaler."""
        parts = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        scaler = self.accelerator.scaler
        return parts if scaler is None else parts | {"scaler": scaler}

    def _remove_outdated(self, root: str) -> None:
        """Keep ``save_total_limit`` checkpoints, and the best one in any case."""
        limit, best = self.args.save_total_limit or 0, self.state.best_model_checkpoint
        steps = sort_checkpoints(root)
        others = [each for each in steps[:-1] if best is None or Path(each) != Path(best)]
        surplus = len(steps) - max(limit, len(steps) - len(others))
        for each in others[: surplus if limit > 0 else 0]:
            if exists(each):
                delete(each)
            shutil.rmtree(each, ignore_errors=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        _load_part(resume_from_checkpoint, {"model": self.model if model is None else model})

    def _load_best_model(self) -> None:
        if not _is_ours(self.state.best_model_checkpoint):
            return super()._load_best_model()
        _load_part(self.state.best_model_checkpoint, {"model": self._trained()})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not _is_ours(checkpoint):
            return super()._load_optimizer_and_scheduler(checkpoint)
        _load_part(checkpoint, self._moments())

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not _is_ours(checkpoint):
            return super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not _is_ours(checkpoint):
            return super()._load_rng_state(checkpoint)
        load_random_states(str(checkpoint), self.args.world_size)


def save_pretrained(checkpoint: str, folder: str, *, dtype: str | None = None) -> None:
    """Write the weights of a trainer's checkpoint where ``from_pretrained(folder)`` reads them.

    Args:
        checkpoint: one of `XckptTrainer`.
        folder: gets ``model.safetensors`` and ``config.json``.
        dtype: element type of the weights, such as ``"bfloat16"``; None leaves them.

    Raises:
        NotACheckpointError: there is none.
    """
    os.makedirs(folder, exist_ok=True)
    others = ("optimizer", "random", "scaler", "scheduler")
    rules = [Rule(f"{part}/{{name...}}", (), [Drop("unchecked")]) for part in others]
    weights = Mapping([Rule("model/{name...}", "{name...}"), *rules])
    target = os.path.join(folder, "model.safetensors")
    convert(checkpoint, target, mapping=weights, dtype=dtype, overwrite=True)
    Path(folder, "config.json").write_text(_notes(checkpoint)["config"], encoding="utf-8")


def _is_ours(checkpoint: object) -> bool:
    """Whether a trainer's checkpoint is one of xckpt."""
    return isinstance(checkpoint, str) and Path(checkpoint, "xckpt.json").exists()


def _notes(checkpoint: str) -> dict[str, str]:
    """The trainer's state and the model's configuration, as JSON's text."""
    return cast(dict[str, str], open_checkpoint(checkpoint).user_metadata)


def _load_part(checkpoint: Any, state: dict[str, Any]) -> None:
    load_into(checkpoint, state, missing="error", unexpected="ignore")
