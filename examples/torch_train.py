"""The two torch phases of the demo; every rank runs this file.

    torchrun --nproc-per-node 4 -m examples.torch_train start FOLDER
    torchrun --nproc-per-node 3 -m examples.torch_train resume FOLDER

`start`, 4 ranks, FSDP over tensor parallelism on a 2 x 2 mesh:
1. train the MiniLM of the package for three steps;
2. save weights, AdamW state and step with xckpt, and record them without it;
3. train three more steps as if nothing had happened, and record the weights.

`resume`, 3 ranks, FSDP alone:
4. build an untrained MiniLM and load the checkpoint that JAX saved into it;
5. compare all of it with the record, bit by bit;
6. train the same three steps, and compare losses and weights with those of the first run;
7. the same once more with AdamW's moments forgotten: that must *not* match.
"""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import BertModel

import xckpt
from examples import minilm, phase
from examples.phase import Check, Layout, Report
from examples.record import Record, leaves
from examples.torch_shardings import Part, fsdp, fsdp_over_tp

LOSS_TOLERANCE = 1e-6
"""Largest difference of two losses (they are between 0.04 and 0.004)."""

WEIGHT_TOLERANCE = 1e-6
"""Largest difference of two weights; a step of AdamW moves a weight by up to 5e-5."""


def start(folder: Path) -> Report:
    """Train, save, and go on training (1. to 3. above)."""
    model = minilm.trained()
    part = fsdp_over_tp(model)
    optimizer = minilm.adamw(model)
    losses = train(model, optimizer, phase.STEPS_BEFORE, part)

    state = training_state(model, optimizer, step=phase.STEPS_BEFORE.stop)
    seconds = timed(lambda: xckpt.save(folder / phase.FROM_TORCH, state))

    write_record(folder / phase.RECORD_AT_SAVE, state)
    layouts = layouts_of(state)
    losses |= train(model, optimizer, phase.STEPS_AFTER, part)
    write_record(folder / phase.RECORD_AT_END, {"model": model.state_dict()})
    return Report(layouts=layouts, seconds={"save": seconds}, losses=losses)


def resume(folder: Path) -> Report:
    """Load, compare, train and compare again (4. to 7. above)."""
    torch.manual_seed(1234)
    model = minilm.untrained()
    part = fsdp(model)
    optimizer = minilm.adamw(model)

    state = training_state(model, optimizer, step=0)
    seconds = timed(lambda: xckpt.load_into(folder / phase.FROM_JAX, state))
    set_optimizer_state_dict(model, optimizer, state["optim"])

    report = Report(layouts=layouts_of(state), seconds={"load": seconds})
    at_save = Record.read(folder / phase.RECORD_AT_SAVE)
    report.checks.append(check_equal(training_state(model, optimizer, state["step"]), at_save))

    steps = range(state["step"], phase.STEPS_AFTER.stop)
    report.losses.update(train(model, optimizer, steps, part))
    at_end = Record.read(folder / phase.RECORD_AT_END)
    uninterrupted = Report.read(folder / "start.json").losses
    report.checks.append(check_losses(report.losses, uninterrupted))
    report.checks.append(check_weights(model, at_end))

    say("  the same steps with AdamW's moments forgotten:")
    xckpt.load_into(folder / phase.FROM_JAX, {"model": model.state_dict()}, strict=False)
    train(model, minilm.adamw(model), steps, part)
    report.checks.append(check_control(model, at_end))
    return report


def training_state(model: BertModel, optimizer: torch.optim.Optimizer, step: int) -> dict:
    """All that a training run must remember: the tree that is saved and loaded."""
    return {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
        "step": step,
    }


def train(
    model: BertModel, optimizer: torch.optim.Optimizer, steps: range, part: Part
) -> dict[int, float]:
    """Train for `steps`; the loss over each whole global batch."""
    losses = {}
    parts = minilm.train(model, optimizer, steps, part.index, part.count)
    for step, loss in zip(steps, parts, strict=True):
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        losses[step] = total.item() / dist.get_world_size()
        say(f"  step {step}: loss {losses[step]:.7f}")
    return losses


def timed(work: Callable[[], object]) -> float:
    """Wall-clock seconds until every rank has done `work`."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def gather(leaf: object) -> object:
    """A DTensor as one whole NumPy array, gathered by torch; a value as it is. Collective."""
    if isinstance(leaf, DTensor):
        leaf = leaf.full_tensor()
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf


def write_record(folder: Path, state: dict) -> None:
    """Gather `state` leaf by leaf; rank 0 keeps and writes it. Collective."""
    record = Record({}, {})
    for name, leaf in leaves(state):
        whole = gather(leaf)
        if dist.get_rank() == 0:
            record.add(name, whole)
    if dist.get_rank() == 0:
        record.write(folder)


def layouts_of(state: dict) -> dict[str, Layout]:
    """Each tensor's sharding and the shapes of all ranks' shards. Collective."""
    tensors = {name: leaf for name, leaf in leaves(state) if isinstance(leaf, torch.Tensor)}
    local = {
        name: tuple(leaf.to_local().shape if isinstance(leaf, DTensor) else leaf.shape)
        for name, leaf in tensors.items()
    }
    everyone: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, local)
    return {
        name: Layout(
            dtype=str(leaf.dtype).removeprefix("torch."),
            shape=tuple(leaf.shape),
            nbytes=leaf.numel() * leaf.itemsize,
            sharding=sharding_of(leaf),
            shards=tuple(dict.fromkeys(rank[name] for rank in everyone)),
        )
        for name, leaf in tensors.items()
    }


def sharding_of(tensor: torch.Tensor) -> str:
    """Mesh axes and placements, such as "dp: S(0), tp: S(1)"."""
    if not isinstance(tensor, DTensor):
        return "on every rank"
    axes = tensor.device_mesh.mesh_dim_names or ()
    return ", ".join(f"{axis}: {p}" for axis, p in zip(axes, tensor.placements, strict=True))


def check_equal(state: dict, record: Record) -> Check:
    """Does every rank see every leaf exactly as recorded? Collective."""
    wrong = record.differences({name: gather(leaf) for name, leaf in leaves(state)})
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, wrong)
    wrong = sorted(set().union(*everyone))
    return Check(
        "3 torch ranks hold bit for bit what 4 torch ranks saved",
        not wrong,
        f"{len(wrong)} leaves differ: {', '.join(wrong[:5])}" if wrong else record.size(),
    )


def check_losses(losses: dict[int, float], uninterrupted: dict[int, float]) -> Check:
    """Do the resumed run's losses match?"""
    worst = max(abs(loss - uninterrupted[step]) for step, loss in losses.items())
    return Check(
        f"the resumed losses match the uninterrupted run's within {LOSS_TOLERANCE:g}",
        worst <= LOSS_TOLERANCE,
        f"steps {', '.join(map(str, losses))}: the largest difference is {worst:.1e}",
    )


def check_weights(model: BertModel, at_end: Record) -> Check:
    """Do the resumed run's weights match? Collective."""
    worst = largest_difference(model, at_end)
    return Check(
        f"the resumed weights match the uninterrupted run's within {WEIGHT_TOLERANCE:g}",
        worst <= WEIGHT_TOLERANCE,
        f"the largest difference is {worst:.1e}",
    )


def check_control(model: BertModel, at_end: Record) -> Check:
    """Without AdamW's moments the weights must miss the tolerance by far. Collective."""
    worst = largest_difference(model, at_end)
    return Check(
        "the same steps with AdamW's moments forgotten do not match",
        worst > 10 * WEIGHT_TOLERANCE,
        f"the largest difference is {worst:.1e}",
    )


def largest_difference(model: BertModel, record: Record) -> float:
    """Largest |weight - recorded weight| over the whole model. Collective."""
    whole = {f"model/{name}": gather(leaf) for name, leaf in model.state_dict().items()}
    return max(float(np.abs(whole[name] - record.tensors[name]).max()) for name in whole)


def say(line: str) -> None:
    """Print a line, once."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Run the phase that the command line names."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    # Gathering a 2-D sharding axis by axis is what the record needs; torch calls it suboptimal.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    try:
        report = {"start": start, "resume": resume}[name](folder)
        if dist.get_rank() == 0:
            report.write(folder / f"{name}.json")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
