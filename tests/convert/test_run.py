"""A conversion gives what NumPy gives, in units of any size, from sources chunked in any way."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.mapping.mappings import Case, cases
from tests.support.examples import examples
from xckpt.convert import Mapping, Rule
from xckpt.convert.run import Converted, convert
from xckpt.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    MappingError,
    StorageError,
    XckptError,
)
from xckpt.mapping.names import tree_of
from xckpt.mapping.operations import Scale, Split, Stack, Strip, Transpose, Untie

LAYERS, WIDTH, HIDDEN, WORDS = 3, 24, 40, 50

MAPPING = Mapping(
    [
        Rule(
            "layers.{layer}.qkv.weight",
            [f"layers/{{layer}}/{part}/kernel" for part in ("query", "key", "value")],
            [Split((WIDTH, WIDTH // 2, WIDTH // 2)), Transpose((1, 0))],
        ),
        Rule(
            "layers.{layer}.up.weight",
            "layers/up/kernel",
            [Transpose((1, 0)), Stack("layer")],
            {"layer": (0, LAYERS)},
        ),
        Rule("layers.{layer}.norm.weight", "layers/{layer}/norm/scale"),
        Rule("embed.weight", "embed/embedding"),
    ]
)


def torch_like(dtype: str = "float32") -> dict[str, Any]:
    """A small model as torch would name and lay it out."""
    rng = np.random.default_rng(7)

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    state: dict[str, Any] = {"embed.weight": weight(WORDS, WIDTH), "step": 11}
    for layer in range(LAYERS):
        state[f"layers.{layer}.qkv.weight"] = weight(2 * WIDTH, WIDTH)
        state[f"layers.{layer}.up.weight"] = weight(HIDDEN, WIDTH)
        state[f"layers.{layer}.norm.weight"] = weight(WIDTH)
    return state


def flax_like(state: dict[str, Any]) -> dict[str, Any]:
    """What the mapping makes of it, said with NumPy alone."""
    layers: dict[str, Any] = {}
    for layer in range(LAYERS):
        query, key, value = np.split(
            state[f"layers.{layer}.qkv.weight"], [WIDTH, WIDTH + WIDTH // 2]
        )
        layers[str(layer)] = {
            "query": {"kernel": query.T},
            "key": {"kernel": key.T},
            "value": {"kernel": value.T},
            "norm": {"scale": state[f"layers.{layer}.norm.weight"]},
        }
    ups = [state[f"layers.{layer}.up.weight"].T for layer in range(LAYERS)]
    layers["up"] = {"kernel": np.stack(ups)}
    return {"layers": layers, "embed": {"embedding": state["embed.weight"]}, "step": state["step"]}


def same(found: Any, expected: Any) -> None:
    """Trees of equal arrays, bit for bit."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, np.ndarray | np.generic):  # A NaN is no other's equal.
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


@given(
    source_chunk=st.integers(256, 5000),
    target_chunk=st.integers(256, 5000),
    memory=st.integers(1 << 14, 200_000),
    dtype=st.sampled_from(["float32", "float16"]),
)
@examples(8, 150)
def test_any_chunks_and_any_budget_give_the_same(
    source_chunk: int, target_chunk: int, memory: int, dtype: str
) -> None:
    state = torch_like(dtype)
    options = xckpt.SaveOptions(chunk_bytes=source_chunk)
    xckpt.save("memory://converting", state, options=options, overwrite=True)
    options = xckpt.SaveOptions(chunk_bytes=target_chunk, memory_bytes=memory)
    convert(
        "memory://converting",
        "memory://converted",
        mapping=MAPPING,
        options=options,
        overwrite=True,
    )
    same(xckpt.load("memory://converted"), flax_like(state))
    assert xckpt.open("memory://converted").verify() == []


def test_the_way_back_gives_the_same_state() -> None:
    state = torch_like()
    xckpt.save("memory://there", state, overwrite=True)
    convert("memory://there", "memory://and", mapping=MAPPING, overwrite=True)
    convert("memory://and", "memory://back", mapping=MAPPING.inverse(), overwrite=True)
    same(xckpt.load("memory://back"), state)


def test_without_a_mapping_the_tree_stays_what_it_was() -> None:
    state = {
        "params": [{"w": np.arange(6.0).reshape(2, 3)}, (np.ones(2, np.int8), "text")],
        "none": None,
        0: np.zeros((0, 3)),
        "empty": [],
    }
    xckpt.save("memory://tree-to-convert", state, metadata={"run": [1, 2]})
    done = convert("memory://tree-to-convert", "memory://tree-to-convert-again")
    assert done == Converted(tensors=3, bytes=50, bytes_before=0)
    again = xckpt.load("memory://tree-to-convert-again")
    assert isinstance(again["params"][1], tuple)
    assert repr(again) == repr(state)
    assert xckpt.open("memory://tree-to-convert-again").user_metadata == {"run": [1, 2]}


@pytest.mark.parametrize("format", ["xckpt", "safetensors"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("key", ["", None])
def test_an_array_that_is_the_root_or_has_an_empty_key_is_no_constant(
    tmp_path: Path, format: str, shape: tuple[int, ...], key: str | None
) -> None:
    array = np.full(shape, 7) + np.arange(shape[-1] if shape else 1).reshape(shape[-1:]) * 5
    state = array if key is None else {key: array}
    xckpt.save(tmp_path / "from", state)
    convert(tmp_path / "from", tmp_path / "to", format=format)
    again = xckpt.load(tmp_path / "to")
    same(again[""] if isinstance(again, dict) else again, array)


def test_a_dtype_casts_floats_and_nothing_else() -> None:
    state = {"w": np.linspace(0, 1, 1000, dtype=np.float32), "n": np.arange(3), "step": 1}
    xckpt.save("memory://cast-floats", state)
    convert("memory://cast-floats", "memory://cast-halves", dtype="float16")
    halves = xckpt.load("memory://cast-halves")
    same(halves, {**state, "w": state["w"].astype(np.float16)})
    convert("memory://cast-floats", "memory://cast-in-short", dtype="fp16")
    same(xckpt.load("memory://cast-in-short"), halves)
    with pytest.raises(MappingError, match="'int8' is not a floating-point type"):
        convert("memory://cast-floats", "memory://never", dtype="int8")


def test_leaves_that_no_rule_takes_are_refused_by_name(tmp_path: Path) -> None:
    xckpt.save("memory://more", {**torch_like(), "head.weight": np.ones((2, 3))})
    with pytest.raises(MappingError, match=r"head\.weight.*\[0, 2\) x \[0, 3\)"):
        convert("memory://more", tmp_path / "never", mapping=MAPPING)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": np.ones(2)})
    xckpt.save(tmp_path / "b", {"w": np.zeros(2)})
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "a", tmp_path / "b")
    same(xckpt.load(tmp_path / "b"), {"w": np.zeros(2)})
    convert(tmp_path / "a", tmp_path / "b", overwrite=True)
    same(xckpt.load(tmp_path / "b"), {"w": np.ones(2)})
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_over_files_of_the_same_names(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": np.arange(3)})
    convert(tmp_path / "a", tmp_path / "b", format="orbax")
    theirs = (tmp_path / "b/w/zarr.json").read_bytes()
    convert(tmp_path / "b", tmp_path / "b", overwrite=True)
    assert np.array_equal(xckpt.load(tmp_path / "b")["w"], np.arange(3))
    assert (tmp_path / "b/w/zarr.json").read_bytes() == theirs
    assert {each.name for each in tmp_path.iterdir()} == {"a", "b"}


def test_a_damaged_source_is_noticed_and_nothing_is_committed(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", torch_like())
    chunk = tmp_path / "a" / "embed.weight" / "c" / "0" / "0"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(CorruptCheckpointError, match=r"embed.weight: \[0, 50\)"):
        convert(tmp_path / "a", tmp_path / "b", mapping=MAPPING)
    assert not (tmp_path / "b").exists()


def test_data_that_a_mapping_takes_for_granted_are_checked_before_anything_is_written(
    tmp_path: Path,
) -> None:
    words = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)
    state = {"embed": words, "head": words.copy(), "w": np.ones((5, 3), np.int16)}
    state["head"][700, 3] = -1
    state["w"][4, 1] = 7
    xckpt.save(tmp_path / "a", state)
    mapping = Mapping(
        [Rule(["embed", "head"], "embed", [Untie(2)]), Rule("w", "w", [Strip(2, axis=0, value=1)])]
    )
    with pytest.raises(MappingError) as caught:
        convert(tmp_path / "a", tmp_path / "b", mapping=mapping)
    head, pad = caught.value.problems
    assert head.startswith("head: [700, 701) x [3, 4): 1 element differs")
    assert pad.startswith("w: [4, 5) x [1, 2): 1 element differs")
    lossy = Mapping([Rule(name, name, [Scale(3.0)] if name == "head" else []) for name in state])
    with pytest.raises(MappingError, match="allow_lossy=True"):
        convert(tmp_path / "a", tmp_path / "b", mapping=lossy)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    state["head"][...], state["w"][...] = words, 1
    xckpt.save(tmp_path / "a", state, overwrite=True)
    convert(tmp_path / "a", tmp_path / "b", mapping=mapping)
    same(xckpt.load(tmp_path / "b"), {"embed": words, "w": state["w"][:3]})


def test_progress_ends_with_all_bytes() -> None:
    state = torch_like()
    xckpt.save("memory://conversion-progress", state, overwrite=True)
    reports: list[xckpt.Progress] = []
    options = xckpt.SaveOptions(progress=reports.append, memory_bytes=1 << 15)
    done = convert(
        "memory://conversion-progress",
        "memory://conversion-progressed",
        mapping=MAPPING,
        options=options,
    )
    assert [each.done for each in reports] == sorted(each.done for each in reports)
    assert len(reports) > 3
    assert reports[-1] == xckpt.Progress(done.bytes, done.bytes)


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_workers_of_an_executor_write_the_same_bytes(tmp_path: Path) -> None:
    state = torch_like()
    small = xckpt.SaveOptions(chunk_bytes=2048, memory_bytes=1 << 16)
    xckpt.save(tmp_path / "a", state, options=small)
    convert(tmp_path / "a", tmp_path / "alone", mapping=MAPPING, options=small)
    with ThreadPoolExecutor(3) as threads:
        convert(
            tmp_path / "a", tmp_path / "threads", mapping=MAPPING, options=small, executor=threads
        )
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        convert(
            tmp_path / "a",
            tmp_path / "processes",
            mapping=MAPPING,
            options=small,
            executor=processes,
        )
        with pytest.raises(StorageError, match="memory of this one; give a path or URL that"):
            convert(tmp_path / "a", "memory://never", mapping=MAPPING, executor=processes)
        for source, name in (("a", "b.safetensors"), ("b.safetensors", "c.safetensors")):
            convert(tmp_path / source, tmp_path / name, executor=processes)
        for fill in (1, 2):  # its metadata are equal
            leaves = {f"w{n}": np.full(1000, fill) for n in range(5)}
            xckpt.save(tmp_path / "d", leaves, overwrite=True)
            convert(tmp_path / "d", tmp_path / "dcp", format="dcp", overwrite=True)
            about: dict[str, Any] = {"options": small, "overwrite": True, "executor": processes}
            convert(tmp_path / "dcp", tmp_path / "from-dcp", **about)
            same(xckpt.load(tmp_path / "from-dcp"), leaves)
    same(xckpt.load(tmp_path / "c.safetensors"), state)
    same(xckpt.load(tmp_path / "processes"), flax_like(state))
    alone = files(tmp_path / "alone")
    assert len(alone) > 10
    assert alone == files(tmp_path / "threads") == files(tmp_path / "processes")


def test_a_target_tree_says_what_is_made_and_in_which_containers() -> None:
    words = np.arange(12, dtype=np.float32).reshape(4, 3)
    xckpt.save("memory://liked", {"l.0.w": words, "l.1.w": words + 1, "step": 3})
    mapping = Mapping([Rule("l.{i}.w", "layers/{i}/kernel", [Transpose((1, 0))])])
    kernel = np.empty((3, 4), np.float32)
    like = {"layers": [{"kernel": kernel}, {"kernel": kernel}], "step": 0}
    convert("memory://liked", "memory://as-liked", mapping=mapping, like=like)
    loaded = xckpt.load("memory://as-liked")
    assert repr(loaded) == repr(
        {"layers": [{"kernel": words.T}, {"kernel": (words + 1).T}], "step": 3}
    )
    for other, word in [
        ({"layers": [{"kernel": kernel}], "step": 0}, "layers/1/kernel"),
        ({"layers": [{"kernel": kernel}, {"kernel": kernel}]}, "step: in the source, but not in"),
        ({**like, "head": kernel}, "head"),
        ({**like, "epoch": 1}, "epoch: in like, but not in the source"),
    ]:
        with pytest.raises(MappingError, match=word):
            convert("memory://liked", "memory://never", mapping=mapping, like=other)


@given(case=cases(), memory=st.integers(1 << 10, 1 << 16))
@examples(25)
def test_random_mappings_convert_and_load_bit_for_bit(case: Case, memory: int) -> None:
    small = xckpt.SaveOptions(chunk_bytes=256, memory_bytes=memory)
    source: Any = tree_of(case.source)
    xckpt.save("memory://random", source, options=small, overwrite=True)
    expected: Any = tree_of(case.target)
    like: Any = tree_of({name: np.empty_like(array) for name, array in case.target.items()})
    same(xckpt.load("memory://random", like, mapping=case.mapping), expected)
    convert(
        "memory://random",
        "memory://random-made",
        mapping=case.mapping,
        options=small,
        overwrite=True,
        like=like,
    )
    same(xckpt.load("memory://random-made"), expected)


def test_what_is_no_group_is_refused_beside_an_executor_too(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": np.ones(3)})
    with ThreadPoolExecutor(1) as pool, pytest.raises(TypeError, match="a group of processes is"):
        convert(tmp_path / "ckpt", tmp_path / "out", group=3, executor=pool)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "state, to, told",
    [
        ({"z": np.ones(2, np.complex128)}, "a.safetensors", "z: .* complex128; cast it by a rule"),
        ({"a": {"b": 1}, "a.b": 2, "w": np.ones(1)}, "d", "rename one of each by a mapping\n.*a.b"),
        ({0: np.ones(1), "0": np.ones(1)}, "a.safetensors", "an int key .*rename one of each\n.*0"),
    ],
)
def test_a_refusal_names_leaf_and_remedy(
    state: Any,
    to: str,
    told: str,
    tmp_path: Path,
) -> None:
    xckpt.save(tmp_path / "a", state)
    with pytest.raises(XckptError, match=told):
        convert(tmp_path / "a", tmp_path / to, format="dcp" if to == "d" else None)


def test_a_cast_of_the_root_that_overflows_names_it(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", np.float32(1e6))
    with pytest.raises(MappingError, match=r"^the root: by a cast 1 element"):
        convert(tmp_path / "a", tmp_path / "b", dtype="float16")


def test_a_rule_with_a_misspelt_name_is_named(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"layers.0.weight": np.ones(2), "head": np.ones(2)})
    mapping = Mapping([Rule("layers.{n}.wieght", "layers/{n}/kernel"), Rule("head", "head")])
    with pytest.raises(MappingError, match=r"layers.0.weight.*rule layers.\{n\}.wieght.* misspelt"):
        convert(tmp_path / "a", tmp_path / "b", mapping=mapping)


@pytest.mark.parametrize("kind", ["sparse", "expanded"])
def test_a_tensor_that_no_array_holds_is_named_by_its_keys(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(1, 2)
    made = tensor.to_sparse() if kind == "sparse" else tensor.expand(9, 2)
    torch.save({"model": {"v": tensor, "w": made}}, tmp_path / "a.pt")
    with pytest.raises(XckptError, match=r"\(after 'model', 'v', 'w'\)|\(after 'model', 'w'\)"):
        convert(tmp_path / "a.pt", tmp_path / "b")
