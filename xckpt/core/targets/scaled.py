"""Weights that are stored with scales beside them: their numbers alone are not the weights.

1. Some exporters name the scales after the weight: `scaled_weights` tries these names.
2. Beside a weight of at most 8 bits, or one packed into integers, anything of its module counts
   whose name has only words of `_WORDS` and of the weight's own name, a scale among them, if it is
   of a wider type.
3. A weight of a wider type than 8 bits is cast as it is (`cast_with_scales`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_ENDINGS = (
    "_scale_inv",
    "_scale",
    "_scales",
    ".scale",
    "/scale",
    ".absmax",
    ".scales",
    ".SCB",
    "._scale_inv",
)
"""Suffix of a weight's name that gives the name of its scales (fp8 blocks, compressed tensors,
bitsandbytes, MLX)."""
_SIBLINGS = {
    "qweight": ("scales",),
    "weight": ("SCB", "weight_scale", "weight_scale_inv", "scales", "scale_weight"),
    "blocks": ("scales",),
    "_packed": ("_scale",),
    "._data": ("._scale",),
    "qdata": ("scale",),
    "qvalue": ("scale",),
}
"""End of a weight's name -> what stands in its place in the name of its scales (GPTQ, LLM.int8,
MXFP4, compressed tensors, ComfyUI, quanto, torchao, AQT)."""
FEW_BITS: Final = ("float4", "float6", "float8")
"""Beginnings of the floating-point types in which weights are rarely stored without scales."""
_WIDE: Final = ("float16", "bfloat16", "float32", "float64", "complex")
"""Beginnings of the types in which a weight needs no scales, and scales are stored."""
_PACKED: Final = re.compile(r"u?int(2|4|8|32)")
_WEIGHT: Final = re.compile(r"(.*_)?(q?weights?|kernel|w|w_q|qdata|qvalue|blocks|codes)")
"""What a leaf of integers is called that are a weight's."""
_SCALE: Final = re.compile(r"q?scales?|scaling|absmax|amax|scb", re.IGNORECASE)
"""A word in the name of any scale."""
_WORDS: Final = re.compile(
    rf"{_SCALE.pattern}|factor|inv|\d|weights?|inputs?|outputs?|act|activations?|block|group|global|"
    "local|tensor|channel|row|col|wise|double|quant|dequant"
)
"""The words in the name of a scale of no other leaf."""


def scaled_weights(dtypes: Mapping[str, str]) -> dict[str, str]:
    """Name of a weight -> name of its scales, for each that has them beside it.

    Args:
        dtypes: name of each leaf -> the format's name of its element type.

    Example:
        >>> names = ["fc.weight", "fc.weight_scale_inv", "fc.bias", "a_blocks", "a_scales"]
        >>> scaled_weights(dict.fromkeys(names, "float32"))
        {'fc.weight': 'fc.weight_scale_inv', 'a_blocks': 'a_scales'}
        >>> scaled_weights({"fc/kernel": "float8_e4m3fn", "fc/qscale": "float32"})
        {'fc/kernel': 'fc/qscale'}
    """
    called = {name: dtype for name, dtype in dtypes.items() if _SCALE.search(name)}
    if not called:  # as in most models
        return {}
    scales = _scales_by_module(called)
    found: dict[str, str] = {}
    for name, dtype in dtypes.items():
        candidates = [f"{name}{ending}" for ending in _ENDINGS]
        for end, others in _SIBLINGS.items():
            if name.endswith(end):
                candidates += [name.removesuffix(end) + other for other in others]
        beside = next((each for each in candidates if each in called and each != name), None)
        if beside is None and (dtype.startswith(FEW_BITS) or _is_packed(name, dtype)):
            beside = _beside(name, scales)
        if beside is not None:
            found[name] = beside
    return found


def cast_with_scales(dtypes: Mapping[str, str]) -> dict[str, str]:
    """Those of `scaled_weights` that are not to be cast alone.

    Others are floats of 16 bits or more: a cast rounds them, and what is beside them scales them
    afterwards as it did before, if it does.

    Example:
        >>> scales = dict.fromkeys(["w_scale", "v_scale"], "float32")
        >>> cast_with_scales({"w": "float32", "v": "float8_e4m3fn", **scales})
        {'v': 'v_scale'}
    """
    scaled = scaled_weights(dtypes)
    return {name: beside for name, beside in scaled.items() if not dtypes[name].startswith(_WIDE)}


def _scales_by_module(dtypes: Mapping[str, str]) -> dict[str, list[str]]:
    """Module -> the leaves in it that are called a scale, of a type wider than 8 bits."""
    found: dict[str, list[str]] = {}
    for name, dtype in dtypes.items():
        module, last = _split(name)
        is_wide = dtype.startswith(_WIDE) or dtype.endswith("e8m0fnu")
        if is_wide and any(_SCALE.fullmatch(word) for word in _words(last)):
            found.setdefault(module, []).append(name)
    return found


def _is_packed(name: str, dtype: str) -> bool:
    """Whether a leaf is of integers, and named like a weight: a step counter is not."""
    return bool(_PACKED.fullmatch(dtype) and _WEIGHT.fullmatch(_split(name)[1].lower()))


def _beside(name: str, scales: Mapping[str, list[str]]) -> str | None:
    """A scale of the same module that is the weight's by its words."""
    module, last = _split(name)
    own = _words(last)
    if last == "bias" or any(_SCALE.fullmatch(word) for word in own):
        return None
    for each in scales.get(module, ()):
        words = _words(_split(each)[1])
        if all(word in own or _WORDS.fullmatch(word) for word in words):
            return each
    return None


def _split(name: str) -> tuple[str, str]:
    """A leaf's module, and its name in that."""
    path = name.replace("%2F", "/")  # in the key of a file that has no tree
    at = max(path.rfind("."), path.rfind("/")) + 1
    return path[:at], path[at:]


def _words(last: str) -> list[str]:
    return [word for word in last.lower().split("_") if word]
