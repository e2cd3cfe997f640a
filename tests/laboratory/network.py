"""Hosts of our own: network namespaces around a router. Needs root and iproute2; touches nothing outside.

A host is cut off as in life, without a FIN or a RST: its link goes down, or the router drops what it sends or what is
sent to it. A link may also be slow and lossy; that one is a pair of TUN devices with a thread in between, because not
every kernel has netem.
"""

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from .servers import Postgres, ordinary_user_prefix

_serial = itertools.count(1)

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000


@dataclass
class Host:
    """A network namespace with one address, behind one link of the router."""

    name: str
    namespace: str
    address: str
    router: str
    wire: "Wire | None" = None
    _dropped: set[str] = field(default_factory=set)

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs another one on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def cut(self) -> None:
        """Pull the cable. Not for a slow one, whose devices must stay up."""
        _ip("-n", self.router, "link", "set", self.name, "down")

    def mute(self) -> None:
        """From now on nothing that it sends arrives; it still hears the others."""
        self._drop("from")

    def deafen(self) -> None:
        """From now on it hears nothing; the others still hear it."""
        self._drop("to")

    def isolate(self) -> None:
        """Both, with the link up: a switch in between has died."""
        self.mute()
        self.deafen()

    def heal(self) -> None:
        """Undo all of that."""
        for way in self._dropped:
            _ip("-n", self.router, "rule", "del", way, self.address, "blackhole")
        self._dropped.clear()
        _ip("-n", self.router, "link", "set", self.name, "up")

    def _drop(self, way: str) -> None:
        _ip("-n", self.router, "rule", "add", way, self.address, "blackhole")
        self._dropped.add(way)


class Network:
    """A router with hosts around it, all gone when the context ends. The caller ends what it runs there before."""

    def __init__(self) -> None:
        self._name = f"lab-{os.getpid()}-{next(_serial)}"
        self._router = f"{self._name}-router"
        self._hosts: list[Host] = []
        self._adding = threading.Lock()

    def __enter__(self) -> "Network":
        _ip("netns", "add", self._router)
        forwarding = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run(["ip", "netns", "exec", self._router, "sh", "-c", forwarding], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            if host.wire is not None:
                host.wire.close()
            _ip("netns", "del", host.namespace)
        _ip("netns", "del", self._router)

    def host(self, *, delay: float = 0.0, loss: float = 0.0) -> Host:
        """Add a host; each packet from or to it is late by `delay` seconds and lost with a probability of `loss`."""
        with self._adding:
            return self._add(delay, loss)

    def _add(self, delay: float, loss: float) -> Host:
        number = len(self._hosts) + 1
        host = Host(f"host{number}", f"{self._name}-{number}", f"10.77.{number}.2", self._router)
        gateway = f"10.77.{number}.1"
        _ip("netns", "add", host.namespace)
        self._hosts.append(host)
        if delay or loss:
            host.wire = Wire(delay, loss)
            for device, name, namespace in zip(
                host.wire.devices, (host.name, "eth0"), (self._router, host.namespace), strict=True
            ):
                _ip("link", "set", device, "netns", namespace, "name", name)
        else:
            _ip(
                *("-n", self._router, "link", "add", host.name, "type", "veth"),
                *("peer", "name", "eth0", "netns", host.namespace),
            )
        _ip("-n", self._router, "address", "add", f"{gateway}/24", "dev", host.name)
        _ip("-n", self._router, "link", "set", host.name, "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", host.namespace, "route", "add", "default", "via", gateway)
        if host.wire is not None:
            host.wire.start()
        return host


class Wire:
    """A slow and lossy link between two TUN devices."""

    def __init__(self, delay: float, loss: float) -> None:
        opened = [_tun(), _tun()]
        self.devices = [name for _, name in opened]
        self._ends = [descriptor for descriptor, _ in opened]
        self._delay = delay
        self._loss = loss
        self._random = random.Random(1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)

    def start(self) -> None:
        """To be called when both devices are up."""
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []  # due, order, where to, packet
        order = itertools.count()
        while not self._closed.is_set():
            ready, _, _ = select.select(self._ends, [], [], 0.005 if under_way else 0.1)
            for end in ready:
                packet = os.read(end, 1 << 16)
                if self._random.random() >= self._loss:
                    (other,) = (to for to in self._ends if to != end)
                    heapq.heappush(under_way, (time.monotonic() + self._delay, next(order), other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(under_way)
                os.write(to, packet)


class RemotePostgres(Postgres):
    """A PostgreSQL on a host of the network. The test looks into it by its Unix socket, which no partition cuts."""

    def __init__(self, directory: Path, binaries: Path, host: Host) -> None:
        super().__init__(directory, binaries, host.address)
        self._on = host

    def spawn(self, *command: str | Path, prefix: tuple[str, ...] = ()) -> None:
        super().spawn(*command, prefix=(*self._on.prefix, *ordinary_user_prefix(), *prefix))

    def url(self, database: str | None = None, user: str = "postgres") -> str:
        return f"postgresql://{user}@/{database or self.database}?host={self.directory}&port={self.port}"

    def remote_url(self) -> str:
        """How the hosts reach it."""
        return super().url()


def _tun() -> tuple[int, str]:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    request = fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"lab%d", IFF_TUN | IFF_NO_PI))
    return descriptor, request[:16].rstrip(b"\0").decode()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
