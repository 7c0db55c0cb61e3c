"""Opening one zarr array of a checkpoint with TensorStore, on metadata that we made ourselves.

No zarr.json is read (``assume_metadata``): what a checkpoint holds there is compared elsewhere,
never trusted. Missing chunks are errors and chunks of zeros are stored: absence never means data.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorstore as ts

from xckpt.core.manifest import ZarrArray
from xckpt.core.zarr_json import array_metadata
from xckpt.storage.location import Location, context

__all__ = ["open_array"]


def open_array(
    root: Location, array: ZarrArray, codecs: Iterable[str], *, mapped: bool = False
) -> ts.TensorStore:
    """The array ``array`` of the checkpoint whose root group is at ``root``.

    Raises:
        ValueError: TensorStore refuses the metadata (a defect of ours).
    """
    metadata = array_metadata(array, codecs)
    del metadata["attributes"], metadata["storage_transformers"]
    spec = {
        "driver": "zarr3",
        "kvstore": root.within(array.path).store_spec(),
        "metadata": metadata,
        "open": True,
        "assume_metadata": True,
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, context=context(mapped=mapped)).result()
