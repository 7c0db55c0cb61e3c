"""How the ranks of a group find each other: the coordinator invites, the others connect.

1. The coordinator listens on a free TCP port of all its interfaces. Its `Invitation` holds the
   port, the addresses at which it may be reached, and a random token. How the ranks get it is the
   framework's business (a key-value store).
2. Another rank tries the addresses in turn, first those that are likely: loopback on the same
   machine, then the interface named for gloo, then the one that reaches the framework's store.
3. It shows one half of the token, and the coordinator answers with the other: so neither accepts a
   foreign process as a rank.

Each connection is an open file of the coordinator, and most systems give a process 1,024 at first.
So the coordinator raises that limit before it invites more ranks (`allow_open_files`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from xckpt.core.struct_types import prepare_structs
from xckpt.engine.ranks.connection import Frame, Kind
from xckpt.engine.ranks.links import BACKLOG, TOKEN_BYTES, Links, no_delay

CONNECT_SECONDS: Final = 3.0
"""How long one address is tried; if nothing listens there, that is known at once."""

RUSH_SECONDS: Final = 60.0
"""How long a coordinator that does not answer is tried, at most: thousands may call it at once."""

SPARE_FILES: Final = 256
"""Files that a coordinator should be able to open besides its connections."""

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


def invite(ranks: int, reaches: tuple[str, int] | None = None) -> tuple[Links, Invitation]:
    """Listen, and return what the other ranks need to connect; see `listen`.

    Args:
        ranks: how many there are.
        reaches: see `listen`.

    Raises:
        OSError: there is no free port, or this process must not open so many files.
    """
    allow_open_files(ranks)
    listener, invitation = listen(reaches)
    return Links(invitation.token, listener), invitation


def allow_open_files(more: int) -> None:
    """Raise this process's limit of open files, if it needs that to open so many more.

    Raises:
        OSError: the system does not allow it; the message says how it would.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    needed = more
    with contextlib.suppress(OSError):
        needed += len(os.listdir("/dev/fd"))
    if needed > most:
        raise OSError(
            errno.EMFILE,
            f"{more:,} ranks connect to this one, which needs {needed + SPARE_FILES:,} open files; "
            f"its hard limit is {hard:,}. Raise it where the job is started: "
            f"`ulimit -n {needed + SPARE_FILES}`, LimitNOFILE= of systemd, --ulimit of docker",
        )
    wanted = min(needed + SPARE_FILES, most)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with contextlib.suppress(ValueError):  # macOS: it has a limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
            ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    else:
        listener = socket.create_server(("", 0), backlog=BACKLOG)
    token = secrets.token_bytes(TOKEN_BYTES)
    addresses = list(dict.fromkeys(_addresses(reaches)))
    port: int = listener.getsockname()[1]
    return listener, Invitation(token, host_identity(), port, addresses)


def reach(invitation: Invitation, rank: int, coordinator: int, seconds: float) -> Links:
    """Connect to the coordinator; it answers once it takes part in a step.

    Raises:
        ConnectionError: no address can be reached; the message lists them.
    """
    links = Links(invitation.token)
    links.add(coordinator, connect(invitation, min(seconds / 2, RUSH_SECONDS)))
    links.send(coordinator, Frame(Kind.HELLO, 0, rank, links.first))
    return links


def connect(invitation: Invitation, seconds: float = 0.0) -> socket.socket:
    """A connection to where an invitation says.

    Args:
        invitation: of the rank that listens.
        seconds: how long addresses that do not answer are tried again: so many may connect at once
            that the system drops some.

    Raises:
        ConnectionError: no address can be reached; the message lists them.
    """
    addresses = list(invitation.addresses)
    if invitation.host == host_identity():
        addresses.insert(0, "localhost")
    until, goes_on = time.monotonic() + seconds, True
    problems: dict[str, OSError] = {}
    while goes_on:
        for address in addresses:
            try:
                peer = socket.create_connection((address, invitation.port), CONNECT_SECONDS)
            except OSError as error:
                problems[address] = error
                continue
            no_delay(peer)
            return peer
        dropped = any(isinstance(error, TimeoutError) for error in problems.values())
        goes_on = dropped and time.monotonic() < until
    tried = "; ".join(f"{address}: {error}" for address, error in problems.items())
    raise ConnectionError(f"cannot connect to port {invitation.port} of {tried}")


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
