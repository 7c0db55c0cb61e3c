"""Assumptions of a pair: what neither names nor shapes show, in words.

`assume` gives each pair at most one of these, the first that fits:

1. *Rotary order*: queries and keys have different names in the two trees, and neither has learned
   positions. So their channels are rotated: neighbours with each other in one code, a head's two
   halves in the other.
2. *One tensor for several*: queries, keys and values (or a gate and what it gates) lie in one
   tensor, which the two trees name or cut differently: one after the other, or head by head; or an
   axis is cut in several, and the module is none of an attention's.
3. *Shifts and scales in one tensor*: some models have the shifts first, some the scales.
4. *Other weights by their names*: one tree calls them an average or a difference of weights, or the
   two use contrary words (encoder and decoder), or the same words with other numbers; or their
   shapes alone are the same; or a ``gate``, as the router of experts is called too, is a
   ``gate_proj``.
5. *A tied head*: the output's weight in one tree is the embedding of the other.
6. *Low-rank factors*: their product counts by a factor (alpha by rank) that no tensor holds.
7. *Few bits*: numbers of eight bits or fewer are seldom the weights, but these by some scale.
8. *Pixels of a patch*: a layer that reads patches has them channels first, or last.
9. *The axis of a stack*: several axes fit, and other stacks show which one.
10. *Convolution*: with as many channels in as out and an even kernel, or a name that says upwards,
    it may be a transposed one, whose kernel some models flip.
11. *Orientation*: its axes may be exchanged, and no other layer of its kind shows which is first.
12. *Scale*: a normalisation without bias stores its scale as it is, or less one.
13. *Order of the modules*: several of one shape were paired in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from xckpt.core.targets.scaled import FEW_BITS, scaled_weights
from xckpt.mapping.infer.align import SAME_ORDER, Pair
from xckpt.mapping.infer.contraries import contrary, derived
from xckpt.mapping.infer.leaves import CONCEPTS, PARTS, Components, ModelLeaf
from xckpt.mapping.infer.structure import GENERIC, IN_ORDER, SAME_SHAPES
from xckpt.mapping.operations import Rearrange

POSITIONS = ("position", "posembed", "wpe", "relative", "alibi")
"""Parts of the words for positions that are learned or added, not rotated."""
ATTENTION_WORDS = ("attn", "attention")
"""Parts of the words for a module with heads."""
ROTATIONS = ("rope", "rotary", "rotemb", "invfreq", "freqscis")
"""Parts of the words for positions that rotate channels."""
OF_A_LAYER = ("weight", "bias")
"""Roles of the leaves of a layer."""
OF_HEADS = ("query", "key", "value", "out")
"""Concepts of the modules whose axis of heads is cut in one way only."""
GATE_WORDS = frozenset(word for word, concept in CONCEPTS.items() if concept == "gate")
"""Words for the gate of an MLP; ``gate`` is also what routers are called."""
UPWARDS = frozenset(("up", "ups"))
"""Words for what a transposed convolution does."""
FUSED_WORDS = ("qkv", "querykeyvalue", "gateup", "cattn", "kv")
"""Parts of the words for a tensor that holds several."""
MODULATION_WORDS = ("modulation", "adaln", "normout")
"""Parts of the words for one that holds shifts and scales; some models have the scales first."""
HEAD_WORDS = ("lmhead", "head", "logits", "unembed", "output", "decoder")
"""Beginnings of the words for the layer behind a model, which may be its embedding."""


@dataclass(frozen=True, slots=True)
class Trees:
    """Facts about both trees that assumptions depend on."""

    positioned: frozenset[tuple[bool, Components]]
    """(is it the target's, path) of the modules that learn or add positions."""
    rotates: bool
    """Whether a name says that positions rotate channels."""
    attentions: frozenset[tuple[bool, Components]]
    """(is it the target's, path) of the modules that have queries or keys, by their names."""
    biased: frozenset[tuple[bool, Components]]
    """(is it the target's, path) of the modules that have a bias."""
    scales: Mapping[str, str]
    """Name of a weight that is stored with scales -> name of these."""
    is_turned: bool
    """Whether one tree has torch's weights and the other Flax's kernels."""

    @classmethod
    def of(cls, sources: Sequence[ModelLeaf], targets: Sequence[ModelLeaf]) -> Trees:
        """What two trees say."""
        sides = [(False, leaf) for leaf in sources] + [(True, leaf) for leaf in targets]
        words = {word for _, leaf in sides for word in leaf.words}.union(PARTS)
        names = words.union(leaf.role for _, leaf in sides)
        positions = {e for e in names if any(p in e for p in POSITIONS) and "rot" not in e}
        return cls(
            frozenset(
                (side, path)
                for side, leaf in sides
                if (path := _positioned(leaf, positions)) is not None
            ),
            any(part in word for word in names for part in ROTATIONS),
            frozenset(
                (side, leaf.path[:-1])
                for side, leaf in sides
                if CONCEPTS.get(str(leaf.path[-1:] and leaf.path[-1])) in ("query", "key")
            ),
            frozenset((side, leaf.path) for side, leaf in sides if leaf.role == "bias"),
            scaled_weights({leaf.name: leaf.spec.dtype for leaf in sources})
            | scaled_weights({leaf.name: leaf.spec.dtype for leaf in targets}),
            _has_kernels(sources) != _has_kernels(targets),
        )

    def has_positions(self, pair: Pair) -> bool:
        """Whether the model that a pair belongs to, on either side, learns or adds positions only.

        Some models do both.
        """
        return not self.rotates and any(
            (bool(side), leaf.path[:length]) in self.positioned
            for side, leaf in enumerate(pair.first)
            for length in range(len(leaf.path) + 1)
        )

    def is_of_heads(self, pair: Pair) -> bool:
        """Whether a pair is a layer of an attention; a critic has a ``value``, too."""
        return any(
            (bool(side), leaf.path[:-1]) in self.attentions
            or any(part in word for word in leaf.words for part in ATTENTION_WORDS)
            for side, leaf in enumerate(pair.first)
            if CONCEPTS.get(next(iter(leaf.words[-1:]), "")) in OF_HEADS
        )


def _has_kernels(leaves: Sequence[ModelLeaf]) -> bool:
    return any(leaf.flavour == "kernel" for leaf in leaves)


def _positioned(leaf: ModelLeaf, words: Set[str]) -> Components | None:
    """The module whose positions a leaf holds, by words for them; None if it holds none.

    Those of one block (relative ones) are for the module that holds the list of blocks.
    """
    if words.isdisjoint(leaf.key):
        return None
    above = leaf.path[: next(n for n, word in enumerate(leaf.key) if word in words)]
    block = next((n for n, each in enumerate(above) if isinstance(each, int)), len(above) + 1)
    above = above[: max(0, block - 1)]
    while above and "embed" in str(above[-1]):
        above = above[:-1]
    return above


def assume(pair: Pair, trees: Trees, kinds: set[str], alternatives: int) -> Pair:
    """The pair with its assumption.

    Args:
        pair: its first layout is the one that is taken.
        trees: what the leaves of both trees say.
        kinds: layouts that shapes decide among the pairs of its class.
        alternatives: along how many axes a stack fits.
    """
    reasons = (
        _rotary(pair, trees),
        _fused(pair, trees),
        _modulation(pair),
        _derived(pair),
        _contrary(pair),
        _router(pair),
        _shaped(pair),
        _numbered(pair),
        _tied(pair),
        _low_rank(pair),
        _few_bits(pair),
        _patch(pair),
        _axis(pair, alternatives),
        _convolution(pair),
        _orientation(pair, kinds, trees),
        _scale(pair, trees),
        _order(pair),
    )
    return replace(pair, assumes=next(filter(None, reasons), ""))


def in_torch(pair: Pair) -> ModelLeaf:
    """The leaf of the pair that is laid out as torch does."""
    source, target = pair.first
    return target if target.flavour == "weight" and source.flavour != "weight" else source


def _rotary(pair: Pair, trees: Trees) -> str:
    one, other = (leaf.words[-1:] for leaf in pair.first)
    concepts = {CONCEPTS.get(word, "") for word in one + other}
    # torch's own attention, whose three projections lie in one tensor, rotates nothing.
    is_torchs = any(leaf.part is not None for leaf in pair.first)
    if one == other or not concepts & {"query", "key"} or is_torchs or trees.has_positions(pair):
        return ""
    return (
        "if positions rotate the channels of a head, both sides have the channels in one order "
        "(neighbours, or halves: see the operation rope) and scale them alike"
    )


def _fused(pair: Pair, trees: Trees) -> str:
    one, other = pair.first
    words = {word for leaf in pair.first for word in leaf.words[-1:]}
    is_fused = any(part in word for word in words for part in FUSED_WORDS)
    is_alike = one.path[-1:] == other.path[-1:] and len(one.shape) == len(other.shape)
    if is_alike or not (is_fused or _is_cut(pair, trees)):
        return ""
    return "the parts in one tensor are in the same order on both sides, head by head or not"


def _is_cut(pair: Pair, trees: Trees) -> bool:
    """Whether an axis of a layer is cut in several, and not in the heads of an attention."""
    cuts = [each for each in pair.layouts[0].operations if isinstance(each, Rearrange)]
    if not cuts or pair.first[0].role not in OF_A_LAYER:
        return False
    is_cut = any(sum(size > 1 for size in cut.sizes.values()) > 1 for cut in cuts)
    return is_cut and not trees.is_of_heads(pair)


def _modulation(pair: Pair) -> str:
    one, other = (_tail(leaf, MODULATION_WORDS) for leaf in pair.first)
    if not (one or other) or one == other:
        return ""
    return "the shifts and scales in one tensor are in the same order on both sides"


def _tail(leaf: ModelLeaf, parts: Sequence[str]) -> tuple[str, ...]:
    """The words of a leaf from the first one with one of these parts on; empty if there is none."""
    words = leaf.words
    first = (n for n, word in enumerate(words) if any(part in word for part in parts))
    return words[next(first, len(words)) :]


def _derived(pair: Pair) -> str:
    word = derived(*(leaf.words for leaf in pair.first))
    return word and f"what one side calls {word} are the weights of the other"


def _contrary(pair: Pair) -> str:
    found = contrary(*(leaf.words for leaf in pair.first))
    return "what one side calls {} is what the other calls {}".format(*found) if found else ""


def _router(pair: Pair) -> str:
    one, other = (GATE_WORDS & {*leaf.words} for leaf in pair.first)
    if not (one and other) or one == other:
        return ""
    return "what one side calls gate is a layer of its MLP, not the router of its experts"


def _shaped(pair: Pair) -> str:
    one, other = (next(iter(leaf.words[-1:]), "") for leaf in pair.first)
    concepts = {CONCEPTS.get(one, one), CONCEPTS.get(other, other)}
    if pair.reason != SAME_SHAPES or len(concepts) == 1 or not GENERIC.isdisjoint((one, other, "")):
        return ""
    return f"what one side calls {one} is what the other calls {other}"


def _numbered(pair: Pair) -> str:
    one, other = pair.source.path, pair.target.path
    same_words = len(one) == len(other) and pair.first[0].words == pair.first[1].words
    in_order = pair.reason in (SAME_ORDER, IN_ORDER)
    if in_order or not same_words or one == other:
        return ""
    return "modules of one name that have other numbers on the two sides are the same"


def _tied(pair: Pair) -> str:
    leaves = sorted(pair.first, key=lambda leaf: leaf.flavour != "embedding")
    if leaves[0].flavour != "embedding" or leaves[1].flavour == "embedding":
        return ""
    word = next(iter(leaves[1].words[-1:]), "")
    if not word.startswith(HEAD_WORDS) or word in leaves[0].words:
        return ""
    return "the embedding and the head of the model are tied, one weight for both"


def _low_rank(pair: Pair) -> str:
    if not any("lora" in leaf.name.lower() for leaf in pair.first):
        return ""
    return "both sides multiply the product of the two factors by the same number (alpha by rank)"


def _few_bits(pair: Pair) -> str:
    one, other = (leaf.spec.dtype for leaf in pair.first)
    if one == other or not (one.startswith(FEW_BITS) or other.startswith(FEW_BITS)):
        return ""
    return "numbers of so few bits are the weights themselves, not to be multiplied by a scale"


def _patch(pair: Pair) -> str:
    one, other = pair.first
    is_layer = one.role == "weight" and len(one.shape) == len(other.shape) == 2
    if not is_layer or not any("patch" in leaf.name.lower() for leaf in pair.first):
        return ""
    return "the pixels of a patch are in the same order on both sides, channels first or last"


def _axis(pair: Pair, alternatives: int) -> str:
    if alternatives < 2:
        return ""
    return f"it is stacked along axis {pair.axis} like the others, though another would fit"


def _convolution(pair: Pair) -> str:
    if pair.layouts[0].kind != "convolution":
        return ""
    outputs, inputs, *space = in_torch(pair).shape
    upwards = any(word in UPWARDS for leaf in pair.first for word in leaf.words[-1:])
    if outputs != inputs or (any(size % 2 for size in space) and not upwards):
        return ""
    return "it is a convolution, not a transposed one, whose kernel may be flipped"


def _orientation(pair: Pair, kinds: set[str], trees: Trees) -> str:
    one, other = pair.first
    kind, shape = pair.layouts[0].kind, one.shape
    # What lies beside a weight, such as its mask or its scales, is turned as the weight is.
    beside = trees.is_turned and one.role != "weight" and "weight" in one.role
    if beside and len(set(shape)) < len(shape):
        return "its axes are in the same order, though those of the weight beside it are not"
    exchangeable = kind == "same" and len(shape) > 2 and len(set(shape)) < len(shape)
    decided = kind in kinds if len(pair.layouts) > 1 else not exchangeable
    if decided or one.flavour == other.flavour:
        return ""
    return (
        f"its axes are {kind}, though its shape {list(shape)} would fit otherwise too and no other "
        "layer shows it"
    )


def _scale(pair: Pair, trees: Trees) -> str:
    one, other = pair.first
    has_bias = any((bool(side), leaf.path) in trees.biased for side, leaf in enumerate(pair.first))
    renamed = one.flavour != other.flavour and "kernel" not in (one.flavour, other.flavour)
    if len(one.shape) != 1 or has_bias or not renamed:
        return ""
    return "both sides store the scale as it is, not less one"


def _order(pair: Pair) -> str:
    if pair.reason != SAME_ORDER:
        return ""
    return "modules of one shape stand in the same order on both sides"


def assumptions_of(pairs: Sequence[Pair]) -> str:
    """The assumptions of the pairs of one finding."""
    return "; ".join(dict.fromkeys(pair.assumes for pair in pairs if pair.assumes))
