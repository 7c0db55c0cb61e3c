"""The leaves of a model and the meaning of their names, in any framework.

1. A name is cut at ``/`` and at ``.`` into components. A component is a word in lower case without
   underscores, with the number that ends it apart: ``h/0``, ``h.0`` and ``h_0`` are all ``h, 0``,
   and ``LayerNorm`` is ``layer_norm``.
2. The last component is the leaf's role, if the frameworks have a word for it: torch's
   ``weight`` is Flax's ``kernel``, ``embedding`` or ``scale``.
3. Components that only wrap a model or name a variable's collection are left out (``params``,
   ``batch_stats``, ``_orig_mod``, the ``value`` of an NNX variable).
4. A module's own parameter may be named like a layer's weight: torch's
   ``q_proj_weight`` is the weight of a ``q_proj``.
5. `concepts` replaces the synonyms that models use by one word: ``self_attn``,
   ``attention`` and ``SelfAttention``; ``q_proj``, ``query`` and ``wq``.
6. torch's nn.MultiheadAttention keeps the weights of query, key and value in one
   ``in_proj_weight`` of (3E, E), and their biases in one ``in_proj_bias``; Flax has three kernels
   of (E, heads, head_dim). `taken_apart` makes three leaves of such a fused one, named as they
   would be on their own. Where both trees have fused leaves these are leaves like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from xckpt.mapping.names import keys_of
from xckpt.mapping.pattern import literal
from xckpt.mapping.spec import TensorSpec

Components = tuple[str | int, ...]
"""Components of a name: words and numbers."""

_FLAVOURS = {
    "weight": {
        "weight": "weight",
        "kernel": "kernel w",
        "embedding": "embedding embeddings",
        "scale": "scale",
        "gamma": "gamma",
    },
    "bias": {"bias": "bias b beta"},
    "mean": {"mean": "runningmean mean"},
    "var": {"var": "runningvar var"},
}
"""Role -> how the frameworks spell it -> last components of that spelling."""
ROLES = {
    word: (role, flavour)
    for role, flavours in _FLAVOURS.items()
    for flavour, words in flavours.items()
    for word in words.split()
}
"""Last component -> the role, one word for all frameworks, and the flavour of it."""

COLLECTIONS = frozenset(("params", "batchstats", "statedict", "variables"))
WRAPPERS = frozenset(("origmod", "fsdpwrappedmodule", "checkpointwrappedmodule", "module"))
VARIABLE_VALUES = frozenset(("value", "rawvalue"))
_OF_A_LAYER = re.compile(r"([qkv]_proj)_(weight|bias)")
"""A parameter of torch's nn.MultiheadAttention that would be a layer's."""
FUSED = {"inprojweight": "weight", "inprojbias": "bias"}
"""Role of a fused leaf -> the role of its parts."""
PARTS = ("qproj", "kproj", "vproj")
"""The layers whose parameters lie in a fused leaf, in their order."""

STACKED = "layer"
"""The index of a stack's rule."""

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


@dataclass(frozen=True, eq=False)
class ModelLeaf:
    """A tensor of a tree, and the meaning of its name. Leaves are compared by identity.

    Example:
        >>> leaf = ModelLeaf.of("params/layers_3/LayerNorm/scale", TensorSpec((8,), "float32"))
        >>> leaf.path, leaf.role, leaf.flavour
        (('layers', 3, 'layernorm'), 'weight', 'scale')
    """

    name: str
    """The mapping name; of a part, with the slice that it is."""
    spec: TensorSpec
    """Shape and dtype."""
    path: Components
    """Components of the module that the leaf belongs to."""
    role: str
    """``weight``, ``bias``, ``mean``, ``var``, or a word of the model's own."""
    flavour: str
    """How the framework spells the role: ``kernel``, ``embedding``, ``scale``, or the role."""
    whole: str
    """The mapping name of the leaf that it is, or is a part of."""
    part: int | None = None
    """Which of the `PARTS` of a fused leaf it is."""

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
        last = _word(parts[-1]) if parts else ""
        role, flavour = ROLES.get(last, (last, last))
        return cls(name, spec, path, role, flavour, name)

    @cached_property
    def key(self) -> Components:
        """Path and role: equal for leaves that are called the same."""
        return (*self.path, self.role)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words of the path, without its numbers."""
        return tuple(each for each in self.path if isinstance(each, str))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements of each dimension."""
        return self.spec.shape

    @property
    def is_fused(self) -> bool:
        """Whether it is (3E, E) or (3E,) and called so."""
        if self.role not in FUSED or len(self.shape) != (2 if FUSED[self.role] == "weight" else 1):
            return False
        rows, *columns = self.shape
        return rows % len(PARTS) == 0 and columns in ([], [rows // len(PARTS)])

    def without_axis(self, axis: int) -> ModelLeaf:
        """The leaf that a stack along this axis holds several of."""
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        return replace(self, spec=TensorSpec(shape, self.spec.dtype))

    def taken_apart(self) -> list[ModelLeaf]:
        """The parts of a fused leaf."""
        size = self.shape[0] // len(PARTS)
        spec = TensorSpec((size, *self.shape[1:]), self.spec.dtype)
        role = FUSED[self.role]
        names = (f"{self.name}[{n * size}:{(n + 1) * size}]" for n in range(len(PARTS)))
        return [
            ModelLeaf(name, spec, (*self.path, layer), role, role, self.name, number)
            for number, (name, layer) in enumerate(zip(names, PARTS, strict=True))
        ]


@dataclass(frozen=True, eq=False)
class LeafGroup:
    """A leaf, or the leaves that one leaf of the other tree may hold in a stack.

    Groups are compared by identity.
    """

    key: Components
    """The key by which it is compared."""
    leaves: tuple[ModelLeaf, ...]
    position: int | None = None
    """Which component of their key counts the leaves of a stack."""

    @property
    def path(self) -> Components:
        """The path of the first, without the number that counts the leaves of a stack."""
        path = self.leaves[0].path
        return path if self.position is None else path[: self.position] + path[self.position + 1 :]


def _word(part: str) -> str:
    return re.sub(r"[\W_]", "", part.lower()) or part


def _components(part: str) -> Components:
    """A word and the number that ends it: ``layers_0``, ``ln_1`` and ``fc1``, not ``conv2d``."""
    match = re.fullmatch(r"(.*?)_?([0-9]{1,18})", part)
    if match is None:
        return (_word(part),)
    word, number = _word(match[1]), int(match[2])
    return (word, number) if word else (number,)


def concepts(key: Components) -> Components:
    """A key with synonyms replaced by one word.

    Example:
        >>> concepts(("h", 0, "selfattn", "qproj", "weight"))
        ('layers', 0, 'attention', 'query', 'weight')
    """
    replaced: list[str | int] = []
    for number, each in enumerate(key[:-1]):
        concept = each if isinstance(each, int) else CONCEPTS.get(each, each)
        counted = number + 1 < len(key) - 1 and isinstance(key[number + 1], int)
        replaced.append(each if concept == "layers" and not counted else concept)
    return (*replaced, key[-1])


def counted(names: Sequence[str], index: str) -> str | None:
    """The pattern of names that differ in one number alone, which counts them from 0; None if they
    do not, or if a pattern cannot express their numbers (``00``).

    Example:
        >>> counted(["h{a}.fc0.w", "h{a}.fc1.w"], "layer"), counted(["h.00.w", "h.01.w"], "layer")
        ('h{{a}}.fc{layer}.w', None)
    """
    parts = [re.split("([0-9]+)", name) for name in names]
    counting = tuple(map(str, range(len(names))))
    places = [n for n, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len({*map(len, parts)}) > 1 or len(places) != 1:
        return None
    [place] = places
    if tuple(part[place] for part in parts) != counting:
        return None
    before, after = ("".join(part) for part in (parts[0][:place], parts[0][place + 1 :]))
    return f"{literal(before)}{{{index}}}{literal(after)}"


def leaves_of(specs: Mapping[str, TensorSpec]) -> list[ModelLeaf]:
    """The leaves of named specs, in their order.

    Example:
        >>> [leaf.key for leaf in leaves_of({"h.0.fc.weight": TensorSpec((2, 4), "int8")})]
        [('h', 0, 'fc', 'weight')]
    """
    return [ModelLeaf.of(name, spec) for name, spec in specs.items()]


def taken_apart(leaves: Sequence[ModelLeaf], others: Sequence[ModelLeaf]) -> list[ModelLeaf]:
    """The leaves of a tree with the parts of fused ones in their place.

    Args:
        leaves: of the tree.
        others: of the tree that it is compared with.

    Example:
        >>> fused = ModelLeaf.of("attn.in_proj_weight", TensorSpec((12, 4), "float32"))
        >>> for part in taken_apart([fused], []):
        ...     print(part.name, part.path, part.spec)
        attn.in_proj_weight[0:4] ('attn', 'qproj') float32[4, 4]
        attn.in_proj_weight[4:8] ('attn', 'kproj') float32[4, 4]
        attn.in_proj_weight[8:12] ('attn', 'vproj') float32[4, 4]
        >>> taken_apart([fused], [fused]) == [fused]
        True
    """
    if any(leaf.is_fused for leaf in others):
        return list(leaves)
    return [part for leaf in leaves for part in (leaf.taken_apart() if leaf.is_fused else [leaf])]
