"""Opening one zarr array of a checkpoint with TensorStore, on metadata that we made ourselves.

No zarr.json is read (``assume_metadata``): what a checkpoint holds there is compared elsewhere,
never trusted. Missing chunks are errors and chunks of zeros are stored: absence never means data.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import tensorstore as ts

from xckpt.core.manifest import ZarrArray
from xckpt.core.zarr_json import array_metadata

__all__ = ["open_array"]


def open_array(root: ts.KvStore, array: ZarrArray, codecs: tuple[str, ...]) -> ts.TensorStore:
    """The array ``array`` of the checkpoint whose root group is at ``root``.

    Raises:
        ValueError: TensorStore refuses the metadata (a defect of ours).
    """
    alike = replace(array, leaf="", number=0, path="", offset=(), first=0, piece_of=None)
    return ts.open(_spec(alike, codecs), kvstore=root / f"{array.path}/").result()


@functools.lru_cache(maxsize=1024)
def _spec(array: ZarrArray, codecs: tuple[str, ...]) -> ts.Spec:
    """What arrays of one dtype, shape and grid have in common; parsing it takes a while."""
    metadata = array_metadata(array, codecs)
    del metadata["attributes"], metadata["storage_transformers"]
    return ts.Spec(
        {
            "driver": "zarr3",
            "metadata": metadata,
            "open": True,
            "assume_metadata": True,
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
    )
