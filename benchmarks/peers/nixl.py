"""NIXL over UCX: a prepared write with a notification. Paths: shm (posix, cma), tcp."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# This file must not shadow the package with the same name.
sys.path[0:1] = []
sys.path.append(str(Path(__file__).parent))

import pair  # noqa: E402


class Nixl:
    """One agent."""

    def __init__(self, ends: pair.Pair, path: str) -> None:
        os.environ["UCX_TLS"] = "sm,self" if path == "shm" else "tcp,self"
        if path == "tcp":
            os.environ["UCX_NET_DEVICES"] = "lo"
        # UCX must be loaded after the fork and after its variables are set.
        from nixl_cu12 import _bindings as nixl

        self.nixl, self.pair = nixl, ends
        self.agent = nixl.nixlAgent(f"rank {ends.rank}", nixl.nixlAgentConfig(False))
        self.backend = self.agent.createBackend("UCX", {"ucx_error_handling_mode": "none"})
        memory = [(array.ctypes.data, len(array), 0, b"") for array in (ends.source, ends.inbox)]
        self.agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, memory), [self.backend])
        its_metadata, self.peer_inbox = ends.exchange(
            (self.agent.getLocalMD(), ends.inbox.ctypes.data)
        )
        self.peer = self.agent.loadRemoteMD(its_metadata)
        if isinstance(self.peer, bytes):
            self.peer = self.peer.decode()
        self.prepared: dict[int, int] = {}
        self.in_flight: int | None = None
        self.notifications = 0
        ends.progress = self.progress

    def prepare(self, offsets: list[int], length: int) -> None:
        while self.in_flight is not None:
            self.progress()
        for request in self.prepared.values():
            self.agent.releaseXferReq(request)
        self.prepared = {offset: self.request(offset, length) for offset in offsets}

    def request(self, offset: int, length: int) -> int:
        source = [(self.pair.source.ctypes.data + offset, length, 0)]
        target = [(self.peer_inbox + offset, length, 0)]
        request: int = self.agent.createXferReq(
            self.nixl.NIXL_WRITE,
            self.nixl.nixlXferDList(self.nixl.DRAM_SEG, source),
            self.nixl.nixlXferDList(self.nixl.DRAM_SEG, target),
            self.peer,
            "m",
            [self.backend],
        )
        return request

    def send(self, offset: int, length: int) -> None:
        while self.in_flight is not None:
            self.progress()
        self.in_flight = self.prepared[offset]
        self.agent.postXferReq(self.in_flight, "m")

    def receive(self) -> None:
        while not self.notifications:
            self.progress()
        self.notifications -= 1

    def progress(self) -> None:
        found = self.agent.getNotifs({}, [])
        self.notifications += sum(len(messages) for messages in found.values())
        request = self.in_flight
        if request is not None and self.agent.getXferStatus(request) != self.nixl.NIXL_IN_PROG:
            self.in_flight = None


if __name__ == "__main__":
    pair.run("NIXL", Nixl)
