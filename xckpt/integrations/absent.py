"""A stand-in for a class, or a module, of a package that is not installed, or is too old."""

from __future__ import annotations

from typing import Any


def absent(package: str, error: ImportError) -> Any:
    """A class for hooks to inherit from; to make an instance of it, or to use it, raises the error.

    Args:
        package: as pip knows it.
        error: why it cannot be imported.

    Example:
        >>> from xckpt.integrations.absent import absent
        >>> pipeline = absent("pipeline", ImportError("No module named 'pipeline'"))
        >>> pipeline()
        Traceback (most recent call last):
        ImportError: pipeline needs pipeline: pip install -U pipeline (No module named 'pipeline')
        >>> pipeline.run
        Traceback (most recent call last):
        ImportError: pipeline needs pipeline: pip install -U pipeline (No module named 'pipeline')
    """

    def missing(name: str) -> ImportError:
        return ImportError(f"{name} needs {package}: pip install -U {package} ({error})")

    class AbsentType(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):  # asked for by the interpreter
                raise AttributeError(name)
            raise missing(cls.__name__) from error

    class Absent(metaclass=AbsentType):
        def __new__(cls, *_: object, **__: object) -> Any:
            raise missing(cls.__name__) from error

    Absent.__name__ = Absent.__qualname__ = package
    return Absent
