"""How the ranks of a group find each other: the coordinator invites, the others connect.

1. The coordinator listens on a free TCP port of all its interfaces. Its `Invitation` holds the
   port, the addresses at which it may be reached, and a random token. How the ranks get it is the
   framework's business (a key-value store).
2. Another rank tries the addresses in turn, first those that are likely: loopback on the same
   machine, then the interface named for gloo, then the one that reaches the framework's store.
3. It shows one half of the token, and the coordinator answers with the other: so neither accepts a
   foreign process as a rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from xckpt.core.struct_types import prepare_structs
from xckpt.engine.ranks.connection import Frame, Kind
from xckpt.engine.ranks.links import TOKEN_BYTES, Links, no_delay

CONNECT_SECONDS: Final = 3.0
"""How long one address is tried; if nothing listens there, that is known at once."""

SIOCGIFADDR: Final = 0x8915
"""Linux: the request for an interface's IPv4 address."""


class Invitation(msgspec.Struct, array_like=True, frozen=True):
    """Where and how to reach the coordinator."""

    token: bytes
    host: str
    port: int
    addresses: list[str]


prepare_structs(Invitation)


def host_identity() -> str:
    """Equal for processes that can reach each other's local sockets and memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text().strip() if boot.exists() else ""
    # Linux: containers of one machine may have networks of their own.
    network = Path("/proc/self/ns/net")
    place = os.stat(network if network.exists() else tempfile.gettempdir())
    return f"{socket.gethostname()}/{started}/{place.st_dev}/{place.st_ino}"


def invite(reaches: tuple[str, int] | None = None) -> tuple[Links, Invitation]:
    """Listen, and return what the other ranks need to connect; see `listen`.

    Raises:
        OSError: there is no free port.
    """
    listener, invitation = listen(reaches)
    return Links(invitation.token, listener), invitation


def listen(reaches: tuple[str, int] | None = None) -> tuple[socket.socket, Invitation]:
    """A socket that listens on all interfaces, and what others need to connect.

    Args:
        reaches: host and port of a machine that all ranks reach; the address from which this one
            reaches it is likely to be good.

    Raises:
        OSError: there is no free port.
    """
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
        )
    else:
        listener = socket.create_server(("", 0), backlog=4096)
    token = secrets.token_bytes(TOKEN_BYTES)
    addresses = list(dict.fromkeys(_addresses(reaches)))
    port: int = listener.getsockname()[1]
    return listener, Invitation(token, host_identity(), port, addresses)


def reach(invitation: Invitation, rank: int, coordinator: int) -> Links:
    """Connect to the coordinator; it answers once it takes part in a step.

    Raises:
        ConnectionError: no address can be reached; the message lists them.
    """
    links = Links(invitation.token)
    links.add(coordinator, connect(invitation))
    links.send(coordinator, Frame(Kind.HELLO, 0, rank, links.first))
    return links


def connect(invitation: Invitation) -> socket.socket:
    """A connection to where an invitation says.

    Raises:
        ConnectionError: no address can be reached; the message lists them.
    """
    addresses = list(invitation.addresses)
    if invitation.host == host_identity():
        addresses.insert(0, "localhost")
    problems: list[str] = []
    for address in addresses:
        try:
            peer = socket.create_connection((address, invitation.port), CONNECT_SECONDS)
        except OSError as error:
            problems.append(f"{address}: {error}")
            continue
        no_delay(peer)
        return peer
    raise ConnectionError(f"cannot connect to port {invitation.port} of {'; '.join(problems)}")


def _addresses(reaches: tuple[str, int] | None) -> Iterator[str]:
    """The addresses at which this machine may be reached, the likely ones first; some twice."""
    interfaces = dict(_interfaces())
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name in interfaces:
            yield interfaces[name]
    if reaches is not None:
        with contextlib.suppress(OSError):
            yield _seen_from(*reaches)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        yield from (str(where[0]) for *_, where in found)
    yield from interfaces.values()


def _seen_from(host: str, port: int) -> str:
    """The address from which this machine sends to another; nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _interfaces() -> Iterator[tuple[str, str]]:
    """Linux: each interface and its IPv4 address."""
    if not sys.platform.startswith("linux"):
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                yield name, socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
