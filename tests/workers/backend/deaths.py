"""Ranks in torch.distributed that are killed or stopped within a collective; the others go on.

Ranks are forked from one process that has imported torch, several groups at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from weft.torch import build

RANKS = 4
#: This rank's elements in a vector.
SHARE = 20_000
#: Limit for each rank step, on a busy machine.
SOON_SECONDS = 60.0
CONTEXT = multiprocessing.get_context("fork")


def all_reduce(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.all_reduce(vector)


def reduce(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.reduce(vector, 1)


def broadcast(vector: Any, parts: list[Any], rank: int) -> None:
    # A root never waits for others by itself.
    for root in range(len(parts)):
        distributed.broadcast(vector, root)


def all_gather(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.all_gather(parts, parts[rank].clone())


def all_gather_into_tensor(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.all_gather_into_tensor(vector, parts[rank].clone())


def reduce_scatter(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.reduce_scatter(torch.empty_like(parts[0]), parts)


def reduce_scatter_tensor(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.reduce_scatter_tensor(torch.empty_like(parts[0]), vector)


def all_to_all(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.all_to_all([torch.empty_like(each) for each in parts], parts)


def all_to_all_single(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.all_to_all_single(torch.empty_like(vector), vector)


def gather(vector: Any, parts: list[Any], rank: int) -> None:
    for root in range(len(parts)):
        distributed.gather(vector, [vector.clone() for _ in parts] if rank == root else None, root)


def scatter(vector: Any, parts: list[Any], rank: int) -> None:
    for root in range(len(parts)):
        distributed.scatter(torch.empty_like(parts[0]), parts if rank == root else None, root)


def send_recv(vector: Any, parts: list[Any], rank: int) -> None:
    peers = [peer for peer in range(len(parts)) if peer != rank]
    works = [distributed.isend(vector, peer) for peer in peers]
    works += [distributed.irecv(torch.empty_like(vector), peer) for peer in peers]
    for work in works:
        work.wait()


def barrier(vector: Any, parts: list[Any], rank: int) -> None:
    distributed.barrier()


COLLECTIVES = {
    each.__name__: each
    for each in (
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        gather,
        scatter,
        send_recv,
        barrier,
    )
}


def join(directory: str, generation: int, rank: int, ranks: int) -> None:
    """Make a generation's default group."""
    store = distributed.FileStore(os.path.join(directory, f"store-{generation}"), ranks)
    limit = timedelta(seconds=SOON_SECONDS)
    distributed.init_process_group("weft", store=store, rank=rank, world_size=ranks, timeout=limit)


def rank(pipe: Connection, directory: str, collective: str, rank: int, victim: int) -> None:
    """Call the collective until it raises; then, as a survivor, form a group with the others."""
    torch.set_num_threads(1)
    join(directory, 0, rank, RANKS)
    call = COLLECTIVES[collective]
    vector = torch.ones(RANKS * SHARE)
    parts = list(vector.chunk(RANKS))
    pipe.send("running")
    calls = 0
    try:
        while True:
            call(vector, parts, rank)
            vector.fill_(1.0)
            calls += 1
    except distributed.DistBackendError as error:
        pipe.send({"at": time.monotonic(), "error": str(error), "calls": calls})
    distributed.destroy_process_group()
    if rank == victim:
        return
    place = rank - (rank > victim)
    join(directory, 1, place, RANKS - 1)
    call(vector[: (RANKS - 1) * SHARE], parts[: RANKS - 1], place)
    total = torch.ones(SHARE)
    distributed.all_reduce(total)
    pipe.send(total.unique().tolist())
    distributed.destroy_process_group()


class Round(NamedTuple):
    """A group under way."""

    collective: str
    victim: int
    processes: list[Any]
    pipes: list[Connection]


def started(collective: str, victim: int, directory: str) -> Round:
    processes, pipes = [], []
    for each in range(RANKS):
        ours, theirs = CONTEXT.Pipe()
        arguments = (theirs, directory, collective, each, victim)
        process = CONTEXT.Process(target=rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return Round(collective, victim, processes, pipes)


def receive(pipe: Connection) -> Any:
    if not wait([pipe], SOON_SECONDS):
        return {"error": "no message of the rank"}
    try:
        return pipe.recv()
    except EOFError:
        return {"error": "the rank ended"}


def finished(round: Round, by: signal.Signals, chance: random.Random) -> dict[str, Any]:
    """Signal the victim; the seconds until each survivor raised, and the failed checks."""
    wrong: list[Any] = [found for pipe in round.pipes if (found := receive(pipe)) != "running"]
    time.sleep(chance.uniform(0, 0.03))
    victim = round.processes[round.victim]
    os.kill(victim.pid, by)
    at = time.monotonic()
    survivors = [each for each in range(RANKS) if each != round.victim]
    noticed = []
    for each in survivors:
        found = receive(round.pipes[each])
        named = re.search(r"rank (\d+)", found["error"])
        if named is None or int(named[1]) != round.victim:
            wrong.append(f"rank {each}: {found}")
        else:
            noticed.append(found["at"] - at)
    wrong += [
        f"rank {each} in the new group: {found}"
        for each in survivors
        if (found := receive(round.pipes[each])) != [float(RANKS - 1)]
    ]
    if by == signal.SIGSTOP:
        os.kill(victim.pid, signal.SIGCONT)
        found = receive(round.pipes[round.victim])
        if "weft" not in found["error"]:
            wrong.append(f"the stopped rank: {found}")
    for process in round.processes:
        process.join(SOON_SECONDS)
    statuses = [process.exitcode for process in round.processes]
    expected = [0] * RANKS
    if by == signal.SIGKILL:
        expected[round.victim] = -signal.SIGKILL
    if statuses != expected:
        wrong.append(f"statuses {statuses}")
    return {"collective": round.collective, "victim": round.victim, "noticed": noticed} | (
        {"wrong": wrong} if wrong else {}
    )


def run(by: str, times: int, seed: int, at_once: int, count: int) -> list[dict[str, Any]]:
    """Each round's outcome: `times` for each of `count` collectives, `at_once` at a time."""
    build.load()
    chance = random.Random(seed)
    names = chance.sample(list(COLLECTIVES), count)
    rounds = [(name, chance.randrange(RANKS)) for _ in range(times) for name in names]
    outcomes = []
    for first in range(0, len(rounds), at_once):
        with tempfile.TemporaryDirectory() as directory:
            groups = []
            for number, (collective, victim) in enumerate(rounds[first : first + at_once]):
                place = Path(directory, str(number))
                place.mkdir()
                groups.append(started(collective, victim, str(place)))
            outcomes += [finished(each, signal.Signals[by], chance) for each in groups]
            for each in groups:
                for process in each.processes:
                    process.kill()
    return outcomes
