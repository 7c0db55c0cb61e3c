"""What a DCP planner attaches to its metadata, kept in the manifest as JSON.

DCP's own planners attach the flattening mapping (fqn -> key path), which the leaf names say
already. What else a planner attaches must be plain values. To store it:

1. Entries that the leaf names imply are left out.
2. The rest is JSON, where ``{"tuple": [...]}`` is a tuple, ``{"dict": [[key, value], ...]}`` a dict
   and a bare list a list, so that it comes back as it was.
3. Anything else is refused by its place: DCP would pickle it, and nothing here is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from xckpt.core.metadata import JSONValue
from xckpt.core.names import KeyPath
from xckpt.core.text.arguments import named_class
from xckpt.errors import ManifestError, PlanError

DEEPEST = 32
"""Most containers around a value."""


def pack(planner_data: object, implied: Mapping[str, KeyPath], odd: Mapping[str, str]) -> JSONValue:
    """A planner's data for the manifest; None if the leaf names say it all.

    Args:
        planner_data: what the planner attached to its metadata.
        implied: fqn -> key path, as the leaf names imply it.
        odd: leaf name -> fqn, where the one does not follow from the other.

    Raises:
        PlanError: it holds something that is not a plain value; all such places are listed.

    Example:
        >>> pack({"a.b": ("a", "b"), "run": [1, (2,)]}, {"a.b": ("a", "b")}, {})
        {'dcp': {'data': {'dict': [['run', [1, {'tuple': [2]}]]]}}}
    """
    rest: object = planner_data
    if isinstance(planner_data, Mapping):
        rest = {k: v for k, v in planner_data.items() if k not in implied or implied[k] != v}
    stored: dict[str, JSONValue] = {}
    if odd:
        stored["fqns"] = dict(odd)
    if rest is not None and rest != {}:
        problems: list[str] = []
        stored["data"] = _encode(rest, "planner_data", 0, problems)
        if problems:
            raise PlanError.listing("the planner's data cannot be stored", problems)
    return {"dcp": stored} if stored else None


def unpack(stored: object) -> tuple[object, dict[str, str]]:
    """(what `pack` was given but for the implied entries, or None; leaf name -> fqn).

    Raises:
        ManifestError: it is nothing that `pack` returns.

    Example:
        >>> unpack({"dcp": {"data": {"tuple": [1, 2]}, "fqns": {"a": "x"}}})
        ((1, 2), {'a': 'x'})
        >>> unpack({"of": "another planner"})
        (None, {})
    """
    noted = stored.get("dcp") if isinstance(stored, Mapping) else None
    if not isinstance(noted, Mapping):
        return None, {}
    try:
        return _decode(noted.get("data")), dict(noted.get("fqns", {}))
    except (TypeError, ValueError, KeyError) as error:
        raise ManifestError(f"the planner data is not as it was written: {error!r}") from error


def restore(data: object, implied: Mapping[str, KeyPath]) -> object:
    """What the planner attached, the implied entries included."""
    if data is None:
        return dict(implied)
    return {**implied, **data} if isinstance(data, Mapping) else data


def _encode(value: object, where: str, depth: int, problems: list[str]) -> JSONValue:
    if depth > DEEPEST:
        problems.append(f"{where}: more than {DEEPEST} containers deep")
        return None
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[return-value]
    if type(value) is float and isfinite(value):
        return value
    if isinstance(value, list | tuple):
        children = [
            _encode(child, f"{where}[{n}]", depth + 1, problems) for n, child in enumerate(value)
        ]
        return children if isinstance(value, list) else {"tuple": children}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [
                    _encode(key, f"{where}: the key {key!r}", depth + 1, problems),
                    _encode(child, f"{where}[{key!r}]", depth + 1, problems),
                ]
                for key, child in value.items()
            ]
        }
    problems.append(
        f"{where}: {named_class(value)} is not a plain value; use "
        f"None, bool, int, finite float, str, and lists, tuples and dicts of these"
    )
    return None


def _decode(stored: object) -> object:
    if isinstance(stored, list):
        return [_decode(child) for child in stored]
    if isinstance(stored, Mapping):
        if "tuple" in stored:
            return tuple(_decode(child) for child in stored["tuple"])
        return {_decode(key): _decode(child) for key, child in stored["dict"]}
    return stored
