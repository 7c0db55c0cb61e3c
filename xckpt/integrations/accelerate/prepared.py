"""What an `Accelerator` has prepared, as a state to save or to load."""

from __future__ import annotations

from typing import Any

from xckpt.core.part.per_rank import PerRank
from xckpt.core.text.arguments import named


def check_accelerator(call: str, accelerator: object) -> None:
    """Refuse what is no accelerator, such as its model.

    Raises:
        TypeError: it is none.
    """
    if not hasattr(accelerator, "distributed_type") or not hasattr(accelerator, "_custom_objects"):
        kind = named(type(accelerator).__name__)
        raise TypeError(f"{call}(accelerator) takes an accelerate.Accelerator, not {kind}")


def state_of(accelerator: Any) -> dict[str, Any]:
    """What all processes have in common, in the order of preparation; models without wraps.

    Raises:
        ValueError: part of it is another's to save.
    """
    kind = accelerator.distributed_type
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(f"{kind}: call accelerator.save_state() and load_state() instead")
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise ValueError(
            "functions given to register_save_state_pre_hook() and register_load_state_pre_hook() "
            "are not called here: give what has a state to register_for_checkpointing() instead"
        )
    # Unwrapped further, the model that is trained would lose its mixed precision.
    return {
        "models": [accelerator.unwrap_model(model) for model in accelerator._models],
        "optimizers": list(accelerator._optimizers),
        "schedulers": list(accelerator._schedulers),
        "scalers": [] if accelerator.scaler is None else [accelerator.scaler],
        "registered": list(accelerator._custom_objects),
    }


def loaders_of(accelerator: Any) -> dict[str, Any]:
    """Where the data loaders of this process are."""
    return {"loaders": [PerRank(LoaderPlace(each)) for each in accelerator._dataloaders]}


class LoaderPlace:
    """Stands for the place of one loader in a state that is saved or loaded.

    1. The number of epochs that it has gone through, and the seed of a seedable sampler, which
       makes its order from both. At its last batch an epoch is over, though Accelerate counts it
       only when the loop asks for another batch.
    2. The generator from which samplers of several processes draw theirs.
    3. The state of the loader itself, if that is a stateful one.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_stateful = getattr(loader, "use_stateful_dataloader", False)
        self._generator: Any = getattr(loader, "synchronized_generator", None)
        self._sampler = _seedable(loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is."""
        generator = [] if self._generator is None else [self._generator.get_state()]
        batches = self._loader.state_dict() if self._is_stateful else {}
        epochs = getattr(self._loader, "iteration", 0) + _is_at_its_end(self._loader)
        seed = [] if self._sampler is None else [self._sampler.initial_seed]
        return {"epochs": epochs, "seed": seed, "generator": generator, "batches": batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the loader there."""
        self._loader.iteration = state["epochs"]
        if self._sampler is not None:
            self._sampler.initial_seed = state["seed"][0]
        for generator in state["generator"]:
            self._generator.set_state(generator)
        if self._is_stateful:
            self._loader.load_state_dict(state["batches"])


def _seedable(loader: Any) -> Any:
    """Accelerate's sampler whose order follows from a seed, in the samplers around it; or None."""
    found = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
    while found is not None and not hasattr(found, "initial_seed"):
        found = getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)
    return found


def _is_at_its_end(loader: Any) -> bool:
    """Whether a loop has the last batch of an epoch, and has not yet asked for another one."""
    under_way = loader in loader.gradient_state.dataloader_references
    return under_way and loader.end_of_dataloader
