"""Ranks under load; one is killed, or leaves."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

import weft
from tests.workers.moe import rounds as moe

#: These tests' silence timeout.
SILENCE_SECONDS = 2.0
#: Listening socket state in /proc/net/tcp.
LISTENING = "0A"


def held() -> dict[str, list[str]]:
    """Resources that could outlive this process: named shared memory, sockets, children."""
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
        # Shared mappings, not libraries in the same folder.
        "shared memory": [
            line for line in maps if "/dev/shm" in line and line.split()[1][3] == "s"
        ],
        "sockets": sockets,
        "children": "".join(children).split(),
    }


def open_sockets() -> set[str]:
    """Inodes for this machine's listening or connected sockets."""
    inodes = set()
    for table, column in (("tcp", 9), ("tcp6", 9), ("unix", 6)):
        lines = Path("/proc/net", table).read_text(encoding="utf-8").splitlines()[1:]
        inodes |= {fields[column] for line in lines if len(fields := line.split()) > column}
    return inodes - {"0"}


def load(all_to_all: weft.moe.AllToAll, random: np.random.Generator) -> str | None:
    """A round; its result's differences."""
    sent = moe.batch(random, all_to_all, "masked")
    with moe.dispatch(all_to_all, sent) as received:
        outputs = moe.run_experts(all_to_all, received)
        combined = all_to_all.combine(received, outputs)
    return moe.compare(all_to_all, sent, combined, "reduce", "combine")


def survive(pipe: Connection, options: Mapping[str, Any], reform: bool) -> None:
    """Rounds until a rank is lost; reports the detection time, then uses the new group."""
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


#: Memory fill without writes in the new group. It is as long as a write, which is one part
#: on every transport.
GUARD, GUARD_BYTES = 0xA5, 1 << 18


class Writes:
    """Large counted writes to every peer, so that a stopped rank is probably inside one."""

    def __init__(self, communicator: weft.Communicator) -> None:
        self.communicator, self.round = communicator, 0
        size = communicator.world_size
        self.peers = [rank for rank in range(size) if rank != communicator.rank]
        self.source = communicator.alloc(GUARD_BYTES)
        self.source.bytes[:] = communicator.rank
        self.inbox = communicator.alloc(GUARD_BYTES * size)
        self.counter = communicator.counter()
        self.granted = communicator.share([self.inbox], [self.counter])

    def exchange(self) -> None:
        """A round to and from every peer."""
        place = GUARD_BYTES * self.communicator.rank
        for peer in self.peers:
            self.counter.wait_for_credit(peer, self.round)
            page = weft.Page(self.source, 0, self.granted[peer][0], place, GUARD_BYTES)
            self.communicator.write(peer, self.counter, [page], round=self.round).wait()
        for peer in self.peers:
            self.counter.wait({peer: 1})
            self.counter.credit(peer)
        self.round += 1

    def wrong(self) -> list[int]:
        """Peers with wrong bytes."""
        slots = self.inbox.bytes.reshape(-1, GUARD_BYTES)
        return [peer for peer in self.peers if not (slots[peer] == peer).all()]


def outlive(pipe: Connection, options: Mapping[str, Any], _: object) -> None:
    """Rounds until a rank is silent; then a new group, whose memory the stopped rank cannot write.

    The stopped rank resumes on a pipe message, and reports its error.
    """
    with weft.init(**options, silence_timeout=SILENCE_SECONDS) as communicator:
        random = np.random.default_rng(communicator.rank)
        all_to_all = weft.moe.AllToAll(communicator, experts=8, top_k=2, hidden=16, max_tokens=32)
        writes = Writes(communicator)
        load(all_to_all, random)
        writes.exchange()
        pipe.send("running")
        try:
            while True:
                load(all_to_all, random)
                writes.exchange()
        except weft.WeftError as error:
            pipe.send({"at": time.monotonic(), "error": type(error).__name__, "rank": error.rank})
        try:
            smaller = communicator.reform(timeout=10)
        except weft.WeftError as error:
            pipe.send({"excluded": type(error).__name__})
            return
        with smaller:
            # The same memory kinds in the same order, so the same keys and lanes as before.
            again = weft.moe.AllToAll(smaller, experts=8, top_k=2, hidden=16, max_tokens=32)
            after = Writes(smaller)
            guards = [smaller.alloc(GUARD_BYTES) for _ in range(4)]
            for guard in guards:
                guard.bytes[:] = GUARD
            smaller.share(guards, [smaller.counter()])
            after.exchange()
            smaller.barrier()
            pipe.send({"place": (smaller.rank, smaller.world_size, smaller.generation)})
            pipe.recv()
            # The late writer is awake now: work beside it, then check every byte.
            wrong: list[object] = []
            for _ in range(10):
                wrong += [load(again, random)]
                after.exchange()
                wrong += after.wrong()
            pipe.recv()
            overwritten = [at for at, guard in enumerate(guards) if (guard.bytes != GUARD).any()]
            smaller.barrier()
            pipe.send({"wrong": [each for each in wrong if each is not None], "over": overwritten})


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
        began = time.monotonic()
        try:
            if wait == "dispatch":
                all_to_all.dispatch(tokens, ids, timeout=20)
            elif wait == "signal":
                counter.wait({1: 1}, timeout=20)
            else:
                communicator.barrier(timeout=20)
            pipe.send({"error": "None", "rank": None})
        except weft.WeftError as error:
            took = time.monotonic() - began
            pipe.send({"error": type(error).__name__, "rank": error.rank, "took": took})


def options(
    rank: int, ranks: int, port: int, providers: Sequence[str] | None, hosts: int
) -> dict[str, Any]:
    """Arguments to `weft.init`."""
    return {
        "rank": rank,
        "world_size": ranks,
        "address": f"127.0.0.1:{port}",
        "secret": b"a secret of this test, long enough",
        "host_id": f"host-{rank * hosts // ranks}",
        "providers": providers,
    }


def share_until_lost(group: weft.Communicator, regions: int) -> None:
    """Repeat `share` until a rank is lost."""
    memory = [group.alloc(1 << 16) for _ in range(regions)]
    while True:
        with group.counter() as counter:
            group.share(memory, [counter])


def reform_until_lost(communicator: weft.Communicator) -> None:
    """Form new groups until one rank is missing; every error is its loss."""
    group = communicator
    while True:
        try:
            group = group.reform()
            if group.world_size < communicator.world_size:
                break
            share_until_lost(group, 1)
        except weft.errors.PeerLostError:
            continue
    group.barrier()


def die(pipe: Connection) -> None:
    """Report the time, and kill this process."""
    pipe.send({"at": time.monotonic()})
    os.kill(os.getpid(), signal.SIGKILL)


def joins(
    pipe: Connection,
    options: Mapping[str, Any],
    argument: tuple[Literal["share", "all-to-all", "device", "reform"], int, float],
) -> None:
    """A rank kills itself in a collective call, after a delay; the others fail.

    Each reports the time when it ended, the killed one before.
    """
    call, victim, delay = argument
    with weft.init(**options) as communicator:
        with contextlib.suppress(weft.errors.GroupPoisonedError):
            # A rank that has left the barrier may have begun to form a new group.
            communicator.barrier()
        if communicator.rank == victim:
            threading.Timer(delay, die, (pipe,)).start()
        try:
            if call == "share":
                share_until_lost(communicator, 8)
            elif call in ("all-to-all", "device"):
                device = "twin" if call == "device" else None
                while True:
                    weft.moe.AllToAll(
                        communicator, experts=8, top_k=2, hidden=16, max_tokens=32, device=device
                    ).close()
            else:
                reform_until_lost(communicator)
            pipe.send({"at": time.monotonic(), "error": "None"})
        except weft.WeftError as error:
            at, name = time.monotonic(), type(error).__name__
            pipe.send({"at": at, "error": name, "rank": error.rank, "message": str(error)})
