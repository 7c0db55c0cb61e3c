"""Assumptions of a pair: what neither names nor shapes show, in words.

`assume` gives each pair at most one of these, the first that fits:

1. *Rotary order*: queries and keys have different names in the two trees, and neither has learned
   positions. So their channels are rotated: neighbours with each other in one code, a head's two
   halves in the other.
2. *One tensor for several*: queries, keys and values (or a gate and what it gates) lie in one
   tensor, which the two trees name or cut differently: one after the other, or head by head.
3. *Shifts and scales in one tensor*: some models have the shifts first, some the scales.
4. *Other weights by their names*: one tree calls them an average or a difference of weights, or the
   two use contrary words (encoder and decoder), or the same words with other numbers.
5. *A tied head*: the output's weight in one tree is the embedding of the other.
6. *Low-rank factors*: their product counts by a factor (alpha by rank) that no tensor holds.
7. *The axis of a stack*: several axes fit, and other stacks show which one.
8. *Convolution*: with as many channels in as out and an even kernel, it may be a transposed one,
   whose kernel some models flip.
9. *Orientation*: its axes may be exchanged, and no other layer of its kind shows which is first.
10. *Scale*: a normalisation without bias stores its scale as it is, or less one.
11. *Order of the modules*: several of one shape were paired in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from xckpt.mapping.infer.align import SAME_ORDER, Pair
from xckpt.mapping.infer.leaves import CONCEPTS, PARTS, Components, ModelLeaf
from xckpt.mapping.infer.structure import IN_ORDER
from xckpt.mapping.scaled import scaled_weights

POSITIONS = ("position", "posembed", "wpe", "relative", "alibi")
"""Parts of the words for positions that are learned or added, not rotated."""
FUSED_WORDS = ("qkv", "querykeyvalue", "gateup", "cattn", "kv")
"""Parts of the words for a tensor that holds several."""
MODULATION_WORDS = ("modulation", "adaln", "normout")
"""Parts of the words for one that holds shifts and scales; some models have the scales first."""
DERIVED_WORDS = frozenset(
    ("ema", "modelema", "emamodel", "emaparams", "averaged", "swa", "polyak", "shadow", "delta")
)
"""Words for tensors derived from the weights: their moving average, what was added to them."""
CONTRARIES = (
    *(("encoder", "decoder"), ("teacher", "student"), ("online", "target"), ("actor", "critic")),
    *(("input", "post"), ("pre", "post"), ("forward", "backward"), ("left", "right")),
    *(("l2r", "r2l"), ("generator", "discriminator"), ("policy", "value"), ("local", "global")),
)
"""Beginnings of words that tell modules of one kind apart."""
HEAD_WORDS = ("lmhead", "head", "logits", "unembed", "output", "decoder")
"""Beginnings of the words for the layer behind a model, which may be its embedding."""


@dataclass(frozen=True, slots=True)
class Trees:
    """Facts about both trees that assumptions depend on."""

    has_positions: bool
    """Whether positions are learned or added."""
    biased: frozenset[tuple[bool, Components]]
    """(is it the target's, path) of the modules that have a bias."""
    scales: Mapping[str, str]
    """Name of a weight that is stored with scales -> name of these."""
    begun: Mapping[str, Sequence[str]]
    """Each word -> those of the `CONTRARIES` with which it begins."""

    @classmethod
    def of(cls, sources: Sequence[ModelLeaf], targets: Sequence[ModelLeaf]) -> Trees:
        """What two trees say."""
        sides = [(False, leaf) for leaf in sources] + [(True, leaf) for leaf in targets]
        words = {word for _, leaf in sides for word in leaf.words}.union(PARTS)
        beginnings = {each for contraries in CONTRARIES for each in contraries}
        return cls(
            any(part in word for word in words for part in POSITIONS),
            frozenset((side, leaf.path) for side, leaf in sides if leaf.role == "bias"),
            scaled_weights([leaf.name for leaf in sources])
            | scaled_weights([leaf.name for leaf in targets]),
            {word: [e for e in beginnings if word.startswith(e)] for word in words},
        )


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
        _fused(pair),
        _modulation(pair),
        _derived(pair),
        _contrary(pair, trees),
        _numbered(pair),
        _tied(pair),
        _low_rank(pair),
        _axis(pair, alternatives),
        _convolution(pair),
        _orientation(pair, kinds),
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
    is_plain = trees.has_positions or any(leaf.part is not None for leaf in pair.first)
    if is_plain or one == other or not concepts & {"query", "key"}:
        return ""
    return (
        "if positions rotate the channels of a head, both sides have the channels in one order "
        "(neighbours, or halves: see the operation rope) and scale them alike"
    )


def _fused(pair: Pair) -> str:
    one, other = pair.first
    words = {word for leaf in pair.first for word in leaf.words[-1:]}
    is_fused = any(part in word for word in words for part in FUSED_WORDS)
    if not is_fused or (one.path[-1:] == other.path[-1:] and len(one.shape) == len(other.shape)):
        return ""
    return "the parts in one tensor are in the same order on both sides, head by head or not"


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
    one, other = (DERIVED_WORDS & {*leaf.words} for leaf in pair.first)
    if bool(one) == bool(other):
        return ""
    return f"what one side calls {min(one | other)} are the weights of the other"


def _contrary(pair: Pair, trees: Trees) -> str:
    sides = [{each for word in leaf.words for each in trees.begun[word]} for leaf in pair.first]
    if not all(sides) or sides[0] == sides[1]:
        return ""
    for contraries in CONTRARIES:
        one, other = (side.intersection(contraries) for side in sides)
        if one and other and not one & other:
            return f"what one side calls {min(one)} is what the other calls {min(other)}"
    return ""


def _numbered(pair: Pair) -> str:
    one, other = pair.first
    same_words = len(one.path) == len(other.path) and one.words == other.words
    in_order = pair.reason in (SAME_ORDER, IN_ORDER)
    if in_order or not same_words or one.path == other.path:
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
    if not any("lora" in word for leaf in pair.first for word in (*leaf.words, leaf.role)):
        return ""
    return "both sides multiply the product of the two factors by the same number (alpha by rank)"


def _axis(pair: Pair, alternatives: int) -> str:
    if alternatives < 2:
        return ""
    return f"it is stacked along axis {pair.axis} like the others, though another would fit"


def _convolution(pair: Pair) -> str:
    if pair.layouts[0].kind != "convolution":
        return ""
    outputs, inputs, *space = in_torch(pair).shape
    if outputs != inputs or any(size % 2 for size in space):
        return ""
    return "it is a convolution, not a transposed one, whose kernel may be flipped"


def _orientation(pair: Pair, kinds: set[str]) -> str:
    one, other = pair.first
    kind, shape = pair.layouts[0].kind, one.shape
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
    renamed = {one.flavour, other.flavour} == {"weight", "scale"}
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
