"""The source of a conversion or a load: named tensors, read by the box, and values.

An `Opaque` value is passed on as the bytes that hold it.
"""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.metadata import JSONValue, Sharding
from xckpt.errors import CorruptCheckpointError, ManifestError, StorageError
from xckpt.mapping.spec import TensorSpec

OWN = "xckpt."
"""What the keys of texts begin with that are not the user's own."""

USER = "xckpt.user"
"""The key of `TensorSource.metadata` that holds a checkpoint's user metadata as JSON."""

NOTHING: Final[Mapping[str, Any]] = {}
"""Never written to; a read-only view would not go to other processes."""


class TensorSource(abc.ABC):
    """Named tensors that can be read by the box, wherever they are stored.

    Names are mapping names (`xckpt.mapping.names`).

    Example:
        >>> class Ones(TensorSource):
        ...     specs, values, leaf_names = {"w": TensorSpec((2, 3), "int8")}, {}, {"w": "w"}
        ...     _identity = b"ones"
        ...     def chunks(self, name):
        ...         return (1, 1)
        ...     def read(self, name, box, into):
        ...         into[...] = 1
        ...     def close(self):
        ...         pass
        >>> import xckpt
        >>> from xckpt.formats.reader import SourceReader
        >>> state = {"w": np.zeros((2, 3), np.int8)}
        >>> _ = xckpt.load_state_dict(state, SourceReader(Ones))
        >>> state["w"].tolist()
        [[1, 1, 1], [1, 1, 1]]
    """

    specs: Mapping[str, TensorSpec]
    """Name -> shape and dtype of every tensor."""
    values: Mapping[str, object]
    """Name -> every leaf that is a Python value."""
    leaf_names: Mapping[str, str]
    """Name -> leaf name, of tensors and values; see `xckpt.core.names`."""
    metadata: Mapping[str, str] = NOTHING
    """What the checkpoint says about itself, as text."""
    containers: Mapping[str, str] = NOTHING
    """Name of each container of the saved tree that is not a plain dict -> its kind."""
    shardings: Mapping[str, Sharding] = NOTHING
    """Name -> the sharding that wrote a tensor, where that is known."""
    annotations: Mapping[str, str] = NOTHING
    """Name -> what a tensor is beyond an array, such as ``"prng_key:threefry2x32"``."""
    skipped: Mapping[str, str] = NOTHING
    """Name -> reason, of objects that the source left out on request because they are neither
    tensors nor values."""
    threads: int | None = None
    """The best number of reading threads, if they wait for a bucket; None for the usual number."""
    _identity: bytes

    @abc.abstractmethod
    def chunks(self, name: str) -> tuple[int, ...]:
        """Elements of each dimension that are cheap to read together.

        Boxes that begin and end at multiples of these read only what is wanted. The tensor's own
        shape where only the whole can be read; 1 in each dimension where any part is as good.
        """

    @abc.abstractmethod
    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box of a tensor; called from several threads.

        Args:
            name: which tensor.
            box: which elements.
            into: writable memory of the box's sizes and the tensor's dtype, of any strides.

        Raises:
            CorruptCheckpointError: what is stored is not what was saved; names leaf and range.
            StorageError: the storage refused.
        """

    def check(self, name: str, box: Box) -> None:
        """Find out whether a box can be read; called from several threads.

        Raises:
            XckptError: it cannot; see `read`.
        """
        self.read(name, box, np.empty(box.sizes, numpy_dtype(self.specs[name].dtype)))

    def read_all(self, wanted: Iterable[tuple[str, Box, NDArray[np.generic]]]) -> None:
        """Read several boxes; together, where they lie together. See `read`.

        Args:
            wanted: tensor, box and memory of each.
        """
        for name, box, into in wanted:
            self.read(name, box, into)

    def identity(self) -> bytes:
        """A digest that identifies the source: it differs if the contents may differ."""
        return self._identity

    def version(self) -> bytes:
        """A value that changes if a file may have been rewritten, as this host sees the files.

        A copy of the files has another value. Empty where `identity` is enough.
        """
        return b""

    def state(self) -> bytes:
        """A value that changes if what is read is written, by the files' sizes and times of change.

        Empty where reads notice that themselves.
        """
        return b""

    def is_written(self, state: bytes, name: str | None = None) -> bool:
        """Whether what is read may have been written since.

        Args:
            state: the result of `state`, before it was read.
            name: the tensor that was read; None for all.
        """
        return self.state() != state

    def check_unchanged(self, state: bytes, path: str | os.PathLike[str]) -> None:
        """Refuse what was read of files that were written meanwhile.

        Args:
            state: the result of `state`, before anything was read.
            path: where they are, for the message.

        Raises:
            StorageError: they were.
        """
        if self.is_written(state):
            raise StorageError(
                f"{os.fspath(path)}: a file of it was written while it was read, so that what was "
                f"read may be of two checkpoints; call again when nothing writes there"
            )

    @contextmanager
    def unchanged(self, state: bytes, path: str | os.PathLike[str]) -> Iterator[None]:
        """Read within it: afterwards, and where something is damaged, `check_unchanged` follows.

        Raises:
            StorageError: a file was written meanwhile, and may be whole again by now.
        """
        try:
            yield
        except CorruptCheckpointError:
            self.check_unchanged(state, path)
            raise
        self.check_unchanged(state, path)

    @abc.abstractmethod
    def close(self) -> None:
        """Release files and memory."""


def metadata_texts(user: object) -> dict[str, str]:
    """User metadata as texts by name; as one text of JSON where they are anything else.

    NaN and infinities stay, as Python's JSON spells them: Orbax's users have them in their metrics.

    Raises:
        ManifestError: they have a text that UTF-8 cannot carry, or what JSON cannot.

    Example:
        >>> metadata_texts({"by": "me"}), metadata_texts([1]), metadata_texts(None)
        ({'by': 'me'}, {'xckpt.user': '[1]'}, {})
        >>> metadata_texts({"loss": float("nan")})
        {'xckpt.user': '{"loss":NaN}'}
    """
    if user is None:
        return {}
    if user and isinstance(user, dict):
        texts = all(isinstance(each, str) for each in (*user, *user.values()))
        if texts and not any(key.startswith(OWN) for key in user):
            return cast(dict[str, str], user)
    try:
        text = json.dumps(user, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError as error:
        raise ManifestError("its metadata hold half a character (a lone surrogate)") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ManifestError(f"its metadata cannot be written as JSON: {error}") from error
    return {USER: text}


def user_of(texts: Mapping[str, str]) -> JSONValue:
    """User metadata from texts by name; inverse of `metadata_texts`.

    Raises:
        ManifestError: what is under `USER` is not JSON.

    Example:
        >>> user_of({"by": "me"}), user_of({USER: "[1]"}), user_of({})
        ({'by': 'me'}, [1], None)
    """
    if USER in texts:
        try:
            return json.loads(texts[USER])
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"its metadata {USER} are not JSON: {str(error)[:200]}") from error
    return dict(texts) or None


class Opaque:
    """The bytes of an object that its writer serialised; nothing here unpickles them.

    They are read on demand. A copy that is sent to another process contains them.

    Args:
        read: gives the bytes.
        reason: why they are not a plain value.

    Example:
        >>> Opaque(lambda: b"pickled").content()
        b'pickled'
    """

    def __init__(self, read: Callable[[], bytes], reason: str = "") -> None:
        self._read = read
        self.reason = reason

    def content(self) -> bytes:
        """The bytes.

        Raises:
            CorruptCheckpointError: they are not what was saved.
            StorageError: they cannot be read.
        """
        return self._read()

    def __reduce__(self) -> tuple[object, ...]:
        return _kept, (self.content(),)


def _kept(content: bytes) -> Opaque:
    return Opaque(lambda: content)
