"""What torch's modules and schedulers take in any form, or as new tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LinearLR, LRScheduler, SequentialLR

import xckpt


class Counting(torch.nn.Module):
    """Keeps an extra state of any form, as quantised layers do whose history grows."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.w, self.extra = torch.nn.Parameter(torch.ones(2)), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


NOTHING = torch.empty(0, dtype=torch.uint8)
HISTORY = torch.arange(5, dtype=torch.uint8)


@pytest.mark.parametrize(
    "saved, given",
    [
        (HISTORY, NOTHING),
        (NOTHING, HISTORY),
        (HISTORY, HISTORY.half()),
        ({"scale": HISTORY, "steps": [1, 2]}, {"bias": HISTORY}),
        ({"scale": 2.0}, None),
        (None, {"scale": 2.0}),
        (2.5, HISTORY),
    ],
    ids=["grown", "shrunk", "dtype", "keys", "none", "to none", "kind"],
)
def test_an_extra_state_is_loaded_as_it_was_saved(tmp_path: Path, saved: Any, given: Any) -> None:
    xckpt.save(tmp_path / "a", {"model": torch.nn.Sequential(Counting(saved))})
    other = Counting(given)
    other.w.data.zero_()
    xckpt.load_into(tmp_path / "a", {"model": torch.nn.Sequential(other)})
    torch.testing.assert_close(other.extra, saved, rtol=0, atol=0)
    assert other.w.tolist() == [1, 1]
    like = {"model": torch.nn.Sequential(Counting(given))}
    state: Any = xckpt.load(tmp_path / "a", like)
    torch.testing.assert_close(state["model"]["0._extra_state"], saved, rtol=0, atol=0)


def test_an_extra_state_that_was_not_saved_is_missing(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"model": {"w": torch.ones(2)}})
    with pytest.raises(xckpt.TreeMismatchError, match="model/_extra_state: wanted, but not in"):
        xckpt.load_into(tmp_path / "a", {"model": Counting(HISTORY)})


def schedule() -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Of rates that are tensors, as optimizers compiled by torch.compile need them."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1))
    return optimizer, SequentialLR(optimizer, [LinearLR(optimizer), ConstantLR(optimizer)], [2])


def test_a_sequence_of_schedulers_over_rates_that_are_tensors_goes_on(tmp_path: Path) -> None:
    """A new one keeps one tensor as its last rate and as that of its first scheduler."""
    optimizer, scheduler = schedule()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    xckpt.save(tmp_path / "a", {"optimizer": optimizer, "scheduler": scheduler})
    new, other = schedule()
    xckpt.load_into(tmp_path / "a", {"optimizer": new, "scheduler": other})
    for _ in range(3):
        rates = [each.param_groups[0]["lr"].item() for each in (optimizer, new)]
        assert rates[0] == rates[1]
        for stepped in (optimizer, new, scheduler, other):
            stepped.step()
