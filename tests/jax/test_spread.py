"""What a JAX process knows of the boxes of all, and saves that each process plans alone."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import jax
import numpy as np
from hypothesis import given
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import xckpt
from tests.support.examples import examples
from tests.support.jax_jobs import run
from tests.support.jax_meshes import shardings, slices
from xckpt.core.geometry.spread import Processes
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.jax.shardings import spread


@examples(40, 1000)
@given(shardings())
def test_each_device_of_the_mesh_holds_what_jax_says(case: tuple[NamedSharding, tuple[int, ...]]):
    sharding, shape = case
    found = spread(sharding, shape)
    assert found is not None
    held = found.held(Processes("jax", np.array([jax.process_index()])))
    assert held is not None
    for number, device in enumerate(np.asarray(sharding.mesh.devices).ravel()):
        said = sharding.devices_indices_map(shape)[device]
        ranges = [part.indices(size) for part, size in zip(said, shape, strict=True)]
        ours = [(part.start, part.stop) for part in slices(held[1], number)]
        assert ours == [(start, stop) for start, stop, _ in ranges]


def test_shardings_without_a_mesh_are_not_known():
    assert spread(SingleDeviceSharding(jax.devices()[0]), (3,)) is None


def save_job(path: str, known: bool) -> tuple[list[int], list[str]]:
    """How often this process planned for all in two saves, and what could not be verified."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(3, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def placed(data: np.ndarray, *spec: object) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])

    state = {
        "rows": placed(np.arange(24.0, dtype=np.float32).reshape(12, 2), ("data", "model")),
        "turned": placed(np.arange(24, dtype=np.int32).reshape(4, 6), "model", "data"),
        "copies": placed(np.arange(5, dtype=np.int8)),
        "step": 3,
    }
    planned = DefaultSavePlanner.create_global_plan
    knows = DefaultSavePlanner.known_plans if known else lambda *_: None
    counts: list[int] = []
    for number in range(2):
        counting = mock.patch.object(
            DefaultSavePlanner, "create_global_plan", autospec=True, side_effect=planned
        )
        with counting as counted, mock.patch.object(DefaultSavePlanner, "known_plans", new=knows):
            if number:
                xckpt.save_async(f"{path}/{number}", state).result()
            else:
                xckpt.save(f"{path}/{number}", state)
        counts.append(counted.call_count)
    return counts, [str(each) for n in range(2) for each in xckpt.open(f"{path}/{n}").verify()]


def test_processes_plan_alone(tmp_path: Path):
    """The save in the background copies nothing, and knows as much."""
    answers = run(save_job, 2, str(tmp_path / "alone"), True, devices=3)
    assert answers == [[[0, 0], []]] * 2
    loaded = [xckpt.load(tmp_path / "alone" / str(number)) for number in range(2)]
    for tree in loaded:
        assert isinstance(tree, dict) and tree["step"] == 3
        assert np.array_equal(tree["rows"], np.arange(24.0).reshape(12, 2))
        assert np.array_equal(tree["turned"], np.arange(24).reshape(4, 6))
        assert np.array_equal(tree["copies"], np.arange(5))


def test_what_processes_do_not_know_one_plans(tmp_path: Path):
    first, second = run(save_job, 2, str(tmp_path / "gathered"), False, devices=3)
    assert [first, second] == [[[1, 0], []], [[0, 0], []]]
