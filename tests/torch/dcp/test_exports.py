"""What becomes a DCP folder is read by torch as it was saved, on as many ranks as there are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import xckpt
from benchmarks.probe import watch
from tests.support.examples import examples
from tests.support.ranks import Ranks
from tests.support.torch_meshes import Case, on_rank_distribute
from tests.torch.dcp.folders import alone, bits, blank, load_alone, raw, save_alone
from tests.torch.dcp.memory import BUDGET
from tests.torch.dcp.test_imports import TORCH_DTYPES, Custom, noise
from xckpt.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedLeafError,
    XckptError,
)
from xckpt.options import LoadOptions, SaveOptions
from xckpt.progress import Progress
from xckpt.torch.dcp import XckptStorageWriter, export_checkpoint, import_checkpoint


def exported(state: Any, folder: Path, **options: Any) -> Path:
    """The DCP folder that a state becomes."""
    path = folder.with_name(f"{folder.name}-checkpoint")
    xckpt.save(path, state, options=options.pop("save_options", None))
    export_checkpoint(path, folder, **options)
    return folder


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {
        "scalar": noise((), dtype),
        "matrix": noise((3, 5), dtype),
        "empty": noise((0, 3), dtype),
    }
    folder = exported(state, tmp_path / "dcp")
    assert bits(load_alone(blank(state), folder)) == bits(state)


def test_values_come_back(tmp_path: Path) -> None:
    state = {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "names": ["a", None, [1, 2]],
        "deep": [torch.ones(2), {"x": 1}],
        "pair": (torch.ones(3), 2),
        "bytes": b"\0\xff",
        "long": "x" * 10_000,
        "flag": True,
        "c": 1 - 2j,
        "int keys": {7: torch.zeros(1)},
    }
    folder = exported(state, tmp_path / "dcp")
    assert bits(load_alone(blank(state), folder)) == bits(state)


class Moments(NamedTuple):
    mu: torch.Tensor
    steps: int


def test_named_tuples_become_tuples(tmp_path: Path) -> None:
    folder = exported({"opt": Moments(torch.ones(2), 3)}, tmp_path / "dcp")
    opt = load_alone({"opt": None}, folder)["opt"]
    assert type(opt) is tuple
    assert bits(opt) == bits((torch.ones(2), 3))


def test_numpy_and_arrays_in_pieces(tmp_path: Path) -> None:
    from tests.support.sharded_arrays import cut
    from tests.support.tilings import Box

    array = np.arange(77.0).reshape(7, 11)
    boxes: list[Box] = [((0, 0), (3, 11)), ((3, 0), (4, 5)), ((3, 5), (4, 6))]
    state = {"pieces": cut(array, boxes), "numpy": np.float32(3)}
    folder = exported(state, tmp_path / "dcp", save_options=SaveOptions(chunk_bytes=64))
    target = {"pieces": torch.zeros(7, 11, dtype=torch.float64), "numpy": torch.zeros(())}
    load_alone(target, folder)
    assert target["pieces"].numpy().tobytes() == array.tobytes()
    assert target["numpy"] == 3


LEAVES = st.one_of(
    st.builds(
        noise,
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from(TORCH_DTYPES),
        st.integers(0, 99),
    ),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8")) | st.binary(),
    st.tuples(st.integers(), st.text(st.characters(codec="utf-8"))),
)
KEYS = st.text("abcdefg%/ é", min_size=1, max_size=4)
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.dictionaries(KEYS, inner, min_size=1) | st.lists(inner, min_size=1),
        max_leaves=8,
    ),
    min_size=1,
    max_size=5,
)


@examples(8, 150)
@given(state=STATES)
def test_from_dcp_to_a_checkpoint_and_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
) -> None:
    root = tmp_path_factory.mktemp("round")
    save_alone(state, root / "dcp")
    import_checkpoint(root / "dcp", root / "checkpoint")
    export_checkpoint(root / "checkpoint", root / "again")
    assert bits(load_alone(blank(state), root / "again")) == bits(state)
    shutil.rmtree(root)


def test_opaque_entries_come_back_through_both(tmp_path: Path) -> None:
    save_alone({"custom": Custom(), "w": torch.ones(2)}, tmp_path / "dcp")
    import_checkpoint(tmp_path / "dcp", tmp_path / "checkpoint", opaque=True)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "again")
    assert isinstance(load_alone({"custom": None}, tmp_path / "again")["custom"], Custom)


def test_what_dcp_wrote_through_the_storage_writer(tmp_path: Path) -> None:
    state = {
        "model": {"w": noise((4, 3), torch.bfloat16), "list": [torch.ones(2), {"x": 1}]},
        "betas": (0.9, 0.95),
    }
    with alone():
        dcp.save(state, storage_writer=XckptStorageWriter(tmp_path / "checkpoint"), no_dist=True)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "dcp")
    assert bits(load_alone(blank(state), tmp_path / "dcp")) == bits(state)


# Several ranks.


def on_rank_load(rank: int, folder: str, cases: list[Case]) -> list[bytes]:
    targets = {f"w{n}": on_rank_distribute(case) for n, case in enumerate(cases)}
    for target in targets.values():
        target.to_local().zero_()
    dcp.load(targets, checkpoint_id=folder)
    return [raw(target.full_tensor())[2] for target in targets.values()]


CASES = [
    Case((8, 6), "float32", "2x2", (0, 1)),
    Case((7, 5), "bfloat16", "4", (0,)),
    Case((16,), "int64", "2x2", (None, 0)),
    Case((4, 9), "uint8", "two", (1,)),
]


def test_loads_into_dtensors(four_ranks: Ranks, tmp_path: Path) -> None:
    state = {f"w{n}": case.array() for n, case in enumerate(CASES)}
    folder = exported(state, tmp_path / "dcp", options=LoadOptions(memory_bytes=256))
    found = four_ranks.run(on_rank_load, str(folder), CASES[:3])
    assert all(parts == [case.array().tobytes() for case in CASES[:3]] for parts in found)


def on_two_ranks_load(rank: int, folder: str) -> bytes | None:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    target = {"w3": on_rank_distribute(CASES[3])}
    target["w3"].to_local().zero_()
    dcp.load(target, checkpoint_id=folder, process_group=cast(dist.ProcessGroup, group))
    return raw(target["w3"].full_tensor())[2]


def test_loads_into_dtensors_on_two_ranks(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(on_rank_mesh_of, CASES[3])
    folder = exported({"w3": CASES[3].array()}, tmp_path / "dcp")
    found = four_ranks.run(on_two_ranks_load, str(folder))
    assert [part for part in found if part] == [CASES[3].array().tobytes()] * 2


def on_rank_mesh_of(rank: int, case: Case) -> None:
    on_rank_distribute(case)


def on_rank_export(rank: int, path: str, folder: str) -> int:
    seen: list[Progress] = []
    options = LoadOptions(memory_bytes=1 << 18, progress=seen.append)
    export_checkpoint(path, folder, options=options)
    return seen[-1].done


def test_ranks_share_the_export(four_ranks: Ranks, tmp_path: Path) -> None:
    state = {"w": noise((512, 256), torch.float32), "v": noise((300,), torch.int16), "n": [1, 2]}
    save = SaveOptions(chunk_bytes=1 << 14)
    xckpt.save(tmp_path / "checkpoint", state, options=save)
    written = four_ranks.run(on_rank_export, str(tmp_path / "checkpoint"), str(tmp_path / "dcp"))
    assert bits(load_alone(blank(state), tmp_path / "dcp")) == bits(state)
    assert sum(written) == 512 * 256 * 4 + 600
    assert max(written) < 1.2 * sum(written) / 4
    assert min(written) > 0


def on_rank_refuse(rank: int, path: str, folder: str) -> str:
    try:
        export_checkpoint(path, folder)
    except XckptError as error:
        return str(error)
    return "no error"


def damage(path: Path) -> None:
    """Change a byte of a checkpoint's largest file, which is a chunk."""
    chunk = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[5] ^= 1
    chunk.write_bytes(content)


def test_a_fault_reaches_every_rank_and_nothing_is_left(four_ranks: Ranks, tmp_path: Path) -> None:
    xckpt.save(tmp_path / "checkpoint", {"w": noise((512, 256), torch.float32)})
    damage(tmp_path / "checkpoint")
    errors = four_ranks.run(on_rank_refuse, str(tmp_path / "checkpoint"), str(tmp_path / "dcp"))
    assert len(set(errors)) == 1 and "w: " in errors[0] and "CorruptCheckpointError" in errors[0]
    errors = four_ranks.run(on_rank_refuse, str(tmp_path / "none"), str(tmp_path / "dcp"))
    assert len(set(errors)) == 1 and "NotACheckpointError" in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


# One process: what is refused, and what is at the target then.


def test_what_torch_cannot_hold_is_listed(tmp_path: Path) -> None:
    state = {
        "a": np.zeros(2, ml_dtypes.float8_e3m4),
        "b": np.zeros(2, ml_dtypes.int4),
        "c": np.zeros(2),
    }
    with pytest.raises(UnsupportedLeafError) as caught:
        exported(state, tmp_path / "dcp")
    assert [problem[:2] for problem in caught.value.problems] == ["a:", "b:"]
    for root in (np.zeros(2), [np.zeros(2)]):
        xckpt.save(tmp_path / "root", root, overwrite=True)
        with pytest.raises(UnsupportedLeafError, match="torch saves dicts only"):
            export_checkpoint(tmp_path / "root", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def test_leaves_that_torch_would_confuse_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"(?s)one name.*a\.b"):
        exported({"a": {"b": np.zeros(2)}, "a.b": np.ones(2)}, tmp_path / "dcp")


def test_an_opaque_value_in_a_tuple_is_refused(tmp_path: Path) -> None:
    options = SaveOptions(serialise=lambda leaf: b"opaque")
    with pytest.raises(UnsupportedLeafError, match="pair: an opaque value inside a tuple"):
        exported({"pair": (Custom(), 1)}, tmp_path / "dcp", save_options=options)


def test_the_target(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    folder = exported(state, tmp_path / "dcp")
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        export_checkpoint(tmp_path / "dcp-checkpoint", folder)
    xckpt.save(tmp_path / "other", {"w": torch.zeros(2)})
    export_checkpoint(tmp_path / "other", folder, overwrite=True)
    assert bits(load_alone(blank(state), folder)) == bits({"w": torch.zeros(2)})
    (tmp_path / "empty").mkdir()
    export_checkpoint(tmp_path / "other", tmp_path / "empty")
    export_checkpoint(tmp_path / "other", f"file://{tmp_path}/new/folder")
    with pytest.raises(CheckpointExistsError, match=r"no \.metadata in it"):
        export_checkpoint(tmp_path / "other", tmp_path / "dcp-checkpoint", overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointExistsError):
        export_checkpoint(tmp_path / "other", tmp_path / "file", overwrite=True)
    with pytest.raises(StorageError):
        export_checkpoint(tmp_path / "other", tmp_path / "file" / "below")
    with pytest.raises(StorageError, match="local file system"):
        export_checkpoint(tmp_path / "other", "s3://bucket/dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dcp", "dcp-checkpoint", "empty", "file", "new", "other"
    ]  # fmt: skip


def test_a_failed_export_leaves_what_was_there(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    folder = exported(state, tmp_path / "dcp")
    xckpt.save(tmp_path / "damaged", {"w": noise((512, 256), torch.float32)})
    damage(tmp_path / "damaged")
    with pytest.raises(CorruptCheckpointError, match="w: "):
        export_checkpoint(tmp_path / "damaged", folder, overwrite=True)
    with pytest.raises(NotACheckpointError):
        export_checkpoint(tmp_path / "none", folder, overwrite=True)
    assert bits(load_alone(blank(state), folder)) == bits(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "dcp", "dcp-checkpoint"]


def test_boxes_are_of_whole_chunks_within_the_budget(tmp_path: Path) -> None:
    state = {"w": noise((100, 64), torch.float32)}
    save = SaveOptions(chunk_bytes=1024)
    options = LoadOptions(memory_bytes=4 * 4096)
    folder = exported(state, tmp_path / "dcp", save_options=save, options=options)
    with alone():
        metadata: Metadata = dcp.FileSystemReader(folder).read_metadata()
    chunks = cast(TensorStorageMetadata, metadata.state_dict_metadata["w"]).chunks
    stored = cast(Any, xckpt.open(tmp_path / "dcp-checkpoint")["w"])
    assert all(chunk.sizes.numel() * 4 <= 4096 for chunk in chunks)
    assert all(chunk.offsets[0] % stored.chunks[0] == 0 for chunk in chunks)
    assert len(chunks) < 100 / stored.chunks[0]
    assert bits(load_alone(blank(state), folder)) == bits(state)


@pytest.mark.thorough
def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    state = {f"w{n}": noise((4096, 4096), torch.float32, n) for n in range(4)}
    state["larger than the budget"] = noise((4096, 16384), torch.float32)
    save_alone(state, tmp_path / "dcp")
    folders = [str(tmp_path / name) for name in ("dcp", "checkpoint", "again")]
    into = watch(("tests.torch.dcp.memory", "import", *folders[:2]))
    back = watch(("tests.torch.dcp.memory", "export", *folders[1:]))
    assert into.anonymous < 1.5 * BUDGET
    assert back.anonymous < 1.5 * BUDGET
    assert bits(load_alone(blank(state), tmp_path / "again")) == bits(state)
