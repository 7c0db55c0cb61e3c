"""Limits of a save: very many objects are refused, very many chunks or pieces warned of.

No array is made to count them: a leaf may have a million pieces.
"""

from __future__ import annotations

import warnings

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.grid import count_cells
from xckpt.core.manifest.decode import decoded_bytes, encode_body
from xckpt.core.manifest.entries import (
    BytesEntry,
    Entry,
    Manifest,
    TensorEntry,
    ValueEntry,
)
from xckpt.core.manifest.memory import DESTINATION_BYTES, REQUEST_BYTES, described_bytes
from xckpt.core.manifest.pieces import MANY_OBJECTS, Pieces
from xckpt.core.manifest.rules import (
    count_array,
    count_chunks,
    count_leaf_chunks,
    count_pieces,
)
from xckpt.errors import PlanError


def check_many(manifest: Manifest, where: str, *, confirmed: bool, memory_bytes: int) -> None:
    """Refuse a planned save of more than a million objects; warn if a load would be refused.

    Args:
        manifest: what the save would commit.
        where: the checkpoint, for the warning.
        confirmed: whether the caller wants that many objects.
        memory_bytes: what a load may take by default.

    Raises:
        PlanError: there are more objects, and that is not confirmed.
    """
    if not confirmed:
        check_objects(manifest)
    if (size := load_bytes(manifest)) > memory_bytes:
        pieces = many_pieces(manifest)
        warnings.warn(
            f"{where}: a rank that loads all of it needs LoadOptions(memory_bytes={size:,}) "
            f"or more, for its lists of {count_chunks(manifest):,} chunks; with the default of "
            f"{memory_bytes:,} the load is refused" + (f"; {pieces}" if pieces else ""),
            UserWarning,
            stacklevel=4,
        )


def load_bytes(manifest: Manifest) -> int:
    """The ``memory_bytes`` that a load of all tensors on one rank asks for, besides elements.

    Example:
        >>> load_bytes(Manifest((TensorEntry("w", "int8", (1 << 20,), (4,)),), "")) >> 20
        64
    """
    tensors = [leaf for leaf in manifest.leaves if isinstance(leaf, TensorEntry)]
    arrays = sum(1 if leaf.pieces is None else len(leaf.pieces) for leaf in tensors)
    # A leaf of one chunk is in no list of chunks.
    counts = ((count_leaf_chunks(leaf), leaf.pieces) for leaf in tensors)
    chunks = sum(count for count, pieces in counts if pieces is not None or count > 1)
    listed = chunks * REQUEST_BYTES + arrays * DESTINATION_BYTES if chunks else 0
    body = memoryview(encode_body(manifest))
    return max(listed, decoded_bytes(body), described_bytes(manifest))


def count_leaf_objects(leaf: Entry, pack_bytes: int) -> int:
    """How many files, or keys of a bucket, the chunks of a leaf are that lie in no pack."""
    if isinstance(leaf, ValueEntry):
        return 0
    if isinstance(leaf, TensorEntry) and leaf.pieces is not None:
        return leaf.pieces.objects(pack_bytes // item_size(leaf.dtype))
    chunks, is_packed = count_array(leaf, pack_bytes)
    if isinstance(leaf, TensorEntry) and leaf.shard is not None:
        return count_cells(leaf.shape, leaf.shard)
    return 0 if is_packed else chunks


def check_objects(manifest: Manifest) -> None:
    """Refuse a save of more than a million objects.

    Raises:
        PlanError: there are more.

    Example:
        >>> many = Manifest((TensorEntry("w", "int8", (3_000_000,), (2,)),), "")
        >>> check_objects(many)
        Traceback (most recent call last):
        ...
        xckpt.errors.PlanError: the save would write 1,500,000 objects, files or keys of a bucket, \
of which w alone has 1,500,000 in chunks of (2,): raise chunk_bytes, set pack_bytes or \
shard_bytes, or confirm more than 1,000,000 by SaveOptions(many_objects=True)
    """
    counts = [count_leaf_objects(leaf, manifest.pack_bytes) for leaf in manifest.leaves]
    if (total := sum(counts)) > MANY_OBJECTS:
        worst = manifest.leaves[counts.index(max(counts))]
        raise PlanError(
            f"the save would write {total:,} objects, files or keys of a bucket, of which "
            f"{worst.name or 'the root'} alone has {max(counts):,} in {_cut(worst)}: raise "
            f"chunk_bytes, set pack_bytes or shard_bytes, or confirm more than {MANY_OBJECTS:,} by "
            "SaveOptions(many_objects=True)"
        )


def _cut(leaf: Entry) -> str:
    """How a leaf is cut into objects, in words."""
    if isinstance(leaf, TensorEntry):
        if isinstance(leaf.pieces, Pieces):
            return f"{len(leaf.pieces):,} pieces"
        return f"chunks of {leaf.shard or leaf.chunk}"
    return f"chunks of {leaf.chunk} bytes" if isinstance(leaf, BytesEntry) else "one"


def many_pieces(manifest: Manifest) -> str:
    """How many pieces there are and what can be done about it; empty if there are none.

    Example:
        >>> cut = Pieces.listed([((0,), (3,), (3,)), ((3,), (1,), (1,))])
        >>> many_pieces(Manifest((TensorEntry("w", "int8", (4,), pieces=cut),), ""))[:42]
        '2 pieces, each a zarr array; w alone has 2'
    """
    pieces = count_pieces(manifest)
    if not pieces:
        return ""
    tensors = (leaf for leaf in manifest.leaves if isinstance(leaf, TensorEntry))
    worst = max(tensors, key=lambda leaf: len(leaf.pieces or ()))
    return (
        f"{pieces:,} pieces, each a zarr array; {worst.name[:80] or 'the root'} alone has "
        f"{len(worst.pieces or ()):,}: shard evenly, in blocks of one size or of multiples of one, "
        f"and a leaf is one array"
    )
