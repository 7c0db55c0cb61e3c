"""One call of `load` or `load_into`: what is asked for, and how it is carried out.

1. `LoadCall` holds the arguments, checked: `PartialLoad` what is wanted, `Strictness` what may be
   missing.
2. `LoadCall.run` makes the planner, finds the group and hands both to `xckpt.engine.load`. Other
   libraries' checkpoints and mappings are imported when a load needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from xckpt.api.parts import PartialLoad
from xckpt.api.save import Path, check_planner, group_of_call, raise_on_others, raised_on_all_ranks
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.report import LoadReport, Severity, Strictness
from xckpt.core.text.arguments import named
from xckpt.engine.groups import GroupFinder
from xckpt.engine.load import load_state
from xckpt.engine.ranks.group import Group
from xckpt.engine.ranks.watch import Watch
from xckpt.errors import UnsupportedLeafError
from xckpt.options import LoadOptions, checked_options, is_watched, with_progress

if TYPE_CHECKING:
    from xckpt.formats.reader import FormatsAt
    from xckpt.mapping.mapping import LeafMapping
    from xckpt.storage.read_checkpoint import ZarrStorageReader


def strictness_of(
    strict: bool,
    missing: Severity | None,
    unexpected: Severity | None,
    planner: LoadPlanner | None,
) -> Strictness:
    """What a load does about leaves that only one side has.

    Raises:
        ValueError: there is no such severity, or a planner of the caller's decides that.
    """
    if planner is not None and (missing or unexpected):
        raise ValueError("missing= and unexpected= are for the planner: give them to it")
    return Strictness.of(strict, missing, unexpected)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCall:
    """What a caller of `load` or `load_into` asks for."""

    path: Path
    in_place: bool
    wanted: PartialLoad
    strictness: Strictness
    cast: bool
    allow_lossy: bool
    planner: LoadPlanner | None
    mapping: LeafMapping | None
    options: LoadOptions | None

    def run(self, like: object, find_ranks: GroupFinder) -> tuple[object, LoadReport]:
        """Load what is asked for.

        Args:
            like: the tree of targets, or None.
            find_ranks: finds the group, once the arguments make sense.

        Returns:
            The loaded tree, and which leaves were loaded, cast, kept and left.
        """
        call = self.name
        with raised_on_all_ranks(find_ranks):
            from xckpt.storage.read_checkpoint import ZarrStorageReader  # an import fails, too

            self._check_mapping()
            check_planner(self.planner, LoadPlanner, call)
            options = checked_options(self.options, LoadOptions, call)
            watch = Watch.of(call, self.path, options) if is_watched(options) else None
            planner, arguments = self._planner(like, options), self._arguments(like)
        ranks = group_of_call(find_ranks)
        tree: Mapping[str, object] | None = like  # type: ignore[assignment]  # our planners take any
        with with_progress(options, call, ranks.rank, self.path) as shown:
            # One for both: the planner opens the format that the coordinator has found.
            others = cache(lambda: _formats_at(self.path, reader, shown))
            # As `raised_on_all_ranks` does, without its frames: each load comes this way.
            try:
                if self.mapping is not None:
                    planner = self._mapped_planner(self.mapping, others, ranks, shown)
                reader = ZarrStorageReader(self.path, options=shown)
            except Exception as error:
                raise_on_others(find_ranks, error)
                raise
            loaded = load_state(
                tree,
                reader,
                group=ranks,
                planner=planner,
                in_place=self.in_place,
                others=others,
                watch=watch,
                arguments=arguments,
            )
        return loaded.tree, planner.report()

    @property
    def name(self) -> str:
        """The function that was called."""
        return "load_into" if self.in_place else "load"

    def _arguments(self, like: object) -> dict[str, str]:
        """What all ranks must ask for alike, in words."""
        return {
            "call": self.name,
            "like": _given(like),
            "mapping": _given(self.mapping),
            **self.wanted.arguments(),
            **self.strictness.arguments(),
            "cast": repr(self.cast),
        }

    def _check_mapping(self) -> None:
        if self.mapping is None:
            return
        from xckpt.mapping.mapping import check_mapping

        check_mapping(self.mapping, self.name)
        if self.planner is not None:
            raise ValueError("give a mapping or a planner, not both; a MappedLoadPlanner has both")
        if not self.wanted.everything:
            taken = "like and the mapping say what is loaded"
            raise ValueError(f"at=, select= and framework= do not go with mapping=: {taken}")

    def _planner(self, like: object, options: LoadOptions) -> LoadPlanner:
        """The planner of what is wanted: the caller's, or one for this call."""
        deserialise = options.deserialise
        return self.wanted.planner(
            self.planner, like, self.strictness, cast=self.cast, deserialise=deserialise
        )

    def _mapped_planner(
        self,
        mapping: LeafMapping,
        others: Callable[[], FormatsAt],
        group: Group,
        options: LoadOptions,
    ) -> LoadPlanner:
        from xckpt.convert.mapped_load import MappedLoadPlanner

        return MappedLoadPlanner(
            mapping,
            lambda: others().open_source(),
            strictness=self.strictness,
            cast=self.cast,
            allow_lossy=self.allow_lossy,
            rank=group.rank,
            ranks=group.size,
            options=options,
        )


def _given(argument: object) -> str:
    return "None" if argument is None else "given"


def _formats_at(path: Path, reader: ZarrStorageReader, options: LoadOptions) -> FormatsAt:
    # Imported when there is a mapping, or no checkpoint of xckpt.
    from xckpt.formats.reader import FormatsAt

    # A bucket is asked within the one time of the load.
    return FormatsAt(reader.location if reader.location.bucket else path, options)


def check_state(state: object) -> None:
    """Refuse None as the state of a load in place.

    Raises:
        TypeError: it is None.
    """
    if state is None:
        raise TypeError("there is nothing to load into: give the state that is to be filled")


def check_filled(loaded: object, state: object) -> None:
    """Refuse a load in place that has made a new root: its caller keeps the old one.

    Raises:
        UnsupportedLeafError: it is new.
    """
    if loaded is not state:
        kind = type(state).__name__
        raise UnsupportedLeafError(
            f"the root: {named(kind)} cannot be changed in place, and Python values in it were "
            f"loaded; put it into a dict or a list, or use xckpt.load, which returns a new one"
        )
