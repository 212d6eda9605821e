"""Operations beside other work on a GPU: streams, lifetime of tensors, graphs, barriers."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from tests.workers.backend.forked import message

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.torch_backend.ranks import Context

#: Longest time for a call that does not wait on the host.
AT_ONCE_SECONDS = 0.1
#: Time that a stream is kept busy.
BUSY_SECONDS = 0.4


def busy(seconds: float = BUSY_SECONDS) -> None:
    """Keep the current stream busy for a while."""
    # Cycles at a loaded GPU's clock.
    torch.cuda._sleep(int(seconds * 1.7e9))


def streams(at: Context) -> dict[str, Any]:
    """Operation host times behind a busy stream, and result order."""
    found: dict[str, Any] = {}
    value = torch.zeros(50_000, device=at.device)
    distributed.all_reduce(value)
    distributed.all_reduce(value, async_op=True).wait()
    # A kernel's first use may wait for the stream.
    busy(0.001)
    value.fill_(1.0)
    value.mul_(3.0)
    (value + 1).unique().tolist()
    (value * 2).unique().tolist()
    torch.ones(1000, device=at.device).sum()
    at.synchronise()
    distributed.barrier()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        found[name] = time.perf_counter() - began
        return result

    busy()
    value.fill_(1.0)
    timed("sync", lambda: distributed.all_reduce(value))
    value.mul_(3.0)
    at.synchronise()
    found["sync value"] = value.unique().tolist()

    busy()
    value.fill_(1.0)
    work = timed("async", lambda: distributed.all_reduce(value, async_op=True))
    found["completed before"] = timed("query", work.is_completed)
    # Independent work on the current stream.
    other = torch.ones(1000, device=at.device).sum()
    timed("wait", work.wait)
    value.mul_(3.0)
    at.synchronise()
    found["async value"] = value.unique().tolist()
    found["completed after"] = work.is_completed()
    found["other"] = other.item()

    side = torch.cuda.Stream()
    busy()
    value.fill_(2.0)
    work = distributed.all_reduce(value, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        moved = value + 1
    side.synchronize()
    found["side value"] = moved.unique().tolist()
    torch.cuda.current_stream().wait_stream(side)

    busy()
    value.fill_(1.0)
    work = distributed.all_reduce(value, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    at.synchronise()
    found["future value"] = doubled.unique().tolist()

    busy()
    work = distributed.all_reduce(value, async_op=True)
    work.wait(timedelta(seconds=20))
    found["completed after a wait on the host"] = work.is_completed()
    busy()
    work = distributed.all_reduce(value, async_op=True)
    found["short wait"] = message(lambda: work.wait(timedelta(milliseconds=20)))
    work.wait()
    at.synchronise()
    return found


def memory(at: Context) -> list[float]:
    """Results from asynchronous operations whose tensors are dropped at once."""
    results = []
    for step in range(20):
        busy(0.002)
        given = torch.full((300_000,), float(step), device=at.device)
        out = torch.empty(2 * 300_000, device=at.device)
        work = distributed.all_gather_into_tensor(out, given, async_op=True)
        # The allocator would hand out its memory again.
        del given
        torch.full((300_000,), -1.0, device=at.device)
        work.wait()
        results.append(out.sum())
    at.synchronise()
    return [each.item() / 600_000 for each in results]


def graphs(at: Context) -> dict[str, Any]:
    """Synchronous and asynchronous operations in a graph that is replayed."""
    found: dict[str, Any] = {}
    given = torch.zeros(3000, device=at.device)
    whole = torch.zeros(6000, device=at.device)
    summed = torch.zeros(3000, device=at.device)

    def step() -> Any:
        summed.copy_(given)
        distributed.all_reduce(summed)
        work = distributed.all_gather_into_tensor(whole, summed + at.rank, async_op=True)
        completed = work.is_completed()
        work.wait()
        whole.mul_(2)
        return completed

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    at.synchronise()
    distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found["completed"] = step()
    results = []
    for round in range(5):
        given.fill_(round + at.rank)
        graph.replay()
        results.append([summed[7].item(), whole[0].item(), whole[-1].item()])
    found["replays"] = results
    # Eager calls follow replays.
    value = torch.ones(3, device=at.device)
    distributed.all_reduce(value)
    found["eager"] = value.tolist()
    fresh = distributed.new_group()
    other = torch.cuda.CUDAGraph()

    def unprepared() -> None:
        with torch.cuda.graph(other):
            distributed.all_reduce(value, group=fresh)

    found["unprepared"] = message(unprepared)
    at.synchronise()
    distributed.destroy_process_group(fresh)
    return found


def barriers(at: Context) -> float:
    """Host seconds in a barrier while rank 1's GPU is busy."""
    distributed.all_reduce(torch.ones(1, device=at.device))
    at.synchronise()
    distributed.barrier()
    if at.rank == 1:
        busy()
    began = time.perf_counter()
    distributed.barrier(device_ids=[at.rank])
    return time.perf_counter() - began
