"""Torch process groups over a backend: handles, groups, errors, functional collectives."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from tests.workers.backend.process_group import TIMEOUT, named, start
from weft.torch import all_reduce_, monitored_barrier

if TYPE_CHECKING:
    from collections.abc import Callable


def handles(backend: str) -> dict[str, Any]:
    """Asynchronous works, their futures and results, and coalesced operations."""
    rank, ranks = start(backend)
    value = torch.full((5,), float(rank))
    work = distributed.all_reduce(value, async_op=True)
    chained = work.get_future().then(lambda future: future.value()[0] * 2)
    found: dict[str, Any] = {"chained": chained.wait().tolist(), "completed": work.is_completed()}
    works = [distributed.all_reduce(torch.full((9,), 1.0), async_op=True) for _ in range(50)]
    found["later first"] = works[-1].wait() and all(each.wait() for each in works)
    found["result"] = works[0].result()[0].tolist()
    coalesced = [torch.ones(3), torch.ones(4, 2) * 2]
    with distributed._coalescing_manager():
        for each in coalesced:
            distributed.all_reduce(each)
    found["coalesced"] = [each.sum().item() for each in coalesced]
    sent, received = torch.tensor([float(rank)]), torch.empty(1)
    swapped = [
        distributed.P2POp(distributed.isend, sent, (rank + 1) % ranks),
        distributed.P2POp(distributed.irecv, received, (rank - 1) % ranks),
    ]
    for each in distributed.batch_isend_irecv(swapped):
        each.wait()
    found["batch"] = received.item()
    if rank == 0:
        # GPUs have no receives from any rank.
        given = [peer if backend == "twin" else None for peer in range(1, ranks)]
        senders = [distributed.recv(torch.empty(3), source) for source in given]
        found["senders"] = sorted(senders)
    else:
        distributed.send(torch.ones(3), 0)
    objects: list[Any] = [None] * ranks
    distributed.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    found["objects"] = [each["rank"] for each in objects]
    sources = [torch.full((each + 1, 2), rank) for each in range(ranks)]
    parts = [torch.empty((rank + 1, 2), dtype=torch.int64) for _ in range(ranks)]
    distributed.all_to_all(parts, sources)
    found["parts"] = [each[0, 0].item() for each in parts]
    monitored_barrier()
    distributed.destroy_process_group()
    return found


def profiled(backend: str) -> list[list[Any]]:
    """Name, shapes and kind for each event that the profiler records for messages."""
    rank, _ = start(backend)
    value = torch.ones(4, 2)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        if rank == 0:
            distributed.send(value, 1)
            distributed.send(value, 1)
        else:
            distributed.recv(value, 0)
            distributed.recv(value)
    events = [each for each in profile.events() if each.name.startswith("weft:")]
    distributed.destroy_process_group()
    return [[each.name, each.input_shapes, each.is_async] for each in events]


def unmatched(backend: str) -> Any:
    """A receive that is posted before a collective and matched after it delays no other work."""
    rank, _ = start(backend)
    received = torch.empty(2)
    pending = distributed.irecv(received, 1) if rank == 0 else None
    for _ in range(20):
        value = torch.ones(3)
        distributed.all_reduce(value, async_op=True).get_future().wait()
    if pending is None:
        distributed.send(torch.full((2,), 7.0), 0)
    else:
        pending.wait()
        value = received
    distributed.destroy_process_group()
    return value.tolist()


def groups(backend: str) -> dict[str, Any]:
    """Groups with some ranks, several at once from several threads, and a device mesh."""
    rank, _ = start(backend)
    halves = [distributed.new_group([0, 1]), distributed.new_group([3, 2])]
    mine = halves[rank // 2]
    value = torch.tensor([rank])
    distributed.all_reduce(value, group=mine)
    found: dict[str, Any] = {"half": value.item()}
    many = [distributed.new_group(backend=named(backend)) for _ in range(3)]
    totals = [0.0] * len(many)

    def run(each: int) -> None:
        for _ in range(20):
            term = torch.full((1000,), float(each))
            distributed.all_reduce(term, group=many[each])
            totals[each] += term.sum().item()

    threads = [threading.Thread(target=run, args=(each,)) for each in range(len(many))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["totals"] = totals
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    value = torch.tensor([rank])
    distributed.all_reduce(value, group=mesh.get_group("row"))
    found["mesh"] = value.item()
    distributed.destroy_process_group()
    return found


def compiled(backend: str) -> dict[str, Any]:
    """Functional collectives, plain and in a compiled function."""
    rank, ranks = start(backend)

    def forward(value: Any) -> Any:
        total = functional.all_reduce(value * 2, "sum", distributed.group.WORLD)
        whole = functional.all_gather_tensor(value, 0, distributed.group.WORLD)
        share = functional.reduce_scatter_tensor(whole, "sum", 0, distributed.group.WORLD)
        moved = functional.all_to_all_single(value, None, None, distributed.group.WORLD)
        return total + share, whole, moved

    value = torch.arange(float(2 * ranks)) + rank
    eager = [each.tolist() for each in forward(value)]
    traced = torch.compile(forward, backend="aot_eager", fullgraph=True)
    result = {"eager": eager, "compiled": [each.tolist() for each in traced(value)]}
    distributed.destroy_process_group()
    return result


def operator(backend: str) -> dict[str, Any]:
    """All-reduces by the operator, their errors, and one in a compiled function."""
    found: dict[str, Any] = {"errors": []}

    def failing(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            found["errors"].append(f"{type(error).__name__}: {error}".splitlines()[0])

    failing(lambda: all_reduce_(torch.ones(2)))
    rank, ranks = start(backend)
    halves = [distributed.new_group([each]) for each in range(ranks)]
    values = torch.arange(1.0, 5.0) + rank
    reductions = ("sum", "avg", "product", "min", "max")
    found["floats"] = [all_reduce_(values.clone(), op).tolist() for op in reductions]
    bits = torch.tensor([1 + rank, 4])
    found["bits"] = [all_reduce_(bits.clone(), op).tolist() for op in ("band", "bor", "bxor")]
    grid = torch.arange(6.0).reshape(2, 3)
    all_reduce_(grid.t())
    found["columns"] = grid.tolist()
    found["alone"] = all_reduce_(values.clone(), group=halves[rank]).tolist()
    failing(lambda: all_reduce_(values, "mean"))
    failing(lambda: all_reduce_(values, "band"))

    def forward(value: Any) -> Any:
        doubled = value * 2
        all_reduce_(doubled, "max")
        return doubled + 1

    found["eager"] = forward(values).tolist()
    traced = torch.compile(forward, backend="aot_eager", fullgraph=True)
    found["compiled"] = traced(values).tolist()
    distributed.destroy_process_group()
    return found


def rejected(backend: str) -> list[str]:
    """Errors from arguments; the group still works after them."""
    start(backend)
    calls: list[Callable[[], Any]] = [
        lambda: distributed.all_reduce(torch.ones(2), ReduceOp.BAND),
        lambda: distributed.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.AVG),
        lambda: distributed.all_reduce(torch.ones(2, dtype=torch.int16)),
        lambda: distributed.all_reduce(torch.ones(2).to_sparse()),
        lambda: distributed.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
        lambda: distributed.reduce_scatter_tensor(torch.ones(2), torch.ones(2)),
        lambda: distributed.all_to_all_single(torch.ones(2), torch.ones(2), [5, 0], [1, 1]),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("none")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".splitlines()[0])
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def absent(backend: str, which: str) -> list[str]:
    """Errors from ranks whose peer, the last rank, does not take part for a while."""
    rank, ranks = start(backend, timedelta(seconds=20))
    group = distributed.new_group(timeout=timedelta(seconds=1.5))
    at_once = distributed.new_group() if which == "monitored" else None
    distributed.barrier()
    gone = threading.Event()
    errors = []
    if at_once is not None and rank == 0:
        # A zero limit, unlike none.
        try:
            monitored_barrier(at_once, timedelta(0))
        except distributed.DistBackendError as error:
            errors.append(str(error))
    if rank < ranks - 1:
        try:
            if which == "monitored":
                monitored_barrier(group, timedelta(seconds=1), wait_all_ranks=True)
            elif which == "wait":
                work = distributed.all_reduce(torch.ones(2), group=group, async_op=True)
                work.wait(timedelta(milliseconds=200))
            else:
                distributed.all_reduce(torch.ones(2), group=group)
        except distributed.DistBackendError as error:
            errors.append(str(error))
    else:
        gone.wait(3)
        try:
            distributed.all_reduce(torch.ones(2), group=group)
        except distributed.DistBackendError as error:
            errors.append(str(error))
    distributed.barrier()
    distributed.destroy_process_group()
    return errors


def aborted(backend: str) -> list[str]:
    """Rank 0 aborts while all wait in two groups; all ranks' waits raise."""
    rank, _ = start(backend, TIMEOUT)
    other = distributed.new_group()
    distributed.barrier()
    errors = []
    received = torch.empty(1)
    works = [distributed.irecv(received, 1 - rank, group) for group in (None, other)]
    store = distributed.distributed_c10d._get_default_store()
    if rank == 0:
        # Not before the other rank waits: a call on an aborted group raises at once.
        store.wait(["waiting"])
        distributed.distributed_c10d._abort_process_group()
    else:
        store.set("waiting", "")
    for work in works:
        try:
            work.wait()
            errors.append("none")
        except distributed.DistBackendError as error:
            errors.append(str(error))
    return errors


def lost(backend: str) -> dict[str, Any]:
    """The last rank dies while the others wait; they make a new group and go on."""
    rank, ranks = start(backend)
    pending = distributed.all_reduce(torch.ones(2), async_op=True)
    pending.wait()
    if rank == ranks - 1:
        # Without a goodbye, and with a result.
        Path(os.environ["TEST_RESULTS"], str(rank)).write_text("{}", encoding="utf-8")
        os._exit(0)
    errors = []
    works = [distributed.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
    for work in works:
        try:
            work.wait()
            errors.append("none")
        except distributed.DistBackendError as error:
            errors.append(str(error))
    survivors = distributed.new_group(list(range(ranks - 1)), use_local_synchronization=True)
    value = torch.tensor([rank + 1])
    distributed.all_reduce(value, group=survivors)
    distributed.destroy_process_group()
    return {"errors": errors, "value": value.item()}


def exchanged(backend: str) -> int:
    """Elements received in messages that the caller and the group's thread both wait for."""
    rank, ranks = start(backend)
    peers = [each for each in range(ranks) if each != rank]
    value, received = torch.ones(80_000), [torch.empty(80_000) for _ in peers]
    for _ in range(400):
        works = [distributed.isend(value, peer) for peer in peers]
        works += [
            distributed.irecv(target, peer) for target, peer in zip(received, peers, strict=True)
        ]
        for work in works:
            work.wait()
    distributed.barrier()
    distributed.destroy_process_group()
    return int(sum(each.sum().item() for each in received))


def left(backend: str) -> list[str]:
    """Errors on rank 0, which waits for rank 1 in two groups; rank 1 has left both."""
    rank, _ = start(backend, timedelta(seconds=60))
    other = distributed.new_group()
    distributed.barrier()
    errors = []
    if rank == 0:
        works = [
            distributed.irecv(torch.empty(1), 1),
            distributed.all_reduce(torch.ones(1), group=other, async_op=True),
        ]
        for work in works:
            try:
                work.wait()
            except distributed.DistBackendError as error:
                errors.append(str(error))
    distributed.destroy_process_group()
    return errors
