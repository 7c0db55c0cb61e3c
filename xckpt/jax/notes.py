"""What a rank that suspects others, gives up or leaves says: notes in the key-value store of JAX.

1. A note lies under the number of the save or load and the rank that wrote it.
2. A rank that waits looks now and then at the notes. It raises what a rank said that has given up
   or left, and hears of the ranks that others have waited for in vain.
3. Writing takes no longer than a moment, also when the process that has the service is stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec

from xckpt.engine.ranks.patience import GRACE_SECONDS
from xckpt.engine.ranks.waiting import SILENT, given_up
from xckpt.errors import RankFailure
from xckpt.jax.service import InTime, silent_ranks

_encode = msgspec.msgpack.Encoder().encode
_ranks = msgspec.msgpack.Decoder(list[int]).decode
_failures = msgspec.msgpack.Decoder(list[RankFailure]).decode


class Notes:
    """The notes of one group, as one rank leaves and finds them.

    Args:
        client: the coordination service.
        prefix: what the keys of the group begin with.
        rank: the rank that leaves notes.
        timeout: seconds that a silent rank is waited for.
    """

    def __init__(self, client: InTime, prefix: str, rank: int, timeout: float) -> None:
        self._client = client
        self._prefix = prefix
        self._rank = rank
        self._timeout = timeout

    def leave(self, operation: int, failures: Sequence[RankFailure]) -> None:
        """Say which ranks are lost or have left, as far as that is quickly done."""
        self._write(f"{self._place(operation)}/end/{self._rank}", list(failures))

    def suspect(self, operation: int, ranks: Sequence[int]) -> None:
        """Say for which ranks this one has waited in vain elsewhere, if that is quickly done."""
        self._write(f"{self._place(operation)}/suspects/{self._rank}", list(ranks))

    def look(self, operation: int) -> set[int]:
        """The ranks that others suspect.

        Raises:
            RanksFailedError: a rank has given up or left; the failures are those that it named.
        """
        suspects: set[int] = set()
        for key, note in self._client.key_value_dir_get_bytes(self._place(operation)):
            if key.rpartition("/")[0].endswith("/suspects"):
                suspects.update(_ranks(note))
                continue
            failures = _failures(note)
            if failures[0].kind == SILENT:
                raise silent_ranks([failure.rank for failure in failures], self._timeout)
            raise given_up(failures)
        return suspects

    def _write(self, key: str, value: object) -> None:
        self._client.until = time.monotonic() + GRACE_SECONDS / 2
        with contextlib.suppress(RuntimeError):
            self._client.key_value_set_bytes(key, _encode(value))

    def _place(self, operation: int) -> str:
        return f"{self._prefix}/{operation}/note"
