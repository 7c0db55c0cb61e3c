"""The inner bytes of a manifest: encoded, and decoded in little memory.

A manifest may have a million leaves, most of which are alike but in name.

1. `decoded_bytes` is an upper bound of the memory that they will take, before any is decoded.
2. `decode_body` takes the leaves as texts first and has `decode_leaves` decode each by itself. What
   leaves have in common (element types, shapes, chunk shapes, shardings) is one object for all, and
   a text that differs from an earlier one in the name alone is not decoded again.
3. Leaves in pieces name theirs by a number (`TensorText`); here they get them.
4. Each leaf is spelled again, and so is what lies around them. As this library spells it, no name
   comes twice in an object; otherwise all names are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

import msgspec

from xckpt.core.json_values import repeated_name
from xckpt.core.manifest.entries import BytesEntry, Entry, Manifest, TensorEntry, ValueEntry
from xckpt.core.manifest.memory import check_memory, json_bytes, leaves_bytes
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.struct_types import prepare_structs
from xckpt.errors import ManifestError

Shared = TypeVar("Shared")
Document = TypeVar("Document")

MOST_SHARED: Final = 1 << 12
"""Different values that are remembered at a time."""
MOST_ALIKE: Final = 1 << 10
"""Different kinds of leaves that are."""


class TensorText(TensorEntry, frozen=True, tag="tensor", tag_field="kind"):
    """A tensor as it is stored."""

    pieces: int | None = None  # type: ignore[assignment]  # of which there may be many
    """Which of the manifest's cuts it has."""


class ManifestText(Manifest, frozen=True):
    """A manifest as it is stored."""

    leaves: tuple[TensorText | ValueEntry | BytesEntry, ...]  # type: ignore[assignment]
    cuts: tuple[Pieces, ...] = ()
    """The pieces of leaves; those that are cut alike share them."""


_BEFORE_NAME: Final = b'{"kind":"tensor","name":'
_BEHIND_NAME: Final = b'","dtype":'
_NAME: Final = msgspec.json.Decoder(str)
_LEAF: Final = msgspec.json.Decoder(TensorText | ValueEntry | BytesEntry)


class _Sharing:
    """Values that many leaves have."""

    def __init__(self) -> None:
        self._values: dict[object, object] = {}

    def one(self, value: Shared) -> Shared:
        """An equal value that was met before, if it is still remembered."""
        if len(self._values) >= MOST_SHARED:
            self._values.clear()
        return self._values.setdefault(value, value)  # type: ignore[return-value]

    def entry(self, leaf: TensorText | ValueEntry | BytesEntry, pieces: Sequence[Pieces]) -> Entry:
        """A leaf that shares what it can, the pieces too."""
        one = self.one
        if isinstance(leaf, ValueEntry):
            return ValueEntry(leaf.name, one(leaf.type), leaf.value)
        if isinstance(leaf, BytesEntry):
            return leaf
        number = leaf.pieces
        if number is not None and not 0 <= number < len(pieces):
            raise msgspec.ValidationError(f"cut {number} of {len(pieces)}")
        return TensorEntry(
            leaf.name,
            one(leaf.dtype),
            one(leaf.shape),
            one(leaf.chunk),
            leaf.shard and one(leaf.shard),
            None if number is None else pieces[number],
            leaf.sharding and one(leaf.sharding),
            leaf.annotation and one(leaf.annotation),
            leaf.dimension_names and one(leaf.dimension_names),
        )


def decode_leaves(
    texts: list[msgspec.Raw], pieces: Sequence[Pieces]
) -> tuple[tuple[Entry, ...], bool]:
    """Decode leaves, and let go of their texts on the way.

    Returns:
        The leaves, and whether all are spelled as this library spells them.

    Raises:
        msgspec.MsgspecError: one is not a leaf; the message has its place.

    Example:
        >>> leaves = [msgspec.Raw(b'{"kind":"value","name":"n","type":"int","value":"0x7"}')]
        >>> decode_leaves(leaves, [])
        ((ValueEntry(name='n', type='int', value='0x7'),), True)
    """
    sharing, encoded, alike = _Sharing(), msgspec.json.Encoder().encode, True
    leaves = cast("list[msgspec.Raw | Entry]", texts)
    known: dict[bytes, tuple[Any, ...]] = {}
    """What a tensor's text says behind the name -> that, where it is spelled as here."""
    number = -1
    try:
        for number, text in enumerate(texts):
            content = bytes(text)
            # No name holds these bytes: its quotes are escaped.
            named = content.find(_BEHIND_NAME) + 1
            about = known.get(content[named:])
            if about is not None and content.startswith(_BEFORE_NAME):
                spelled = content[len(_BEFORE_NAME) : named]
                name = _NAME.decode(spelled)
                alike = alike and encoded(name) == spelled
                leaves[number] = TensorEntry(name, *about)
                continue
            leaf = _LEAF.decode(content)
            is_alike = encoded(leaf) == content
            alike = alike and is_alike
            leaves[number] = entry = sharing.entry(leaf, pieces)
            if is_alike and isinstance(entry, TensorEntry):
                if len(known) >= MOST_ALIKE:
                    known.clear()
                known[content[named:]] = msgspec.structs.astuple(entry)[1:]
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"leaf {number}: {error}") from error
    return cast(tuple[Entry, ...], tuple(leaves)), alike


class _Texts(ManifestText, frozen=True):
    """A manifest whose leaves are not decoded yet."""

    leaves: list[msgspec.Raw]  # type: ignore[assignment]  # before they are


_BEFORE_LEAVES: Final = b'{"leaves":['

prepare_structs(_Texts)


def encode_body(manifest: Manifest) -> bytes:
    """The inner bytes of a manifest; the pieces of leaves that are cut alike are there once."""
    numbers: dict[Pieces, int] = {}
    leaves = tuple(_stored(leaf, numbers) for leaf in manifest.leaves)
    about = {name: getattr(manifest, name) for name in Manifest.__struct_fields__}
    about["leaves"] = leaves
    return msgspec.json.encode(ManifestText(**about, cuts=tuple(numbers)))


def _stored(leaf: Entry, numbers: dict[Pieces, int]) -> TensorText | ValueEntry | BytesEntry:
    """A leaf as it is stored, and its pieces among those that have a number."""
    if not isinstance(leaf, TensorEntry) or leaf.pieces is None:
        return cast("TensorText | ValueEntry | BytesEntry", leaf)
    about = {name: getattr(leaf, name) for name in TensorEntry.__struct_fields__}
    about["pieces"] = numbers.setdefault(leaf.pieces, len(numbers))
    return TensorText(**about)


def decoded_bytes(body: memoryview) -> int:
    """An estimate of the memory that a manifest takes once its inner bytes are decoded."""
    parts = decode(body, dict[str, msgspec.Raw], "the manifest breaks the format")
    return sum(
        (leaves_bytes if name == "leaves" else json_bytes)(bytes(text))
        for name, text in parts.items()
    )


def decode_body(body: memoryview, memory_bytes: int | None) -> Manifest:
    """The manifest that the inner bytes hold, whose leaves are decoded one by one.

    Raises:
        ManifestError: they hold none, or take more memory than allowed.
    """
    texts = decode(body, _Texts, "the manifest breaks the format")
    length = sum(map(len, map(memoryview, texts.leaves)))
    faults = [f"cut {n}: {cut.fault()}" for n, cut in enumerate(texts.cuts) if cut.fault()]
    if faults:
        raise ManifestError.listing("the manifest breaks the format", faults)
    try:
        leaves, alike = decode_leaves(texts.leaves, texts.cuts)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"the manifest breaks the format: {error}") from error
    about = {name: getattr(texts, name) for name in Manifest.__struct_fields__ if name != "leaves"}
    manifest = Manifest(leaves, **about)
    rest = msgspec.json.encode(msgspec.structs.replace(texts, leaves=[]))
    before, after = _BEFORE_LEAVES, rest[len(_BEFORE_LEAVES) :]
    length += len(rest) + max(0, len(leaves) - 1)
    ends = bytes(body[: len(before)]) == before and bytes(body[-len(after) :]) == after
    if not (alike and ends and length == len(body)):
        _refuse_repeated_names(body, memory_bytes)
    return manifest


def _refuse_repeated_names(body: memoryview, memory_bytes: int | None) -> None:
    """A text in this library's spelling, which is quick to see, has no name twice."""
    text = bytes(body)
    if memory_bytes is not None:
        what = f"the manifest of {len(text):,} bytes, which another library spelled,"
        check_memory(json_bytes(text), what, memory_bytes)
    try:
        name = repeated_name(text)
    except RecursionError as error:
        raise ManifestError("the manifest breaks the format: it is nested too deep") from error
    if name is not None:
        raise ManifestError(
            f"the manifest breaks the format: an object in it has two members named {name[:80]!r}"
        )


def decode(
    data: bytes | memoryview, kind: type[Document], complaint: str, advice: str = ""
) -> Document:
    """What a JSON text holds.

    Raises:
        ManifestError: it holds something else; begins with the ``complaint``, and ends with the
            ``advice``.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        text = f"{complaint}: {error}"
        raise ManifestError(f"{text}; {advice}" if advice else text) from error
