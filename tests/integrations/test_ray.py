"""Ray Train with two workers: nothing is uploaded, Ray's rules keep, damage is passed over."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xckpt
from tests.integrations.conftest import own_bytes

STEPS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    place = str(Path(__file__).parents[2])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": place, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def trained(root: Path, name: str, fails_at: int | None) -> Any:
    """The result of a run whose workers die once before a step, and damage the one before."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def loop(config: dict[str, Any]) -> None:
        import torch

        import xckpt
        from tests.integrations.conftest import damage
        from xckpt.integrations.ray import report, restore_into

        rank = torch.distributed.get_rank()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        own = torch.full((3,), rank)
        frozen = torch.ones(1024, 1024)
        start = torch.tensor(0)
        like = {"next": start, "own": xckpt.PerRank(own), "base": frozen}
        restored = restore_into(state | like)
        assert restored is bool(start) and own.tolist() == [rank] * 3
        for step in range(int(start), STEPS):
            if step == config["fails_at"] and not restored:
                if rank == 0:
                    damage(config["folder"] / f"step-{step - 1}")
                raise RuntimeError("a fault")
            batch = torch.sin(torch.arange(16.0) + step).view(4, 4)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            also = {"next": torch.tensor(step + 1), "own": xckpt.PerRank(own), "base": frozen}
            report({"step": step}, state | also, f"step-{step}")

    return TorchTrainer(
        loop,
        train_loop_config={"fails_at": fails_at, "folder": root / name},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            storage_path=str(root),
            name=name,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_two_workers_resume(tmp_path: Path) -> None:
    from xckpt.integrations.ray import url_of

    states = []
    # A run of Ray takes a minute: the fault and the damage are in one.
    for name, fails_at in (("whole", None), ("run", 4)):
        result = trained(tmp_path, name, fails_at)
        assert result.metrics["step"] == STEPS - 1
        path = url_of(result.checkpoint)
        assert path == str(tmp_path / name / f"step-{STEPS - 1}")
        assert xckpt.open(path).verify() == []
        left = {each.name for each in (tmp_path / name).iterdir() if each.name.startswith("step-")}
        assert left == {"step-4", "step-5"}
        assert max(own_bytes(tmp_path / name / each) for each in left) < 100_000
        states.append(xckpt.load(path, framework="torch"))
    whole, run = states
    for name in ("weight", "bias"):
        assert torch.equal(whole["model"][name], run["model"][name])
    assert run["own"]["rank1"].tolist() == [1, 1, 1]


def test_a_file_system_that_xckpt_does_not_open() -> None:
    from pyarrow import fs
    from ray.train import Checkpoint

    from xckpt.integrations.ray import url_of

    with pytest.raises(ValueError, match="file system of the kind 'mock'"):
        url_of(Checkpoint("run/step-1", filesystem=fs._MockFileSystem()))
