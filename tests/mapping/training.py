"""Train a toy in torch or in Optax: same data, same loss, same AdamW."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from tests.mapping import toys

RATE, DECAY, BETAS = 3e-3, 0.02, (0.8, 0.95)
# A key's bias has no gradient but noise, which a smaller one would blow up to whole steps.
EPSILON = 1e-5


def batches(start: int, count: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Words and what the model should say to them, for steps from ``start`` on."""
    found = []
    for step in range(start, start + count):
        random = np.random.default_rng(step)
        words = random.integers(0, toys.WORDS, (4, 7))
        found.append((words, random.standard_normal((4, 7, toys.WORDS), np.float32)))
    return found


def adamw(module: torch.nn.Module, *, named: bool = False) -> Any:
    """torch's AdamW."""
    parameters = module.named_parameters() if named else module.parameters()
    return torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


def optax_adamw() -> optax.GradientTransformation:
    """Optax's, inside a chain and with a schedule, as people have it."""
    return optax.chain(
        optax.clip_by_global_norm(1e6),
        optax.adamw(
            optax.constant_schedule(RATE),
            b1=BETAS[0],
            b2=BETAS[1],
            eps=EPSILON,
            weight_decay=DECAY,
        ),
    )


def train_torch(module: torch.nn.Module, optimizer: Any, start: int, count: int) -> None:
    """Take steps in place."""
    for words, wanted in batches(start, count):
        optimizer.zero_grad()
        loss = (module(torch.from_numpy(words)) - torch.from_numpy(wanted)).square().mean()
        loss.backward()
        optimizer.step()


@functools.cache
def compiled_step(model: Any) -> Any:
    """(parameters, state, words, wanted) -> parameters and state after one step."""
    optimizer = optax_adamw()

    def step(params: Any, state: Any, words: Any, wanted: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> Any:
            return jnp.square(model.apply(params, words) - wanted).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def train_optax(model: Any, params: Any, state: Any, start: int, count: int) -> tuple[Any, Any]:
    """Take steps; the new parameters and state."""
    step = compiled_step(model)
    for words, wanted in batches(start, count):
        params, state = step(params, state, words, wanted)
    return params, state
