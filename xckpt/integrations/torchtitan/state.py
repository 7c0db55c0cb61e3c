"""The state of torchtitan's trainer, laid out as its own manager does it.

The model's tensors are at the top, beside them ``optimizer``, ``lr_scheduler``, ``dataloader`` and
``train_state``. So a run resumes from that manager's steps, too.
"""

# torchtitan has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from xckpt.api.load import load_into
from xckpt.core.plan.report import LoadReport
from xckpt.core.run.names import step_number
from xckpt.integrations.absent import absent
from xckpt.options import LoadOptions

try:
    from torchtitan.components import checkpointer as titan
    from torchtitan.config import TORCH_DTYPE_MAP
except ImportError as error:
    titan = TORCH_DTYPE_MAP = absent("torchtitan", error)


class TrainerState:
    """What is saved and loaded of a trainer.

    Args:
        trainer: what has a state, as a manager's arguments name it: ``model_parts``, ``states``,
            ``optimizers``, ``lr_schedulers``, ``dataloader``; None for what the trainer lacks.
        excluded: names of parts that are saved, and not loaded.
        options: for each load.

    Raises:
        ValueError: no part has an excluded name.
    """

    def __init__(
        self, trainer: Mapping[str, Any], excluded: Sequence[str], options: LoadOptions | None
    ) -> None:
        self._model = titan.ModelWrapper(trainer["model_parts"])
        names = {titan.OPTIMIZER: "optimizers", titan.LR_SCHEDULER: "lr_schedulers"}
        names |= {titan.DATALOADER: "dataloader"}
        parts = {**trainer["states"], **{name: trainer[each] for name, each in names.items()}}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._excluded, self._options = excluded, options
        if unknown := [each for each in excluded if each not in self._parts]:
            raise ValueError(f"exclude_from_loading: {unknown} is not in {sorted(self._parts)}")

    def whole(self) -> dict[str, Any]:
        """All that is saved."""
        return self._model.state_dict() | self._parts

    def weights(self, dtype: str) -> dict[str, Any]:
        """The model alone, its floating-point tensors in another dtype such as ``"bfloat16"``."""
        state, wanted = self._model.state_dict(), TORCH_DTYPE_MAP[dtype]
        floating = {name: value for name, value in state.items() if value.is_floating_point()}
        return state | {name: value.to(wanted) for name, value in floating.items()}

    def resume(self, path: str) -> LoadReport:
        """Load a step of the run; as in torchtitan, step 0 is a seed: a model and nothing else.

        Raises:
            XckptError: as `fill`.
        """
        is_seed = step_number(os.path.basename(path)) == 0
        if is_seed:  # the optimizers begin anew: a damaged step may have filled some moments
            for optimizer in self._parts.get(titan.OPTIMIZER, ()):
                optimizer.state.clear()
        return self.fill(path, is_seed)

    def fill(self, path: str, model_only: bool) -> LoadReport:
        """Load a checkpoint: all that is not excluded, or the model alone, in whatever dtype.

        Raises:
            XckptError: as `xckpt.load_into`.
        """
        excluded = [*self._parts] if model_only else self._excluded
        parts = {name: part for name, part in self._parts.items() if name not in excluded}
        state = self._model.state_dict() | parts
        report = load_into(path, state, unexpected="ignore", cast=model_only, options=self._options)
        self._model.load_state_dict(state)  # hooks of the model see its tensors
        return report
