"""Ranks that are killed, stopped, or leave: the others name them in time; no resources leak.

`WEFT_TEST_KILLS`, `WEFT_TEST_STOPS`, `WEFT_TEST_JOINS`: number of ranks killed, stopped, and killed
inside a collective call, on each transport: for example, `WEFT_TEST_KILLS=100`.
"""

import json
import os
import random
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from tests import fork_server
from tests.workers.group import loss

RANKS = 4
KILLS = int(os.environ.get("WEFT_TEST_KILLS", "10"))
JOINS = int(os.environ.get("WEFT_TEST_JOINS", "5"))
STOPS = int(os.environ.get("WEFT_TEST_STOPS", "2"))
#: Documented detection limit for a lost process. The median over many survivors
#: keeps it, and the fastest among few: a busy machine may not run the others in time.
NOTICED_SECONDS = 2.0
#: Documented detection limit for a stopped process after the silence timeout.
HEARTBEAT_SECONDS = 1.0
#: Limit for a single detection on a busy machine: before silence, 15 s, would be a loss.
BUSY_SECONDS = 10.0
#: Limit for all other steps, on a busy machine.
SOON_SECONDS = 20.0

# Processes are forked from one with all imports that are installed: a fresh interpreter for each of
# some two hundred would take minutes. That process never calls weft.init().
SERVER = fork_server.server_with(["tests.workers.group.loss", "weft.cuda"])

PROVIDERS: dict[str, tuple[list[str] | None, int]] = {
    "shm": (["shm"], 1),
    "tcp": (["tcp"], 1),
    "mixed": (None, 2),
}
#: Transports with ofi, which needs libfabric.
GROUPS = PROVIDERS | {"ofi": (["ofi"], 1)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def group(
    work: Callable[..., None], transport: str, argument: object
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """Ranks that run `work(pipe, options, argument)`, all ended at the end."""
    providers, hosts = GROUPS[transport]
    port = free_port()
    with ExitStack() as stack:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for rank in range(RANKS):
            ours, theirs = fork_server.CONTEXT.Pipe()
            stack.enter_context(ours)
            options = loss.options(rank, RANKS, port, providers, hosts)
            process = fork_server.CONTEXT.Process(target=work, args=(theirs, options, argument))
            fork_server.start_from(SERVER, process)
            theirs.close()
            stack.callback(end, process)
            processes.append(process)
            pipes.append(ours)
        yield processes, pipes


def end(process: BaseProcess) -> None:
    if process.is_alive():
        process.kill()
    process.join(SOON_SECONDS)
    process.close()


def receive(pipe: Connection) -> Any:
    assert pipe.poll(SOON_SECONDS), "no message of a rank"
    return pipe.recv()


def record(test: str, transport: str, times: int, seed: int, noticed: list[float]) -> None:
    """Print the outcome in the `benchmarks/record.py` format."""
    slowest, usual = max(noticed), sorted(noticed)[len(noticed) // 2]
    outcome = {"test": test, "transport": transport, "times": times, "failed": 0, "seed": seed}
    outcome |= {"noticed_s": {"median": round(usual, 3), "most": round(slowest, 3)}}
    print("\noutcome", json.dumps(outcome))


@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.parametrize("transport", list(PROVIDERS))
def test_a_killed_rank_is_named_by_all_others(transport: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    noticed: list[float] = []
    for round in range(KILLS):
        victim, reform = chance.randrange(RANKS), round % 4 == 3
        with group(loss.survive, transport, reform) as (processes, pipes):
            held = [receive(pipe) for pipe in pipes]
            time.sleep(chance.uniform(0, 0.05))
            killed_at = time.monotonic()
            processes[victim].kill()
            survivors = [rank for rank in range(RANKS) if rank != victim]
            results = [receive(pipes[rank]) for rank in survivors]
            for process in processes:
                process.join(SOON_SECONDS)
            exits = [process.exitcode for process in processes]
        context = f"round {round}, victim {victim}, seed {seed}: {results}"
        for result in results:
            assert (result["error"], result["rank"]) == ("PeerLostError", victim), context
            noticed.append(result["at"] - killed_at)
            assert noticed[-1] < BUSY_SECONDS, context
        assert exits == [-signal.SIGKILL if r == victim else 0 for r in range(RANKS)], context
        if reform:
            places = [result["place"] for result in results]
            assert places == [(rank, RANKS - 1, 1) for rank in range(RANKS - 1)], context
            assert all(result["wrong"] == [None] * 3 for result in results), context
        assert all(not each["shared memory"] and not each["children"] for each in held), held
        assert not loss.open_sockets() & {inode for each in held for inode in each["sockets"]}
    assert statistics.median(noticed) < NOTICED_SECONDS, sorted(noticed)
    record("kill", transport, KILLS, seed, noticed)


@pytest.mark.timeout(60 + 20 * STOPS)
@pytest.mark.parametrize("transport", list(PROVIDERS))
def test_a_stopped_rank_that_comes_back_touches_nothing_of_the_new_group(transport: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    noticed: list[float] = []
    for round in range(STOPS):
        victim = chance.randrange(RANKS)
        survivors = [rank for rank in range(RANKS) if rank != victim]
        with group(loss.outlive, transport, None) as (processes, pipes):
            assert [receive(pipe) for pipe in pipes] == ["running"] * RANKS
            time.sleep(chance.uniform(0, 0.05))
            stopped, stopped_at = processes[victim].pid, time.monotonic()
            assert stopped is not None
            os.kill(stopped, signal.SIGSTOP)
            results = [receive(pipes[rank]) for rank in survivors]
            places = [receive(pipes[rank]) for rank in survivors]
            os.kill(stopped, signal.SIGCONT)
            for rank in survivors:
                pipes[rank].send("the late writer is awake")
            reports = [receive(pipes[victim]) for _ in range(2)]
            for rank in survivors:
                pipes[rank].send("the late writer has raised")
            ends = [receive(pipes[rank]) for rank in survivors]
            for process in processes:
                process.join(SOON_SECONDS)
            exits = [process.exitcode for process in processes]
        context = f"round {round}, victim {victim}, seed {seed}: {results} {reports} {ends}"
        for result in results:
            assert (result["error"], result["rank"]) == ("PeerLostError", victim), context
            noticed.append(result["at"] - stopped_at)
            assert noticed[-1] > loss.SILENCE_SECONDS / 2, context
            # A rank that did not run itself does not count silence in that time.
            assert noticed[-1] < loss.SILENCE_SECONDS + BUSY_SECONDS, context
        new = [{"place": (rank, RANKS - 1, 1)} for rank in range(RANKS - 1)]
        assert places == new, context
        assert reports[0]["error"] == "PeerLostError", context
        assert reports[1] == {"excluded": "ExcludedError"}, context
        assert ends == [{"wrong": [], "over": []}] * (RANKS - 1), context
        assert exits == [0] * RANKS, context
    assert min(noticed) < loss.SILENCE_SECONDS + HEARTBEAT_SECONDS, sorted(noticed)
    record("stop", transport, STOPS, seed, noticed)


@pytest.mark.parametrize("wait", ["dispatch", "signal", "barrier"])
@pytest.mark.parametrize("transport", list(PROVIDERS))
def test_a_rank_that_leaves_is_named_by_those_who_wait_for_it(transport: str, wait: str) -> None:
    with group(loss.leave, transport, wait) as (processes, pipes):
        results = [receive(pipe) for pipe in pipes]
        for process in processes:
            process.join(SOON_SECONDS)
        assert [process.exitcode for process in processes] == [0] * RANKS
    took = [results[rank].pop("took", float("inf")) for rank in (0, 2, 3)]
    for rank in (0, 2, 3):
        assert results[rank] == {"error": "PeerLeftError", "rank": 1}
    assert min(took) < NOTICED_SECONDS, took


@pytest.mark.timeout(60 + 10 * JOINS)
@pytest.mark.parametrize(
    "call", ["share", "all-to-all", pytest.param("device", marks=pytest.mark.torch), "reform"]
)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_dies_in_a_call_that_joins_ranks_is_lost(transport: str, call: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    noticed: list[float] = []
    for round in range(JOINS):
        victim, delay = chance.randrange(RANKS), chance.uniform(0, 0.03)
        with group(loss.joins, transport, (call, victim, delay)) as (processes, pipes):
            survivors = [rank for rank in range(RANKS) if rank != victim]
            results = [receive(pipes[rank]) for rank in survivors]
            killed_at = receive(pipes[victim])["at"]
            for process in processes:
                process.join(SOON_SECONDS)
            exits = [process.exitcode for process in processes]
        context = f"round {round}, victim {victim}, {delay} s, seed {seed}: {results}"
        for result in results:
            noticed.append(result["at"] - killed_at)
            assert noticed[-1] < BUSY_SECONDS, context
            if call == "reform":
                assert result["error"] == "None", context
            else:
                assert (result["error"], result["rank"]) == ("PeerLostError", victim), context
        assert exits == [-signal.SIGKILL if r == victim else 0 for r in range(RANKS)], context
    assert min(noticed) < NOTICED_SECONDS, sorted(noticed)
