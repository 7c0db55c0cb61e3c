"""The keys of a bucket, and a refusal of Google's storage that looks like none.

TensorStore takes the error that Google's storage answers to a listing, which is JSON too, for the
end of the listing. Expired credentials would make a run look empty, and a training begin anew;
those that expire between two pages, or a limit of requests, would hide its newest steps.

So each listing there is confirmed by another one, from its last key on: that key must be listed,
and none behind it. If there is no key, it is asked again, and one that nobody writes is read: that
is refused too, and seen.
"""

from __future__ import annotations

from typing import Final

import tensorstore as ts

from xckpt.errors import StorageError
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
        StorageError: the storage gave no answer in time, or does not list a key that is there.
        OSError | ValueError | RuntimeError: it refused; see `storage_errors`.

    Example:
        >>> from xckpt.storage.location import open_store
        >>> where = Location.parse("memory://listed-keys")
        >>> _ = open_store(where).write("b", b"").result()
        >>> listed(open_store(where), where)
        [b'b']
    """
    within = within or ts.KvStore.KeyRange()
    keys = answer(store.list(within), where)
    if where.driver != "gcs":
        return keys
    if not keys:
        again = store.list(within)
        answer(store.read(NOBODYS), where)
        keys = answer(again, where)
    while keys:
        last = max(keys)
        more = answer(store.list(ts.KvStore.KeyRange(last, within.exclusive_max)), where)
        behind = [key for key in more if key > last]
        if last not in more:
            _check_gone(store, where, last)
            # Others are deleting the last keys just now: what is left is listed from further ahead.
            keys = sorted(keys)[: len(keys) // 2] or answer(store.list(within), where)
        elif behind:
            keys += behind
        else:
            break
    return keys


def _check_gone(store: ts.KvStore, where: Location, key: bytes) -> None:
    """Refuse a listing that lacks a key which is there."""
    if answer(store.read(key, byte_range=slice(0, 0)), where).state == "value":
        raise StorageError(
            f"{where}: the bucket does not list {key.decode('utf-8', 'replace')}, which is there: "
            f"these credentials may not list any more (storage.objects.list), or it has too many "
            f"requests: get new ones, or try again"
        )
