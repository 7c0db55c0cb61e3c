"""Mappings that do not fit: each fault is named, with its leaf and its range, before any data."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import xckpt
from tests.mapping.mappings import Arrays, made_by, same_bits, specs_of
from tests.support.steps import steps
from tests.support.time_limit import ALLOWANCE, untraced
from xckpt.convert import Mapping, convert, family, infer
from xckpt.errors import MappingError
from xckpt.mapping.names import specs_of as tree_specs
from xckpt.mapping.operations import (
    Add,
    Cast,
    Concatenate,
    Constant,
    Drop,
    Each,
    Operation,
    Pad,
    Scale,
    Split,
    Stack,
    Tie,
    Transpose,
    Untie,
)
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec

Specs = dict[str, TensorSpec]


def specs(dtype: str = "float32", **shapes: Sequence[int]) -> Specs:
    return {name: TensorSpec(tuple(shape), dtype) for name, shape in shapes.items()}


def layers(count: int, name: str = "l.{}.w", shape: tuple[int, ...] = (2, 3)) -> Specs:
    return {name.format(i): TensorSpec(shape, "float32") for i in range(count)}


def problems(mapping: Mapping, source: Specs, target: Specs) -> tuple[str, ...]:
    with pytest.raises(MappingError) as caught:
        mapping.check(source, target)
    return caught.value.problems


def test_an_open_checkpoint_is_a_tree() -> None:
    state = {"m": {"a.b": np.zeros((2, 3)), "a/b": np.ones(4, np.int8)}, "l": [np.ones(1)], "n": 1}
    xckpt.save("memory://a-tree-of-specs", state)
    checkpoint = xckpt.open("memory://a-tree-of-specs")
    assert tree_specs(checkpoint) == tree_specs(checkpoint.tree) == tree_specs(state)
    assert tree_specs(checkpoint["m"]) == tree_specs(state["m"])
    for path in ("memory://a-tree-of-specs", Path("folder")):
        with pytest.raises(TypeError, match=r"not a path: xckpt\.open"):
            infer(path, state)


WRONG: Any = {"a": "b"}


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Mapping(cast(Any, Rule("a", "b"))), "a mapping is made of a list of rules"),
        (lambda: Mapping([WRONG]), "a mapping is made of a list of rules"),
        (lambda: Rule("a", "b", cast(Any, Transpose((1, 0)))), "operations are a list such as"),
        (lambda: infer(3, {}), "taken from a tree of arrays, not from 3"),
        (lambda: infer({}, None), "taken from a tree of arrays, not from None"),
        (lambda: Rule(cast(Any, 3), "b"), "source is a name or a list of names, not 3"),
        (lambda: Rule("a", cast(Any, [4])), r"target is a name or a list of names, not \[4\]"),
        (lambda: Rule("a", "b", (), cast(Any, 5)), "indices are a dict such as"),
        (lambda: Rule("a", "b", (), {}, cast(Any, 5)), "optional is a name or a list of names"),
        (lambda: Rule("a", "b", [WRONG]), r"Rule\.from_document takes a table"),
        (lambda: family("llama", cast(Any, 3)), "config takes a dict, an object of transformers"),
        (lambda: xckpt.load("ckpt", {}, mapping=WRONG), r"load takes mapping=xckpt\.convert"),
        (lambda: convert("ckpt", "new", mapping=WRONG), r"convert takes mapping=xckpt\.convert"),
        (lambda: convert("memory://typed", "new", dtype=WRONG), "dtype takes a name, such as"),
        (lambda: convert("ckpt", "new", executor=WRONG), "executor takes one of concurrent"),
        (
            lambda: infer({}, {}, progress=cast(Any, 5)),
            r"infer\(progress=\) takes a function .* int 5",
        ),
        (
            lambda: TensorSpec(cast(Any, None), "int8"),
            r"TensorSpec\(shape=\) takes a tuple of ints",
        ),
        (lambda: TensorSpec(cast(Any, 3), "int8"), r"TensorSpec\(shape=\) .*, not the int 3"),
        (lambda: TensorSpec(cast(Any, (1.5,)), "int8"), r"TensorSpec\(shape=\) .*, not the tuple"),
        (
            lambda: TensorSpec((1,), cast(Any, None)),
            r"TensorSpec\(dtype=\) takes the format's name",
        ),
    ],
)
def test_what_is_of_another_type_is_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make()


def test_what_a_mapping_is_fits_a_line_however_large_the_models_are() -> None:
    layers = {f"layers.{n}.up.weight": np.zeros((4, 2), np.float32) for n in range(500)}
    kernels = {f"up/{n}": np.zeros((2, 4), np.float32) for n in range(500)}
    mapping = Mapping([Rule(name, f"at/{n}") for n, name in enumerate(layers)])
    both = mapping.then(mapping.inverse())
    for thing in (mapping, both, mapping.resolve(layers), infer(layers, kernels | layers)):
        assert len(repr(thing)) < 300 and "\n" not in repr(thing)
    assert repr(mapping).startswith("<Mapping of 500 rules: layers.0.up.weight -> at/0, ")
    assert ", then <Mapping of 500 rules: at/0 -> " in repr(both)
    assert "500 leaves" in repr(mapping.resolve(layers))
    assert repr(Mapping(mapping.rules[:1])) == "<Mapping of 1 rule: layers.0.up.weight -> at/0>"
    assert repr(infer(layers, layers)) == (
        "<Inference: 500 certain, 0 assumed, 0 ambiguous, 0 unmatched>"
    )


def test_a_shape_is_a_tuple_however_it_is_given() -> None:
    assert TensorSpec(cast(Any, [2, 3]), "int8") == TensorSpec((2, 3), "int8")


AB = Mapping([Rule("a", "b", [Transpose((1, 0))])])
QKV = Rule(("q", "k", "v"), "qkv", [Concatenate((4, 2, 2))])


@pytest.mark.parametrize(
    "mapping, source, target, expected",
    [
        pytest.param(
            AB,
            specs(a=(2, 3), c=(5,)),
            specs(b=(3, 2)),
            ["source 'c': no rule uses [0, 5)"],
            id="an unused source",
        ),
        pytest.param(
            AB,
            specs(a=(2, 3)),
            specs(b=(3, 2), c=(5, 1)),
            ["target 'c' has a gap: [0, 5) x [0, 1); no rule makes it"],
            id="a gap",
        ),
        pytest.param(
            Mapping([*AB.rules, Rule("x", "c")]),
            specs(a=(2, 3)),
            specs(b=(3, 2), c=(5,)),
            ["target 'c' has a gap: [0, 5); rule x -> c would, but takes no leaf"],
            id="a gap, and the rule that found no source",
        ),
        pytest.param(
            AB,
            specs(b=(3, 2)),
            specs(a=(2, 3)),
            [
                "no rule takes a leaf of the source, and rule a -> b makes its 'b': is the inverse "
                "meant (inverse() or --inverse)?",
                "target 'a' has a gap: [0, 2) x [0, 3); no rule makes it",
                "source 'b': no rule uses [0, 3) x [0, 2)",
            ],
            id="the way back",
        ),
        pytest.param(
            AB,
            specs(a=(2, 3)),
            {},
            ["target 'b' is not wanted, but rule a -> b makes [0, 3) x [0, 2) of it"],
            id="an unwanted target",
        ),
        pytest.param(
            AB,
            specs(a=(2, 3)),
            specs(b=(2, 3)),
            ["target 'b' is float32[2, 3], but rule a -> b makes float32[3, 2]"],
            id="another shape",
        ),
        pytest.param(
            AB,
            specs(a=(2, 3)),
            specs("bfloat16", b=(3, 2)),
            ["target 'b' is bfloat16[3, 2], but rule a -> b makes float32[3, 2]"],
            id="another dtype",
        ),
        pytest.param(
            Mapping([Rule("a", "c"), Rule("b", "c")]),
            specs(a=(2,), b=(3,)),
            specs(c=(2,)),
            ["target 'c' overlaps: [0, 3) is made by rule a -> c and rule b -> c"],
            id="an overlap",
        ),
        pytest.param(
            Mapping([Rule("a.{i}", "b.{i}"), Rule("{rest...}", "c.{rest...}")]),
            layers(1, "a.{}"),
            layers(1, "b.{}"),
            ["source 'a.0' is ambiguous: rule a.{i} -> b.{i} and rule {rest...} -> c.{rest...} "
             "match it"],
            id="an ambiguous rule",
        ),
        pytest.param(
            Mapping([Rule(("a.{i}", "a.{i}"), ("b", "c"), [
                Each(((Stack("i"),), (Stack("i"),)))
            ])]),
            layers(2, "a.{}"),
            {},
            [f"source 'a.{i}' is ambiguous: rule a.{{i}} + a.{{i}} -> b + c and rule "
             f"a.{{i}} + a.{{i}} -> b + c match it" for i in range(2)],
            id="one leaf for two places of a rule",
        ),
        pytest.param(
            Mapping([Rule("{rest...}", "encoder.{rest...}")]),
            {"encoder.w": TensorSpec((2,), "int8")},
            {"encoder.w": TensorSpec((2,), "int8")},
            [
                "rule {rest...} -> encoder.{rest...} fires twice: it makes 'encoder.encoder.w' of "
                "'encoder.w', which has the name of a target already",
                "target 'encoder.w' has a gap: [0, 2); no rule makes it",
            ],
            id="a rename that fires twice",
        ),
        pytest.param(
            Mapping([Rule("{a...}.{b...}", "{b...}.{a...}")]),
            {"x.y.z": TensorSpec((2,), "float32")},
            {},
            ["rule {a...}.{b...} -> {b...}.{a...}: '{a...}.{b...}' matches 'x.y.z' in several "
             "ways"],
            id="a name that a rule matches in two ways",
        ),
        pytest.param(
            Mapping([QKV]),
            specs(q=(4, 3), k=(2, 3), v=(3, 3)),
            specs(qkv=(8, 3)),
            ["rule q + k + v -> qkv on 'q' [0, 4) x [0, 3), 'k' [0, 2) x [0, 3), 'v' [0, 3) "
             "x [0, 3): "
             "concatenate [4, 2, 2]: part 2 has shape [3, 3], not [2, 3]; "
             "its input: float32[4, 3], float32[2, 3], float32[3, 3]"],
            id="a wrong shape",
        ),
        pytest.param(
            Mapping([QKV]),
            specs(q=(4, 3), v=(2, 3)),
            specs(qkv=(8, 3)),
            ["rule q + k + v -> qkv: the source has no 'k'"],
            id="a missing part",
        ),
        pytest.param(
            Mapping([Rule("a", ("b", "c"), [Split((2, 2))])]),
            specs(a=(5,)),
            specs(b=(2,), c=(2,)),
            ["rule a -> b + c on 'a' [0, 5): split [2, 2]: axis 0 has size 5, not 2 + 2; its "
             "input: float32[5]"],
            id="sizes that do not add up",
        ),
        pytest.param(
            Mapping([Rule("l.{i}.w", "w", [Stack("i")])]),
            {n: s for n, s in layers(4).items() if n != "l.2.w"},
            specs(w=(4, 2, 3)),
            ["rule l.{i}.w -> w: index 'i' has 3 but not 2"],
            id="a layer that is not there",
        ),
        pytest.param(
            Mapping([Rule("l.{i}.w", "w", [Stack("i")], {"i": 4})]),
            layers(3),
            specs(w=(4, 2, 3)),
            ["rule l.{i}.w -> w: the source has no 'l.3.w'"],
            id="a stated layer that is not there",
        ),
        pytest.param(
            Mapping([Rule("l.{i}.w", "w", [Stack("i")], {"i": 2})]),
            layers(3),
            specs(w=(2, 2, 3)),
            ["source 'l.2.w': no rule uses [0, 2) x [0, 3)"],
            id="a layer beyond the stated ones",
        ),
        pytest.param(
            Mapping([Rule("l.{i}.w", "w", [Stack("i")])]),
            layers(2) | {"l.1.w": TensorSpec((3, 2), "float32")},
            specs(w=(2, 2, 3)),
            ["rule l.{i}.w -> w on 'l.0.w' [0, 2) x [0, 3), 'l.1.w' [0, 3) x [0, 2): stack "
             "i: i 1 is float32[3, 2], i 0 is float32[2, 3]; its input: "
             "float32[2, 3] or float32[3, 2] x 2"],
            id="layers of different shapes",
        ),
        pytest.param(
            Mapping([Rule("e.{i}.{j}", "e", [Stack("j"), Stack("i")])]),
            layers(3, "e.0.{}") | layers(2, "e.1.{}"),
            specs(e=(2, 3, 2, 3)),
            ["rule e.{i}.{j} -> e: the source has no 'e.1.2'"],
            id="an expert that is not there",
        ),
        pytest.param(
            Mapping([Rule(("a", "b"), "c", [Untie(2)])]),
            specs(a=(2,), b=(3,)),
            specs(c=(2,)),
            ["rule a + b -> c on 'a' [0, 2), 'b' [0, 3): untie 2: tied tensors are "
             "float32[2] and float32[3]; its input: "
             "float32[2], float32[3]"],
            id="tied tensors of different shapes",
        ),
        pytest.param(
            Mapping([Rule("a", "a", [Cast(("float32", "float16"))])]),
            specs("float16", a=(2,)),
            specs("float16", a=(2,)),
            ["rule a -> a on 'a' [0, 2): cast ['float32', 'float16']: it is float16, not "
             "float32; its input: "
             "float16[2]"],
            id="a cast of another type",
        ),
        pytest.param(
            Mapping([Rule("a", "a", [Scale(2.0)])]),
            specs("int32", a=(2,)),
            specs("int32", a=(2,)),
            ["rule a -> a on 'a' [0, 2): scale 2.0: it is int32: arithmetic is for "
             "floating-point tensors; its "
             "input: int32[2]"],
            id="arithmetic on whole numbers",
        ),
        pytest.param(
            Mapping([Rule("a", (), [Drop(0, (3,), "float32")])]),
            specs(a=(2,)),
            {},
            ["rule a -> nothing on 'a' [0, 2): drop 0, shape [3], dtype float32: it is "
             "float32[2]; its input: "
             "float32[2]"],
            id="a dropped tensor of another shape",
        ),
        pytest.param(
            Mapping([Rule("a", (), [Drop("unchecked")])]).inverse(),
            {},
            specs(a=(2,)),
            ["rule nothing -> a: constant unchecked: it was dropped unchecked: its value is "
             "not known; its input: nothing"],
            id="what was dropped unchecked is wanted back",
        ),
        pytest.param(
            Mapping([Rule("a", "b"), Rule("b", "c")]).then(Mapping([Rule("b", "d")])),
            specs(a=(2,), b=(3,)),
            specs(d=(2,)),
            ["step between: 'c' is used by no rule", "source 'b': nothing uses [0, 3)"],
            id="a leaf of a first step that the second one forgets",
        ),
    ],
)  # fmt: skip
def test_a_mapping_that_does_not_fit_is_refused(
    mapping: Mapping, source: Specs, target: Specs, expected: list[str]
) -> None:
    assert list(problems(mapping, source, target)) == expected


def test_all_problems_are_reported_at_once() -> None:
    mapping = Mapping([Rule("a", "a"), Rule("q", "q", [Transpose((0, 1))]), Rule("z.{i}", "z.{i}")])
    found = problems(mapping, specs(a=(1,), q=(3,), c=(2,)), specs(a=(2,), q=(3,), d=(4,)))
    assert len(found) == 4
    assert [line.split("'")[1] if "'" in line else line[:6] for line in found] == [
        "q",
        "a",
        "d",
        "c",
    ]


@pytest.mark.parametrize(
    "source, target, operations, indices, words",
    [
        ("a.{i}", "b", [], {}, "index 'i' is not in the target: stack it once"),
        ("a", "b.{i}", [], {}, "index 'i' is not in the source: unstack it once"),
        ("a.{i}", "b.{i}", [Stack("i")], {}, "is stacked or unstacked, but is not on just one"),
        ("a.{i}", "b", [Stack("i"), Stack("i")], {}, "stack it once"),
        (("a.{i}", "b"), "c.{i}", [Concatenate((1, 1))], {}, "do not all have the same indices"),
        ("a.{t...}", "b", [Stack("t")], {}, "text 't' stands on one side only"),
        ("a", "b", [], {"i": 3}, "no name has the index i"),
        (("a", "b"), "c", [], {}, "give 2 tensors for 1 targets"),
        (("a", "b"), "c", [Concatenate((1, 1, 1))], {}, "takes 3 tensors, but has 2"),
        ("a", (), [], {}, "give 1 tensors for 0 targets"),
        ((), (), [], {}, "neither source nor target"),
        ("a.{i}", "b.{i}", [], {"i": (3, 3)}, "not a range"),
        ("a.{i}", "b.{i}", [], {"i": (1, 2, 3, 4)}, r"a range is \[start, stop\]"),
    ],
)
def test_a_rule_that_can_never_be_right_is_refused(
    source: str | tuple[str, ...],
    target: str | tuple[str, ...],
    operations: list[Operation],
    indices: dict[str, int | tuple[int, ...]],
    words: str,
) -> None:
    with pytest.raises(MappingError, match=words):
        Rule(source, target, operations, indices)


def filled(source: Specs, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(spec.shape).astype(spec.dtype) for name, spec in source.items()
    }


def test_tied_weights_may_be_absent_and_come_back_where_wanted() -> None:
    rule = Rule(("emb", "head"), "table", [Untie(2)], optional="head")
    mapping = Mapping([rule])
    table = np.arange(6.0).reshape(2, 3)
    both, one = {"emb": table, "head": table}, {"emb": table}
    for source in (both, one):
        assert same_bits(made_by(mapping, source, {}), {"table": table})
        mapping.check(specs_of(source), specs_of({"table": table}))
        back = made_by(mapping.inverse(), {"table": table}, specs_of(source))
        assert same_bits(back, source)
    assert len(mapping.resolve(specs_of(both)).assertions) == 1
    # Without a list of what is wanted, an optional name is not made.
    assert set(mapping.inverse().resolve({"table": TensorSpec((2, 3), "float64")}).targets) == {
        "emb"
    }


def test_tied_names_that_are_all_optional_keep_the_data() -> None:
    names = ("a", "b", "c")
    mapping = Mapping([Rule(names, "t", [Untie(3)], optional=names)])
    spec = TensorSpec((4,), "int8")
    for present in (["a"], ["c"], ["b", "c"], list(names)):
        source = dict.fromkeys(present, spec)
        mapping.check(source, {"t": spec})
        mapping.inverse().check({"t": spec}, source)
    assert list(mapping.inverse().resolve({"t": spec}).targets) == ["a"]
    with pytest.raises(MappingError, match="source 't': nothing uses"):
        mapping.inverse().check({"t": spec}, {})


def test_a_table_can_be_held_twice_once_transposed() -> None:
    mapping = Mapping([Rule("w", ("emb", "head"), [Tie(2), Each(((), (Transpose((1, 0)),)))])])
    table = np.arange(6.0).reshape(2, 3)
    target = {"emb": table, "head": np.ascontiguousarray(table.T)}
    assert same_bits(made_by(mapping, {"w": table}, specs_of(target)), target)
    mapping.check({"w": TensorSpec((2, 3), "float64")}, specs_of(target))
    back = mapping.inverse().check(specs_of(target), {"w": TensorSpec((2, 3), "float64")})
    assert len(back.assertions) == 1


def test_a_dropped_constant_is_made_again_where_it_is_wanted() -> None:
    mapping = Mapping([Rule("pos", (), [Drop(5, arange=1)]), Rule("w", "w")])
    source = {"pos": np.arange(5, 12).reshape(1, 7), "w": np.ones(2)}
    target = {"w": np.ones(2)}
    resolved = mapping.check(specs_of(source), specs_of(target))
    assert [each.reason for each in resolved.assertions] == [
        "what is dropped must be 5, and count up from there (pos -> nothing)"
    ]
    assert same_bits(made_by(mapping.inverse(), target, specs_of(source)), source)
    assert same_bits(made_by(mapping.inverse(), target, specs_of(target)), target)
    with pytest.raises(MappingError, match="state its shape and dtype"):
        mapping.inverse().resolve(specs_of(target))


@pytest.mark.parametrize("dtype", ["int8", "bool", "float16", "bfloat16", "complex64", "int4"])
def test_constants_have_the_type_that_is_stated(dtype: str) -> None:
    mapping = Mapping([Rule((), "c", [Constant(1, (2, 2), dtype)])])
    made = made_by(mapping, {}, {"c": TensorSpec((2, 2), dtype)})
    assert made["c"].dtype.name == dtype
    assert (made["c"] == np.ones((2, 2), made["c"].dtype)).all()


def test_an_inhomogeneous_scan_has_blocks_and_a_remainder() -> None:
    """Five local layers and a global one a block, two blocks, three layers left over."""
    rules = [
        Rule("l.{6*block+local}.w", "scan/local/w", [Stack("local"), Stack("block")],
             {"block": 2, "local": 5}),
        Rule("l.{6*block+5}.w", "scan/global/w", [Stack("block")], {"block": 2}),
        Rule("l.{12+left}.w", "rest/{left}/w", [], {"left": 3}),
    ]  # fmt: skip
    mapping = Mapping(rules)
    source = filled(layers(15))
    weights = [source[f"l.{i}.w"] for i in range(15)]
    target = {
        "scan/local/w": np.stack([np.stack(weights[6 * b : 6 * b + 5]) for b in range(2)]),
        "scan/global/w": np.stack([weights[5], weights[11]]),
        **{f"rest/{i}/w": weights[12 + i] for i in range(3)},
    }
    assert same_bits(made_by(mapping, source, specs_of(target)), target)
    assert same_bits(made_by(mapping.inverse(), target, specs_of(source)), source)
    mapping.check(specs_of(source), specs_of(target))
    mapping.inverse().check(specs_of(target), specs_of(source))


def test_a_whole_permutation_is_one_copy_and_a_fusion_one_for_each_part() -> None:
    from xckpt.mapping.operations import Interleave, Rearrange, Rope

    shape = (32 * 8, 48)
    for operation in (
        Transpose((1, 0)),
        Rope("halves", 32),
        Rearrange("(h d) w -> w h d", {"h": 32}),
        Rearrange("(h two d) w -> (h d two) w", {"h": 32, "two": 2}),
    ):
        resolved = Mapping([Rule("a", "b", [operation])]).resolve(specs(a=shape))
        assert len(resolved.copies["b"]) == 1
    partial = Mapping([Rule("a", "b", [Rope("halves", 32, rotary=4)])])
    assert len(partial.resolve(specs(a=shape)).copies["b"]) == 2
    fused = Mapping([Rule(("a", "b"), "c", [Interleave(2)])])
    assert len(fused.resolve(specs(a=shape, b=shape)).copies["c"]) == 2
    stacked = Mapping([Rule("l.{i}.w", "w", [Transpose((1, 0)), Stack("i", 1)])])
    assert len(stacked.resolve(layers(24)).copies["w"]) == 24


def test_lossy_operations_state_their_bounds() -> None:
    mapping = Mapping(
        [Rule("a", "a", [Scale(3.0), Cast(("float32", "bfloat16")), Add(1.0), Scale(0.5)])]
    )
    found = mapping.resolve(specs(a=(4,))).lossy
    assert [each.operation for each in found] == [
        "scale 3.0",
        "cast ['float32', 'bfloat16']",
        "add 1.0",
        "scale 0.5",
    ]
    assert "2 x 2^-24" in found[0].bound
    assert "2^-8" in found[1].bound
    assert found[3].bound == "exact, but for values that overflow or underflow"
    assert (
        not Mapping([Rule("a", "a", [Cast(("bfloat16", "float32"))])])
        .resolve(specs("bfloat16", a=(2,)))
        .lossy
    )


def test_an_asserted_cast_is_not_lossy() -> None:
    mapping = Mapping([Rule("step", "count", [Cast(("float32", "int32"), exact=True)])])
    resolved = mapping.check(specs(step=()), specs("int32", count=()))
    assert not resolved.lossy
    (assertion,) = resolved.assertions
    assert [step.target for step in assertion.expected.copies[0].arithmetic] == ["int32", "float32"]


def test_a_leaf_without_a_name_is_refused() -> None:
    with pytest.raises(MappingError, match="the source is a leaf without"):
        Mapping([Rule("{a...}", "{a...}")]).resolve(np.zeros(3))


def test_a_mapping_goes_to_other_processes() -> None:
    mapping = Mapping([Rule("l.{i}.w", "w", [Stack("i"), Add(1.0)], {"i": 2})])
    again = pickle.loads(pickle.dumps(mapping))
    assert again == mapping
    assert hash(again) == hash(mapping)


def test_trees_are_taken_for_source_and_target() -> None:
    mapping = Mapping([Rule("fc.weight", "params/fc/kernel", [Transpose((1, 0))])])
    source = {"fc.weight": np.zeros((4, 2), np.float32)}
    target = {"params": {"fc": {"kernel": np.zeros((2, 4), np.float32)}}}
    assert mapping.check(source, target).targets == {
        "params/fc/kernel": TensorSpec((2, 4), "float32")
    }


@pytest.mark.parametrize(
    "text, words",
    [
        ("rule = 3", "rules are tables"),
        ("[[rule]]\nsource = 'a'\ntarget = 'b'\nwhere = 1", "no where"),
        ("[[rule]]\nsource = 4\ntarget = 'b'", "source is a name"),
        ("[[rule]]\nsource = 'a'\ntarget = 'b'\noperations = [{}]", "no operation"),
        ("[[rule]]\nsource = 'a'\ntarget = 'b'\noperations = [3]", "an operation is a table"),
        ("[[rule]]\nsource = 'a'\ntarget = 'b'\noperations = [{ turn = 1 }]", "no operation"),
        (
            "[[rule]]\nsource='a'\ntarget='b'\noperations=[{transpose=[0, 0]}]",
            "not an order of 2",
        ),
        ("[[rule]]\nsource='a'\ntarget='b'\noperations=[{transpose='x'}]", "not the str 'x'"),
        (
            "[[rule]]\nsource='a'\ntarget='b'\noperations=[{transpose=[0], axis=1}]",
            "no field axis: axes stands under its name",
        ),
        ("[[rule]]\nsource='a'\ntarget='b'\noperations=[{transpose=[0], tie=1}]", "tie"),
        ("[[rule]]\nsource='a'\ntarget='b'\noperations=[{each=[1]}]", "list of lists"),
        ("[[rule]]\nsource='a'\ntarget='b'\noperations=[{each=1}]", "list of lists"),
        ("[[rule]]\nsource='a'\ntarget='b'\noperations=[{each=[[3]]}]", "rule a -> b: .* a table"),
        ("[[rule]]\nsource='a{i}'\ntarget='b{i}'\nindices.i = 'x'", "rule a{i} -> b{i}: index i"),
        ("[[rule]]\nsource='a'\ntarget='b'\noperations=[{rearrange='a b -> a'}]", "one side only"),
        ("[[rule]]\nsource='a'\ntarget='b'\noperations=[{rearrange='(a b) -> a b'}]", "sizes of"),
        ("[[rule]]\nsource = 'a.{i'\ntarget = 'b'", "does not close"),
        ("version = 9", "version 9"),
        ("rules = []", "no rules"),
        ("then = 3", "then is a table"),
        ("a = ", "not TOML"),
        ("a = " + "[" * 100_000, "not TOML"),
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mapping.toml"
    path.write_text(text)
    with pytest.raises(MappingError, match=words) as caught:
        Mapping.from_file(path)
    assert str(path) in str(caught.value)


def test_no_more_is_read_than_a_mapping_can_have(tmp_path: Path) -> None:
    path = tmp_path / "mapping.toml"
    path.touch()
    os.truncate(path, (64 << 20) + 1)
    with pytest.raises(MappingError, match=r"mapping\.toml is longer than 64 MiB"):
        Mapping.from_file(path)


def test_a_file_of_names_that_utf8_lacks_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(MappingError, match=r"a\\ud800' holds half a character"):
        Mapping([Rule("a\ud800", "b")]).to_file(tmp_path / "m.toml")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["", None, 5, [], [("rule", [])]], ids=repr)
def test_a_document_is_a_table(given: Any) -> None:
    with pytest.raises(MappingError, match=r"a mapping's document is a table \(a dict\), not the "):
        Mapping.from_document(given)


def test_a_file_is_named_by_a_path() -> None:
    for call in (Mapping.from_file, Mapping([]).to_file):
        with pytest.raises(
            TypeError, match=r"_file\(path=\) takes a str or a PathLike, not the None"
        ):
            call(cast(Any, None))
    with open("/dev/null", "rb") as file, pytest.raises(TypeError, match="PathLike"):
        Mapping.from_file(file.fileno())  # type: ignore[arg-type]
    with open("/dev/null", "wb") as file, pytest.raises(TypeError, match="PathLike"):
        Mapping([]).to_file(file.fileno())  # type: ignore[arg-type]


def test_a_file_holds_every_operation_and_any_name(tmp_path: Path) -> None:
    mapping = Mapping(
        [
            Rule('q"\\\n\x7f\u00e9\U0001f600{{.{rest...}', "{rest...}", [Transpose(())]),
            Rule("pad", "pad", [Pad(3, 1, -0.5), Pad(1, 0, float("inf"))]),
            Rule(("e", "t"), ("e", "t"), [Untie(2), Tie(2)], optional=["t"]),
            Rule((), "c", [Constant(True, (), "bool")]),
            Rule("l.{i+1}", "l", [Stack("i")], {"i": range(0, 8, 2)}),
        ]
    ).then(Mapping([Rule("{all...}", "x.{all...}")]).then(Mapping([Rule("x", "y")])))
    path = tmp_path / "mapping.toml"
    mapping.to_file(path)
    assert Mapping.from_file(path) == mapping
    mapping.inverse().to_file(path)
    assert Mapping.from_file(path) == mapping.inverse()


def test_steps_compose_without_a_leaf_in_between() -> None:
    fuse = Mapping([Rule(("q", "k"), "qk", [Concatenate((4, 2))])])
    turn = Mapping([Rule("{name...}", "t.{name...}", [Transpose((1, 0))])])
    both = fuse.then(turn)
    source = filled(specs(q=(4, 3), k=(2, 3)))
    target = {"t.qk": np.ascontiguousarray(np.concatenate([source["q"], source["k"]]).T)}
    assert same_bits(made_by(both, source, specs_of(target)), target)
    assert same_bits(made_by(both.inverse(), target, specs_of(source)), source)
    assert both.inverse().inverse() == both
    both.check(specs_of(source), specs_of(target))


def many_leaves(blocks: int) -> tuple[Mapping, dict[str, TensorSpec]]:
    """Four rules for each block, and forty leaves."""
    from xckpt.mapping.operations import Reshape, Rope

    operations: list[list[Operation]] = [
        [Transpose((1, 0))],
        [],
        [Rope("halves", 8)],
        [Reshape(((64, 64), (8, 8, 64)))],
    ]
    rules = [
        Rule(f"b{b}.{k}.{{layer}}.w", f"b{b}/{{layer}}/{k}", operations[k])
        for b in range(blocks)
        for k in range(4)
    ]
    mapping = Mapping(rules)
    source = {
        name: TensorSpec((64, 64), "bfloat16")
        for b in range(blocks)
        for k in range(4)
        for name in (f"b{b}.{k}.{layer}.w" for layer in range(10))
    }
    return mapping, source


def resolved_and_checked(mapping: Mapping, source: dict[str, TensorSpec]) -> int:
    """How many leaves there are in the end."""
    resolved = mapping.resolve(source)
    mapping.check(source, resolved.targets)
    return len(resolved.targets)


def test_the_steps_grow_as_the_leaves_do_however_many_rules_there_are() -> None:
    few, many = many_leaves(3), many_leaves(9)
    assert resolved_and_checked(*few) == 120
    each = steps(lambda: resolved_and_checked(*few)) / 120
    assert steps(lambda: resolved_and_checked(*many)) / 360 < 1.1 * each < 2000


def test_rules_of_another_model_are_refused_in_steps_that_grow_as_they_do() -> None:
    """Each rule was compared with each leaf: 3,000 rules took three minutes for 20,000 leaves."""

    def refused(count: int) -> None:
        mapping = Mapping([Rule(f"other.{n}.w", f"l/{n}/w") for n in range(count)])
        assert len(problems(mapping, layers(count), {})) == count

    each = steps(lambda: refused(300)) / 300
    assert steps(lambda: refused(1_200)) / 1_200 < 1.1 * each


def test_a_check_reports_how_far_it_is() -> None:
    mapping, source = many_leaves(30)
    wanted = mapping.resolve(source).targets
    seen: list[float] = []
    mapping.then(mapping.inverse()).then(mapping).check(source, wanted, progress=seen.append)
    assert len(seen) > 6
    assert seen == sorted(seen)
    assert 0.0 < seen[0] < seen[-1] == 1.0


@pytest.mark.thorough
@untraced
def test_ten_thousand_leaves_and_a_thousand_rules_are_quick() -> None:
    """Of processor time; it takes about a second where nothing else runs."""
    mapping, source = many_leaves(250)
    started = time.process_time()
    assert resolved_and_checked(mapping, source) == 10_000
    assert time.process_time() - started < 8 * ALLOWANCE


def test_a_constant_is_made_without_a_list_of_what_is_wanted_unless_it_cannot_be() -> None:
    make = [Constant(0, (2,), "int8")]
    assert set(Mapping([Rule((), "c", make)]).resolve({}).targets) == {"c"}
    optional = Mapping([Rule((), "c", make, optional="c")])
    assert not optional.resolve({}).targets
    assert set(optional.resolve({}, specs("int8", c=(2,))).targets) == {"c"}
    assert not Mapping([Rule("a", (), [Drop("unchecked")])]).inverse().resolve({}).targets
