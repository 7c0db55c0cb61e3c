"""A conversion as a value that can be sent to any process, and its state when opened there.

1. `Conversion` names source, mapping and dtype; it pickles.
2. `Conversion.open` opens the source and resolves the mapping, or the identity where there is none,
   on its shapes. Lossy steps that the caller has not allowed, and leaves that no rule takes, are
   errors.
3. `dtype` adds a cast to each floating-point tensor, after everything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from xckpt.core.dtypes import DTYPES, SHORT_NAMES
from xckpt.core.targets.scaled import cast_with_scales
from xckpt.errors import MappingError
from xckpt.formats.detect import open_source
from xckpt.formats.reader import FormatsAt
from xckpt.formats.source import TensorSource
from xckpt.mapping.mapping import RESOLVED, LeafMapping, check_mapping, part_of
from xckpt.mapping.prove import problems_with
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import Arithmetic, StridedCopy
from xckpt.mapping.traced import leaf
from xckpt.options import STORAGE, LoadOptions, SaveOptions, check_flags, checked_options
from xckpt.progress import Progress
from xckpt.storage.budget import Access
from xckpt.storage.location import Location

MANY_LEAVES = 1000
"""Fewest leaves for which work on names and shapes alone reports its progress."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A source that is open, and the mapping resolved on it; see `Conversion.open`."""

    source: TensorSource
    resolved: ResolvedMapping
    as_it_is: bool
    """Whether names and layouts stay those of the source."""
    state: bytes
    """The source's, before anything was read."""
    access: Access
    """How long source and target are asked, together."""

    def in_time(self, path: str) -> Location:
        """A place that is asked within the time of the conversion."""
        return replace(Location.parse(path), access=self.access)

    def identity(self, *more: object) -> bytes:
        """A digest of the source's contents, of the resolved mapping, and of ``more``.

        The first of ``more`` is the version of the source's files, as the coordinator sees them.
        """
        digest = hashlib.blake2b(self.source.identity(), digest_size=16)
        for name in sorted(self.resolved.targets):
            made = (name, self.resolved.targets[name], self.resolved.copies[name])
            digest.update(repr(made).encode("utf-8", "surrogatepass"))
        digest.update(repr(more).encode("utf-8", "surrogatepass"))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to convert, and how.

    Example:
        >>> import numpy as np, xckpt
        >>> state = {"w": np.ones(3, np.float32), "n": np.ones(2, int)}
        >>> _ = xckpt.save("memory://resolving", state)
        >>> opened = Conversion("memory://resolving", dtype="bfloat16").open()
        >>> {name: str(spec) for name, spec in opened.resolved.targets.items()}
        {'w': 'bfloat16[3]', 'n': 'int64[2]'}
    """

    path: str
    """Where the source is."""
    format: str | None = None
    """The source's format; None to detect it."""
    mapping: LeafMapping | None = None
    """None to leave names and layouts as they are."""
    dtype: str | None = None
    """Element type of all floating-point tensors; None to leave them as they are."""
    allow_lossy: bool = False
    """Whether lossy steps are allowed."""
    wanted: tuple[tuple[str, TensorSpec], ...] | None = None
    """(name, spec) of each tensor of the target, where it is known."""
    opaque: bool = False
    """Whether objects of the source are passed on as the bytes that hold them."""
    options: LoadOptions | None = None
    """How the source is read."""

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", SHORT_NAMES.get(self.dtype, self.dtype))

    def open(self, progress: Callable[[Progress], None] | None = None) -> Opened:
        """Open the source and resolve the mapping on it.

        Args:
            progress: called with how many leaves the mapping has been resolved on and proven for,
                where they are very many.

        Raises:
            NotACheckpointError: there is no known format at the path.
            MappingError: the mapping does not fit the source, leaves some of it out, or is lossy
                although `allow_lossy` is False; all problems are listed.
        """
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise TypeError(f"dtype takes a name, such as 'bfloat16', not {self.dtype!r}")
        if self.dtype is not None and not is_float(self.dtype):
            known = ", ".join(filter(is_float, DTYPES))
            raise MappingError(
                f"dtype {self.dtype!r} is not a floating-point type; known are {known}"
            )
        place = Location.parse(self.path, self.options)
        place.access.start(parts=True)
        there = FormatsAt(place if place.bucket else self.path, self.options).path
        source = open_source(there, self.format, options=self.options, opaque=self.opaque)
        try:
            state = source.state()
            resolved = self._resolved(source, progress)
            return Opened(source, resolved, self.mapping is None, state, place.access)
        except BaseException:
            source.close()
            raise

    def _resolved(
        self, source: TensorSource, progress: Callable[[Progress], None] | None
    ) -> ResolvedMapping:
        if self.mapping is None:
            resolved = unchanged(source.specs)
            return resolved if self.dtype is None else cast_floats(resolved, self.dtype)
        wanted = None if self.wanted is None else dict(self.wanted)
        self.mapping.require_accepted()
        report = in_leaves(progress, len(source.specs))
        resolving, proving = part_of(report, 0.0, RESOLVED), part_of(report, RESOLVED, 1.0)
        resolved = self.mapping.resolve(source.specs, wanted, progress=resolving)
        if not self.allow_lossy:
            require_lossless(resolved, {})
        if self.dtype is not None:
            resolved = cast_floats(resolved, self.dtype)
        made = resolved.targets if wanted is None else wanted
        problems = problems_with(resolved, made, progress=proving)
        if problems:
            raise MappingError.listing("the mapping does not fit", problems)
        return resolved


def in_leaves(
    progress: Callable[[Progress], None] | None, leaves: int
) -> Callable[[float], None] | None:
    """A callback for work on leaves: it takes the part that is done, and reports a count of leaves.

    None for few leaves, which are not worth a report.

    Example:
        >>> report = in_leaves(print, 20_000)
        >>> report(0.25)
        Progress(done=5000, total=20000, unit='leaves')
        >>> in_leaves(print, 20) is None
        True
    """
    if progress is None or leaves < MANY_LEAVES:
        return None
    return lambda part: progress(Progress(round(part * leaves), leaves, "leaves"))


def require_lossless(resolved: ResolvedMapping, wanted: Mapping[str, TensorSpec]) -> None:
    """Refuse a mapping with lossy steps, or one that casts weights without their scales.

    Args:
        resolved: the mapping.
        wanted: the targets that a load casts to.

    Raises:
        MappingError: lists the steps with their bounds.

    Example:
        >>> from xckpt.mapping.operations import Scale
        >>> from xckpt.mapping.rule import Rule
        >>> mapping = LeafMapping([Rule("w", "v", [Scale(3.0)])])
        >>> require_lossless(mapping.resolve({"w": TensorSpec((2,), "float32")}), {})
        Traceback (most recent call last):
        xckpt.errors.MappingError: the mapping is lossy; allow_lossy=True allows it
          - w -> v: scale 3.0: a value comes back to a relative 2 x 2^-24
    """
    lossy = [f"{each.rule}: {each.operation}: {each.bound}" for each in resolved.lossy]
    if lossy := [*lossy, *_lost_scales(resolved, {**resolved.targets, **wanted})]:
        raise MappingError.listing("the mapping is lossy; allow_lossy=True allows it", lossy)


def _scaled(resolved: ResolvedMapping) -> dict[str, str]:
    """The weights of the source that are not to be cast without their scales, and these."""
    return cast_with_scales({name: spec.dtype for name, spec in resolved.sources.items()})


def _lost_scales(resolved: ResolvedMapping, targets: Mapping[str, TensorSpec]) -> Iterator[str]:
    """What becomes another dtype without its scales, which nothing takes."""
    scaled = _scaled(resolved)
    if not scaled:
        return
    asserted = (assertion.tensor.copies for assertion in resolved.assertions)
    taken = {copy.source for copies in (*resolved.copies.values(), *asserted) for copy in copies}
    for target, copies in resolved.copies.items():
        for source in sorted({copy.source for copy in copies} & scaled.keys()):
            before, after = resolved.sources[source].dtype, targets[target].dtype
            if scaled[source] not in taken and before != after:
                yield (
                    f"{source}, {before}, becomes {target}, {after}, without its scales, "
                    f"{scaled[source]}, which no rule takes"
                )


def unchanged(specs: Mapping[str, TensorSpec]) -> ResolvedMapping:
    """The mapping that keeps every tensor as it is, under its own name.

    Example:
        >>> resolved = unchanged({"w": TensorSpec((2, 3), "int8")})
        >>> resolved.targets == resolved.sources
        True
    """
    copies = {
        name: tuple(replace(copy, target=name) for copy in leaf(name, spec).copies)
        for name, spec in specs.items()
    }
    return ResolvedMapping(sources=dict(specs), targets=dict(specs), copies=copies)


def is_float(dtype: str) -> bool:
    """Whether a format's name is that of a real floating-point type.

    Example:
        >>> is_float("bfloat16"), is_float("int8"), is_float("complex64"), is_float("half")
        (True, False, False, False)
    """
    return dtype in DTYPES and dtype.startswith(("float", "bfloat"))


def cast_floats(resolved: ResolvedMapping, dtype: str) -> ResolvedMapping:
    """The same with every floating-point target of one dtype.

    Raises:
        MappingError: a weight has scales beside it, so that another dtype would change it.

    Example:
        >>> kept = unchanged({"w": TensorSpec((2,), "float32"), "n": TensorSpec((), "int64")})
        >>> {name: str(spec) for name, spec in cast_floats(kept, "bfloat16").targets.items()}
        {'w': 'bfloat16[2]', 'n': 'int64[]'}
    """
    if scaled := _scaled(resolved):
        raise MappingError.listing(
            f"weights that are stored with scales cannot be cast to {dtype} alone: multiply them "
            "first, or convert without a dtype",
            [f"{name}: its scales are {scales}" for name, scales in scaled.items()],
        )
    targets, copies = dict(resolved.targets), dict(resolved.copies)
    for name, spec in resolved.targets.items():
        if is_float(spec.dtype) and spec.dtype != dtype:
            targets[name] = replace(spec, dtype=dtype)
            copies[name] = tuple(cast_target(copy, spec.dtype, dtype) for copy in copies[name])
    return replace(resolved, targets=targets, copies=copies)


def cast_target(copy: StridedCopy, before: str, after: str) -> StridedCopy:
    """A copy that casts its elements at the end, from ``before``, the type that it makes.

    Example:
        >>> [copy] = unchanged({"w": TensorSpec((2,), "float32")}).copies["w"]
        >>> [step.operation for step in cast_target(copy, "float32", "float16").arithmetic]
        ['cast']
    """
    steps = (*copy.arithmetic, Arithmetic("cast", before, after))
    return replace(copy, arithmetic=steps)


def checked_arguments(
    options: object, mapping: object, overwrite: object, opaque: object, allow_lossy: object
) -> SaveOptions:
    """The options of a conversion whose arguments make sense.

    Raises:
        TypeError: an argument makes no sense; it is named.

    Example:
        >>> checked_arguments(None, None, False, False, "yes")
        Traceback (most recent call last):
        TypeError: convert(allow_lossy=) takes True or False, not the str 'yes'
    """
    check_mapping(mapping, "convert")
    check_flags("convert", overwrite=overwrite, opaque=opaque, allow_lossy=allow_lossy)
    return checked_options(options, SaveOptions, "convert")


def reading_options(options: SaveOptions) -> LoadOptions:
    """How the source is read: within the memory of the conversion, and asked as its target is.

    Example:
        >>> reading_options(SaveOptions(timeout=60.0, chunk_bytes=1 << 20)).timeout
        60.0
    """
    asked = {name: getattr(options, name) for name in STORAGE}
    return LoadOptions(memory_bytes=options.memory_bytes, **asked)
