"""Weights that are stored with scales beside them: their numbers alone are not the weights."""

from __future__ import annotations

from collections.abc import Collection

_ENDINGS = ("_scale_inv", "_scale", "_scales", ".scale", "/scale")
"""Suffix of a weight's name that gives the name of its scales (fp8 blocks, compressed tensors)."""
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


def scaled_weights(names: Collection[str]) -> dict[str, str]:
    """Name of a weight -> name of its scales, for each that has them beside it.

    Example:
        >>> scaled_weights(["fc.weight", "fc.weight_scale_inv", "fc.bias", "a_blocks", "a_scales"])
        {'fc.weight': 'fc.weight_scale_inv', 'a_blocks': 'a_scales'}
    """
    known = set(names)
    found: dict[str, str] = {}
    for name in names:
        candidates = [f"{name}{ending}" for ending in _ENDINGS]
        for end, others in _SIBLINGS.items():
            if name.endswith(end):
                candidates += [name.removesuffix(end) + other for other in others]
        scales = next((each for each in candidates if each in known and each != name), None)
        if scales is not None:
            found[name] = scales
    return found
