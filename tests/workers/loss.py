"""Ranks under load of which one is killed, or leaves."""

import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

import weft
from workers import moe

#: In /proc/net/tcp, a socket that listens.
LISTENING = "0A"


def held() -> dict[str, list[str]]:
    """What of this process could outlive it by mistake: named shared memory, sockets, children."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    sockets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            sockets.append(target[len("socket:[") : -1])
    children = [
        each.read_text(encoding="utf-8") for each in Path("/proc/self/task").glob("*/children")
    ]
    return {
        "shared memory": [line for line in maps if "/dev/shm" in line],
        "sockets": sockets,
        "children": "".join(children).split(),
    }


def open_sockets() -> set[str]:
    """The inodes of this machine's sockets that listen or are connected."""
    inodes = set()
    for table, column in (("tcp", 9), ("tcp6", 9), ("unix", 6)):
        lines = Path("/proc/net", table).read_text(encoding="utf-8").splitlines()[1:]
        inodes |= {fields[column] for line in lines if len(fields := line.split()) > column}
    return inodes - {"0"}


def load(all_to_all: weft.moe.AllToAll, random: np.random.Generator) -> str | None:
    """A round; what was wrong with its result."""
    sent = moe.batch(random, all_to_all, "masked")
    with moe.dispatch(all_to_all, sent) as received:
        outputs = moe.run_experts(all_to_all, received)
        combined = all_to_all.combine(received, outputs)
    return moe.compare(all_to_all, sent, combined, "reduce", "combine")


def survive(pipe: Connection, options: Mapping[str, Any], reform: bool) -> None:
    """Rounds until a rank is lost; says when that was noticed, and goes on with the survivors."""
    with weft.init(**options) as communicator:
        random = np.random.default_rng(communicator.rank)
        all_to_all = weft.moe.AllToAll(communicator, experts=8, top_k=2, hidden=16, max_tokens=32)
        load(all_to_all, random)
        pipe.send(held())
        noticed: dict[str, Any] = {}
        try:
            while True:
                load(all_to_all, random)
        except weft.WeftError as error:
            noticed = {
                "at": time.monotonic(),
                "error": type(error).__name__,
                "rank": error.rank,
                "message": str(error),
            }
        if reform:
            with communicator.reform() as smaller:
                again = weft.moe.AllToAll(smaller, experts=8, top_k=2, hidden=16, max_tokens=32)
                wrong = [load(again, random) for _ in range(3)]
                smaller.barrier()
                place = (smaller.rank, smaller.world_size, smaller.generation)
            noticed |= {"place": place, "wrong": wrong}
        pipe.send(noticed)


def leave(
    pipe: Connection, options: Mapping[str, Any], wait: Literal["dispatch", "signal", "barrier"]
) -> None:
    """Rank 1 leaves; the others wait for it."""
    with weft.init(**options) as communicator:
        all_to_all = weft.moe.AllToAll(communicator, experts=8, top_k=2, hidden=16, max_tokens=32)
        counter = communicator.counter()
        communicator.share([], [counter])
        communicator.barrier()
        if communicator.rank == 1:
            pipe.send({})
            return
        tokens, ids = np.zeros((4, 16), np.float32), np.tile(np.arange(2), (4, 1))
        try:
            if wait == "dispatch":
                all_to_all.dispatch(tokens, ids, timeout=20)
            elif wait == "signal":
                counter.wait({1: 1}, timeout=20)
            else:
                communicator.barrier(timeout=20)
            pipe.send({"error": "nothing", "rank": None})
        except weft.WeftError as error:
            pipe.send({"error": type(error).__name__, "rank": error.rank})


def options(
    rank: int, ranks: int, port: int, providers: Sequence[str] | None, hosts: int
) -> dict[str, Any]:
    """What `weft.init` is told."""
    return {
        "rank": rank,
        "world_size": ranks,
        "address": f"127.0.0.1:{port}",
        "secret": b"a secret of this test, long enough",
        "host_id": f"host-{rank * hosts // ranks}",
        "providers": providers,
    }
