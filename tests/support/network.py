"""Two hosts in network namespaces, and the network between them, which loses and delays packets.

`Network` makes three namespaces: a host at each end and a relay in the middle, this module as a
process, which copies packets from one cable to the other. How it treats them stands in a file that
any process may write at any time (`Weather`).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

SIOCETHTOOL = 0x8946
OFFLOADS = (0x15, 0x17, 0x1F, 0x24, 0x2C)
"""Of cables that are emulated: receive and transmit checksums, TSO, GSO, GRO; all are turned off,
so that each packet is whole, and small enough."""
LONGEST = 1 << 16


@dataclass(frozen=True)
class Weather:
    """How packets fare on the way from one host to the other, in each direction."""

    loss: float = 0.0
    """The share of packets that is lost."""
    lost_from: str = "ab"
    """The hosts whose packets are lost."""
    delay: float = 0.0
    """Seconds that each packet takes."""

    def write(self, to: Path) -> None:
        """Have the network be so from now on."""
        new = to.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(asdict(self)))
        new.rename(to)


class Network:
    """Hosts ``a`` and ``b``, and what is between them.

    Raises:
        OSError, subprocess.CalledProcessError: this user, or this system, makes no namespaces.
    """

    def __init__(self, folder: Path) -> None:
        self.weather = folder / "weather.json"
        mark = f"x{os.getpid()}"
        self.hosts = {side: f"{mark}{side}" for side in "ab"}
        self.addresses = {"a": "10.99.7.1", "b": "10.99.7.2"}
        self._relay_host = f"{mark}r"
        self._stack = contextlib.ExitStack()
        Weather().write(self.weather)
        try:
            self._make(mark)
        except BaseException:
            self._stack.close()
            raise

    def _make(self, mark: str) -> None:
        for name in (*self.hosts.values(), self._relay_host):
            _ip("netns", "add", name)
            self._stack.callback(_ip, "netns", "del", name)
        for side, name in self.hosts.items():
            near, far = f"{mark}{side}0", f"{mark}{side}1"
            _ip(
                "link", "add", near, "netns", name, "type", "veth", "peer", far, "netns", mark + "r"
            )
            _ip("-n", name, "addr", "add", f"{self.addresses[side]}/24", "dev", near)
            for where, link in ((name, near), (name, "lo"), (self._relay_host, far)):
                _ip("-n", where, "link", "set", link, "up")
        self.links = {side: f"{mark}{side}0" for side in "ab"}
        for side, name in self.hosts.items():
            self._within(name, "plain", f"{mark}{side}0").wait(30)
        relay = self._within(self._relay_host, "relay", f"{mark}a1", f"{mark}b1", str(self.weather))
        self._stack.callback(relay.wait)
        self._stack.callback(relay.kill)
        ready = self.weather.with_name("relay is ready")
        until = time.monotonic() + 30
        while not ready.exists():
            assert relay.poll() is None and time.monotonic() < until, "the relay does not start"
            time.sleep(0.01)

    def _within(self, name: str, *args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "tests.support.network", *args]
        )

    def run(self, side: str, code: str, *args: str) -> subprocess.Popen[str]:
        """Start Python code on a host; what it writes is to be read from ``stdout``."""
        command = ["ip", "netns", "exec", self.hosts[side], sys.executable, "-W", "ignore"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.links[side]}
        return subprocess.Popen(
            [*command, "-c", code, *args], stdout=subprocess.PIPE, text=True, env=environment
        )

    def close(self) -> None:
        """Remove all of it."""
        self._stack.close()


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def _make_plain(link: str) -> None:
    """Turn off what an emulated cable leaves to hardware that it has not."""
    with socket.socket() as probe:
        for command in OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", link.encode(), value.buffer_info()[0])
            with contextlib.suppress(OSError):
                fcntl.ioctl(probe, SIOCETHTOOL, request)


def _relay(links: dict[str, str], weather: Path) -> None:
    """Carry packets between two links until this process is killed."""
    ends: dict[str, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for side, link in links.items():
        _make_plain(link)
        ends[side] = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        ends[side].bind((link, 0))
        selector.register(ends[side], selectors.EVENT_READ, side)
    weather.with_name("relay is ready").touch()
    now, looked, chance = Weather(), 0.0, random.Random(7)
    waiting: list[tuple[float, int, str, bytes]] = []
    count = 0
    while True:
        due = waiting[0][0] - time.monotonic() if waiting else 0.05
        for key, _ in selector.select(max(0.0, min(due, 0.05))):
            packet, (_, _, kind, *_) = key.fileobj.recvfrom(LONGEST)  # type: ignore[union-attr]
            if kind == socket.PACKET_OUTGOING:
                continue
            if time.monotonic() > looked + 0.01:
                looked, now = time.monotonic(), Weather(**json.loads(weather.read_text()))
            if key.data in now.lost_from and chance.random() < now.loss:
                continue
            count += 1
            to = "b" if key.data == "a" else "a"
            heapq.heappush(waiting, (time.monotonic() + now.delay, count, to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                ends[to].send(packet)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        _make_plain(sys.argv[2])
    else:
        _relay({"a": sys.argv[2], "b": sys.argv[3]}, Path(sys.argv[4]))
