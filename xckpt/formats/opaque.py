"""An object in a checkpoint that is passed on as the bytes that hold it."""

from __future__ import annotations

from collections.abc import Callable


class Opaque:
    """The bytes of an object that its writer serialised; nothing here unpickles them.

    They are read when they are asked for. A copy that is sent to another process has them with it.

    Args:
        read: gives the bytes.

    Example:
        >>> Opaque(lambda: b"pickled").content()
        b'pickled'
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read

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
