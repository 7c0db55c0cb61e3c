"""Plans to the coordinator and shares back, without what the other side knows already.

1. Every rank makes its local plan and sends it, but for its leaf table: of that a digest, which is
   most often equal to the coordinator's own. A table that the coordinator lacks it asks of one rank
   (`Ask.TABLES`), and that is all that a second round carries.
2. The shares go back, with a leaf table only where that is not the rank's own.
3. What was planned is kept: on a rank its share under the digest of its plan, with a token; on the
   coordinator all ranks' tokens and the metadata. A rank whose plan has the digest sends the token,
   16 bytes. Where the coordinator has kept just these of all ranks, nothing is planned, and all it
   sends is where to write. Else it asks for the plans (`Ask.PLANS`), and all is as the first time.

A token is made of the digests of all ranks' plans, so shares of two different plans never mix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, TypeVar

import msgspec

from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import BriefData, SavePlan
from xckpt.engine.ranks.group import Group, KeptPlans
from xckpt.engine.ranks.wire import SavePlanCodec
from xckpt.engine.steps import reduce_scatter
from xckpt.errors import PlanError

MOST_KEPT: Final = 4
"""Plans that a group keeps: of states that are saved in turns."""


class Ask(IntEnum):
    """What the coordinator wants before it can plan."""

    NOTHING = 0
    PLANS = 1
    """Every rank's plan."""
    TABLES = 2
    """The leaf tables of some ranks."""


class _Offer(msgspec.Struct, array_like=True):
    """What a rank sends."""

    token: bytes = b""
    """That of the share that it has kept."""
    plan: bytes = b""
    table: bytes = b""
    """The leaf table, if it was asked for."""


class _Answer(msgspec.Struct, array_like=True):
    """What the coordinator sends to a rank."""

    ask: Ask = Ask.NOTHING
    ranks: tuple[int, ...] = ()
    """Whose leaf tables are asked for."""
    share: bytes = b""
    table: bytes = b""
    """The share's leaf table, if it is not the rank's own."""
    plan: bytes = b""
    """A digest of all ranks' plans, if the share may be kept."""
    place: bytes = b""
    """Where to write what the kept share says."""


T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_offer = msgspec.msgpack.Decoder(_Offer).decode
_answer = msgspec.msgpack.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class Planning:
    """What the save does in this exchange."""

    local: Callable[[], SavePlan]
    """This rank's plan."""
    decide: Callable[[list[SavePlan]], Sequence[SavePlan]]
    """The coordinator: all ranks' shares."""
    planned: Callable[[], Metadata]
    """The coordinator: what was planned, once that is decided."""
    repeat: Callable[[Metadata, SavePlan], object]
    """The coordinator: where to write the shares of an earlier plan, given its own share."""
    key: bytes | None
    """What a plan depends on beside the ranks' plans; None if it must not be kept."""


class _Exchange:
    """One rank's part in the planning of one save."""

    def __init__(self, group: Group, planning: Planning, kept: KeptPlans | None) -> None:
        self._group, self._planning = group, planning
        self._kept = kept if planning.key is not None and kept is not None else KeptPlans()
        self._keeps = planning.key is not None and kept is not None
        self._codec = SavePlanCodec(many=True)
        self._plan = self._table = self._digest = b""
        self._offers: list[_Offer] = []
        """The coordinator: all ranks' plans."""

    def run(self, step: str) -> SavePlan:
        """This rank's share."""
        local, asked = self._first, Ask.NOTHING
        for _ in Ask:
            answer = _answer(reduce_scatter(self._group, step, local, self._decide))
            if answer.ask is Ask.NOTHING:
                return self._taken(answer)
            asked, speaks = answer.ask, self._group.rank in answer.ranks
            if asked is Ask.PLANS:
                local = self._whole
            else:
                table = self._table if speaks else b""
                local = lambda table=table: _encode(_Offer(table=table))  # noqa: E731
        raise PlanError("the ranks' plans did not come; nothing was written")

    def _first(self) -> bytes:
        plan = self._planning.local()
        self._plan = self._codec.encode(plan)
        self._table = self._codec.table_of(plan)
        self._digest = _digest(self._planning.key or b"", self._plan)
        if self._digest in self._kept.shares:
            return _encode(_Offer(token=self._kept.shares[self._digest][0]))
        return self._whole()

    def _whole(self) -> bytes:
        return _encode(_Offer(plan=self._plan))

    def _taken(self, answer: _Answer) -> SavePlan:
        """The share that an answer gives; it is kept for the next save."""
        if not answer.share:
            _, share = self._kept.shares[self._digest]
            assert isinstance(share.storage_data, BriefData)
            place: object = msgspec.msgpack.decode(answer.place)
            return replace(share, storage_data=replace(share.storage_data, place=place))
        if answer.table:
            self._codec.learn(answer.table)
        share = self._codec.decode(answer.share)
        if self._keeps and answer.plan and isinstance(share.storage_data, BriefData):
            token = _digest(self._digest, answer.plan)
            _keep(self._kept.shares, self._digest, (token, share))
        return share

    def _decide(self, messages: list[bytes]) -> list[bytes]:
        """The coordinator: an answer for each rank."""
        offers = [_offer(message) for message in messages]
        if any(offer.token for offer in offers):
            again = self._again(b"".join(offer.token for offer in offers))
            return [_encode(again)] * len(offers)
        if not self._offers:
            self._offers = offers
        for offer in offers:
            if offer.table:
                self._codec.learn(offer.table)
        lacking: dict[bytes, int] = {}
        for rank, offer in enumerate(self._offers):
            name = self._codec.table_name(offer.plan)
            if name not in self._codec.tables:
                lacking.setdefault(name, rank)
        if lacking:
            return [_encode(_Answer(Ask.TABLES, tuple(lacking.values())))] * len(offers)
        return self._answers()

    def _again(self, tokens: bytes) -> _Answer:
        """Where to write, if all ranks have kept their shares of one plan; else the question."""
        known = self._kept.plans.get(self._digest)
        if known is None or known[0] != tokens or self._digest not in self._kept.shares:
            return _Answer(Ask.PLANS)
        place = self._planning.repeat(known[1], self._kept.shares[self._digest][1])
        return _Answer(place=_encode(place))

    def _answers(self) -> list[bytes]:
        shares = self._planning.decide([self._codec.decode(offer.plan) for offer in self._offers])
        if len(shares) != len(self._offers):
            raise PlanError(f"{len(shares)} answers for {len(self._offers)} ranks")
        digests = [_digest(self._planning.key or b"", offer.plan) for offer in self._offers]
        plan = _digest(*digests) if self._keeps else b""
        if self._keeps:
            tokens = b"".join(_digest(digest, plan) for digest in digests)
            _keep(self._kept.plans, self._digest, (tokens, self._planning.planned()))
        answers: list[bytes] = []
        for offer, share in zip(self._offers, shares, strict=True):
            data = self._codec.encode(share)
            own = self._codec.table_name(data) == self._codec.table_name(offer.plan)
            table = b"" if own else self._codec.table_of(share)
            answers.append(_encode(_Answer(share=data, table=table, plan=plan)))
        return answers


def plan_together(
    group: Group, step: str, planning: Planning, kept: KeptPlans | None = None
) -> SavePlan:
    """This rank's share of a save of several ranks; collective.

    Raises:
        XckptError: some rank failed (see `xckpt.errors`); no rank is left waiting.
    """
    return _Exchange(group, planning, kept).run(step)


def _keep(kept: dict[bytes, T], digest: bytes, value: T) -> None:
    """Keep a value in place of the oldest."""
    kept.pop(digest, None)
    while len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[digest] = value


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()
