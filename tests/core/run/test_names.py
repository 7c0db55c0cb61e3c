"""Step names: written in one form, read as the trainers write them, and nothing else is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.run.names import step_name, step_number, steps_in

numbers = st.integers(0, 10**12)
WORDS = ("step", "global_step", "global-step", "globalstep", "checkpoint", "ckpt", "iter")
plain = st.one_of(
    st.just("{}"),
    st.builds(
        "{}{}{}".format, st.sampled_from(WORDS), st.sampled_from(["", "-", "_"]), st.just("{}")
    ),
)
"""Templates of torchtitan, Orbax, Hugging Face, Megatron, DeepSpeed and others."""

metric = st.builds(
    "{}={}".format,
    st.sampled_from(["epoch", "loss", "val_loss", "val_step", "consumed_samples", "lr"]),
    st.one_of(
        st.integers(0, 99),
        st.sampled_from(["0.25", "-0.50", "1e-05", "nan", "inf", "800.0"]),
    ),
)
field = st.one_of(metric, st.sampled_from(["llama", "megatron_gpt-", "v1.2"]))
version = st.sampled_from([[], ["v1"], ["last"]])


@st.composite
def lightning(draw: st.DrawFn) -> str:
    """A template as of Lightning's `ModelCheckpoint`: fields, one of which is the step."""
    before, after = draw(st.lists(field, max_size=2)), draw(st.lists(metric, max_size=2))
    step = draw(st.sampled_from(["step={}", "global_step={}"]))
    return "-".join([*before, step, *after, *draw(version)]) + draw(st.sampled_from(["", ".ckpt"]))


@given(numbers, plain, st.sampled_from(["", ".ckpt", ".pt", ".pth"]), st.integers(1, 12))
def test_a_word_and_a_number_are_read(number: int, shape: str, ending: str, digits: int) -> None:
    assert step_number(shape.format(f"{number:0{digits}d}") + ending) == number


@given(numbers, lightning())
def test_a_field_of_the_step_is_read(number: int, shape: str) -> None:
    assert step_number(shape.format(number)) == number


@given(numbers)
def test_what_is_written_is_read(number: int) -> None:
    assert step_number(step_name(number)) == number


@given(numbers, st.one_of(plain, lightning()), st.sampled_from([".", "..", "/", "run/"]))
def test_what_is_hidden_or_deeper_is_no_step(number: int, shape: str, before: str) -> None:
    assert step_number(before + shape.format(number)) is None


@given(
    numbers,
    st.one_of(plain, lightning()),
    st.sampled_from([".tmp", ".orbax-checkpoint-tmp-12", ".part", ".saving-0", "/x", ".ckpt.tmp"]),
)
def test_what_is_still_being_written_is_no_step(number: int, shape: str, after: str) -> None:
    assert step_number(shape.format(number) + after) is None


@given(st.integers(0, 10**8 - 1), st.integers(0, 10**8 - 1))
def test_names_sort_as_numbers_do(a: int, b: int) -> None:
    assert (step_name(a) < step_name(b)) == (a < b)


@pytest.mark.parametrize(
    "name",
    [
        *("", "best", "step-", "step--1", "step-1.tmp", ".5.saving-0", "v1", "1e3", "٣", "9" * 19),
        *("last.ckpt", "epoch=3.ckpt", "hpc_ckpt_3.ckpt", "latest", "release", "mp_rank_00"),
        *("tmp-checkpoint-5", "latest_checkpointed_iteration.txt", "global_step5_universal"),
        *("loss=0.25-val_step=3.ckpt", "step=0.5", "step=-5", "substep=5"),
        *("step_5_6", "5-6", "step-5-rank0.pt", "Step-5", "epoch_5.pth", "step=5=6", "step 5"),
        *("5\n", "step=5\n", "step-5 ", "+5", "0x5", "step-5.safetensors", "checkpoint-5.zip"),
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert step_number(name) is None


@pytest.mark.parametrize(
    "name, number",
    [
        ("epoch=1_step=5.ckpt", 5),
        ("model_step=5.ckpt", 5),
        ("epoch=1_val_step=9_step=5.ckpt", 5),
        ("step=5-val_step=9.ckpt", 5),
        ("megatron_gpt--val_loss=2.34-step=100-consumed_samples=800.0-last.ckpt", 100),
        ("iter_0000123", 123),
        ("checkpoint-500", 500),
    ],
)
def test_names_of_trainers(name: str, number: int) -> None:
    assert step_number(name) == number


@given(st.sets(numbers, max_size=5))
def test_steps_come_in_order_and_our_name_counts(found: set[int]) -> None:
    names = [f"checkpoint-{n}" for n in found] + [step_name(n) for n in found] + ["zarr.json"]
    there = list(steps_in(names).items())
    assert [number for _, number in there] == sorted([*found, *found])
    assert there[1::2] == [(step_name(n), n) for n in sorted(found)]
