"""Ranks over RDMA NICs."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import weft
from tests.workers.group import loss
from tests.workers.group.pairs import End
from tests.workers.group.process import exit_of
from weft import qdl

#: A guest's NICs.
NICS = ("rxe0", "rxe1")
#: Write bytes; and for one that a work request holds itself.
LENGTH, SHORT = 20_000, 40


def until_lost(started: str, limit: float = 60.0) -> dict[str, Any]:
    """Dispatch and combine rounds until a rank is lost; the loss.

    Args:
        started: file that rank 0 makes after the first rounds.
        limit: seconds after which the ranks give up.

    Returns:
        Rank that the error names, its text, and the longest round in seconds.
    """
    with weft.init() as communicator:
        assert communicator.route(1 - min(communicator.rank, 1)).provider == "verbs"
        random = np.random.default_rng(communicator.rank)
        all_to_all = weft.moe.AllToAll(communicator, experts=8, top_k=2, hidden=16, max_tokens=32)
        end = time.monotonic() + limit
        rounds = 0
        while time.monotonic() < end:
            begin = time.monotonic()
            try:
                different = loss.load(all_to_all, random)
            except weft.errors.PeerLostError as error:
                seconds = time.monotonic() - begin
                return {"rank": error.rank, "error": str(error), "seconds": seconds}
            assert different is None, different
            rounds += 1
            if rounds == 10 and communicator.rank == 0:
                Path(started).touch()
    raise AssertionError(f"no rank was lost in {limit:g} s and {rounds} rounds")


class Ring:
    """Each rank writes to the next one, between arrays in the processes' private memory."""

    def __init__(self, communicator: weft.Communicator) -> None:
        rank, size = communicator.rank, communicator.world_size
        self.communicator, self.counter = communicator, communicator.counter()
        self.source, self.inbox = (np.zeros(LENGTH + SHORT, np.uint8) for _ in range(2))
        self.region = communicator.register(self.source)
        inbox = communicator.register(self.inbox)
        self.after, self.before = (rank + 1) % size, (rank - 1) % size
        self.target = communicator.share([inbox], [self.counter])[self.after][0]
        self.round = 0
        self.wrong: list[int] = []

    def bytes_of(self, rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Bytes that a rank writes in this round."""
        return np.random.default_rng([rank, self.round]).integers(
            256, size=LENGTH + SHORT, dtype=np.uint8
        )

    def turn(self, rounds: int) -> None:
        """Write in some rounds; records the ones in which other bytes arrive."""
        for _ in range(rounds):
            self.counter.wait_for_credit(self.after, self.round)
            self.source[:] = self.bytes_of(self.communicator.rank)
            for begin, length in ((0, LENGTH), (LENGTH, SHORT)):
                page = weft.Page(self.region, begin, self.target, begin, length)
                self.communicator.write(self.after, self.counter, [page], round=self.round).wait()
            self.counter.wait({self.before: 2})
            if not np.array_equal(self.inbox, self.bytes_of(self.before)):
                self.wrong.append(self.round)
            self.counter.credit(self.before)
            self.round += 1


def load(requests: Connection, ring: Ring) -> None:
    """A data loader worker's loop: a batch for each request, and errors from Weft calls.

    It also writes to its copies of the registered arrays.
    """
    calls: list[Any] = [ring.communicator.barrier, weft.init]
    for number in iter(requests.recv, None):
        errors = []
        for call in calls:
            try:
                call()
            except weft.errors.ForkError as error:
                errors.append(type(error).__name__)
        ring.source[:] = ring.inbox[:] = number
        requests.send((np.full(1000, number), errors))


def fork_loaders(rounds: int = 20) -> dict[str, Any]:
    """Writes beside and after data loader workers that each rank has forked.

    Two serve batches while their parent writes; one is killed, the other returns. Of two
    others one exits like a program at once, and one without handlers after the batches.

    Returns:
        Provider, rounds with wrong bytes, errors in the workers, and their exit codes.
    """
    with weft.init() as communicator:
        ring = Ring(communicator)
        ring.turn(rounds)
        child = os.fork()
        if child == 0:
            # Exit handlers run, and the block closes the communicator.
            sys.exit(7)
        exits = [exit_of(child)]
        fork = multiprocessing.get_context("fork")
        pipes, workers = [], []
        for _ in range(2):
            ours, theirs = fork.Pipe()
            workers.append(fork.Process(target=load, args=(theirs, ring)))
            workers[-1].start()
            pipes.append(ours)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reader, 1)
            os._exit(8)
        errors = []
        for number in range(rounds):
            for pipe in pipes:
                pipe.send(number)
            ring.turn(1)
            for pipe in pipes:
                batch, raised = pipe.recv()
                assert (batch == number).all(), batch
                errors += raised
        os.kill(workers[0].pid or 0, signal.SIGKILL)
        pipes[1].send(None)
        os.write(writer, b".")
        exits.append(exit_of(child))
        for worker in workers:
            worker.join(20)
            exits.append(f"exit {worker.exitcode}")
        ring.turn(rounds)
        communicator.barrier()
        provider = communicator.route(ring.after).provider
        return {"provider": provider, "wrong": ring.wrong, "errors": errors, "exits": exits}


def pair(port: int, messages: int) -> list[int]:
    """Answers to rank 1's messages, which connects to rank 0 only over verbs."""
    rank, address = int(os.environ["WEFT_RANK"]), f"{os.environ['WEFT_ADDR']}:{port}"
    if rank > 1:
        return []
    if rank == 0:
        with weft.listen(address, providers=["verbs"]) as listener:
            formed = listener.accept(timeout=60)
    else:
        formed = weft.connect(address, providers=["verbs"], timeout=60)
    with formed:
        assert formed.route(1 - rank).provider == "verbs"
        end = End(formed)
        answers = []
        for number in range(messages):
            if rank == 0:
                end.answer()
            else:
                end.send(number)
                answers.append(end.receive())
        formed.barrier()
        return answers


def dispatch(port: int, cases: dict[str, str], absent: str) -> dict[str, Any]:
    """Rank 1's queries to rank 0's node, which listens at all addresses, only over verbs.

    Further ranks return at once.

    Args:
        port: the node's port.
        cases: the node's addresses, by case name.
        absent: address that is then given to this host, on no RDMA NIC.

    Returns:
        Packets that each NIC on rank 1 sends in each case, and the error from a connection from
        `absent`.
    """
    done = Path(os.environ["TEST_RESULTS"], "done")
    vector = qdl.Tensor("vector", "float32", (256,))
    if int(os.environ["WEFT_RANK"]) > 1:
        return {}
    if os.environ["WEFT_RANK"] == "0":
        with qdl.Accelerator(
            lambda vectors: vectors + 1,
            inputs=[vector],
            outputs=[vector],
            address=f"0.0.0.0:{port}",
            provider="verbs",
        ):
            while not done.exists():
                time.sleep(0.05)
        return {}
    queries = [[np.full(256, number, np.float32)] for number in range(300)]
    packets = {}
    try:
        for case, nodes in cases.items():
            before = [packets_sent(nic) for nic in NICS]
            found = qdl.ask([nodes], queries, provider="verbs", slots=16)
            answers = [np.frombuffer(answer[0], np.float32) for answer in found.answers if answer]
            assert not found.failures, found.failures
            assert [answer[0] for answer in answers] == list(range(1, 301))
            packets[case] = [
                packets_sent(nic) - count for nic, count in zip(NICS, before, strict=True)
            ]
        subprocess.run(["ip", "address", "add", f"{absent}/32", "dev", "lo"], check=True)
        address = next(iter(cases.values()))
        try:
            weft.connect(address, source=absent, providers=["verbs"], timeout=10)
        except weft.errors.ProviderError as error:
            return {"packets": packets, "error": str(error)}
    finally:
        done.touch()
    raise AssertionError("connected from an address without an RDMA NIC")


def packets_sent(nic: str) -> int:
    """Packets that an rxe device has sent."""
    counter = Path(f"/sys/class/infiniband/{nic}/ports/1/hw_counters/sent_pkts")
    return int(counter.read_text(encoding="ascii"))
