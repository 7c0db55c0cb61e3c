"""What DCP wrote becomes a checkpoint with the same bits, whichever ranks wrote and import it.

The oracle is torch: what it saved is at hand, in memory, as full tensors.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import xckpt
from tests.support.examples import examples
from tests.support.ranks import Ranks
from tests.support.torch_meshes import MESHES, Case, cases, on_rank_distribute
from tests.torch.dcp.folders import alone, bits, blank, raw, save_alone
from xckpt.core.dtypes import DTYPES
from xckpt.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    ManifestError,
    NotACheckpointError,
    PlanError,
    StorageError,
    UnsafePickleError,
    UnsupportedLeafError,
    XckptError,
)
from xckpt.options import SaveOptions
from xckpt.progress import Progress
from xckpt.storage.location import Location, open_store
from xckpt.torch.dcp import XckptStorageReader, import_checkpoint
from xckpt.torch.leaf import from_numpy, torch_dtype


def same(stored: Any, tensor: torch.Tensor) -> bool:
    return raw(from_numpy(stored[...])) == raw(tensor)


def imported(folder: Path, **options: Any) -> xckpt.Checkpoint:
    """The checkpoint that a DCP folder becomes, beside the folder."""
    path = folder.with_name(f"{folder.name}-imported")
    shutil.rmtree(path, ignore_errors=True)
    import_checkpoint(folder, path, **options)
    assert xckpt.open(path).verify() == []
    return xckpt.open(path)


# One process.


TORCH_DTYPES = [
    dtype
    for name in DTYPES
    if (dtype := torch_dtype(name)) is not None and name not in ("int2", "int4")
]
"""All but those that torch only has names for."""


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits (NaNs and infinities too), or of random bools."""
    size = int(np.prod(shape, dtype=np.int64))
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = size * dtype.itemsize
    return (
        torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
    )


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {
        "scalar": noise((), dtype),
        "vector": noise((7,), dtype),
        "transposed": noise((3, 5), dtype).t(),
        "empty": noise((0, 3), dtype),
        "part": noise((10, 4), dtype)[2:5, 1:3],
    }
    checkpoint = imported(save_alone(state, tmp_path / "dcp"))
    assert set(checkpoint) == set(state)
    for name, tensor in state.items():
        assert same(checkpoint[name], tensor), name


def test_what_torch_has_only_noted_down(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugated": values.conj(), "negated": values.conj().imag}
    checkpoint = imported(save_alone(state, tmp_path / "dcp"))
    assert same(checkpoint["conjugated"], values.conj().resolve_conj())
    assert same(checkpoint["negated"], values.conj().imag.resolve_neg())


def test_the_tree_comes_back(tmp_path: Path) -> None:
    state = {
        "model": {"layers.0.weight": torch.ones(2), "deep": [torch.zeros(1), {"x": torch.ones(1)}]},
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "plain": [1, "two", None, [3.0]],
        "flags": {"amp": True, "name": "run", "z": 1 - 2j, "raw": b"\0\xff", "none": b""},
        "big": 1 << 200,
        "pair": (torch.ones(3), 5),
        "ordered": collections.OrderedDict(b=1, a=2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        7: torch.ones(1),
    }
    checkpoint = imported(save_alone(state, tmp_path / "dcp"))
    tree = cast(dict[str, Any], checkpoint.tree)
    assert same(tree["model"]["layers.0.weight"], torch.ones(2))
    assert same(tree["model"]["deep"][1]["x"], torch.ones(1))
    for name in ("lr", "betas", "plain", "flags", "big", "ordered"):
        assert tree[name] == state[name]
        assert type(tree[name]) in (type(state[name]), dict)
    assert same(tree["pair"][0], torch.ones(3)) and tree["pair"][1] == 5
    assert same(tree["parameter"], torch.ones(2))
    assert same(tree["7"], torch.ones(1))


def test_names_without_key_paths_are_single_keys(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"a.b/c": torch.ones(2), "n": 1}, checkpoint_id=tmp_path / "dcp", planner=planner)
    assert imported(tmp_path / "dcp").tree.keys() == {"a.b/c", "n"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [{"thread_count": 3}, {"single_file_per_rank": False}, {"sync_files": False}],
    ids=str,
)
def test_every_way_of_torch_to_lay_out_files(options: dict[str, Any], tmp_path: Path) -> None:
    state: dict[str, Any] = {f"w{n}": noise((n, 3), torch.float32, n) for n in range(5)}
    checkpoint = imported(save_alone(state | {"step": 3}, tmp_path / "dcp", **options))
    assert all(same(checkpoint[name], tensor) for name, tensor in state.items())
    assert checkpoint["step"] == 3


def test_where_from_and_where_to(tmp_path: Path) -> None:
    folder = save_alone({"w": torch.ones(2)}, tmp_path / "a folder")
    saved = import_checkpoint(f"file://{folder}", "memory://imported", metadata={"run": 1})
    assert saved.user_metadata == {"run": 1}
    assert same(xckpt.open("memory://imported")["w"], torch.ones(2))
    with pytest.raises(CheckpointExistsError):
        import_checkpoint(folder, "memory://imported")
    import_checkpoint(str(folder), "memory://imported", overwrite=True)
    with pytest.raises(StorageError, match="is not supported"):
        import_checkpoint("ftp://bucket/dcp", "memory://imported")


def test_from_a_store_of_objects(tmp_path: Path) -> None:
    """Chunks are read by range there, and values kept as they are."""
    state = {"w": noise((64, 48), torch.float32), "v": torch.arange(6).conj(), "f": object}
    folder = save_alone(state, tmp_path / "dcp")
    store = open_store(Location.parse("memory://a-dcp"))
    for file in folder.iterdir():
        store.write(file.name, file.read_bytes()).result()
    import_checkpoint("memory://a-dcp", "memory://from-objects", opaque=True)
    import_checkpoint(folder, "memory://from-files", opaque=True)
    found, expected = xckpt.open("memory://from-objects"), xckpt.open("memory://from-files")
    assert found["f"] == expected["f"]
    assert same(found["w"], state["w"]) and same(found["v"], state["v"])


def test_options_and_progress(tmp_path: Path) -> None:
    folder = save_alone({"w": noise((512, 1024), torch.float32)}, tmp_path / "dcp")
    seen: list[Progress] = []
    options = SaveOptions(chunk_bytes=1 << 18, memory_bytes=1 << 22, progress=seen.append)
    checkpoint = imported(folder, options=options)
    assert cast(Any, checkpoint["w"]).chunks == (64, 1024)
    assert seen[-1] == Progress(1 << 21, 1 << 21)
    assert [step.done for step in seen] == sorted(step.done for step in seen)


def test_dcp_reads_what_was_imported_through_the_storage_reader(tmp_path: Path) -> None:
    state = {
        "model": {"w": noise((4, 3), torch.bfloat16), "list": [torch.ones(2), {"x": 1}]},
        "betas": (0.9, 0.95),
        "custom": Custom(),
    }
    folder = save_alone(state, tmp_path / "dcp")
    import_checkpoint(folder, tmp_path / "imported", opaque=True)
    target = blank(state)
    with alone():
        dcp.load(target, storage_reader=XckptStorageReader(tmp_path / "imported"), no_dist=True)
    assert isinstance(target.pop("custom"), Custom) and state.pop("custom")
    assert bits(target) == bits(state)


# Several ranks.


def on_rank_save(rank: int, case: Case, folder: str) -> None:
    tensor = on_rank_distribute(case)
    group = on_rank_group(case.mesh)
    if group is not None:
        dcp.save({"w": tensor, "step": 3}, checkpoint_id=folder, process_group=group)
    dist.barrier()


GROUPS: dict[str, Any] = {}


def on_rank_group(mesh: str) -> Any:
    """The process group of a mesh's ranks; None outside it."""
    ranks = sorted(np.array(MESHES[mesh]).ravel().tolist())
    if mesh not in GROUPS:
        GROUPS[mesh] = dist.new_group(ranks)
    return GROUPS[mesh] if dist.get_rank() in ranks else None


@examples(8, 150)
@given(case=cases(meshes=["4", "2x2", "2x1x2", "three", "two", "one", "4x1"]))
def test_dtensors_of_one_to_four_ranks(
    four_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    folder = tmp_path_factory.mktemp("dtensors") / "dcp"
    four_ranks.run(on_rank_save, case, str(folder))
    checkpoint = imported(folder)
    assert cast(Any, checkpoint["w"])[...].tobytes() == case.array().tobytes()
    assert cast(Any, checkpoint["w"]).shape == case.shape
    assert checkpoint["step"] == 3


def on_rank_import(rank: int, folder: str, path: str) -> int:
    seen: list[Progress] = []
    options = SaveOptions(memory_bytes=1 << 22, progress=seen.append)  # units of 256 KiB
    import_checkpoint(folder, path, options=options)
    return seen[-1].done if seen else 0


def test_ranks_share_the_import(four_ranks: Ranks, tmp_path: Path) -> None:
    state = {
        "whole": noise((4096, 256), torch.float32),
        "more": {f"w{n}": noise((64 + n, 256), torch.bfloat16, n) for n in range(8)},
        "step": 7,
    }
    folder = save_alone(state, tmp_path / "dcp")
    written = four_ranks.run(on_rank_import, str(folder), str(tmp_path / "imported"))
    checkpoint = xckpt.open(tmp_path / "imported")
    assert checkpoint.verify() == []
    assert same(checkpoint["whole"], state["whole"])
    assert all(same(checkpoint[f"more/{name}"], w) for name, w in state["more"].items())
    assert checkpoint["step"] == 7
    assert max(written) < 1.2 * sum(written) / 4
    assert sum(written) == 4096 * 256 * 4 + sum(w.nbytes for w in state["more"].values())


def on_rank_refuse(rank: int, folder: str, path: str) -> str:
    try:
        import_checkpoint(folder, path)
    except XckptError as error:
        return str(error)
    return "no error"


def test_a_fault_reaches_every_rank(four_ranks: Ranks, tmp_path: Path) -> None:
    folder = save_alone({"w": torch.ones(2), "v": torch.ones(3)}, tmp_path / "dcp")
    missing = four_ranks.run(on_rank_refuse, str(tmp_path / "none"), str(tmp_path / "imported"))
    (folder / "__0_0.distcp").unlink()
    torn = four_ranks.run(on_rank_refuse, str(folder), str(tmp_path / "imported"))
    assert len(set(missing)) == 1 and "no .metadata" in missing[0]
    assert len(set(torn)) == 1 and "is missing" in torn[0]
    assert not (tmp_path / "imported").exists()


def on_rank_sharded_tensors(rank: int, folder: str) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec

    chunked = ChunkShardingSpec(0, [f"rank:{n}/cpu" for n in range(4)])
    boxes = [((0, 0), (3, 4), 2), ((3, 0), (5, 1), 0), ((3, 1), (5, 3), 0)]
    listed = EnumerableShardingSpec(
        [ShardMetadata(list(o), list(s), f"rank:{r}/cpu") for o, s, r in boxes]
    )
    state = {
        "chunked": sharded_tensor.empty(chunked, 10, 3),
        "listed": sharded_tensor.empty(listed, 8, 4),
    }
    for name, tensor in state.items():
        for shard in tensor.local_shards():
            shard.tensor.copy_(expected(name)[region(shard.metadata)])
    dcp.save(state, checkpoint_id=folder)


def region(shard: Any) -> tuple[slice, ...]:
    sizes = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    return tuple(slice(o, o + n) for o, n in sizes)


def expected(name: str) -> torch.Tensor:
    shape = {"chunked": (10, 3), "listed": (8, 4)}[name]
    return torch.arange(float(np.prod(shape))).reshape(shape)


def test_sharded_tensors(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(on_rank_sharded_tensors, str(tmp_path / "dcp"))
    checkpoint = imported(tmp_path / "dcp")
    assert same(checkpoint["chunked"], expected("chunked"))
    assert same(checkpoint["listed"], expected("listed"))


def on_rank_train(rank: int, folder: str) -> dict[str, Any]:
    """An FSDP2 + TP model with its optimizer, trained a little and saved; all as full tensors."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    for _ in range(2):
        model(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)

    def full(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: full(child) for key, child in node.items()}
        if isinstance(node, list | tuple):
            return [full(child) for child in node]
        if isinstance(node, DTensor):
            return node.full_tensor().numpy()
        return node.numpy() if isinstance(node, torch.Tensor) else node

    return full({"model": weights, "optim": states})


def leaves(node: Any, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], Any]:
    if isinstance(node, dict):
        return {k: v for key, child in node.items() for k, v in leaves(child, (*path, key)).items()}
    if isinstance(node, list | tuple):
        return {k: v for n, child in enumerate(node) for k, v in leaves(child, (*path, n)).items()}
    return {path: node}


def test_fsdp2_with_tensor_parallelism_and_its_optimizer(four_ranks: Ranks, tmp_path: Path) -> None:
    full = leaves(four_ranks.run(on_rank_train, str(tmp_path / "dcp"))[0])
    found = leaves(imported(tmp_path / "dcp").tree)
    assert found.keys() == full.keys()
    for path, value in full.items():
        if isinstance(value, np.ndarray):
            assert found[path][...].tobytes() == value.tobytes(), path
        else:
            assert found[path] == value, path
    assert any("exp_avg_sq" in path for path in full)


# What is not a plain value, and what is not a DCP folder.


class Custom:
    """What a state dict may hold, and no checkpoint should."""


@pytest.mark.parametrize(
    "value, words",
    [
        (Custom(), "Custom"),
        ([1, {"deep": Custom()}], "Custom"),
        ({1, 2}, "set"),
        (torch.device("cpu"), "torch.device"),
        (np.float32(1), "numpy"),
        (range(3), "range"),
        (len, "builtin"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_plain_value_is_refused_by_name_or_kept_opaque(
    value: Any, words: str, tmp_path: Path
) -> None:
    folder = save_alone({"w": torch.ones(2), "odd": {"one": value}}, tmp_path / "dcp")
    with pytest.raises(UnsupportedLeafError, match=f"(?s)odd.one.*{words}.*opaque=True"):
        import_checkpoint(folder, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()
    checkpoint = imported(folder, opaque=True)
    content = checkpoint.get("odd/one", b"")
    if isinstance(value, list):
        content = checkpoint["odd/one/1/deep"]
    assert isinstance(content, bytes)
    again = torch.load(io.BytesIO(content), weights_only=False)
    assert type(again) is type(Custom() if isinstance(value, list) else value)


def test_an_opaque_value_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Harm:
        def __reduce__(self) -> Any:
            return os.system, ("touch harmed",)

    folder = save_alone({"harm": Harm()}, tmp_path / "dcp")
    with pytest.raises(UnsupportedLeafError, match="system"):
        import_checkpoint(folder, tmp_path / "imported")
    assert isinstance(imported(folder, opaque=True)["harm"], bytes)
    assert not (tmp_path / "harmed").exists()


def test_folders_that_are_none(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(NotACheckpointError, match=r"no .metadata"):
            import_checkpoint(folder, tmp_path / "imported")
    (tmp_path / "__0.metadata").touch()
    with pytest.raises(NotACheckpointError, match="use_collectives"):
        import_checkpoint(tmp_path, tmp_path / "imported")


def test_missing_and_truncated_files_are_all_named(tmp_path: Path) -> None:
    state = {name: torch.ones(3) for name in "abc"}
    folder = save_alone(state, tmp_path / "dcp", single_file_per_rank=False)
    (folder / "__0_0.distcp").unlink()
    whole = (folder / "__0_1.distcp").read_bytes()
    (folder / "__0_1.distcp").write_bytes(whole[:-1])
    with pytest.raises(CorruptCheckpointError) as caught:
        import_checkpoint(folder, tmp_path / "imported")
    missing, truncated = sorted(caught.value.problems)
    assert "a: chunk [0, 3)" in missing and "is missing" in missing
    assert "b: chunk [0, 3)" in truncated and "is truncated" in truncated
    assert not (tmp_path / "imported").exists()


def rewrite(folder: Path, change: Any) -> None:
    """Change what a folder's ``.metadata`` say, as torch's objects."""
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def two_halves(folder: Path) -> Path:
    """A folder with a tensor of two chunks, [0, 2) and [2, 4)."""
    save_alone({"w": torch.zeros(2), "v": torch.ones(2)}, folder)

    def merge(metadata: Metadata) -> None:
        described = cast(TensorStorageMetadata, metadata.state_dict_metadata["w"])
        del metadata.state_dict_metadata["v"]
        described.size = torch.Size([4])
        described.chunks.append(ChunkStorageMetadata(torch.Size([2]), torch.Size([2])))
        moved = metadata.storage_data.pop(MetadataIndex("v", [0]))
        metadata.storage_data[MetadataIndex("w", [2])] = moved

    rewrite(folder, merge)
    return folder


def test_two_chunks(tmp_path: Path) -> None:
    checkpoint = imported(two_halves(tmp_path / "dcp"))
    assert cast(Any, checkpoint["w"])[...].tolist() == [0, 0, 1, 1]


def chunk_at(metadata: Metadata, number: int, offset: int, size: int) -> None:
    described = cast(TensorStorageMetadata, metadata.state_dict_metadata["w"])
    before = described.chunks[number]
    described.chunks[number] = ChunkStorageMetadata(torch.Size([offset]), torch.Size([size]))
    place = metadata.storage_data[MetadataIndex("w", before.offsets)]
    metadata.storage_data[MetadataIndex("w", [offset])] = place


@pytest.mark.parametrize(
    "change, words",
    [
        ((1, 1, 2), r"\[1, 2\) is in several chunks: \[0, 2\) and \[1, 3\)"),
        ((1, 3, 1), r"\[2, 3\) is in no chunk"),
        ((1, 3, 2), r"\[3, 5\) lies outside"),
    ],
)
def test_chunks_that_overlap_or_leave_gaps(
    change: tuple[int, int, int], words: str, tmp_path: Path
) -> None:
    folder = two_halves(tmp_path / "dcp")
    rewrite(folder, lambda metadata: chunk_at(metadata, *change))
    with pytest.raises(PlanError, match=words):
        import_checkpoint(folder, tmp_path / "imported")


def test_a_chunk_of_another_shape_or_dtype_than_the_metadata_say(tmp_path: Path) -> None:
    folder = save_alone({"w": torch.zeros(4)}, tmp_path / "dcp")

    def change(metadata: Metadata) -> None:
        cast(
            TensorStorageMetadata, metadata.state_dict_metadata["w"]
        ).properties.dtype = torch.float16

    rewrite(folder, change)
    with pytest.raises(CorruptCheckpointError, match=r"say float16 of shape \(4,\).*float32"):
        import_checkpoint(folder, tmp_path / "imported")


@pytest.mark.parametrize("file", ["../dcp/__0_0.distcp", "/etc/passwd", "", "a\\b", "x/../../y"])
def test_a_path_out_of_the_folder_is_refused(file: str, tmp_path: Path) -> None:
    folder = save_alone({"w": torch.zeros(4)}, tmp_path / "dcp")

    def change(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = file

    rewrite(folder, change)
    with pytest.raises(ManifestError, match="not a file of the folder"):
        import_checkpoint(folder, tmp_path / "imported")


def test_transformed_entries_are_refused_by_the_extensions_name(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    folder = save_alone({"w": torch.zeros(4)}, tmp_path / "dcp")

    def change(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.transform_descriptors = [ZStandard.registry_name()]

    rewrite(folder, change)
    with pytest.raises(UnsupportedLeafError, match=r"w: .*stream.zstd"):
        import_checkpoint(folder, tmp_path / "imported")


def test_safetensors_are_refused_by_name(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    kind = SerializationFormat.SAFETENSORS
    folder = save_alone({"w": torch.zeros(99)}, tmp_path / "dcp", serialization_format=kind)
    with pytest.raises(UnsupportedLeafError, match=r"w: chunk .*safetensors"):
        import_checkpoint(folder, tmp_path / "imported")


def test_dtypes_that_the_format_lacks_are_all_named(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        odd = torch.zeros(2, dtype=torch.complex32)
    folder = save_alone({"odd": odd, "w": torch.zeros(2), "strange": odd}, tmp_path / "dcp")
    with pytest.raises(UnsupportedLeafError, match=r"(?s)odd: dtype complex32.*strange: dtype"):
        import_checkpoint(folder, tmp_path / "imported")
    folder = save_alone({"pair": (odd,)}, tmp_path / "another")
    with pytest.raises(UnsupportedLeafError, match=r"pair: .*complex32"):
        import_checkpoint(folder, tmp_path / "imported")


def test_a_foreign_pickle_in_a_tensors_place(tmp_path: Path) -> None:
    folder = save_alone({"w": torch.zeros(4), "harm": Custom()}, tmp_path / "dcp")

    def change(metadata: Metadata) -> None:
        del metadata.state_dict_metadata["harm"]
        metadata.storage_data[MetadataIndex("w", [0])] = metadata.storage_data.pop(
            MetadataIndex("harm")
        )

    rewrite(folder, change)
    with pytest.raises(UnsafePickleError, match=r"(?s)w: chunk .*Custom"):
        import_checkpoint(folder, tmp_path / "imported")


@examples(40)
@given(data=st.data())
def test_a_damaged_file_never_hurts(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Damage is refused, or lies in what is not read, or in the elements."""
    folder = tmp_path_factory.mktemp("damaged") / "dcp"
    save_alone({"w": torch.zeros(8), "n": [1, 2.5, "x"]}, folder)
    path = folder / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = bytearray(path.read_bytes())
    # The length depends on the folder's name, so places are drawn as parts of it.
    for part in data.draw(st.lists(st.integers(0, 4095), min_size=1, max_size=3)):
        content[part * len(content) >> 12] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: len(content) >> data.draw(st.integers(0, 1))])
    try:
        import_checkpoint(folder, folder.with_name("imported"))
    except xckpt.XckptError:
        assert not folder.with_name("imported").exists()
