"""The saved corpus is replayed, and the judges find what is wrong where something is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conformance.implementations import reader_golden
from tests.fuzz import checkpoints, corpus, targets
from tests.fuzz.choices import Choices, edit_bytes, edit_json
from tests.fuzz.corpus import inputs, pack, unpack
from tests.fuzz.targets import SHARES, TARGETS, Judge, load
from xckpt.core.manifest import codec
from xckpt.errors import XckptError
from xckpt.storage.chunks import chunk
from xckpt.storage.integrity import Integrity

OUTCOMES = {
    "manifest": {"refused", "read", "unchanged"},
    "readers": {"refused", "read"},
    "names": {"canonical", "not canonical"},
    "checkpoint": {"refused", "loaded"},
    "metadata": {"refused", "read"},
    "archive": {"refused", "read"},
    "safetensors": {"refused", "read"},
    "shown": {"exit code 0", "exit code 1"},
}


@pytest.mark.parametrize("target", TARGETS)
def test_saved_inputs_are_dealt_with(target: str) -> None:
    judge = Judge(load(target))
    outcomes = Counter(judge(content) for content in inputs(target))
    assert OUTCOMES[target] <= set(outcomes)
    assert outcomes.total() >= 15


def test_the_independent_reader_deals_with_saved_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    (reader,) = reader_golden.READERS
    errors = (XckptError, *reader.errors)
    monkeypatch.setattr(checkpoints, "XckptError", errors)
    monkeypatch.setattr(checkpoints, "_load", lambda copy, way: reader.load(copy.path))
    few = inputs("checkpoint")[::3]
    outcomes = Counter(checkpoints.checkpoint(content) for content in few)
    assert {"refused", "loaded"} <= set(outcomes)


def test_every_target_gets_a_share() -> None:
    assert SHARES.keys() == TARGETS.keys()


def findings(target: str) -> Iterator[str]:
    run = load(target)
    for content in inputs(target):
        try:
            run(content)
        except Exception as error:
            yield f"{type(error).__name__}: {error}"


def test_a_reader_that_compares_no_digests_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Any:
        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr(chunk, "digest_array", lambda array: Any())
    monkeypatch.setattr(chunk.PlainFile, "digest", lambda file: Any())
    assert any("loaded silently" in each for each in findings("checkpoint"))


def test_a_reader_that_compares_no_zarr_json_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Integrity, "_problem", lambda *arguments: "")
    assert any("zarr.json is not what was saved" in each for each in findings("checkpoint"))


def test_rules_that_are_not_kept_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "problems", lambda manifest: [])
    assert len(list(findings("manifest"))) > 10


def test_what_takes_too_long_or_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SECONDS", 0.05)

    def slow(content: bytes) -> str:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        return "done"

    with pytest.raises(AssertionError, match=r"took .* s"):
        Judge(slow)(b"")
    monkeypatch.setattr(targets, "SECONDS", 60.0)
    monkeypatch.setattr(targets, "MEMORY", 1 << 26)
    with pytest.raises(AssertionError, match=r"took .* MiB"):
        Judge(lambda content: str(np.ones(1 << 28, np.uint8)[-1]))(b"")


def test_choices_come_to_an_end() -> None:
    choices = Choices(b"\3")
    assert [choices.below(5), choices.below(5), choices.number(8), choices.left] == [3, 0, 0, 0]
    assert edit_bytes(b"abc", choices) == b"abc"
    document = {"a": [1]}
    edit_json(document, choices)
    assert document == {"a": [1]}


def test_bytes_and_json_are_changed() -> None:
    assert edit_bytes(b"abc", Choices(b"\0\1x" + b"z")) == b"azc"
    document = {"a": [1], "b": "x"}
    edit_json(document, Choices(b"\2\0"))
    assert document == {"a": [], "b": "x"}


def test_a_corpus_is_saved_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CORPUS", tmp_path / "corpus")
    pack("names", [b"longer", b"\xff\0", b"longer"])
    assert inputs("names") == [b"\xff\0", b"longer"]
    unpack("names", tmp_path / "files")
    assert sorted(each.read_bytes() for each in (tmp_path / "files").iterdir()) == [
        b"longer",
        b"\xff\0",
    ]
