"""Key path <-> leaf name <-> zarr path.

A key path leads from the root of a tree to a leaf: dict keys, attribute names and sequence indices.
People type a leaf name; file systems and buckets store a zarr path.

Name: the keys joined with ``/``.

1. An int is its digits: ``("opt", 0, "mu")`` is ``opt/0/mu``.
2. In a string, ``%`` and ``/`` become ``%25`` and ``%2F``.
3. A string that would read as an int has its first character escaped: ``"0"`` is ``%30``.
4. An empty string is ``%``.

Path: the name, component by component, made safe to store.

1. A byte of the component's UTF-8 outside letters, digits and ``-_.%+@=,() `` becomes ``%XX``.
2. A component that a store reserves (``zarr.json``, a leading ``.`` or ``__``, and so on) has its
   first character escaped; a final dot or space is escaped too. In a component that ends in
   ``.__lock``, as TensorStore's lock files do, that dot is escaped.
3. A component of more than 160 bytes keeps its first 100 and adds ``~`` and a 128-bit digest of the
   whole. The manifest holds the name, so this path is never decoded.
4. A root that is itself a leaf is ``%root``.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from xckpt.core.text.arguments import named

KeyPath = tuple[str | int, ...]

_INT_LIKE = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_INT_STARTS = frozenset("-0123456789")
_PLAIN_COMPONENT = r"(?:0|[1-9][0-9]{0,18}|[^%/0-9\-][^%/]*)"
_PLAIN = re.compile(rf"{_PLAIN_COMPONENT}(?:/{_PLAIN_COMPONENT})*")
"""Names without an escape: most are."""
_NUMBERED = re.compile("(?:.*/)?state/[0-9]+/")

_UNSAFE = re.compile(rb"[^A-Za-z0-9\-_.%+@=,() ]")
_RESERVED = {
    "zarr.json",
    "xckpt.json",
    "xckpt.digests",
    "xckpt.packs",
    "xckpt.saving",
    ".generations",
}
_LOCK = ".__lock"
LONGEST_COMPONENT = 160
"""Bytes of the longest component of a zarr path."""
_KEPT = 100


def join_keys(keys: Sequence[str | int]) -> str:
    """The leaf name of a key path.

    Example:
        >>> join_keys(("model", "layers.0.weight")), join_keys((0, "a/b", "0"))
        ('model/layers.0.weight', '0/a%2Fb/%30')
    """
    return "/".join(map(component, keys))


@functools.lru_cache(maxsize=1 << 14)
def split_name(name: str) -> KeyPath:
    """The key path of a leaf name; inverse of `join_keys`.

    Example:
        >>> split_name("0/a%2Fb/%30")
        (0, 'a/b', '0')
    """
    return tuple(map(key_of, name.split("/"))) if name else ()


def is_name(text: str) -> bool:
    """Whether a text is a leaf name as `join_keys` writes it.

    Example:
        >>> is_name("opt/0/mu"), is_name("a%2fb"), is_name("a%2Fb")
        (True, False, True)
    """
    return _PLAIN.fullmatch(text) is not None or join_keys(split_name(text)) == text


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can carry a text: none of it is half a character (a lone surrogate).

    Example:
        >>> is_utf8("naïve 重み"), is_utf8("\\ud800")
        (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def odd_names(texts: Iterable[str], deepest: int) -> list[str]:
    """The texts that are not leaf names, or names of that many containers or more.

    Example:
        >>> odd_names(["opt/0/mu", "a%2fb", "a%2Fb", "a/b/c/d"], 3)
        ['a%2fb', 'a/b/c/d']
    """
    plain = _PLAIN.fullmatch
    odd = [text for text in texts if not plain(text) or text.count("/") >= deepest]
    return [text for text in odd if text.count("/") >= deepest or not is_name(text)]


@functools.lru_cache(maxsize=1 << 14)
def zarr_path(name: str) -> str:
    """The path of a leaf's zarr node, relative to the checkpoint's root group.

    Example:
        >>> zarr_path("model/layers.0.weight"), zarr_path("a%2Fb/naïve"), zarr_path("zarr.json")
        ('model/layers.0.weight', 'a%2Fb/na%C3%AFve', '%7Aarr.json')
    """
    return "/".join(_stored(part) for part in name.split("/")) if name else "%root"


def names_by_size(shape: Sequence[int]) -> list[str]:
    """A name for each dimension that has none: its size, and a number where sizes repeat.

    Example:
        >>> names_by_size((64, 3, 3))
        ['d64', 'd3', 'd3_1']
    """
    repeats = [shape[:d].count(size) for d, size in enumerate(shape)]
    return [f"d{n}_{k}" if k else f"d{n}" for n, k in zip(shape, repeats, strict=True)]


def dimension_name_faults(names: Sequence[str], rank: int) -> Iterator[str]:
    """What is wrong with the names of a tensor's dimensions.

    Example:
        >>> list(dimension_name_faults(["embed", "embed"], 2))
        ["dimension_names ('embed', 'embed') are not 2 different, non-empty strings"]
    """
    if len(names) != rank or len(set(names)) < rank or not all(names):
        given = str(tuple(names))[:80]
        yield f"dimension_names {given} are not {rank} different, non-empty strings"


def refuse_dimension_names(
    named: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Refuse the caller's names of dimensions that do not fit the tensors.

    Args:
        named: name of a leaf -> the names of its dimensions.
        shapes: of those leaves that are tensors.

    Raises:
        ValueError: a leaf is not a tensor, or its names are not one for each dimension.

    Example:
        >>> refuse_dimension_names({"w": ["embed"]}, {"w": (4, 2)})
        Traceback (most recent call last):
        ValueError: w: dimension_names ('embed',) are not 2 different, non-empty strings
    """
    if unknown := sorted(named.keys() - shapes.keys())[:5]:
        listed = ", ".join(unknown)
        raise ValueError(f"dimension_names: {listed}: no tensor of the state has this name")
    for name, given in named.items():
        for fault in dimension_name_faults(given, len(shapes[name])):
            raise ValueError(f"{name}: {fault}")


def check_dimension_names(given: object) -> None:
    """Refuse an option that does not map leaf names to lists of names.

    Raises:
        TypeError: it has another form.

    Example:
        >>> check_dimension_names({"w": "xy"})
        Traceback (most recent call last):
        ...
        TypeError: SaveOptions(dimension_names=) takes {leaf name: [a name for each dimension]}, \
not a str for w
    """
    takes = "SaveOptions(dimension_names=) takes {leaf name: [a name for each dimension]}, not"
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise TypeError(f"{takes} {named(type(given).__name__)}")
    for name, names in cast(Mapping[object, object], given).items():
        if not isinstance(names, list | tuple):
            raise TypeError(f"{takes} {named(type(names).__name__)} for {name}")
        for each in cast(Sequence[object], names):
            if not isinstance(each, str):
                raise TypeError(f"{takes} {named(type(each).__name__)} among those of {name}")


def about_numbered(names: Iterable[str]) -> str:
    """What to do where ranks differ in an optimizer's state by number; empty without such names.

    Example:
        >>> about_numbered(["opt/state/0/exp_avg"]).split(": ")[1]
        'torch.distributed.checkpoint.state_dict.get_optimizer_state_dict names it by parameter'
        >>> about_numbered(["model/state/w", "opt/param_groups/0/lr"])
        ''
    """
    if not any(map(_NUMBERED.match, names)):
        return ""
    return (
        "; an optimizer of torch names its state by number, and ranks may number other parameters: "
        "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict names it by parameter"
    )


def component(key: str | int) -> str:
    """A key as it stands in a leaf name: its value, where it is of a class such as an enum.

    Example:
        >>> component("a/b"), component(0), component("0")
        ('a%2Fb', '0', '%30')
    """
    if isinstance(key, int):
        return int.__repr__(key)
    if type(key) is not str:
        key = str.__str__(key)  # a class may have another text for people
    if key == "":
        return "%"
    if "%" in key or "/" in key:
        key = key.replace("%", "%25").replace("/", "%2F")
    return _escape_first(key) if _is_int(key) else key


def key_of(part: str) -> str | int:
    """The key that a component of a name stands for; inverse of `component`.

    Example:
        >>> key_of("0"), key_of("%30"), key_of("a%2Fb")
        (0, '0', 'a/b')
    """
    if "%" not in part:
        return int(part) if _is_int(part) else part
    if part == "%":
        return ""
    return re.sub("%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), part)


def _is_int(part: str) -> bool:
    """Whether a component reads as an int; most begin with a letter, which is quick to see."""
    return part[:1] in _INT_STARTS and _INT_LIKE.fullmatch(part) is not None


@functools.lru_cache(maxsize=1 << 12)
def _stored(part: str) -> str:
    raw = part.encode("utf-8", "surrogatepass")
    safe = _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], raw).decode("ascii")
    if safe in _RESERVED or safe.startswith((".", "__")):
        safe = _escape_first(safe)
    if safe[-1] in " .":
        safe = f"{safe[:-1]}%{ord(safe[-1]):02X}"
    if safe.endswith(_LOCK):
        safe = f"{safe[: -len(_LOCK)]}%2E{_LOCK[1:]}"
    if len(safe) > LONGEST_COMPONENT:
        safe = f"{safe[:_KEPT]}~{hashlib.blake2b(raw, digest_size=16).hexdigest()}"
    return safe


def _escape_first(text: str) -> str:
    return f"%{ord(text[0]):02X}{text[1:]}"
