"""What neither names nor shapes show of a pair: what its rule takes for granted, in words.

`assume` gives each pair at most one of these, the first that fits:

1. *Rotary order*: queries and keys go by other names in the two trees, and neither has positions
   that are learned, so that their channels are rotated: neighbours with each other in one code, a
   head's two halves in another.
2. *One tensor for several*: queries, keys and values (or a gate and what it gates) lie in one
   tensor, which the two trees call or cut otherwise: one after the other, or head by head.
3. *The axis of a stack*: it fits along several, and other stacks show which.
4. *Convolution*: with as many channels in as out and an even kernel, it may be a transposed one,
   whose kernel some models flip.
5. *Orientation*: all axes are of one size, and no other layer of its kind shows which is first.
6. *Scale*: a normalisation without bias stores its scale as it is, or less one.
7. *Order of the modules*: some of one shape were paired in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from xckpt.mapping.infer.align import SAME_ORDER, Pair
from xckpt.mapping.infer.leaves import CONCEPTS, ModelLeaf, Path
from xckpt.mapping.scaled import scaled_weights

POSITIONS = ("position", "posembed", "wpe", "relative", "alibi")
"""Parts of the words for positions that are learned or added, not rotated."""
FUSED_WORDS = ("qkv", "querykeyvalue", "gateup", "cattn", "kv")
"""Parts of the words for a tensor that holds several."""


@dataclass(frozen=True, slots=True)
class Trees:
    """What the leaves of both trees say together."""

    has_positions: bool
    """Whether positions are learned or added."""
    biased: frozenset[tuple[bool, Path]]
    """(is it the target's, path) of the modules that have a bias."""
    scales: Mapping[str, str]
    """Name of a weight that is stored with scales -> name of these."""

    @classmethod
    def of(cls, sources: Sequence[ModelLeaf], targets: Sequence[ModelLeaf]) -> Trees:
        """What two trees say."""
        sides = [(False, leaf) for leaf in sources] + [(True, leaf) for leaf in targets]
        words = {word for _, leaf in sides for word in leaf.path if isinstance(word, str)}
        return cls(
            any(part in word for word in words for part in POSITIONS),
            frozenset((side, leaf.path) for side, leaf in sides if leaf.role == "bias"),
            scaled_weights([leaf.name for leaf in sources])
            | scaled_weights([leaf.name for leaf in targets]),
        )


def assume(pair: Pair, trees: Trees, kinds: set[str], alternatives: int) -> Pair:
    """The pair with what it takes for granted.

    Args:
        pair: its first layout is the one that is taken.
        trees: what the leaves of both trees say.
        kinds: layouts that shapes decide among the pairs of its class.
        alternatives: along how many axes a stack fits.
    """
    reasons = (
        _rotary(pair, trees),
        _fused(pair),
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


def _words(leaf: ModelLeaf) -> tuple[str, ...]:
    return tuple(word for word in leaf.path if isinstance(word, str))


def _rotary(pair: Pair, trees: Trees) -> str:
    one, other = (_words(leaf)[-1:] for leaf in pair.first)
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
    words = {word for leaf in pair.first for word in _words(leaf)[-1:]}
    is_fused = any(part in word for word in words for part in FUSED_WORDS)
    if not is_fused or (one.path[-1:] == other.path[-1:] and len(one.shape) == len(other.shape)):
        return ""
    return "what lies in one tensor lies there in one order on both sides, head by head or not"


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
    """What the pairs of one finding take for granted together."""
    return "; ".join(dict.fromkeys(pair.assumes for pair in pairs if pair.assumes))
