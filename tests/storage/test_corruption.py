"""Damage of every kind to every file of a checkpoint: refused by name, or harmless; never wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import xckpt
from tests.support.sharded_arrays import Sharded, cut
from tests.support.states import LAYOUTS, everything, expected, same
from xckpt.core.manifest.entries import arrays

Damage = Callable[[bytes], bytes]

STRIDE = 41
"""Set it to 1 to flip every byte, which takes minutes."""


FULLEST = "sharded crc32c"
"""The layout that has all that another has."""


def layouts(*often: str) -> list[Any]:
    """Every layout; the default tier damages a few."""
    return [
        pytest.param(layout, marks=() if layout in often else pytest.mark.thorough)
        for layout in LAYOUTS
    ]


some_chunks = pytest.mark.parametrize("saved", layouts("plain", FULLEST), indirect=True)
"""A shard's index tells of damage that a plain chunk's digest alone has to tell."""


@pytest.fixture(scope="module", params=layouts(FULLEST))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in each layout; tests that damage it repair it."""
    path = tmp_path_factory.mktemp("corruption") / "ckpt"
    xckpt.save(path, everything(), options=LAYOUTS[request.param])
    return path


def files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def chunks(checkpoint: Path, leaf: str = "") -> list[Path]:
    return [path for path in files(checkpoint / leaf) if "c" in path.relative_to(checkpoint).parts]


def some(paths: list[Path]) -> list[Path]:
    """All but most chunks of the note, which are alike and as many as all other files together."""
    return [path for path in paths if path.parts[-3:-1] != ("note", "c") or path.name in "012"]


def array_paths(checkpoint: Path) -> dict[Path, str]:
    """Folder of each zarr array -> the leaf that it belongs to."""
    return {checkpoint / a.path: a.leaf for a in arrays(xckpt.open(checkpoint).manifest)}


def owner(file: Path, folders: dict[Path, str]) -> str | None:
    return next((folders[parent] for parent in file.parents if parent in folders), None)


class Damaged:
    """A file with other content for a while."""

    def __init__(self, file: Path, content: bytes | None) -> None:
        self.file, self.before, self.content = file, file.read_bytes(), content

    def __enter__(self) -> bool:
        if self.content is None:
            self.file.unlink()
        else:
            self.file.write_bytes(self.content)
        return self.content != self.before

    def __exit__(self, *error: object) -> None:
        self.file.unlink(missing_ok=True)
        self.file.write_bytes(self.before)


class Linked(Damaged):
    """A file that is a symbolic link for a while."""

    def __init__(self, file: Path, elsewhere: Path) -> None:
        super().__init__(file, None)
        self.elsewhere = elsewhere

    def __enter__(self) -> bool:
        self.file.unlink()
        self.file.symlink_to(self.elsewhere)
        return True


def outcome(checkpoint: Path, *, alone: bool) -> xckpt.XckptError | None:
    """How a load of a damaged checkpoint ends: refused, or with the data that were saved."""
    try:
        loaded = xckpt.load(checkpoint, options=xckpt.LoadOptions(threads=1 if alone else 2))
    except (xckpt.CorruptCheckpointError, xckpt.ManifestError, xckpt.StorageError) as error:
        return error
    except xckpt.NotACheckpointError as error:
        assert not (checkpoint / "xckpt.json").is_file()
        return error
    assert same(loaded, expected(everything())), "wrong data were loaded without an error"
    return None


def found_by_verify(checkpoint: Path) -> Sequence[str]:
    try:
        return xckpt.open(checkpoint).verify()
    except (xckpt.ManifestError, xckpt.NotACheckpointError) as error:
        return [str(error)]


def examine(checkpoint: Path, file: Path, folders: dict[Path, str], *, alone: bool) -> None:
    """A damaged file is refused and named, or it holds nothing that a load needs."""
    error = outcome(checkpoint, alone=alone)
    listed = found_by_verify(checkpoint)
    leaf = owner(file, folders)
    if file.name == "zarr.json" and leaf in (None, "none"):
        # A group's document, and one of an array without elements, serve other readers only.
        assert error is None
        assert any(str(file.relative_to(checkpoint)) in line for line in listed)
    elif error is None:
        # What pads an edge chunk is not an element of the array.
        assert file in chunks(checkpoint) and listed == []
    else:
        assert listed
        if leaf is not None:
            assert leaf in str(error) and any(leaf in line for line in listed)
        if file in chunks(checkpoint):
            assert f"{leaf}: [" in str(error) or f"{leaf}: the scalar" in str(error)


def flips(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    pick = random.Random(seed)
    for _ in range(min(count, len(content))):
        position, bit = pick.randrange(len(content)), 1 << pick.randrange(8)
        yield content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :]


@some_chunks
def test_flipped_bits(saved: Path) -> None:
    folders = array_paths(saved)
    for number, file in enumerate(some(files(saved))):
        for content in flips(file.read_bytes(), 1, seed=number):
            with Damaged(file, content):
                examine(saved, file, folders, alone=number % 2 == 0)
    assert found_by_verify(saved) == []


@pytest.mark.thorough
def test_bytes_flipped_all_over(saved: Path) -> None:
    folders = array_paths(saved)
    for number, file in enumerate(files(saved)):
        content = file.read_bytes()
        for position in range(number % STRIDE, len(content), STRIDE):
            flipped = bytes([content[position] ^ 1 << position % 8])
            with Damaged(file, content[:position] + flipped + content[position + 1 :]):
                error = outcome(saved, alone=position % 2 == 0)
                needed = owner(file, folders) not in (None, "none") or file.name != "zarr.json"
                assert error is not None or not needed or file in chunks(saved)


DAMAGES: dict[str, Damage] = {
    "emptied": lambda content: b"",
    "halved": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "zeroed": lambda content: bytes(len(content)),
    "set": lambda content: b"\xff" * len(content),
    "reversed": lambda content: content[::-1],
    "one byte long": lambda content: content + b"\0",
    "doubled": lambda content: content * 2,
    "a page of junk": lambda content: content + b"junk" * 1024,
    "shifted": lambda content: content[1:] + content[:1],
}


@some_chunks
@pytest.mark.parametrize(
    "every",
    [pytest.param(len(DAMAGES), id="some"), pytest.param(1, id="all", marks=pytest.mark.thorough)],
)
def test_damaged_files(saved: Path, every: int) -> None:
    folders = array_paths(saved)
    for number, file in enumerate(some(files(saved))):
        for damage in list(DAMAGES.values())[number % every :: every]:
            with Damaged(file, damage(file.read_bytes())) as differs:
                if differs:
                    examine(saved, file, folders, alone=number % 2 == 0)


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_deleted_files(saved: Path, turn: int) -> None:
    """Each file; every other one is read by one thread alone, and in the other turn the rest."""
    folders = array_paths(saved)
    for number, file in enumerate(some(files(saved))):
        with Damaged(file, None):
            examine(saved, file, folders, alone=number % 2 == turn)


def test_deleted_folders(saved: Path, tmp_path: Path) -> None:
    for folder in [path for path in saved.rglob("*") if path.is_dir()]:
        folder.rename(tmp_path / "away")
        try:
            error = outcome(saved, alone=False)
            assert (error is None) is (folder.name == "none")
            assert found_by_verify(saved)
        finally:
            (tmp_path / "away").rename(folder)


@some_chunks
def test_swapped_chunks(saved: Path) -> None:
    every = some(chunks(saved))
    for one, other in zip(every, [*every[1:], every[0]], strict=True):
        first, second = one.read_bytes(), other.read_bytes()
        with Damaged(one, second), Damaged(other, first):
            if first != second:
                assert outcome(saved, alone=True) is not None
                assert found_by_verify(saved)


def another(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """An array whose every byte differs."""
    return (array.view(np.uint8) ^ 1).view(array.dtype) if array.ndim else array + 1  # type: ignore[operator]


@pytest.fixture(scope="module")
def earlier(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same tree, shapes and layout, with other numbers."""
    state = everything()
    for name, leaf in state.items():
        if isinstance(leaf, Sharded) and leaf.array is not None:
            boxes = [(box.offsets, box.sizes) for box in leaf.boxes]
            state[name] = cut(another(leaf.array), boxes)
        elif isinstance(leaf, np.ndarray):
            state[name] = another(leaf)
        elif isinstance(leaf, str):
            state[name] = leaf.replace("ü", "ö")
    layout = next(each for each in LAYOUTS if options_of(saved) == each)
    path = tmp_path_factory.mktemp("earlier") / "ckpt"
    xckpt.save(path, state, options=LAYOUTS[layout])
    return path


def options_of(checkpoint: Path) -> str:
    """The name of the layout that a checkpoint was saved in."""
    manifest = xckpt.open(checkpoint).manifest
    sharded = any(array.shard is not None for array in arrays(manifest))
    return " ".join([*(["sharded"] if sharded else []), *manifest.codecs]) or "plain"


def test_chunks_of_an_earlier_save(saved: Path, earlier: Path) -> None:
    folders = array_paths(saved)
    for file in some(chunks(saved)):
        stale = (earlier / file.relative_to(saved)).read_bytes()
        with Damaged(file, stale) as differs:
            if differs:
                error = outcome(saved, alone=True)
                assert error is not None and str(owner(file, folders)) in str(error)


@pytest.mark.parametrize("kept", ["xckpt.json", "xckpt.digests"])
def test_all_but_one_file_of_an_earlier_save(
    saved: Path, earlier: Path, tmp_path: Path, kept: str
) -> None:
    mixed = Path(shutil.copytree(earlier, tmp_path / "ckpt"))
    shutil.copy(saved / kept, mixed / kept)
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"xckpt.digests: altered; restore it"):
        xckpt.load(mixed)
    assert found_by_verify(mixed)


def edits() -> dict[str, Callable[[dict], object]]:
    def codec(document: dict) -> dict:
        chain = document["codecs"]
        if chain[0]["name"] == "sharding_indexed":
            chain = chain[0]["configuration"]["codecs"]
        return chain[0]["configuration"]

    return {
        "shape": lambda d: d["shape"].append(d["shape"].pop() + 1) if d["shape"] else d.clear(),
        "data_type": lambda d: d.update(data_type={"float32": "int32"}.get(d["data_type"], "r8")),
        "endian": lambda d: codec(d).update(endian="big"),
        "separator": lambda d: d["chunk_key_encoding"]["configuration"].update(separator="."),
        "key encoding": lambda d: d["chunk_key_encoding"].update(name="v2"),
        "fill_value": lambda d: d.update(fill_value=7),
        "chunks": lambda d: d["chunk_grid"]["configuration"]["chunk_shape"].append(1),
        "attribute": lambda d: d["attributes"].update(hello="world"),
        "names": lambda d: d.update(dimension_names=["a"] * len(d["shape"])),
        "node_type": lambda d: d.update(node_type="group"),
        "codecs": lambda d: d["codecs"].append({"name": "gzip", "configuration": {"level": 1}}),
    }


@pytest.mark.parametrize("edit", edits())
def test_edited_zarr_json(saved: Path, edit: str) -> None:
    edited = 0
    for folder, leaf in array_paths(saved).items():
        file = folder / "zarr.json"
        document = json.loads(file.read_bytes())
        edits()[edit](document)
        with Damaged(file, json.dumps(document, indent=2).encode()) as differs:
            if not differs or leaf == "none":
                continue
            edited += 1
            error = outcome(saved, alone=True)
            assert error is not None
            assert f"{file.relative_to(saved)}: edited" in str(error)
            with pytest.raises(xckpt.CorruptCheckpointError):
                xckpt.open(saved)[leaf][...]  # type: ignore[index]
    assert edited > 2


@pytest.mark.parametrize("content", [b"{}", None], ids=["edited", "missing"])
def test_which_zarr_json_a_load_reads(saved: Path, content: bytes | None) -> None:
    """Those of arrays with data; those of groups and empty arrays only verification reads."""
    folders, needed, others = array_paths(saved), 0, 0
    for file in sorted(saved.rglob("zarr.json")):
        with Damaged(file, content):
            error, listed = outcome(saved, alone=True), found_by_verify(saved)
        name = str(file.relative_to(saved))
        assert any(name in line and ("edited" in line) == bool(content) for line in listed)
        if folders.get(file.parent, "none") == "none":
            others += 1
            assert error is None, name
        else:
            needed += 1
            assert error is not None and name in str(error)
    assert needed > 5 and others > 2


def test_zarr_json_in_another_spelling_is_refused_too(saved: Path) -> None:
    file = saved / "even" / "zarr.json"
    with Damaged(file, json.dumps(json.loads(file.read_bytes())).encode()):
        error = outcome(saved, alone=True)
        assert error is not None and "even/zarr.json: edited" in str(error)


def test_verify_lists_everything(saved: Path) -> None:
    folders = array_paths(saved)
    with contextlib.ExitStack() as without:
        without.enter_context(Damaged(saved / "zarr.json", b"{}"))
        without.enter_context(Damaged(saved / "nested" / "zarr.json", None))
        for file in chunks(saved):
            without.enter_context(Damaged(file, None))
        listed = found_by_verify(saved)
    assert "zarr.json: edited; it is not the one that was saved" in listed
    assert "nested/zarr.json: missing" in listed
    lost = [line for line in listed if "the chunk is missing" in line]
    assert len(lost) == len(listed) - 2
    assert len(lost) == sum(array.count for array in arrays(xckpt.open(saved).manifest))
    for leaf in {owner(file, folders) for file in chunks(saved)}:
        assert any(line.startswith(f"{leaf}: ") for line in lost)


def test_values_and_slices_are_verified_too(saved: Path) -> None:
    file = chunks(saved, "note")[0]
    content = file.read_bytes()
    with Damaged(file, content[:5] + b"?" + content[6:]):
        with pytest.raises(xckpt.CorruptCheckpointError, match=r"note: \[0, "):
            xckpt.open(saved)["note"]
        assert xckpt.open(saved)["step"] == 3
    file = chunks(saved, "pieces")[0]
    with Damaged(file, bytes(len(file.read_bytes()))):
        stored = xckpt.open(saved)["pieces"]
        assert isinstance(stored, xckpt.StoredArray)
        with pytest.raises(xckpt.CorruptCheckpointError, match=r"pieces: \[0, "):
            stored[0]
        assert stored[100].tolist() == [300, 301, 302]


def test_linked_files(saved: Path, tmp_path: Path) -> None:
    """A link to the same content is as good as the content; to another it is damage."""
    for number, file in enumerate([*chunks(saved)[::5], saved / "even" / "zarr.json"]):
        content = file.read_bytes()
        elsewhere = tmp_path / str(number)
        elsewhere.write_bytes(content)
        with Linked(file, elsewhere):
            assert outcome(saved, alone=True) is None
            elsewhere.write_bytes(b"x" * len(content))
            assert outcome(saved, alone=True) is not None
            elsewhere.unlink()
            assert outcome(saved, alone=False) is not None
        with Linked(file, file):
            assert outcome(saved, alone=True) is not None
            assert found_by_verify(saved)
    assert outcome(saved, alone=True) is None


CARELESSLY_READ = ("giant", "truncated", "a pipe", "a folder")

HOSTILE = f"""
import os, sys
import xckpt

DAMAGES = {CARELESSLY_READ}

path = sys.argv[1]
names = sys.argv[2:]
for damage, name in ((damage, name) for damage in DAMAGES for name in names):
    for threads in (1, 2):
        file = os.path.join(path, name)
        with open(file, "rb") as stream:
            content = stream.read()
        if damage == "giant":
            os.truncate(file, 1 << 42)
        elif damage == "truncated":
            os.truncate(file, len(content) // 2)
        elif damage == "a pipe":
            os.unlink(file)
            os.mkfifo(file)
        elif damage == "a folder":
            os.unlink(file)
            os.mkdir(file)
        for read in (lambda: xckpt.load(path, options=options), lambda: verify()):
            options = xckpt.LoadOptions(threads=threads)
            def verify():
                problems = xckpt.open(path, options=options).verify()
                assert problems
                raise xckpt.CorruptCheckpointError(problems[0])
            try:
                read()
                print("loaded", damage, name)
            except xckpt.XckptError as error:
                print("refused", damage, name)
        if damage == "a folder":
            os.rmdir(file)
        else:
            os.unlink(file)
        with open(file, "wb") as stream:
            stream.write(content)
"""


def test_files_that_would_kill_a_careless_reader(saved: Path) -> None:
    """4 TiB, shorter than its map, a pipe: the process lives and says what is wrong."""
    names = [
        "xckpt.json",
        "xckpt.digests",
        "even/zarr.json",
        str(chunks(saved, "even")[0].relative_to(saved)),
        str(chunks(saved, "note")[0].relative_to(saved)),
    ]
    command = [sys.executable, "-c", HOSTILE, str(saved), *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines() == [
        f"refused {damage} {name}" for damage in CARELESSLY_READ for name in names for _ in range(4)
    ]
