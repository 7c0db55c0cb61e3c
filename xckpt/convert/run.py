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
from concurrent.futures import Executor

from xckpt.convert.conversion import Conversion
from xckpt.convert.work import ConversionRun, Converted
from xckpt.core.metadata import JSONValue
from xckpt.engine.adapters import find_group
from xckpt.engine.group import Group, LocalGroup
from xckpt.formats.detect import open_sink
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.names import specs_of
from xckpt.mapping.spec import TensorSpec
from xckpt.options import SaveOptions

Path = str | os.PathLike[str]


def convert(
    src: Path,
    dst: Path,
    *,
    mapping: LeafMapping | None = None,
    dtype: str | None = None,
    executor: Executor | None = None,
    group: Group | None = None,
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
    same call resumes from it.

    Args:
        src: what to convert: an xckpt checkpoint, a safetensors file or folder, an Orbax or DCP
            checkpoint, a ``torch.save`` file; a local path or a URL.
        dst: where to; see `xckpt.save`.
        mapping: how tensors of the source become tensors of the target; None leaves them as they
            are. Python values go along under their own names.
        dtype: element type of all floating-point tensors, such as ``"bfloat16"``; None leaves them.
        executor: any executor of `concurrent.futures`, whose workers share the work. They must
            reach both paths; this process plans and commits.
        group: the ranks that share the work; found by itself if there is no executor.
        overwrite: replace what is at ``dst``, once the new checkpoint is committed.
        format: what to write: ``"xckpt"``, ``"safetensors"``, ``"orbax"`` or ``"dcp"``; None goes
            by the name of ``dst``.
        source_format: what ``src`` is; None detects it.
        metadata: anything that JSON can carry, kept with the new checkpoint; None keeps what the
            source has.
        opaque: pass objects that DCP has pickled on as the bytes that hold them, to a checkpoint of
            ours or a DCP folder; by default they are refused by name.
        allow_lossy: allow steps that do not bring every value back. Casting by ``dtype`` is always
            allowed.
        like: the target's tree, of anything with ``.shape`` and ``.dtype``: the mapping is then
            proven to make just this, optional leaves included, and the checkpoint has its
            containers. None makes what the mapping makes of the source, in nested dicts.
        options: chunk sizes, threads, memory, progress.

    Returns:
        How much was converted.

    Raises:
        NotACheckpointError: there is no known format at ``src``.
        MappingError: the mapping does not fit the source, leaves some of it out, is lossy although
            ``allow_lossy`` is False, or asserts what the data do not fulfil; all problems are
            listed.
        CheckpointExistsError: something is at ``dst``, and ``overwrite`` is False.
        CorruptCheckpointError: the source is not what was saved; names leaf and range.
        StorageError: a storage refused, or a worker died.
        RanksFailedError: any of these, in a group of several ranks. Nothing is committed.

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
    conversion = Conversion(
        os.fspath(src), source_format, mapping, dtype, allow_lossy, _wanted(mapping, like), opaque
    )
    work = ConversionRun(
        conversion,
        os.fspath(dst),
        overwrite,
        options or SaveOptions(),
        executor,
        _group_for(executor, group),
        like,
        metadata,
    )
    work.check()
    try:
        if open_sink(dst, format, overwrite=overwrite) is None:
            return work.into_checkpoint()
        return work.into_sink(format)
    finally:
        work.close()


def _wanted(mapping: LeafMapping | None, like: object) -> tuple[tuple[str, TensorSpec], ...] | None:
    if like is None:
        return None
    if mapping is None:
        raise ValueError("like is the target of a mapping: give one")
    return tuple(specs_of(like).items())


def _group_for(executor: Executor | None, group: Group | None) -> Group:
    if executor is None:
        return find_group() if group is None else group
    if group is not None and group.size > 1:
        raise ValueError("an executor's workers or a group's ranks can share the work, not both")
    return LocalGroup()
