"""One torch rank of the run of `examples.demo_run`: a training loop with a CheckpointManager.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m examples.run_torch ROOT

Every rank runs this file. It knows nothing of kills: it is started again, and goes on.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import xckpt
from examples import lora, minilm
from examples.torch_shardings import fsdp
from examples.torch_train import say, training_state
from xckpt.policies import EverySteps, Latest, OnPreemption

STEPS = 13
"""Steps of training: 0 to 12, of which every other is saved."""


def train(root: str) -> None:
    """Train to the end, or until a rank is asked to end."""
    model = minilm.trained()
    lora.adapt(model)
    part = fsdp(model)
    optimizer = lora.adamw(model)
    save, keep = [EverySteps(2), OnPreemption()], [Latest(3), EverySteps(6)]
    with xckpt.CheckpointManager(root, save=save, keep=keep) as checkpoints:
        state = training_state(model, optimizer, step=-1)
        if checkpoints.restore_into(state):
            set_optimizer_state_dict(model, optimizer, state["optim"])
        for skipped in checkpoints.skipped:
            say(f"  skipped {skipped}")
        say(f"  {dist.get_world_size()} ranks begin with step {checkpoints.next_step}")
        for step in range(checkpoints.next_step, STEPS):
            once = range(step, step + 1)
            [part_loss] = minilm.train(model, optimizer, once, part.index, part.count)
            loss = torch.tensor(part_loss)
            dist.all_reduce(loss)
            state = training_state(model, optimizer, step)
            metrics = {"loss": loss.item() / dist.get_world_size()}
            saved = checkpoints.save(step, state, metrics)
            say(f"  step {step}: loss {metrics['loss']:.6f}{', saving' if saved else ''}")
            if checkpoints.preempted:
                say(f"  asked to end: step {step} is saved on all ranks")
                break


def be_rank(root: str) -> None:
    """Join the other ranks, train, and take leave of them."""
    dist.init_process_group("gloo")
    try:
        train(root)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    be_rank(sys.argv[1])
