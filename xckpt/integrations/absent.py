"""A stand-in for a class of a package that is not installed."""

from __future__ import annotations

from typing import Any


def absent(package: str, error: ImportError) -> Any:
    """A class for hooks to inherit from; to make an instance of it raises the error.

    Args:
        package: as pip knows it.
        error: why it cannot be imported.

    Example:
        >>> from xckpt.integrations.absent import absent
        >>> absent("pipeline", ImportError("No module named 'pipeline'"))()
        Traceback (most recent call last):
        ImportError: pipeline needs pipeline: pip install pipeline (No module named 'pipeline')
    """

    class Absent:
        def __init__(self, *_: object, **__: object) -> None:
            raise ImportError(
                f"{type(self).__name__} needs {package}: pip install {package} ({error})"
            ) from error

    Absent.__name__ = Absent.__qualname__ = package
    return Absent
