"""Plans go to the coordinator and shares come back, without what the other side knows already.

1. A rank that knows all ranks' plans (`xckpt.core.plan.alone`) plans its own share, and sends a
   digest of what it knows, 16 bytes. If the digests of all ranks are equal, the coordinator answers
   where to write and nothing else. Otherwise it asks for the plans (`Ask.PLANS`).
2. Any other rank sends its local plan, with a digest in place of the leaf table. Most ranks have
   the coordinator's table. If the coordinator lacks a table, it asks one rank for it
   (`Ask.TABLES`), and the next round carries nothing else.
3. The coordinator sends each rank its share, with a leaf table only where it is not the rank's own.
4. Plans are kept: a rank keeps its share under the digest of its plan, with a token, and the
   coordinator keeps all ranks' tokens and the metadata. A rank that makes the same plan again sends
   the token, 16 bytes. If the coordinator has kept the tokens of all ranks, it plans nothing and
   answers where to write. Otherwise it asks for the plans, as in a first save. A rank also keeps a
   share that it planned alone, under the digest of what it knew.
5. After the commit, ranks that planned alone receive only what they cannot know (`KnownCommit`).

A token is made of the digests of all ranks' plans, so shares of two different plans never mix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Final, TypeVar

import msgspec

from xckpt.core.metadata import BytesStorageMetadata, JSONValue, Metadata
from xckpt.core.plan.alone.known import KnownPlans
from xckpt.core.plan.items import SavePlan, WriteItems
from xckpt.core.storage import BriefData, StorageWriter
from xckpt.engine.ranks.group import Group, KeptPlans, OwnPlan
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
    NO_MORE = 3
    """Nothing: all know the same of all plans, so each has planned its share alone."""


class _Offer(msgspec.Struct, array_like=True):
    """What a rank sends."""

    token: bytes = b""
    """The token of the share that it has kept, or a digest of what it knows of all plans."""
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


class _Brief(msgspec.Struct, array_like=True):
    """What the coordinator tells ranks that know the rest of a commit."""

    user: bytes
    """The caller's metadata, JSON."""
    kinds: dict[str, str]
    """Leaf name -> kind, of each value whose kind differs from the plan's."""


T = TypeVar("T")

_brief = msgspec.msgpack.Decoder(_Brief).decode
_encode = msgspec.msgpack.Encoder().encode
_offer = msgspec.msgpack.Decoder(_Offer).decode
_answer = msgspec.msgpack.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class Planning:
    """The steps of a save that an exchange of plans calls."""

    local: Callable[[], SavePlan]
    """This rank's plan."""
    decide: Callable[[list[SavePlan]], Sequence[SavePlan]]
    """The coordinator: all ranks' shares."""
    planned: Callable[[], Metadata]
    """The coordinator: what was planned, once that is decided."""
    repeat: Callable[[Metadata, SavePlan], object]
    """The coordinator: where to write the shares of an earlier plan, given its own share."""
    key: bytes | None
    """What the shares depend on besides the ranks' plans; None if they must not be kept."""
    known: Callable[[SavePlan], KnownPlans | None] = lambda _: None
    """All ranks' plans, given this rank's, if it knows them."""
    own: Callable[[KnownPlans], OwnPlan | None] = lambda _: None
    """This rank's share and the whole; None if all have to plan."""


@dataclass(frozen=True, slots=True)
class KnownCommit:
    """What will be committed, as far as ranks that have planned alone know it.

    Example:
        >>> known = KnownCommit(Metadata({"step": BytesStorageMetadata("int")}))
        >>> committed = Metadata(known.metadata.state_dict_metadata, user_metadata={"loss": 2})
        >>> known.committed(known.brief(committed)) == committed
        True
    """

    metadata: Metadata
    """As far as a plan can tell."""

    def finish(self, writer: StorageWriter, planned: Metadata, results: Sequence[object]) -> bytes:
        """On the coordinator: commit what was written; return the answer to all ranks."""
        return self.brief(writer.committed_metadata(writer.finish(planned, results)))

    def brief(self, committed: Metadata) -> bytes:
        """The parts of a commit that other ranks do not know."""
        kinds = {
            name: described.kind
            for name, described in committed.state_dict_metadata.items()
            if isinstance(described, BytesStorageMetadata) and described != self.metadata[name]
        }
        return _encode(_Brief(msgspec.json.encode(committed.user_metadata), kinds))

    def committed(self, received: bytes) -> Metadata:
        """What was committed, from its `brief`."""
        brief = _brief(received)
        user: JSONValue = msgspec.json.decode(brief.user)
        leaves = self.metadata.state_dict_metadata
        if brief.kinds:
            values = {name: BytesStorageMetadata(kind) for name, kind in brief.kinds.items()}
            leaves = {**leaves, **values}
        return replace(self.metadata, state_dict_metadata=leaves, user_metadata=user)


class _Exchange:
    """One rank's part in the planning of one save."""

    def __init__(self, group: Group, planning: Planning, kept: KeptPlans | None) -> None:
        self._group, self._planning = group, planning
        kept = None if planning.key is None else kept
        self._kept, self._keeps = kept or KeptPlans(), kept is not None
        self._codec = SavePlanCodec()
        self._local: SavePlan | None = None
        self._plan = self._digest = b""
        self._known = b""
        """A digest of what this rank knows of all plans; empty if it sends its own plan."""
        self._offers: list[_Offer] = []
        """The coordinator: all ranks' plans."""

    def run(self, step: str) -> tuple[SavePlan, KnownCommit | None]:
        """This rank's share; and what will be committed, where each rank has planned alone."""
        offer: Callable[[], bytes] = self._first_offer
        for _ in Ask:  # each question comes at most once
            answer = _answer(reduce_scatter(self._group, step, offer, self._decide))
            match answer.ask:
                case Ask.NOTHING:
                    return self._received(answer), None
                case Ask.NO_MORE:
                    own = self._kept.own[self._known]
                    return _placed(own.share, answer), KnownCommit(own.committed)
                case Ask.PLANS:
                    offer = self._plan_offer
                case Ask.TABLES:
                    offer = partial(self._table_offer, self._group.rank in answer.ranks)
        raise PlanError("the ranks' plans did not come; nothing was written")

    def _first_offer(self) -> bytes:
        plan = self._local = self._planning.local()
        known = self._planning.known(plan) if self._planning.key is not None else None
        digest = b"" if known is None else self._digest_of(plan, known)
        if digest not in self._kept.own:
            self._encode_plan(plan)
            if self._digest in self._kept.shares:
                return _encode(_Offer(token=self._kept.shares[self._digest][0]))
            if known is None or not self._plan_alone(known, digest):
                return self._plan_offer()
        self._known = digest
        return _encode(_Offer(token=digest))

    def _digest_of(self, plan: SavePlan, known: KnownPlans) -> bytes:
        """A digest of all that the shares depend on."""
        table = self._codec.name_of(WriteItems.of(plan.items).table)
        return _digest(self._planning.key or b"", table, *known.facts())

    def _plan_alone(self, known: KnownPlans, digest: bytes) -> bool:
        """Plan this rank's share and keep it, if what it knows is enough for that."""
        made = self._planning.own(known)
        if made is None:
            return False
        is_coordinator = self._group.rank == self._group.coordinator
        _keep(self._kept.own, digest, made if is_coordinator else replace(made, planned=None))
        return True

    def _encode_plan(self, plan: SavePlan) -> None:
        self._plan = self._codec.encode(plan)
        self._digest = _digest(self._planning.key or b"", self._plan)

    def _plan_offer(self) -> bytes:
        """This rank's plan; what it took for the others' plans is not true."""
        self._kept.own.pop(self._known, None)
        self._known = b""
        if not self._plan and self._local is not None:
            self._encode_plan(self._local)
        return _encode(_Offer(plan=self._plan))

    def _table_offer(self, asked: bool) -> bytes:
        """This rank's leaf table, if it was asked for it."""
        assert self._local is not None
        return _encode(_Offer(table=self._codec.table_of(self._local) if asked else b""))

    def _received(self, answer: _Answer) -> SavePlan:
        """The share that an answer gives; it is kept for the next save."""
        if not answer.share:
            return _placed(self._kept.shares[self._digest][1], answer)
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
        tokens = [offer.token for offer in offers]
        if any(tokens):
            alike = self._known != b"" and tokens.count(self._known) == len(tokens)
            answer = self._place_of_own() if alike else self._place_of_kept(b"".join(tokens))
            return [_encode(answer)] * len(offers)
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
        return self._shares()

    def _place_of_own(self) -> _Answer:
        """Where to write the shares that the ranks have planned alone."""
        own = self._kept.own[self._known]
        assert own.planned is not None
        return _Answer(Ask.NO_MORE, place=_encode(self._planning.repeat(own.planned, own.share)))

    def _place_of_kept(self, tokens: bytes) -> _Answer:
        """Where to write, if all ranks have kept their shares of one plan; else ask for plans."""
        known = self._kept.plans.get(self._digest)
        if known is None or known[0] != tokens or self._digest not in self._kept.shares:
            return _Answer(Ask.PLANS)
        place = self._planning.repeat(known[1], self._kept.shares[self._digest][1])
        return _Answer(place=_encode(place))

    def _shares(self) -> list[bytes]:
        """Plan for all ranks; each rank's share."""
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
) -> tuple[SavePlan, KnownCommit | None]:
    """This rank's share of a save of several ranks; collective.

    And what will be committed, where each rank has planned alone.

    Raises:
        XckptError: some rank failed (see `xckpt.errors`); no rank is left waiting.
    """
    return _Exchange(group, planning, kept).run(step)


def _placed(share: SavePlan, answer: _Answer) -> SavePlan:
    """A share that this rank has kept, with the place to write to."""
    assert isinstance(share.storage_data, BriefData)
    place: object = msgspec.msgpack.decode(answer.place)
    return replace(share, storage_data=replace(share.storage_data, place=place))


def _keep(kept: dict[bytes, T], digest: bytes, value: T) -> None:
    """Keep a value in place of the oldest."""
    kept.pop(digest, None)
    while len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[digest] = value


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()
