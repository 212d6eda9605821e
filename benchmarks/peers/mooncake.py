"""Mooncake's transfer engine: a write with a notification. Path: tcp."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# This file must not shadow the package with the same name.
sys.path[0:1] = []
sys.path.append(str(Path(__file__).parent))
os.environ.setdefault("GLOG_minloglevel", "3")
os.environ.setdefault("MC_LOG_LEVEL", "FATAL")
os.environ["MC_FORCE_TCP"] = "1"

import pair  # noqa: E402


class Mooncake:
    """One transfer engine."""

    def __init__(self, ends: pair.Pair, path: str) -> None:
        if path != "tcp":
            raise SystemExit(f"path {path}: Mooncake is measured over tcp only")
        from mooncake import engine as mooncake

        self.pair, self.write = ends, mooncake.TransferOpcode.Write
        self.engine = mooncake.TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise SystemExit("Mooncake: initialize failed")
        for array in (ends.source, ends.inbox):
            if self.engine.register_memory(array.ctypes.data, len(array)):
                raise SystemExit("Mooncake: register_memory failed")
        mine = (f"127.0.0.1:{self.engine.get_rpc_port()}", ends.inbox.ctypes.data)
        self.peer, self.peer_inbox = ends.exchange(mine)
        self.notice = mooncake.TransferNotify("m", "m")
        self.notices = 0

    def prepare(self, offsets: list[int], length: int) -> None:
        """No preparation: memory is registered."""

    def send(self, offset: int, length: int) -> None:
        failed = self.engine.transfer_sync(
            self.peer,
            self.pair.source.ctypes.data + offset,
            self.peer_inbox + offset,
            length,
            self.write,
            self.notice,
        )
        if failed:
            raise SystemExit("Mooncake: transfer_sync failed")

    def receive(self) -> None:
        while not self.notices:
            self.notices += len(self.engine.get_notifies())
        self.notices -= 1


if __name__ == "__main__":
    pair.run("Mooncake", Mooncake)
