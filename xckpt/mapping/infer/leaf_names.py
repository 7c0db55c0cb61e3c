"""Parsing leaf names, whichever framework wrote them.

1. A name is cut at ``/`` and at ``.`` into components. A component is a word in lower case without
   underscores, with the number that ends it apart: ``h/0``, ``h.0`` and ``h_0`` are all ``h, 0``,
   and ``LayerNorm`` is ``layer_norm``.
2. The last component is the leaf's role, where the frameworks have a word for it: torch's
   ``weight`` is Flax's ``kernel``, ``embedding`` or ``scale``.
3. What only wraps a model, or says which collection a variable is in, is left out (``params``,
   ``batch_stats``, ``_orig_mod``, the ``value`` of an NNX variable).
4. A parameter that a module has of its own may be called as a layer's weight would be: torch's
   ``q_proj_weight`` is the weight of a ``q_proj``.
5. `concepts` replaces components by one word for what models call by many: ``self_attn``,
   ``attention`` and ``SelfAttention``; ``q_proj``, ``query`` and ``wq``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeGuard

import numpy as np

from xckpt.core.dtypes import DTYPES, dtype_name
from xckpt.core.names import split_name
from xckpt.core.tree import flatten
from xckpt.engine.adapters import loaded_adapters
from xckpt.errors import MappingError
from xckpt.mapping.names import keys_of, mapping_name
from xckpt.mapping.operations.base import is_table
from xckpt.mapping.spec import TensorSpec

Path = tuple[str | int, ...]
"""Components of a name: words and numbers."""

ROLES = {
    "weight": ("weight", "weight"),
    "kernel": ("weight", "kernel"),
    "w": ("weight", "kernel"),
    "embedding": ("weight", "embedding"),
    "embeddings": ("weight", "embedding"),
    "scale": ("weight", "scale"),
    "gamma": ("weight", "scale"),
    "bias": ("bias", "bias"),
    "b": ("bias", "bias"),
    "beta": ("bias", "bias"),
    "runningmean": ("mean", "mean"),
    "mean": ("mean", "mean"),
    "runningvar": ("var", "var"),
    "var": ("var", "var"),
}
"""Last component -> the role, one word for all frameworks, and the flavour of it."""

COLLECTIONS = frozenset(("params", "batchstats", "statedict", "variables"))
WRAPPERS = frozenset(("origmod", "fsdpwrappedmodule", "checkpointwrappedmodule", "module"))
VARIABLE_VALUES = frozenset(("value", "rawvalue"))
_OF_A_LAYER = re.compile(r"([qkv]_proj)_(weight|bias)")
"""A parameter of torch's nn.MultiheadAttention that would be a layer's."""

_CONCEPTS = {
    "attention": "attn attention selfattn selfattention mha multiheadattention",
    "query": "q query qproj queryproj wq toq",
    "key": "k key kproj keyproj wk tok",
    "value": "v value vproj valueproj wv tov",
    "out": "out oproj outproj wo toout",
    "gate": "gate gateproj",
    "up": "up upproj",
    "down": "down downproj",
    "mlp": "mlp ffn feedforward",
    "token_embedding": "wte embedtokens tokembeddings tokenembedding wordembeddings tokenembed",
    "position_embedding": "wpe embedpositions positionembeddings positionembedding posembedding"
    " posembed",
    "layers": "layers layer h blocks block",
    "norm": "norm ln layernorm rmsnorm",
    "batchnorm": "bn batchnorm",
    "final_norm": "lnf finalnorm finallayernorm",
    "input_norm": "inputlayernorm inputnorm attentionnorm",
}
CONCEPTS = {word: concept for concept, words in _CONCEPTS.items() for word in words.split()}


@dataclass(frozen=True)
class FusedPart:
    """Which part of a leaf something is, where the leaf holds several tensors in a row."""

    whole: str
    """The leaf's mapping name."""
    number: int
    """Which of the parts."""
    sizes: tuple[int, ...]
    """Of all parts along the first axis."""


@dataclass(frozen=True)
class ModelLeaf:
    """A tensor of a tree, and what its name says.

    Example:
        >>> leaf = ModelLeaf.of("params/layers_3/LayerNorm/scale", TensorSpec((8,), "float32"))
        >>> leaf.path, leaf.role, leaf.flavour
        (('layers', 3, 'layernorm'), 'weight', 'scale')
    """

    name: str
    """The mapping name; of a part, with the slice that it is."""
    spec: TensorSpec
    """Shape and dtype."""
    path: Path
    """Components of the module that the leaf belongs to."""
    role: str
    """``weight``, ``bias``, ``mean``, ``var``, or a word of the model's own."""
    flavour: str
    """How the framework spells the role: ``kernel``, ``embedding``, ``scale``, or the role."""
    part: FusedPart | None = None
    """What it is a part of, where it is no leaf itself (`xckpt.mapping.infer.fused`)."""

    @classmethod
    def of(cls, name: str, spec: TensorSpec) -> ModelLeaf:
        """The leaf of a mapping name."""
        parts = [part for key in keys_of(name) for part in re.split(r"[./]", key) if part]
        if len(parts) > 1 and _word(parts[-1]) in VARIABLE_VALUES and _word(parts[-2]) in ROLES:
            parts.pop()
        if parts and (of_a_layer := _OF_A_LAYER.fullmatch(parts[-1])):
            parts[-1:] = of_a_layer.groups()
        path = tuple(component for part in parts[:-1] for component in _components(part))
        path = tuple(each for each in path if each not in WRAPPERS)
        while path and path[0] in COLLECTIONS:
            path = path[1:]
        last = parts[-1] if parts else ""
        role, flavour = ROLES.get(_word(last), (_word(last), _word(last)))
        return cls(name, spec, path, role, flavour)

    @cached_property
    def key(self) -> Path:
        """Path and role: equal for leaves that are called the same."""
        return (*self.path, self.role)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements of each dimension."""
        return self.spec.shape

    @property
    def whole(self) -> str:
        """The mapping name of the leaf that it is, or is a part of."""
        return self.name if self.part is None else self.part.whole

    def without_axis(self, axis: int) -> ModelLeaf:
        """What a stack along this axis holds one of."""
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        return replace(self, spec=TensorSpec(shape, self.spec.dtype))


def _word(part: str) -> str:
    return re.sub(r"[^a-z0-9]", "", part.lower())


def _components(part: str) -> Path:
    """A word and the number that ends it: ``layers_0``, ``ln_1`` and ``fc1``, not ``conv2d``."""
    match = re.fullmatch(r"(.*?)_?(\d{1,18})", part)
    if match is None:
        return (_word(part),)
    word, number = _word(match[1]), int(match[2])
    return (word, number) if word else (number,)


def concepts(key: Path) -> Path:
    """A key with one word for what models call by many.

    Example:
        >>> concepts(("h", 0, "selfattn", "qproj", "weight"))
        ('layers', 0, 'attention', 'query', 'weight')
    """
    found: list[str | int] = []
    for number, each in enumerate(key[:-1]):
        concept = each if isinstance(each, int) else CONCEPTS.get(each, each)
        counted = number + 1 < len(key) - 1 and isinstance(key[number + 1], int)
        if concept == "layers" and not counted:
            concept = each
        found.append(concept)
    return (*found, key[-1])


def words_of(key: Path) -> Path:
    """A key with all its numbers replaced by 0.

    Example:
        >>> words_of(("h", 7, "fc", "weight"))
        ('h', 0, 'fc', 'weight')
    """
    return tuple(0 if isinstance(component, int) else component for component in key)


def numbers_of(keys: Iterable[Path]) -> dict[Path, set[Path]]:
    """`words_of` a key -> the numbers of all keys that have these words.

    Example:
        >>> numbers_of([("net", 0, "weight"), ("net", 2, "weight")])[("net", 0, "weight")] == {
        ...     (0,), (2,)}
        True
    """
    numbers: dict[Path, set[Path]] = defaultdict(set)
    for key in keys:
        numbers[words_of(key)].add(tuple(each for each in key if isinstance(each, int)))
    return numbers


def numbered_alike(one: set[Path], other: set[Path]) -> bool:
    """Whether equal numbers mean the same: they are the same, or one has the first of the other's.

    So 0, 1 of 0, 1, 2, 3 are a model with fewer layers, and 0, 2 of 0, 1, 2 are not.
    """
    fewer, more = sorted((one, other), key=len)
    if fewer == more:
        return True
    columns = zip(zip(*fewer, strict=True), zip(*more, strict=True), strict=True)
    return fewer < more and all(
        sorted(set(some)) == sorted(set(every))[: len(set(some))] for some, every in columns
    )


def specs_of(tree: object) -> dict[str, TensorSpec]:
    """Mapping name -> shape and dtype of every array of a tree.

    Leaves that are no arrays of the format's dtypes (numbers, texts, JAX's random keys) are left
    out.

    Args:
        tree: nested containers of anything with ``.shape`` and ``.dtype``, or `TensorSpec` by
            mapping name, which is returned as it is.

    Raises:
        MappingError: two leaves have one mapping name; all such are listed.

    Example:
        >>> specs_of({"layers": [{"kernel": np.zeros((2, 3), np.float16)}], "step": 7})
        {'layers/0/kernel': TensorSpec(shape=(2, 3), dtype='float16')}
    """
    if _are_specs(tree):
        return dict(tree)
    specs: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for leaf_name, leaf in flatten(tree, loaded_adapters()).leaves.items():
        shape, dtype = getattr(leaf, "shape", None), _dtype(getattr(leaf, "dtype", None))
        if shape is None or dtype is None:
            continue
        name = mapping_name(split_name(leaf_name))
        if name in specs:
            problems.append(f"{name}: two leaves have this name")
        specs[name] = TensorSpec(tuple(int(size) for size in shape), dtype)
    if problems:
        raise MappingError.listing("a mapping cannot tell some leaves apart", problems)
    return specs


def _are_specs(tree: object) -> TypeGuard[Mapping[str, TensorSpec]]:
    """Whether a tree is a dict of nothing but specs."""
    return is_table(tree) and all(isinstance(value, TensorSpec) for value in tree.values())


def _dtype(dtype: object) -> str | None:
    """The format's name of a dtype of any framework; None if it has none."""
    text = str(dtype).removeprefix("torch.")
    if text in DTYPES:
        return text
    try:
        return dtype_name(np.dtype(dtype))  # type: ignore[call-overload]
    except TypeError:
        return None


def leaves_of(specs: Mapping[str, TensorSpec]) -> list[ModelLeaf]:
    """The leaves of named specs, in their order."""
    return [ModelLeaf.of(name, spec) for name, spec in specs.items()]
