"""Ranks in a Rust test in guests: `python -m lab.rdma.ranks SIZE BINARY TEST`, one in each guest.

A test whose ranks are processes exchanges messages over pipes with its parent
(`crates/fabric/tests/common/ranks.rs`). Here each rank's parent is this program, in its own guest;
guest 0 serves the all-gathers over TCP.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from lab.rdma.guest import address

if TYPE_CHECKING:
    from io import TextIOWrapper

__all__ = ["main"]

PORT: Final = 7000
#: Seconds for all ranks to start.
START: Final = 30.0


def main(size: int, binary: str, test: str) -> int:
    """Run this guest's rank; returns the exit status."""
    rank = int(os.environ["LAB_GUEST"])
    if rank == 0:
        listener = socket.create_server((address(0), PORT), backlog=size)
        threading.Thread(target=serve, args=(listener, size), daemon=True).start()
    with connected() as connection, connection.makefile("rw", encoding="ascii") as gather:
        gather.write(f"{rank}\n")
        gather.flush()
        process = subprocess.Popen(
            [binary, test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"],
            env=os.environ | {"WEFT_TEST_RANK": str(rank), "WEFT_TEST_BIND": address(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                # The test's name may begin the line.
                _, at, mine = line.partition("@")
                if not at:
                    print(line, end="", flush=True)
                    continue
                gather.write(mine)
                gather.flush()
                everyones = gather.readline()
                if not everyones:
                    process.stdin.close()
                    continue
                process.stdin.write(everyones)
                process.stdin.flush()
        return process.returncode


def connected() -> socket.socket:
    """Connection to the server in guest 0, which may still boot."""
    end = time.monotonic() + START
    while True:
        try:
            return socket.create_connection((address(0), PORT), timeout=START)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def serve(listener: socket.socket, size: int) -> None:
    """Serve all-gathers until a rank ends; then close all connections."""
    with ExitStack() as stack:
        stack.enter_context(listener)
        streams: dict[int, TextIOWrapper] = {}
        for _ in range(size):
            connection = stack.enter_context(listener.accept()[0])
            stream = stack.enter_context(connection.makefile("rw", encoding="ascii"))
            streams[int(stream.readline())] = stream
        while True:
            lines = [streams[rank].readline() for rank in range(size)]
            if not all(lines):
                return
            everyones = " ".join(line.rstrip("\n") for line in lines) + "\n"
            for stream in streams.values():
                stream.write(everyones)
                stream.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
