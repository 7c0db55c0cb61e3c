"""Words that tell weights of one shape apart: where two trees differ in them, names are no proof.

1. `derived`: one tree calls a tensor an average of the weights, a moment or a gradient of them, an
   earlier or another copy; the other does not.
2. `contrary`: the trees use contrary words (encoder and decoder), or words that differ in their
   last letter alone (``encoder_q`` and ``encoder_k``).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import product

_DERIVED_WORDS = (
    "ema modelema emamodel emaparams averaged average averagemodel avg movingaverage runningaverage"
    " swa polyak shadow delta grad grads gradient gradients momentum momentumbuffer momentummodel"
    " moments velocity trace mu nu expavg expavgsq maxexpavgsq old oldmodel oldpolicy oldactor"
    " oldparams ref refmodel refpolicy reference referencemodel best bestmodel bestparams"
    " targetnet targetnetwork targetmodel targetparams targetcritic critictarget qtarget targetq"
    " actortarget targetactor backup snapshot initialparams"
)
"""Words for tensors that are derived from the weights, or are copies of another time."""
_DERIVED = frozenset(_DERIVED_WORDS.split())

_BEGINNINGS = tuple(
    (one, other)
    for one, others in {
        "encoder": "decoder",
        "teacher": "student",
        "online": "target",
        "source": "target sink",
        "src": "tgt trg",
        "actor": "critic",
        "input": "post output",
        "inproj": "outproj",
        "inlayer": "outlayer",
        "pre": "post",
        "forward": "backward",
        "left": "right",
        "l2r": "r2l",
        "generator": "discriminator",
        "policy": "value",
        "local": "global",
        "cross": "self",
        "attncross": "attnself",
        "encoderattn": "selfattn",
        "encoderattention": "selfattention",
        "vision": "text audio",
        "visual": "text audio",
        "image": "text audio video",
        "audio": "text video",
        "down": "up",
        "shared": "expert routed",
        "first": "last second",
        "start": "end",
        "top": "bottom",
        "low": "high",
        "lower": "upper",
        "min": "max",
        "real": "imag",
        "spatial": "temporal",
        "row": "col",
        "user": "item",
        "front": "rear back",
        "inner": "outer",
        "fast": "slow",
        "long": "short",
        "head": "tail",
        "prefix": "suffix",
        "train": "eval",
        "main": "aux",
        "sender": "receiver",
        "reader": "writer",
        "edge": "node",
        "question": "ctx context passage answer",
        "query": "passage doc",
        "coarse": "fine",
        "content": "style",
        "rgb": "depth",
        "timemix": "channelmix",
        "mean": "std var logvar logstd",
    }.items()
    for other in others.split()
)
"""Beginnings of words that tell modules of one kind apart."""

_FIRST_MOMENTS, _SECOND_MOMENTS = ("mu", "m", "expavg"), ("nu", "v", "expavgsq")
_WHOLE = frozenset(
    pair
    for first, second in product(_FIRST_MOMENTS, _SECOND_MOMENTS)
    for pair in ((first, second), (second, first))
)
"""Contrary words as a whole."""

_SHORTEST = 5
"""The fewest letters of words whose last letter may tell two modules apart."""


def derived(one: Collection[str], other: Collection[str]) -> str:
    """The word by which one of two names is of something derived; empty if neither or both are.

    Args:
        one: the words of a name.
        other: those of the other tree's.

    Example:
        >>> derived(["ema", "fc"], ["fc"]), derived(["mu", "fc"], ["expavg", "fc"])
        ('ema', '')
    """
    found, others = _DERIVED.intersection(one), _DERIVED.intersection(other)
    return "" if bool(found) == bool(others) else min(found | others)


def contrary(one: Collection[str], other: Collection[str]) -> tuple[str, str] | None:
    """A word of each of two names that contradict each other; None if there are none.

    Args:
        one: the words of a name.
        other: those of the other tree's.

    Example:
        >>> contrary(["encoder", "fc"], ["decoderstack", "fc"])
        ('encoder', 'decoder')
        >>> contrary(["encoderq"], ["encoderk"]), contrary(["encoder", "decoder"], ["decoder"])
        (('encoderq', 'encoderk'), None)
    """
    own, others = set(one).difference(other), set(other).difference(one)
    if not own or not others:
        return None
    for pair in product(sorted(own), sorted(others)):
        if pair in _WHOLE or _differ_at_the_end(*pair):
            return pair
    begun, ended = (frozenset[str]().union(*map(_begun, words)) for words in (one, other))
    for pair in _BEGINNINGS if begun and ended and begun != ended else ():
        mine, theirs = begun.intersection(pair), ended.intersection(pair)
        if mine and theirs and not mine & theirs:
            return min(mine), min(theirs)
    return None


@cache
def _begun(word: str) -> frozenset[str]:
    """The contraries with which a word begins."""
    return frozenset(each for pair in _BEGINNINGS for each in pair if word.startswith(each))


def _differ_at_the_end(one: str, other: str) -> bool:
    alike = len(one) == len(other) >= _SHORTEST and one[:-1] == other[:-1]
    return alike and one[-1].isalpha() and other[-1].isalpha()
