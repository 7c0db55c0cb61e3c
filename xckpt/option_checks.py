"""Checks of options when they are made: a wrong one names itself.

Each takes the options and the names of fields. A value of another type is a TypeError, one that is
out of range a ValueError.
"""

from __future__ import annotations


def check_number(options: object, name: str, least: int, most: int | None = None) -> None:
    """Refuse what is no int in ``[least, most]``: a number of threads or of bytes."""
    value: object = getattr(options, name)
    if value is None and name == "threads":
        return
    if not isinstance(value, int) or isinstance(value, bool):
        unit = "a number of threads or None" if name == "threads" else "a number of bytes, an int"
        example = "" if name == "threads" else ", such as 8 << 20 for 8 MiB"
        raise TypeError(f"{_where(options, name)} takes {unit}{example}, not {_shown(value)}")
    if value < least or (most is not None and value > most):
        within = f"at least {least}" if most is None else f"in [{least:,}, {most:,}]"
        raise ValueError(f"{name} must be {within}, got {value:,}")


def check_flags(options: object, *names: str) -> None:
    """Refuse what is neither True nor False."""
    for name in names:
        value: object = getattr(options, name)
        if not isinstance(value, bool):
            raise TypeError(f"{_where(options, name)} takes True or False, not {_shown(value)}")


def check_functions(options: object, **takes: str) -> None:
    """Refuse what is neither callable nor None; ``takes`` says what each option takes."""
    for name, what in takes.items():
        value: object = getattr(options, name)
        if value is not None and not callable(value):
            raise TypeError(f"{_where(options, name)} takes {what}, not {_shown(value)}")


def _where(options: object, name: str) -> str:
    return f"{type(options).__name__}({name}=)"


def _shown(value: object) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
