"""What is known of a step of a run, and how it is written into the step's checkpoint.

A checkpoint that a manager writes has this as its user metadata, so that the root of a run needs no
file of its own::

    {"run": {"step": 500, "time": 1767225600.0, "metrics": {"loss": 0.25}, "keep": ["Latest(3)"],
     "base": 400}}

A metric that is not a JSON number is written as one of the texts ``"nan"``, ``"inf"``, ``"-inf"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Annotated, Final, Literal

import msgspec

from xckpt.core.dtypes import DTYPES, item_size
from xckpt.core.manifest.pieces import MAX_RANK, MAX_TENSOR_BYTES
from xckpt.core.metadata import JSONValue
from xckpt.core.struct_types import prepare_structs
from xckpt.core.text.arguments import wrong_argument
from xckpt.core.text.shown import documented


@documented
@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed checkpoint of a run.

    Raises:
        TypeError: ``number`` is not an int, or ``metrics`` are no mapping.

    Example:
        >>> StepRecord(500, 1767225600.0, {"loss": 0.25}, bytes=1024).name
        'step-00000500'
    """

    number: int
    """The step, counted by the training loop."""
    time: float | None = None
    """When its save began, in seconds since the epoch by the coordinator's clock; None if no
    manager wrote it. Such a step is listed and restored, and never deleted by a policy."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """What the training loop passed as ``metrics=``."""
    bytes: int = 0
    """Bytes of all elements of its tensors."""
    name: str = ""
    """The name of its folder in the root."""
    temporary: bool = False
    """Whether it lies in the run's temporary root."""
    format: str = "xckpt"
    """``"xckpt"``, or the format of another library, which is read and never deleted."""
    keep: tuple[str, ...] = ()
    """The rules by which its run kept steps when it was saved; see `xckpt.core.run.rules`."""
    linked: bool = False
    """Whether its folder is a symbolic link. Such a step is listed and restored, and never deleted
    or replaced: what it points to may be another step."""
    base: int | None = None
    """The step whose unchanged chunks its save was to share; None if it was to write everything."""

    @property
    def managed(self) -> bool:
        """Whether policies decide if it stays; what no manager wrote always does."""
        return self.time is not None and not self.linked

    def __post_init__(self) -> None:
        if type(self.number) is not int:  # as most are
            from xckpt.core.run.numbers import whole

            try:
                object.__setattr__(self, "number", whole(self.number))
            except TypeError:
                raise wrong_argument("StepRecord", "number", "an int", self.number) from None
        if not isinstance(self.metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            takes = "a mapping from names to numbers"
            raise wrong_argument("StepRecord", "metrics", takes, self.metrics)
        if not self.name:
            from xckpt.core.run.names import step_name

            object.__setattr__(self, "name", step_name(self.number))


def place_of(record: StepRecord) -> tuple[object, ...]:
    """The place of a step among others; of those with one number the one that counts is the last.

    That is one in the kept root, one of xckpt, one whose name a manager gives.

    Example:
        >>> theirs, ours = StepRecord(5, name="step-5", format="dcp"), StepRecord(5, name="5")
        >>> max([ours, theirs], key=place_of).name
        '5'
    """
    from xckpt.core.run.names import in_order

    number, *named = in_order(record.number, record.name)
    return number, not record.temporary, record.format == "xckpt", *named


class _Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    time: float
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]] = {}
    keep: tuple[str, ...] = ()
    base: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Written(msgspec.Struct, frozen=True):
    run: _Run


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_TENSOR_BYTES)]


class _TensorOutline(msgspec.Struct, tag="tensor", tag_field="kind", gc=False):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANK)]


class _ValueOutline(msgspec.Struct, tag="value", tag_field="kind", gc=False):
    pass


class _BytesOutline(msgspec.Struct, tag="bytes", tag_field="kind", gc=False):
    pass


class _Outline(msgspec.Struct):
    """What a record needs of a manifest; no text makes objects of many times its length."""

    leaves: list[_TensorOutline | _ValueOutline | _BytesOutline]
    user: msgspec.Raw = msgspec.Raw(b"null")


class Sealed(msgspec.Struct):
    """A manifest as it is stored."""

    digest: str
    checkpoint: msgspec.Raw


prepare_structs(_Written)
sealed: Final = msgspec.json.Decoder(Sealed).decode
_outline: Final = msgspec.json.Decoder(_Outline).decode
_written: Final = msgspec.json.Decoder(_Written).decode


def run_metadata(record: StepRecord, user: JSONValue = None) -> JSONValue:
    """What a manager gives to a save as ``metadata=``.

    Args:
        record: the step.
        user: what its user gave: a dict, beside whose keys the manager puts one.

    Example:
        >>> run_metadata(StepRecord(3, 60.0, {"loss": float("inf")}))
        {'run': {'step': 3, 'time': 60.0, 'metrics': {'loss': 'inf'}}}
        >>> list(run_metadata(StepRecord(3), {"data": "v2"}))
        ['data', 'run']
    """
    if user is not None and (not isinstance(user, dict) or "run" in user):
        raise TypeError("metadata= of a step is a dict without the key 'run', which is the run's")
    metrics: dict[str, JSONValue] = {
        name: value if isfinite(value) else str(value) for name, value in record.metrics.items()
    }
    run: dict[str, JSONValue] = {"step": record.number, "time": record.time, "metrics": metrics}
    if record.keep:
        run["keep"] = list(record.keep)
    if record.base is not None:
        run["base"] = record.base
    return {**(user or {}), "run": run}


def read_record(number: int, name: str, user: bytes, size: int) -> StepRecord:
    """The record of a step from the user metadata of its checkpoint; see `run_metadata`.

    Args:
        number: the step, by its folder's name.
        name: that name.
        user: the checkpoint's user metadata, by any writer, in JSON: only the fields of a
            record become objects.
        size: bytes of its tensors.

    Example:
        >>> read_record(3, "3", b'{"run":{"step":3,"time":60.0}}', 8)
        StepRecord(number=3, time=60.0, metrics={}, bytes=8, name='3', temporary=False, ...)
        >>> read_record(3, "3", b'{"run":"a"}', 8).time is None
        True
    """
    try:
        run = _written(user).run
    except (msgspec.MsgspecError, RecursionError):
        return StepRecord(number, bytes=size, name=name)
    metrics = {each: float(value) for each, value in run.metrics.items()}
    return StepRecord(number, run.time, metrics, size, name, keep=run.keep, base=run.base)


def outlined(manifest: bytes | msgspec.Raw) -> tuple[int, bytes]:
    """Bytes of the tensors of a manifest, and its user metadata, by its inner bytes.

    A load checks these as a whole.

    Raises:
        msgspec.MsgspecError: they are not those of a manifest, or absurd.

    Example:
        >>> leaf = b'{"kind":"tensor","dtype":"int8","shape":[2,3]}'
        >>> outlined(b'{"leaves":[%s],"digests":"","user":[1]}' % leaf)
        (6, b'[1]')
    """
    outline = _outline(manifest)
    tensors = (leaf for leaf in outline.leaves if isinstance(leaf, _TensorOutline))
    size = tensor_bytes((leaf.dtype, leaf.shape) for leaf in tensors)
    if size >= 1 << 63:
        raise msgspec.DecodeError("the tensors are absurdly large")
    return size, bytes(outline.user)


def is_of(record: StepRecord, manifest: bytes) -> bool:
    """Whether a stored manifest is of the save that a record describes: it began at the same time.

    Where the record or a damaged manifest says no time, it counts as the same.

    Example:
        >>> user = b'{"run":{"step":3,"time":60.0}}'
        >>> manifest = b'{"digest":"","checkpoint":{"leaves":[],"user":%s}}' % user
        >>> is_of(StepRecord(3, 60.0), manifest), is_of(StepRecord(3, 61.0), manifest)
        (True, False)
    """
    try:
        _, user = outlined(sealed(manifest).checkpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    return record.time in (None, read_record(record.number, record.name, user, 0).time)


def tensor_bytes(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of the elements of tensors, given by dtype and shape; unknown dtypes count nothing.

    Example:
        >>> tensor_bytes([("float32", (2, 3)), ("int8", ())])
        25
    """
    return sum(prod(shape) * item_size(dtype) for dtype, shape in tensors if dtype in DTYPES)
