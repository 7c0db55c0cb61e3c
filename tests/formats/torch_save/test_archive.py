"""Archives of `torch.save` are read from any place in a file, and torch is the oracle."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.torch.dcp.folders import raw
from xckpt.core.manifest import memory
from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    StorageError,
    UnsafePickleError,
    UnsupportedLeafError,
)
from xckpt.formats.torch_save import values
from xckpt.formats.torch_save.archive import Archive, Where
from xckpt.formats.torch_save.values import MappedTensor
from xckpt.storage.foreign.documents import Allowance
from xckpt.torch.leaf import from_numpy


def archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def opened(folder: Path, content: bytes, before: int = 0, after: int = 0) -> Archive:
    (folder / "file").write_bytes(b"x" * before + content + b"y" * after)
    return Archive.open(folder, Where("file", before, len(content)))


def mapped(folder: Path, value: Any) -> torch.Tensor:
    found = opened(folder, archive(value)).value()
    assert isinstance(found, MappedTensor)
    return from_numpy(found.array())


@examples(50)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    before=st.integers(0, 9),
    after=st.integers(0, 100),
    data=st.data(),
)
def test_a_view_of_a_larger_storage_anywhere_in_a_file(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    before: int,
    after: int,
    data: st.DataObject,
) -> None:
    base = torch.arange(float(3 * 4**3 + 50))
    strides = [data.draw(st.integers(0, 12)) for _ in shape]
    view = base.as_strided(shape, strides, data.draw(st.integers(0, 50)))
    folder = tmp_path_factory.mktemp("archive")
    found = opened(folder, archive(view), before, after).value()
    assert isinstance(found, MappedTensor)
    assert raw(from_numpy(found.array())) == raw(view)


def test_mapped_memory_is_not_writable(tmp_path: Path) -> None:
    found = opened(tmp_path, archive(torch.ones(3))).value()
    assert isinstance(found, MappedTensor)
    assert not found.array().flags.writeable


def test_archives_without_checksums(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        assert raw(mapped(tmp_path, torch.ones(3))) == raw(torch.ones(3))
    finally:
        torch.serialization.set_crc32_options(before)


def test_tensors_that_share_a_storage(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    found: Any = opened(tmp_path, archive([base, base[2:4], base.view(2, 3).t()])).value()
    arrays = [part.array().tolist() for part in found]
    assert arrays == [[0, 1, 2, 3, 4, 5], [2, 3], [[0, 3], [1, 4], [2, 5]]]


ODD = {
    "old format": lambda: _old_format(),
    "no archive": lambda: b"x" * 500,
    "empty": lambda: b"",
    "compressed": lambda: _zipped({"archive/data.pkl": b"N."}, zipfile.ZIP_DEFLATED),
    "no data.pkl": lambda: _zipped({"archive/version": b"3"}),
    "cut in front": lambda: archive(torch.ones(9))[10:],
    "cut behind": lambda: archive(torch.ones(9))[:-10],
    "an entry's header": lambda: archive(torch.ones(9)).replace(b"PK\3\4", b"PK\3\5"),
    "no storage": lambda: _without(archive(torch.ones(9)), "data/0"),
    "short storage": lambda: _with(archive(torch.ones(9)), "data/0", b"1234"),
}


def _old_format() -> bytes:
    stream = io.BytesIO()
    torch.save(torch.ones(3), stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def _zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return stream.getvalue()


def _entries(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {name: file.read(name) for name in file.namelist()}


def _without(content: bytes, name: str) -> bytes:
    return _zipped({k: v for k, v in _entries(content).items() if not k.endswith(name)})


def _with(content: bytes, name: str, data: bytes) -> bytes:
    return _zipped({k: data if k.endswith(name) else v for k, v in _entries(content).items()})


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_archive_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="file"):
        opened(tmp_path, ODD[what]()).value()


def test_zips_of_others_are_read_alike(tmp_path: Path) -> None:
    content = _zipped(_entries(archive(torch.arange(4))))
    found: Any = opened(tmp_path, content).value()
    assert found.array().tolist() == [0, 1, 2, 3]


def test_big_endian_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="big-endian"):
        opened(tmp_path, _with(archive(torch.ones(9)), "byteorder", b"big")).value()
    wide: Any = opened(tmp_path, _with(archive(torch.ones(2).byte()), "byteorder", b"big")).value()
    assert wide.array().tolist() == [1, 1]


ODD_TENSORS = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_tensors_without_plain_elements_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafePickleError, match=r"torch\._utils\._rebuild"):
        opened(tmp_path, archive(ODD_TENSORS[kind]())).value()


def test_a_value_that_repeats_itself_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "MOST_PARTS", 1000)
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedLeafError, match="containers deep"):
        opened(tmp_path, archive(value)).value()
    doubled: Any = [1]
    for _ in range(60):
        doubled = [doubled, doubled]
    with pytest.raises(UnsupportedLeafError, match="more than 1,000 parts"):
        opened(tmp_path, archive(doubled)).value()


def test_an_expanded_tensor_is_refused(tmp_path: Path) -> None:
    """A file of a kilobyte could ask for any number of elements."""
    with pytest.raises(UnsupportedLeafError, match=r"expanded .*\.contiguous\(\)"):
        opened(tmp_path, archive(torch.ones(1).expand(1 << 40))).value()


def test_an_absurd_shape_of_nothing_is_refused(tmp_path: Path) -> None:
    """NumPy has no such array either."""
    with pytest.raises(ManifestError, match="unusable arguments"):
        opened(tmp_path, archive(torch.empty(1 << 40, 0, 1 << 40))).value()


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    content = archive(torch.ones(1))
    (tmp_path / "file").write_bytes(content)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        Archive.open(tmp_path, Where("file", 0, len(content)))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptCheckpointError, match="not a plain file"):
        Archive.open(tmp_path, Where("pipe", 0, 10))


def with_entries(content: bytes, entries: dict[str, bytes]) -> bytes:
    """An archive with more entries at its end."""
    stream = io.BytesIO(content)
    with zipfile.ZipFile(stream, "a") as added, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name that is there already
        for name, data in entries.items():
            added.writestr(name, data)
    return stream.getvalue()


def test_an_entry_outside_of_the_archives_folder_is_none_of_it(tmp_path: Path) -> None:
    """`data/0` is another than `archive/data/0`, to torch too."""
    found = opened(tmp_path, with_entries(archive(torch.arange(4)), {"data/0": bytes(32)})).value()
    assert isinstance(found, MappedTensor)
    assert found.array().tolist() == [0, 1, 2, 3]


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    """torch takes the first, other readers the last."""
    content = with_entries(archive(torch.arange(4)), {"archive/data/0": bytes(32)})
    with pytest.raises(CorruptCheckpointError, match="two entries archive/data/0"):
        opened(tmp_path, content)


@pytest.mark.parametrize(
    "what, count", [("a directory of 6,", 100), ("a data.pkl of ", 1)], ids=["entries", "pickle"]
)
def test_what_describes_an_archive_is_bounded_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, count: int
) -> None:
    """46 bytes of a directory become ten times as many; a pickle may be a hole in a file."""
    monkeypatch.setattr(memory, "LEAST_LIMIT", 1)
    monkeypatch.setattr("xckpt.storage.foreign.documents.LEAST_LIMIT", 1)
    content = with_entries(
        archive("x" * 9000 if count == 1 else 1), {f"archive/{n:010}": b"" for n in range(count)}
    )
    (tmp_path / "file").write_bytes(content)
    where = Where("file", 0, len(content))
    assert Archive.open(tmp_path, where, Allowance(1 << 20)).value() in (1, "x" * 9000)
    with pytest.raises(ManifestError, match=rf"{what}.* takes .*memory_bytes \(19.5 KiB\)"):
        Archive.open(tmp_path, where, Allowance(20_000))
