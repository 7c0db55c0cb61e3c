"""A pickle is described and never run: what Python's pickler writes is read, all else is refused.

The oracle is Python's own pickle. Each pickle that would run something marks a file if it does.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import os
import pickle
import pickletools
import struct
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xckpt.errors import ManifestError, UnsafePickleError, XckptError
from xckpt.formats.dcp import metadata
from xckpt.formats.torch_save import values
from xckpt.formats.torch_save.pickle_machine import Record, Symbol, load

PROTOCOLS = [2, 3, 4, 5]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 2100), 1 << 2100)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers())
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(collections.OrderedDict)
    ),
    max_leaves=30,
)


@given(TREES, st.sampled_from(PROTOCOLS))
@examples(40, 1000)
def test_what_the_pickler_writes_is_read(tree: Any, protocol: int) -> None:
    data = pickle.dumps(tree, protocol)
    assert load(data, values.NAMES) == pickle.loads(data)


@given(TREES, st.sampled_from(PROTOCOLS), st.data())
@examples(50, 1000)
def test_a_truncated_pickle_is_refused(tree: Any, protocol: int, data: st.DataObject) -> None:
    whole = pickle.dumps(tree, protocol)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ManifestError):
        load(whole[:length], values.NAMES)


@given(TREES, st.data())
@examples(50, 1000)
def test_a_damaged_pickle_is_refused_or_read_as_plain_values(
    tree: Any, data: st.DataObject
) -> None:
    raw = bytearray(pickle.dumps(tree, 4))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(XckptError):
        load(bytes(raw), values.NAMES)


@given(st.binary(max_size=64))
def test_noise_is_refused_or_read_as_plain_values(data: bytes) -> None:
    with contextlib.suppress(XckptError):
        load(b"\x80\x04" + data, metadata.NAMES)


def test_shared_and_nested_values_come_back_shared() -> None:
    shared = [1]
    first, second = load(pickle.dumps((shared, shared)), {})  # type: ignore[misc]
    assert first is second


def test_instances_are_described() -> None:
    described = load(pickle.dumps(timedelta(2, 3), 2), {"datetime.timedelta": Record})
    assert isinstance(described, Record)
    assert described.arguments == (2, 3, 0)


# What pickles do to harm.


class Calls:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def global_op(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def stack_global(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


META = "torch.distributed.checkpoint.metadata"
COMMAND = "touch harmed"


def called(module: str, name: str, argument: str) -> bytes:
    return b"\x80\x04" + stack_global(module, name) + short(argument) + b"\x85R."


HARMFUL: dict[str, bytes] = {
    **{f"reduce {p}": pickle.dumps(Calls(os.system, COMMAND), p) for p in range(6)},
    **{f"nested {p}": pickle.dumps({"a": [(Calls(os.system, COMMAND),)]}, p) for p in range(6)},
    **{f"eval {p}": pickle.dumps(Calls(eval, "open('harmed', 'w')"), p) for p in range(6)},
    "dotted": called(META, "os.system", COMMAND),
    "dotted global": b"\x80\x02" + global_op(META, "os.system") + short(COMMAND) + b"\x85R.",
    "dotted module": called(f"{META}.os", "system", COMMAND),
    "dunder": b"\x80\x04" + stack_global(META, "Metadata.__init__.__globals__") + b".",
    "inst": b"(S'touch harmed'\nios\nsystem\n.",
    "obj": b"(" + global_op("os", "system") + b"S'touch harmed'\no.",
    "copyreg": pickle.dumps(Calls(copyreg._reconstructor, Path, object, None), 2),  # type: ignore[attr-defined]
    "extension": b"\x80\x02\x82\x01.",
    "getattr": b"\x80\x04"
    + stack_global("builtins", "getattr")
    + stack_global(META, "Metadata")
    + short("__init__")
    + b"\x86R.",
    "import": called("importlib", "import_module", "antigravity"),
    "call a dtype": b"\x80\x04" + stack_global("torch", "float32") + b")R.",
    "call a value": b"\x80\x04" + short("print") + b")R.",
    "new of a value": b"\x80\x04" + short("print") + b")\x81.",
    "build on a class": b"\x80\x04" + stack_global(META, "Metadata") + b"}b.",
    "build on a dict": b"\x80\x04}" + stack_global("torch", "Size") + b"b.",
    "persistent": b"\x80\x04" + short("x") + b"Q.",
    "append to a record": b"\x80\x04" + stack_global(META, "Metadata") + b")RK\x01a.",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_pickle_is_refused_and_nothing_is_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    for names in (metadata.NAMES, values.NAMES):
        with pytest.raises(ManifestError):
            load(HARMFUL[name], names)
    assert list(tmp_path.iterdir()) == []
    assert set(sys.modules) == before


def test_the_harmful_pickles_would_do_harm(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"],
        input=HARMFUL["reduce 4"],
        cwd=tmp_path,
        check=True,
    )
    assert (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "name, words",
    [
        ("reduce 0", "posix.system"),
        ("reduce 4", "posix.system"),
        ("nested 2", "posix.system"),
        ("eval 5", "builtins.eval"),
        ("dotted", f"{META}.os.system"),
        ("dotted global", f"{META}.os.system"),
        ("getattr", "builtins.getattr"),
        ("call a dtype", "torch.float32"),
    ],
)
def test_the_refusal_names_the_class(name: str, words: str) -> None:
    with pytest.raises(UnsafePickleError, match=words.replace(".", r"\.")):
        load(HARMFUL[name], metadata.NAMES)


def test_names_that_may_occur_are_only_names() -> None:
    symbol = load(b"\x80\x04" + stack_global("torch", "float32") + b".", metadata.NAMES)
    assert symbol == Symbol("torch.float32")


ABSURD = {
    "memo": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo read": b"\x80\x02j\xff\xff\xff\xff.",
    "string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"a.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "int": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "negative int": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"a.",
    "no mark": b"\x80\x04t.",
    "empty": b"",
    "only a header": b"\x80\x04",
    "nothing": b"\x80\x04.",
    "two values": b"\x80\x04NN.",
    "below a mark": b"\x80\x04N(\x85.",
    "odd items": b"\x80\x04}(Nu.",
    "list as key": b"\x80\x04}]Ns.",
    "protocol": b"\x80\x06N.",
    "no text": b"\x80\x04\x8c\x01\xff.",
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_pickle_is_refused(name: str) -> None:
    with pytest.raises(ManifestError):
        load(ABSURD[name], values.NAMES)


def test_depth_and_repetition_cost_neither_stack_nor_time() -> None:
    deep = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert isinstance(load(deep, {}), list)
    tuples = b"\x80\x04)" + b"\x85" * 100_000 + b"."
    assert isinstance(load(tuples, {}), tuple)
    # Each line doubles: the value has 2**64 parts, the pickle 200 bytes.
    pairs = b"".join(b"h%c" % n * 2 + b"\x86\x940" for n in range(64))
    doubled = b"\x80\x04)\x940" + pairs + b"h@."
    assert isinstance(load(doubled, {}), tuple)
    # As a key it would be hashed for ever.
    with pytest.raises(ManifestError, match="as a key"):
        load(b"\x80\x04}" + doubled[2:-1] + b"Ns.", {})


def test_every_opcode_that_the_pickler_writes_is_known() -> None:
    tree = [None, True, False, 1, -1, 300, 70000, 1 << 40, 1 << 3000, 1.5, "a", "b" * 300, b"c",
            b"d" * 300, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1], [1, 2], {}, {1: 2},
            {1: 2, 3: 4}]  # fmt: skip
    for protocol in PROTOCOLS:
        data = pickle.dumps((tree, tree), protocol)
        assert load(data, values.NAMES) == (tree, tree)
        assert pickletools.optimize(data)
