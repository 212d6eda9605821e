"""Communicators over groups in torch.distributed, and over subsets of another's ranks."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import weft

SECONDS = 20.0
#: Detection limit for a lost rank on a busy machine, before silence would be one.
LOST_SECONDS = 10.0


def ring(communicator: weft.Communicator) -> list[int]:
    """Each rank writes its rank to the next one; the received and the expected rank."""
    rank, world_size = communicator.rank, communicator.world_size
    source, mailbox = communicator.alloc(8), communicator.alloc(8)
    counter = communicator.counter()
    shared = communicator.share([mailbox], [counter], timeout=SECONDS)
    source.bytes.view(np.int64)[:] = rank
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    if world_size == 1:
        return [rank, rank]
    communicator.write(following, counter, [weft.Page(source, 0, shared[following][0], 0, 8)])
    counter.wait({before: [8]}, timeout=SECONDS)
    came = int(mailbox.bytes.view(np.int64)[0])
    counter.credit(before)
    communicator.barrier(timeout=SECONDS)
    return [came, before]


def described(communicator: weft.Communicator | None) -> Any:
    if communicator is None:
        return None
    return [communicator.rank, communicator.world_size, *ring(communicator)]


def begin(rendezvous: str, rank: int, ranks: int) -> Any:
    """Torch's default group, without environment variables."""
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )
    return distributed


def over_torch(rendezvous: str, rank: int, ranks: int, hosts: int = 1) -> dict[str, Any]:
    """The default group and one with its odd ranks, which outlive torch's groups."""
    distributed = begin(rendezvous, rank, ranks)
    host_id = f"host {rank % hosts}" if hosts > 1 else None
    whole = weft.Communicator.from_group(host_id=host_id)
    odd = distributed.new_group(list(range(1, ranks, 2)))
    refused, of_odd = "", None
    try:
        of_odd = weft.Communicator.from_group(odd, host_id=host_id)
    except weft.errors.ConfigurationError as error:
        refused = str(error)
    distributed.destroy_process_group()
    reports = {
        "whole": described(whole),
        "odd": described(of_odd),
        "refused": refused,
        "hosts": whole.hosts,
        "routes": whole.routes(),
    }
    if of_odd is not None:
        of_odd.close()
    whole.barrier(timeout=SECONDS)
    whole.close()
    return reports


def refused_by_one(rendezvous: str, rank: int, ranks: int) -> Any:
    """Rank 1 names an unknown provider; time and error on each rank."""
    distributed = begin(rendezvous, rank, ranks)
    providers = ["pigeon"] if rank == 1 else None
    begun = time.monotonic()
    try:
        weft.Communicator.from_group(providers=providers)
    except weft.WeftError as error:
        return [type(error).__name__, error.rank, str(error), time.monotonic() - begun]
    finally:
        # Otherwise its threads may end the process with an error.
        distributed.destroy_process_group()
    return None


def splits() -> dict[str, Any]:
    """Two halves at once, a group in another order, one with a single rank, none."""
    with weft.init() as whole:
        rank = whole.rank
        reports: dict[str, Any] = {}
        halves = whole.split([0, 1] if rank < 2 else [2, 3], timeout=SECONDS)
        reports["half"] = described(halves)
        reports["turned"] = described(whole.split([3, 0], timeout=SECONDS))
        reports["one"] = described(whole.split([2], timeout=SECONDS))
        assert halves is not None
        reports["of a half"] = described(halves.split([1, 0], timeout=SECONDS))
        halves.close()
        reports["whole"] = described(whole)
        last = whole.split([0, 1, 2, 3], timeout=SECONDS)
    reports["after the whole was closed"] = described(last)
    assert last is not None
    last.close()
    return reports


def refusals() -> list[Any]:
    """Invalid lists; each raises on every rank, and the group continues."""
    with weft.init() as whole:
        raised = []
        given: list[list[int]] = [[0, 1] if whole.rank else [0, 2], [0, 0], [], [0, 4]]
        for ranks in given:
            try:
                whole.split(ranks, timeout=SECONDS)
            except weft.WeftError as error:
                raised.append([type(error).__name__, str(error)])
        raised.append(described(whole))
        return raised


def moe_in_halves() -> list[float]:
    """Two all-to-alls' rounds at once, one on each half: the experts double."""
    with weft.init() as whole:
        half = whole.split([0, 2] if whole.rank % 2 == 0 else [1, 3], timeout=SECONDS)
        assert half is not None
        with (
            half,
            weft.moe.AllToAll(half, experts=4, top_k=2, hidden=8, max_tokens=16) as all_to_all,
        ):
            tokens = np.full((5, 8), 1.0 + whole.rank, dtype=np.float32)
            ids = np.array([[token % 4, (token + 1) % 4] for token in range(5)])
            with all_to_all.dispatch(tokens, ids) as received:
                combined = all_to_all.combine(received, received.tokens * 2)
            assert np.all(combined == combined[0, 0])
            return [float(combined[0, 0]), half.rank, half.world_size]


def loss(rank: int, ranks: int, address: str) -> list[Any]:
    """Rank 3 is killed: its group names its rank there; a group without it continues."""
    whole = weft.init(rank=rank, world_size=ranks, address=address)
    pair = whole.split([0, 2] if whole.rank % 2 == 0 else [1, 3], timeout=SECONDS)
    assert pair is not None
    described(pair)
    # Only once the others have left the barrier: in it they would report the loss.
    met = [Path(os.environ["TEST_RESULTS"]) / f"met {each}" for each in range(ranks)]
    met[rank].touch()
    if whole.rank == 3:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and not all(each.exists() for each in met):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    reports: list[Any] = []
    until = time.monotonic() + LOST_SECONDS
    while time.monotonic() < until and not reports:
        try:
            whole.check()
        except weft.errors.PeerLostError as error:
            reports.append(error.rank)
        time.sleep(0.01)
    try:
        reports.append(described(pair))
    except weft.errors.PeerLostError as error:
        reports.append(["lost", error.rank])
    pair.close()
    whole.close()
    return reports
