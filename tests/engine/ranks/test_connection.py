"""What comes over a connection is frames or its end, whatever was lost on the line."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.engine.ranks.connection import HEADER, Connection, Frame, Kind


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Connection]]:
    one, other = socket.socketpair()
    connection = Connection(other)
    yield one, connection
    one.close()
    connection.close()


@pytest.mark.parametrize("length", [1 << 45, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_length_beyond_all_memory_ends_it(
    ends: tuple[socket.socket, Connection], length: int
) -> None:
    one, connection = ends
    one.send(HEADER.pack(Kind.MESSAGE, 0, 1, 1, length) + b"what came behind it")
    connection.receive()
    assert connection.end == "it sent bytes that are not a message"
    assert not connection.frames


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=4),
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_frames_arrive_in_whatever_pieces(contents: list[bytes], pieces: list[int]) -> None:
    one, other = socket.socketpair()
    connection = Connection(other)
    stream = b"".join(
        HEADER.pack(Kind.MESSAGE, step + 2, 1, step, len(content)) + content
        for step, content in enumerate(contents)
    )
    turn = 0
    while stream:
        size = pieces[turn % len(pieces)]
        one.send(stream[:size])
        connection.receive()
        stream, turn = stream[size:], turn + 1
    one.close()
    connection.receive()
    expected = [Frame(Kind.MESSAGE, 1, at, each, at + 2) for at, each in enumerate(contents)]
    assert list(connection.frames) == expected
    assert connection.end == "it closed the connection"
    connection.close()
