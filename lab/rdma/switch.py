"""Ethernet switch for one guest network, with lost and delayed frames.

`Switch` forwards by earlier frames' source addresses and has no clock and no I/O. `Wire` runs one
over datagram sockets in a thread. Lost frames follow from a seed, by frame order at each port.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["FRAME", "LIMIT", "Switch", "Wire"]

#: Longest frame in bytes: the guests' MTU and Ethernet's header fit.
FRAME: Final = 1 << 14
#: Frames that wait at a port whose guest does not receive; later ones are lost.
LIMIT: Final = 8192
#: Frames received from a port before the next port's turn.
BURST: Final = 64


class Switch:
    """Forwards frames between ports.

    Args:
        ports: port count.
        drop: probability that a frame is lost on its way to a port, 0 to 1.
        delay_s: seconds from a frame's arrival to its departure.
        seed: seed for the lost frames.

    Attributes:
        drop: same as the argument; may be changed at any time.
        delay_s: same as the argument; may be changed at any time.
        forwarded: frames that have departed.
        dropped: frames lost on purpose.
        overflows: frames lost at full ports.

    Raises:
        LabError: if a value is out of range.
    """

    def __init__(self, ports: int, drop: float = 0.0, delay_s: float = 0.0, seed: int = 0) -> None:
        if ports < 1:
            raise LabError(f"ports {ports}: expected at least 1")
        if not 0 <= drop <= 1:
            raise LabError(f"drop {drop}: expected a probability from 0 to 1")
        if not 0 <= delay_s <= 10:
            raise LabError(f"delay_s {delay_s}: expected 0 to 10 seconds")
        self.ports = ports
        self.drop = drop
        self.delay_s = delay_s
        self.forwarded = self.dropped = self.overflows = 0
        self.chance = [random.Random(f"{seed}/{port}") for port in range(ports)]
        self.port_of: dict[bytes, int] = {}
        self.delayed: list[tuple[float, int, int, bytes]] = []
        self.order = itertools.count()

    def receive(self, port: int, frame: bytes, now: float) -> None:
        """A frame that arrives at a port."""
        if len(frame) < 14:
            return
        self.port_of[frame[6:12]] = port
        known = self.port_of.get(frame[:6])
        others = range(self.ports) if known is None else (known,)
        for to in others:
            if to == port:
                continue
            if self.chance[port].random() < self.drop:
                self.dropped += 1
            else:
                item = (now + self.delay_s, next(self.order), to, frame)
                heapq.heappush(self.delayed, item)

    def departures(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Ports and frames due by now, in time order."""
        while self.delayed and self.delayed[0][0] <= now:
            _, _, port, frame = heapq.heappop(self.delayed)
            yield port, frame

    def next_departure(self) -> float | None:
        """Next departure time."""
        return self.delayed[0][0] if self.delayed else None


class Wire(threading.Thread):
    """A switch over connected datagram sockets, one for each port, until `close`.

    Args:
        switch: the switch, with as many ports as sockets.
        sockets: closed at the end.
    """

    def __init__(self, switch: Switch, sockets: Sequence[socket.socket]) -> None:
        super().__init__(name="weft-lab-switch", daemon=True)
        self.switch = switch
        self.sockets = list(sockets)
        self.waiting: list[deque[bytes]] = [deque() for _ in sockets]
        self.ending, self.end = socket.socketpair()
        self.epoll = select.epoll()
        self.epoll.register(self.ending, select.EPOLLIN)
        self.ports = {each.fileno(): port for port, each in enumerate(self.sockets)}
        for each in self.sockets:
            each.setblocking(False)
            self.epoll.register(each, select.EPOLLIN)

    def close(self) -> None:
        """End the thread, and close the sockets."""
        self.end.close()
        if self.is_alive():
            self.join()
        self.epoll.close()
        for each in (*self.sockets, self.ending):
            each.close()

    def run(self) -> None:
        """Forward frames until `close`."""
        while True:
            due = self.switch.next_departure()
            timeout = None if due is None else max(due - time.monotonic(), 0)
            for descriptor, events in self.epoll.poll(timeout):
                if descriptor == self.ending.fileno():
                    return
                port = self.ports[descriptor]
                if events & select.EPOLLOUT:
                    self.flush(port)
                if events & ~select.EPOLLOUT and not self.receive(port):
                    # The guest has ended.
                    self.epoll.unregister(descriptor)
            for port, frame in self.switch.departures(time.monotonic()):
                self.send(port, frame)

    def receive(self, port: int) -> bool:
        """Take frames from a port; false if its other end is closed."""
        for _ in range(BURST):
            try:
                frame = self.sockets[port].recv(FRAME)
            except BlockingIOError:
                break
            except OSError:
                return False
            self.switch.receive(port, frame, time.monotonic())
        return True

    def send(self, port: int, frame: bytes) -> None:
        """Send a frame, behind those that wait for the guest."""
        waiting = self.waiting[port]
        if len(waiting) >= LIMIT:
            self.switch.overflows += 1
            return
        waiting.append(frame)
        if len(waiting) == 1:
            self.flush(port)

    def flush(self, port: int) -> None:
        """Send the frames that wait at a port, as far as the guest receives them."""
        waiting = self.waiting[port]
        events = select.EPOLLIN
        try:
            while waiting:
                self.sockets[port].send(waiting[0])
                waiting.popleft()
                self.switch.forwarded += 1
        except BlockingIOError:
            events |= select.EPOLLOUT
        except OSError:
            waiting.clear()
        # No longer registered after its guest has ended.
        with contextlib.suppress(FileNotFoundError):
            self.epoll.modify(self.sockets[port], events)
