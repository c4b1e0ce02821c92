"""Two hosts in network namespaces, between which packets are late or lost.

Each host has a network device of which this process is the cable: it reads packets
from one and writes them to the other. It needs Linux, root, `ip` and /dev/net/tun, and
not the kernel's own emulator of networks, which few kernels of containers have.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def are_possible():
    return (
        hasattr(os, "geteuid")
        and os.geteuid() == 0
        and os.path.exists("/dev/net/tun")
        and shutil.which("ip") is not None
    )


class Hosts:
    """Two hosts.

    Attributes:
      packets: The number of packets between them.
      lost: The number of those that were dropped.
    """

    def __init__(self, delay, loss):
        self.packets = self.lost = 0
        self._delay, self._loss = delay, loss
        self._names = [f"radazo{os.getpid()}{end}" for end in "ab"]
        self._stopped = threading.Event()

    def command(self, host, *command):
        """A command on one of the hosts."""
        return ["ip", "netns", "exec", self._names[host], *map(str, command)]

    def start(self):
        self._ends = [self._connected(host) for host in range(2)]
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def stop(self):
        self._stopped.set()
        self._thread.join()
        for end, name in zip(self._ends, self._names, strict=True):
            os.close(end)
            _ip("netns", "del", name)

    def _connected(self, host):
        """A host, and the end of its cable."""
        name, mine, peer = self._names[host], ADDRESSES[host], ADDRESSES[1 - host]
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        device = f"rz{os.getpid() % 10**6}{host}"
        flags = struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(end, _TUNSETIFF, flags)
        _ip("netns", "add", name)
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "addr", "add", mine, "peer", peer, "dev", device)
        for each in ("lo", device):
            _ip("-n", name, "link", "set", each, "up")
        return end

    def _carry(self):
        rng, waiting = random.Random(0), []
        other = dict(zip(self._ends, self._ends[::-1], strict=True))
        while not self._stopped.is_set():
            until = waiting[0][0] - time.monotonic() if waiting else 0.05
            for end in select.select(self._ends, [], [], min(max(until, 0), 0.05))[0]:
                with contextlib.suppress(BlockingIOError):
                    while packet := os.read(end, 1 << 16):
                        self.packets += 1
                        if rng.random() < self._loss:
                            self.lost += 1
                            continue
                        at = time.monotonic() + self._delay
                        item = (at, self.packets, other[end], packet)
                        heapq.heappush(waiting, item)
            while waiting and waiting[0][0] <= time.monotonic():
                *_, end, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # Its queue is full: lost as well.
                    os.write(end, packet)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def hosts(delay, loss):
    """Two hosts, the packets between which take so many seconds, or are lost."""
    found = Hosts(delay, loss)
    found.start()
    try:
        yield found
    finally:
        found.stop()
