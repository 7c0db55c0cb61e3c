"""The laws of the mapping language, over random compositions of operations and every dtype."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from tests.mapping.mappings import Case, cases, execute, made_by, same_bits
from tests.support.examples import examples
from xckpt.convert import Mapping
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.errors import MappingError
from xckpt.mapping.operations import Add, Scale
from xckpt.mapping.rule import Rule


@given(cases())
def test_a_mapping_makes_bit_for_bit_what_numpy_makes(case: Case) -> None:
    assert same_bits(made_by(case.mapping, case.source, case.target_specs), case.target)


@given(cases())
def test_the_inverse_brings_back_every_bit(case: Case) -> None:
    back = case.mapping.inverse()
    assert same_bits(made_by(back, case.target, case.source_specs), case.source)


@given(cases())
def test_the_inverse_of_the_inverse_is_the_mapping(case: Case) -> None:
    assert case.mapping.inverse().inverse() == case.mapping


@given(cases())
def test_a_mapping_and_its_inverse_come_back_from_toml(case: Case) -> None:
    for mapping in (case.mapping, case.mapping.inverse()):
        written = tomli_w.dumps(mapping.to_document())
        assert Mapping.from_document(tomllib.loads(written)) == mapping


@given(cases())
def test_both_directions_are_proven_on_shapes(case: Case) -> None:
    case.mapping.check(case.source_specs, case.target_specs)
    case.mapping.inverse().check(case.target_specs, case.source_specs)


@given(cases())
def test_without_a_target_the_proof_is_of_what_the_mapping_makes(case: Case) -> None:
    made = case.mapping.resolve(case.source_specs, case.target_specs).targets
    assert case.mapping.check(case.source_specs).targets == made
    more = case.source_specs | {"left over": next(iter(case.source_specs.values()))}
    with pytest.raises(MappingError, match="source 'left over': no rule uses"):
        case.mapping.check(more)


@given(cases())
def test_a_mapping_that_is_turned_round_is_recognised(case: Case) -> None:
    with pytest.raises(MappingError, match=r"is the inverse meant \(inverse\(\) or --inverse\)"):
        case.mapping.check(case.target_specs, case.source_specs)


@given(cases())
def test_a_prefix_before_all_names_is_recognised(case: Case) -> None:
    """And the mapping that the message proposes removes it."""
    nested = {f"ema{{}}/{name}": spec for name, spec in case.source_specs.items()}
    with pytest.raises(MappingError, match=r"no rule takes .* without 'ema{}/': Map") as caught:
        case.mapping.check(nested, case.target_specs)
    assert "Mapping([Rule('ema{{}}/{n...}', '{n...}')]).then(...)" in str(caught.value)
    whole = Mapping([Rule("ema{{}}/{n...}", "{n...}")]).then(case.mapping)
    assert whole.check(nested, case.target_specs).targets == case.target_specs


@given(cases(most_rules=1), st.data())
def test_the_copies_into_a_box_are_a_slice_of_the_whole(case: Case, data: st.DataObject) -> None:
    resolved = case.mapping.resolve(case.source_specs, case.target_specs)
    name = data.draw(st.sampled_from(sorted(case.target)))
    whole = case.target[name]
    low = tuple(data.draw(st.integers(0, n)) for n in whole.shape)
    sizes = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(whole.shape, low, strict=True))
    copies = resolved.copies_into(name, ChunkStorageMetadata(low, sizes))
    box = tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))
    held = np.empty(sizes, whole.dtype)
    held.reshape(-1).view(np.uint8)[...] = 0xA5
    execute(copies, case.source, held, low)
    assert held.tobytes() == whole[box].tobytes()
    assert sum(copy.elements for copy in copies) == held.size


@given(cases())
@examples(50)
def test_assertions_hold_where_the_mapping_made_the_data(case: Case) -> None:
    back = case.mapping.inverse().resolve(case.target_specs, case.source_specs)
    for assertion in back.assertions:
        sides = []
        for tensor in (assertion.tensor, assertion.expected):
            array = np.empty(tensor.shape, np.dtype(case.target[next(iter(case.target))].dtype))
            execute(tensor.copies, case.target, array, None)
            sides.append(array.tobytes())
        assert sides[0] == sides[1]


@given(cases(most_rules=1))
@examples(60)
def test_a_mapping_and_then_its_inverse_is_the_identity(case: Case) -> None:
    both = case.mapping.then(case.mapping.inverse())
    assert same_bits(made_by(both, case.source, case.source_specs), case.source)
    assert both.inverse() == both
    both.check(case.source_specs, case.source_specs)


@given(cases(most_rules=1, dtypes=["float16", "bfloat16", "float32", "float8_e5m2"]), st.data())
@examples(60)
def test_arithmetic_is_the_same_wherever_a_tensor_is_cut(case: Case, data: st.DataObject) -> None:
    """Every element is computed as NumPy does it in float32, step by step; NaN stays NaN."""
    steps = Mapping([Rule("{name...}", "{name...}", [Scale(0.7), Add(1.0)])])
    resolved = case.mapping.then(steps).resolve(case.source_specs, case.target_specs)
    name = data.draw(st.sampled_from(sorted(case.target)))
    before = case.target[name]
    with np.errstate(all="ignore"):
        scaled = (before.astype(np.float32) * np.float32(0.7)).astype(before.dtype)
        expected = (scaled.astype(np.float32) + np.float32(1.0)).astype(before.dtype)
    low = tuple(data.draw(st.integers(0, n)) for n in expected.shape)
    box = tuple(slice(a, None) for a in low)
    sizes = tuple(n - a for n, a in zip(expected.shape, low, strict=True))
    made = np.empty(sizes, expected.dtype)
    execute(resolved.copies_into(name, ChunkStorageMetadata(low, sizes)), case.source, made, low)
    number = ~np.isnan(expected[box].astype(np.float32))
    assert np.array_equal(np.isnan(made.astype(np.float32)), ~number)
    assert made[number].tobytes() == expected[box][number].tobytes()
