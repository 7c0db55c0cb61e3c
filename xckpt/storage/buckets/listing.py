"""The keys of a bucket, and a refusal of Google's storage that looks like none.

TensorStore takes the error that Google's storage answers to a listing, which is JSON too, for the
end of the listing: expired credentials would make a run look empty, and a training begin anew. So a
key that nobody writes is read after each listing there: that is refused too, and seen.
"""

from __future__ import annotations

from typing import Final

import tensorstore as ts

from xckpt.storage.location import Location, answer

NOBODYS: Final = "xckpt.unlisted"
"""A key that nobody writes."""


def listed(
    store: ts.KvStore, where: Location, within: ts.KvStore.KeyRange | None = None
) -> list[bytes]:
    """The keys of a store, or those in a range of them.

    Args:
        store: at the place.
        where: for errors.
        within: which keys.

    Raises:
        StorageError: the storage gave no answer in time.
        OSError | ValueError | RuntimeError: it refused; see `storage_errors`.

    Example:
        >>> from xckpt.storage.location import open_store
        >>> where = Location.parse("memory://listed")
        >>> _ = open_store(where).write("b", b"").result()
        >>> listed(open_store(where), where)
        [b'b']
    """
    keys = answer(store.list() if within is None else store.list(within), where)
    if where.driver == "gcs":
        answer(store.read(NOBODYS), where)
    return keys
