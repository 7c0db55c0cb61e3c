"""Frames over a socket that never blocks: what ranks send each other.

A frame is a header (kind, what the sender calls, number of the save or load, number of the step in
it, length) and its bytes. A `Connection` keeps what is still to be sent and what has come in part,
so that a wait may end at any time, by a deadline or by a KeyboardInterrupt, and the next one goes
on where it stopped.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections import deque
from enum import IntEnum
from typing import Final, NamedTuple

from xckpt.engine.ranks.waiting import NO_MESSAGE

HEADER: Final = struct.Struct("<BB2xIIQ")
AGO: Final = struct.Struct("<d")
"""The content of `Kind.ALIVE`, if it has any: seconds."""
GREETING_BYTES: Final = 256
"""The longest frame taken from a peer that has not yet shown that it belongs to the group."""
ANY_LENGTH: Final = 1 << 63
INTERRUPTED: Final = "this process was interrupted in the middle of a message"
"""Why a connection ends if an interrupt left a message half sent or received."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 0
    """The token of the group and the sender's rank; answered by the other half of the token."""
    MESSAGE = 1
    """A step's bytes."""
    LOST = 2
    """The ranks given up as lost, and why: the save or load has failed."""
    LEFT = 3
    """The sender has left the save or load, and why."""
    ALIVE = 4
    """The sender waits for others itself, or works; perhaps how long ago it made progress."""
    SUSPECTS = 5
    """Ranks that the sender has timed out on elsewhere."""
    WAITS = 6
    """The sender waits for the coordinator's bytes in this step, and owes it none."""


class Frame(NamedTuple):
    """A frame that has come."""

    kind: int
    operation: int
    """The save or load, as the sender counts them."""
    step: int
    """The step in it, as the sender counts them."""
    data: bytes
    call: int = 0
    """What the sender calls, by its place in `xckpt.engine.ranks.group.CALLS`."""


class Connection:
    """One end of a socket between two ranks.

    Args:
        peer: a connected socket; it is the connection's own from now on.
        limit: the longest frame that is taken, bytes; `ANY_LENGTH` once the peer is known. Before
            that, one frame is taken.

    Example:
        >>> here, there = map(Connection, socket.socketpair())
        >>> here.send(Frame(Kind.MESSAGE, 1, 0, b"plan"))
        >>> there.receive()
        >>> there.frames.popleft().data
        b'plan'
        >>> here.close(), there.receive(), there.end
        (None, None, 'it closed the connection')
        >>> there.close()
    """

    def __init__(self, peer: socket.socket, limit: int = ANY_LENGTH) -> None:
        peer.setblocking(False)
        self.peer = peer
        self.limit = limit
        self.rank = -1
        """The rank at the other end, once it is known."""
        self.frames: deque[Frame] = deque()
        """Frames that have come and were not yet handled."""
        self.end: str = ""
        """Why nothing more comes; empty while the connection stands."""
        self.heard: float = time.monotonic()
        """When bytes last came, or were taken after a wait; or when the other end made progress."""
        self._outgoing: deque[memoryview] = deque()
        self._incoming = memoryview(bytearray(HEADER.size))
        self._filled = 0
        self._header: tuple[int, int, int, int, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the peer has shown that it belongs to the group."""
        return self.limit == ANY_LENGTH

    @property
    def is_sending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._outgoing) and not self.end

    def send(self, frame: Frame) -> None:
        """Send a frame, or as much of it as the socket takes now: `flush` sends the rest."""
        kind, operation, step, data, call = frame
        header = memoryview(HEADER.pack(kind, call, operation, step, len(data)))
        # In one call, so that no interrupt comes between them.
        self._outgoing.extend((header, memoryview(data)) if data else (header,))
        heard = self.heard
        self.flush()
        self.heard = heard  # the kernel takes the first bytes for a process that is stopped, too

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            while self._outgoing and not self.end:
                part = self._outgoing[0]
                sent = self.peer.send(part)
                self.heard = time.monotonic()
                if sent == len(part):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = part[sent:]
        except BlockingIOError:
            pass
        except OSError:
            # `receive` takes what the peer has sent before it went, and finds its end.
            self._outgoing.clear()
        except BaseException:
            self.finish(INTERRUPTED)
            raise

    def receive(self) -> None:
        """Take what has come; whole frames go to `frames`."""
        try:
            while not self.end and (self.is_known or not self.frames):
                if self._filled < len(self._incoming):
                    count = self.peer.recv_into(self._incoming[self._filled :])
                    if not count:
                        self.finish("it closed the connection")
                        return
                    self.heard = time.monotonic()
                    self._filled += count
                if self._filled == len(self._incoming):
                    self._full()
        except BlockingIOError:
            pass
        except OSError as error:
            self.finish(error)
        except BaseException:
            self.finish(INTERRUPTED)
            raise

    def _full(self) -> None:
        """Handle a complete header, or the complete bytes behind it."""
        if self._header is None:
            self._header = HEADER.unpack(self._incoming)
            if self._header[4]:
                self._expect_content(self._header[4])
                return
            self._incoming = memoryview(b"")
        kind, call, operation, step, _ = self._header
        if kind > max(Kind):
            self.finish(NO_MESSAGE)
            return
        frame = Frame(kind, operation, step, self._incoming.tobytes(), call)
        if frame.kind == Kind.ALIVE and self.is_known and len(frame.data) == AGO.size:
            self.heard -= max(0.0, AGO.unpack(frame.data)[0])
        else:
            self.frames.append(frame)
        self._header = None
        self._expect(HEADER.size)

    def _expect_content(self, count: int) -> None:
        try:
            if count <= self.limit:
                self._expect(count)
                return
        except (MemoryError, OverflowError):
            pass  # where a line has lost bytes, other content is taken for a length
        self.finish(NO_MESSAGE)

    def _expect(self, count: int) -> None:
        self._incoming, self._filled = memoryview(bytearray(count)), 0

    def finish(self, why: object) -> None:
        """Take and send nothing more; frames that came before stay available."""
        self.end = self.end or str(why)

    def close(self) -> None:
        """Close the socket; what the kernel has taken is still sent."""
        if not self.end:
            # Closed with bytes unread, a socket resets the connection, and what was sent is lost.
            with contextlib.suppress(OSError):
                self.peer.shutdown(socket.SHUT_WR)
            self.receive()
        self.finish("it was closed here")
        self.peer.close()
