"""`convert`: a checkpoint of any format and model becomes one of another, unit by unit.

1. Open the source, resolve the mapping, and check its assertions on the data, before anything is
   written. Ranks share the reading.
2. Plan units of work (`xckpt.convert.units.plan`). Every process finds the same ones.
3. Make and write them: an xckpt checkpoint through the ordinary steps of a save
   (`xckpt.convert.to_checkpoint`), any other format through a sink
   (`xckpt.convert.to_sink`). The work is shared by the ranks of a group, by the workers of an
   executor, or by this process's threads.
4. Commit. Until then nothing is at the destination.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

from xckpt.convert.conversion import Conversion, Opened, checked_arguments, reading_options
from xckpt.convert.target_tree import find_places, target_tree
from xckpt.convert.to_checkpoint import IDENTITY, ConvertingWriter
from xckpt.convert.to_sink import PREPARE, SinkTarget, SinkWriter
from xckpt.convert.units.assertions import check_assertions
from xckpt.convert.units.plan import plan_units
from xckpt.convert.units.run import UnitShare, share_units
from xckpt.convert.units.unit import Chunks
from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.groups import GroupFinder, refuse_others
from xckpt.engine.limits import naming_limit
from xckpt.engine.ranks.group import Group, LocalGroup, operation
from xckpt.engine.ranks.watch import Step, Watch
from xckpt.engine.save import save_state
from xckpt.engine.steps import all_reduce
from xckpt.errors import CheckpointExistsError, StorageError
from xckpt.formats.detect import open_sink
from xckpt.formats.sink import Contents
from xckpt.formats.source import Opaque, metadata_texts, user_of
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.names import specs_of
from xckpt.mapping.spec import TensorSpec
from xckpt.options import SaveOptions, is_watched, with_progress

Path = str | os.PathLike[str]

UNITS_IN_FLIGHT = 8
"""Units of the usual size that fit the budget of memory, sources and targets counted."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion; see `convert`.

    Example:
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": np.zeros((2, 3), np.int16)}, "converted-result.safetensors")
        >>> convert("converted-result.safetensors", "memory://converted-result")
        Converted(tensors=1, bytes=12, bytes_before=0)
    """

    tensors: int
    """Tensors of the target."""
    bytes: int
    """Bytes of their elements."""
    bytes_before: int
    """How many of these bytes an earlier process had written, on this rank."""
    metadata: Metadata | None = field(default=None, compare=False, repr=False)
    """Metadata of the new checkpoint, if its format is xckpt."""


def convert(
    src: Path,
    dst: Path,
    *,
    mapping: LeafMapping | None = None,
    dtype: str | None = None,
    executor: Executor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
    overwrite: bool = False,
    format: str | None = None,
    source_format: str | None = None,
    metadata: JSONValue = None,
    opaque: bool = False,
    allow_lossy: bool = False,
    like: object = None,
    options: SaveOptions | None = None,
) -> Converted:
    """Write a checkpoint of another model, dtype or format; every rank of a group calls it.

    Memory stays within ``options.memory_bytes``, whatever the size of the model. After an error or
    a kill, what was written to a local folder is kept in a hidden folder beside ``dst``, and the
    same call resumes from it. A note on the exception says where, and how large it is; `xckpt.gc`
    removes it.

    Args:
        src: what to convert: an xckpt checkpoint, a safetensors file or folder, an Orbax or DCP
            checkpoint, a ``torch.save`` file; a local path or a URL.
        dst: where to; see `xckpt.save`.
        mapping: how tensors of the source become tensors of the target; None leaves them as they
            are. Python values keep their own names.
        dtype: element type of all floating-point tensors: ``"bfloat16"``, or ``"bf16"`` in short.
        executor: any executor of `concurrent.futures`, whose workers share the work. They must
            reach both paths; this process plans and commits.
        group: the ranks that share the work; found by itself if there is no executor.
        timeout: seconds to wait for a rank that neither answers nor makes progress; see
            `xckpt.save`. Workers of an executor are no ranks.
        overwrite: replace what is at ``dst``, once the new checkpoint is committed.
        format: what to write: ``"xckpt"``, ``"safetensors"``, ``"orbax"`` or ``"dcp"``; None goes
            by the name of ``dst``.
        source_format: what ``src`` is; None detects it.
        metadata: anything that JSON can carry, kept with the new checkpoint; None keeps what the
            source has.
        opaque: pass on objects that DCP has pickled as the bytes that hold them, to an xckpt
            checkpoint or a DCP folder; by default they are refused by name.
        allow_lossy: allow steps that do not bring every value back. Casting by ``dtype`` is always
            allowed.
        like: the target's tree, of anything with ``.shape`` and ``.dtype``: the mapping is then
            proven to make just this, optional leaves included, and the checkpoint has its
            containers. None makes what the mapping makes of the source, in nested dicts.
        options: chunk sizes, threads, memory, progress, metrics; tries and times, the source's too.

    Returns:
        How much was converted.

    Raises:
        NotACheckpointError: there is no known format at ``src``.
        MappingError: the mapping does not fit the source, leaves some of it out, is lossy although
            ``allow_lossy`` is False, or asserts what the data do not fulfil; all problems are
            listed.
        CheckpointExistsError: something is at ``dst``, and ``overwrite`` is False.
        CorruptCheckpointError: the source is not what was saved; names leaf and range.
        StorageError: a storage refused, a worker died, or the source was written meanwhile.
        NoGroupError: a launcher started several processes, but no process group joins them.
        RanksFailedError: ranks failed for several causes, or were lost. Nothing is committed.

    Example:
        >>> import numpy as np, xckpt
        >>> from xckpt.convert import Mapping, Rule
        >>> from xckpt.mapping.operations import Transpose
        >>> state = {"fc.weight": np.arange(6.0).reshape(2, 3), "step": 7}
        >>> _ = xckpt.save("memory://torch-model", state)
        >>> mapping = Mapping([Rule("fc.weight", "fc/kernel", [Transpose((1, 0))])])
        >>> convert("memory://torch-model", "memory://flax-model", mapping=mapping)
        Converted(tensors=1, bytes=48, bytes_before=0)
        >>> xckpt.load("memory://flax-model")["fc"]["kernel"].shape
        (3, 2)
    """
    alone = group is None and executor is not None
    find = GroupFinder(LocalGroup() if alone else group, timeout=timeout)
    with raised_on_all_ranks(find):
        options = checked_arguments(options, mapping, overwrite, opaque, allow_lossy)
        source, target = os.fspath(src), os.fspath(dst)
        wanted, reading = _wanted(mapping, like), reading_options(options)
        conversion = Conversion(
            source, source_format, mapping, dtype, allow_lossy, wanted, opaque, reading
        )
        group = _group_for(executor, group, find)
        _check_executor(executor, [source, target])
        to_sink = open_sink(dst, format, overwrite=overwrite) is not None
        watch = Watch.of("convert", dst, options) if is_watched(options) else None
    with operation(group), _noting_leftovers(dst), ExitStack() as stack:
        stack.enter_context(watch or nullcontext())
        shown = stack.enter_context(with_progress(options, "convert", group.rank, dst))
        work = _Work(
            conversion, target, overwrite, shown, executor, group, like, metadata, stack, watch
        )
        first = itemgetter(group.coordinator)  # each host may have a copy, with other times
        work.version = all_reduce(work.watched_group, PREPARE, work.check_source, first)
        return work.into_sink(format) if to_sink else work.into_checkpoint()


@contextmanager
def raised_on_all_ranks(find: GroupFinder) -> Iterator[None]:
    """Around what this rank checks before the first step: all ranks raise what it raises."""
    try:
        yield
    except Exception as error:
        # Not on the way of a call that makes sense.
        from xckpt.engine.ranks.compare import refuse

        refuse(find.likely(), error, PREPARE)
        raise


@contextmanager
def _noting_leftovers(dst: Path) -> Iterator[None]:
    """Add a note to the error that ends a conversion: what stays beside ``dst`` to resume from."""
    try:
        yield
    except BaseException as error:
        raised, stays = naming_limit(error), ""
        with suppress(OSError):  # there may be no descriptor left to look with
            from xckpt.storage.commit.collect import kept_for_later

            stays = kept_for_later(dst, IDENTITY)
        if stays and not isinstance(error, CheckpointExistsError):  # then it is another's
            raised.add_note(stays)
        if raised is not error:
            raise raised from error
        raise


@dataclass(eq=False)
class _Work:
    """One call of `convert`, on one rank."""

    conversion: Conversion
    destination: str
    overwrite: bool
    options: SaveOptions
    executor: Executor | None
    group: Group
    like: object
    metadata: JSONValue
    stack: ExitStack
    """Closes everything at the end."""
    watch: Watch | None
    """Times the conversion, if there is a listener."""
    version: bytes = b""
    """The source's, as the coordinator sees it."""

    @cached_property
    def watched_group(self) -> Group:
        """The group, whose waiting is counted if there is a listener."""
        return self.group if self.watch is None else self.watch.watched(self.group)

    @property
    def step(self) -> Step:
        """The context of a step, by its name."""
        return nullcontext if self.watch is None else self.watch.step

    @cached_property
    def opened(self) -> Opened:
        """The source, opened when it is first looked at."""
        watcher = self.options.progress
        opened = self.conversion.open(None if isinstance(watcher, bool) else watcher)
        self.stack.callback(opened.source.close)
        return opened

    @property
    def unit_bytes(self) -> int:
        """The usual size of a unit."""
        return max(1, self.options.memory_bytes // (2 * UNITS_IN_FLIGHT))

    def check_source(self) -> bytes:
        """Open the source, and check this rank's share of what is asserted of it; its version."""
        with self.step("check"):
            mine = self.opened.resolved.assertions[self.group.rank :: self.group.size]
            check_assertions(mine, self.opened.source, memory_bytes=self.options.memory_bytes)
        return self.opened.source.version()

    def share(self, target_chunks: Chunks | None = None) -> UnitShare:
        """Plan the units; this rank's share of them."""
        opened, rank = self.opened, self.group.rank
        units = plan_units(opened.resolved, opened.source.chunks, self.unit_bytes, target_chunks)
        mine = share_units(units, rank, self.group.size)
        return UnitShare(mine, rank, self.conversion, opened, self.options, self.executor)

    def into_checkpoint(self) -> Converted:
        """Write an xckpt checkpoint."""
        options, share = self.options, self.share()
        names, tree = target_tree(self.opened, share.units, self.like)
        about = self.version, self.unit_bytes, options.layout, sorted(names.items())
        target = self.opened.in_time(self.destination), self.opened.identity(*about)
        writer = ConvertingWriter(*target, names, share, overwrite=self.overwrite)
        planner = DefaultSavePlanner(grid=writer.options.grid, serialise=_content)
        user = user_of(self.opened.source.metadata) if self.metadata is None else self.metadata
        metadata = save_state(
            tree, writer, group=self.group, planner=planner, metadata=user, watch=self.watch
        )
        return self._converted(share, metadata)

    def into_sink(self, format: str | None) -> Converted:
        """Write another format."""
        contents = self._contents(
            self.opened.identity(self.version, format, self.options.memory_bytes)
        )
        target = SinkTarget(self.destination, format, self.overwrite, contents)
        share = SinkWriter(target, self.share, self.step).write(self.watched_group)
        return self._converted(share)

    def _contents(self, digest: bytes) -> Contents:
        """What a sink is to carry."""
        opened, source = self.opened, self.opened.source
        targets = opened.resolved.targets
        return Contents(
            targets,
            source.values,
            source.metadata if self.metadata is None else metadata_texts(self.metadata),
            *find_places(opened, self.like),
            source.annotations if opened.as_it_is else {},
            {name: source.chunks(name) for name in targets} if opened.as_it_is else {},
            max(1, self.options.memory_bytes // 4),
            origin=digest,
        )

    def _converted(self, share: UnitShare, metadata: Metadata | None = None) -> Converted:
        if self.watch is not None:
            self.watch.bytes = share.target_bytes - share.bytes_before
        targets = self.opened.resolved.targets.values()
        nbytes = sum(spec.nbytes for spec in targets)
        return Converted(len(targets), nbytes, share.bytes_before, metadata)


def _wanted(mapping: LeafMapping | None, like: object) -> tuple[tuple[str, TensorSpec], ...] | None:
    if like is None:
        return None
    if mapping is None:
        raise ValueError("like= is the target of a mapping: give mapping= too")
    return tuple(specs_of(like).items())


def _group_for(executor: Executor | None, group: Group | None, find: GroupFinder) -> Group:
    if executor is not None and group is None:
        refuse_others()
    found = find()  # refuses what is no group
    if executor is not None and found.size > 1:
        raise ValueError("an executor's workers or a group's ranks can share the work, not both")
    return found


def _check_executor(executor: Executor | None, paths: Sequence[str]) -> None:
    """Refuse what cannot work and start the workers, before anything is opened.

    Raises:
        TypeError: it is not an executor.
        StorageError: the workers could not reach this process's memory.
    """
    if executor is None:
        return
    if not hasattr(executor, "submit"):
        raise TypeError(f"executor takes one of concurrent.futures, not {executor!r}")
    for path in paths:
        if path.startswith("memory://") and not isinstance(executor, ThreadPoolExecutor):
            fault = "no other process reaches the memory of this one"
            raise StorageError(f"{path}: {fault}; give a path or URL that its workers reach")
    # A process that is forked later has TensorStore's memory without its threads, and would abort.
    executor.submit(os.getpid).result()


def _content(leaf: object) -> bytes:
    """The bytes of an `Opaque` value, the only kind of leaf that no adapter knows."""
    assert isinstance(leaf, Opaque)
    return leaf.content()
