"""Objects that a serialiser made bytes of: which targets take them.

1. `check_object_target`: an object of an unknown class is a target only where a deserialiser makes
   it again.
2. `not_stored`: what lies inside such an object is not a leaf.
"""

from __future__ import annotations

from typing import Final

from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.core.text.arguments import named
from xckpt.errors import UnsupportedLeafError

NOT_STORED: Final = "wanted, but not in the checkpoint"


def check_object_target(name: str, like: object, metadata: Metadata, deserialises: bool) -> None:
    """Refuse an object of an unknown class as a target, unless a deserialiser makes it from bytes.

    Raises:
        UnsupportedLeafError: names the leaf and says what to give.
    """
    advice = "give an array, a tensor or a jax.ShapeDtypeStruct"
    if metadata.state_dict_metadata.get(name) == BytesStorageMetadata("opaque"):
        if deserialises:
            return
        advice = (
            "the checkpoint holds what a serialiser made of it: pass "
            "options=LoadOptions(deserialise=...), or b'' to take the bytes"
        )
    kind = f"{type(like).__module__}.{type(like).__qualname__}"
    if kind.startswith("xckpt."):
        advice = "xckpt.open(path).like('numpy'), or 'torch' or 'jax', gives targets"
    raise UnsupportedLeafError(f"{name or 'the root'}: {named(kind)} is not a target; {advice}")


def not_stored(name: str, metadata: Metadata, like: object = None) -> str:
    """Why a leaf that a target wants is not in the checkpoint.

    Args:
        name: the leaf.
        metadata: the checkpoint's.
        like: what it is to be like, where that is known.

    Example:
        >>> stored = Metadata({"a": BytesStorageMetadata("opaque")})
        >>> not_stored("b", stored)
        'wanted, but not in the checkpoint'
        >>> not_stored("a/0", stored)[:70]
        'wanted, but the checkpoint holds a as one object that its writer seria'
        >>> not_stored("", stored, "a")
        "wanted, but not in the checkpoint: a text is a value to be loaded; at='a' takes that part"
    """
    if not name and isinstance(like, str):
        known = any(f"{each}/".startswith(f"{like}/") for each in metadata.state_dict_metadata)
        part = f"at={like!r} takes that part" if known else "at= takes a part by its name"
        return f"{NOT_STORED}: a text is a value to be loaded; {part}"
    above = name
    while "/" in above:
        above = above.rpartition("/")[0]
        if metadata.state_dict_metadata.get(above) == BytesStorageMetadata("opaque"):
            return (
                f"wanted, but the checkpoint holds {above} as one object that its writer "
                f"serialised; b'' as the target of {above} takes its bytes (torch's DCP pickles a "
                f"tuple, or a list of plain values, as a whole: dcp.load gives it back, and so do "
                f"export_checkpoint and import_checkpoint of xckpt.torch.dcp, as leaves)"
            )
    return NOT_STORED
