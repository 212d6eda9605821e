"""Ranks of the backend `weft` of torch.distributed on GPUs, in processes of their own.

`Ranks` starts them and has all of them run a function of this module by name. Functions take the
context of a rank and return what a test checks; those of streams and graphs need a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    import torch

#: Limit of a function on a busy machine, compilation included.
LIMIT_SECONDS = 120.0
#: Longest time of a call that does not wait on the host.
AT_ONCE_SECONDS = 0.1
#: Time that a stream is kept busy.
BUSY_SECONDS = 0.4


@dataclass(frozen=True)
class Context:
    """A rank: its number, the number of ranks, its device, and whether that is a GPU."""

    rank: int
    ranks: int
    device: torch.device
    on_gpu: bool

    def synchronise(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()


class Ranks:
    """Processes that wait for functions to run; a failure ends them.

    Args:
        kind: "cuda" for a GPU each, "twin" for the CPU.
        folder: for the store.
        bound: whether the default group is bound to the GPU.
    """

    def __init__(self, kind: str, folder: str, ranks: int = 2, *, bound: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, kind, rank, ranks, os.path.join(folder, "store"), bound)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, name: str, **arguments: Any) -> list[Any]:
        """Results of a function on all ranks; its first error as AssertionError."""
        for pipe in self.pipes:
            pipe.send((name, arguments))
        try:
            replies = [self.receive(rank) for rank in range(len(self.pipes))]
        except Exception:
            self.end()
            raise
        failures = [f"rank {rank}: {each[1]}" for rank, each in enumerate(replies) if each[0]]
        if failures:
            self.end()
            raise AssertionError("\n".join(failures))
        return [each[1] for each in replies]

    def receive(self, rank: int) -> Any:
        """Reply of a rank."""
        if not self.pipes[rank].poll(LIMIT_SECONDS):
            raise AssertionError(f"rank {rank} did not reply within {LIMIT_SECONDS:g} s")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(10)
            status = self.processes[rank].exitcode
            raise AssertionError(f"rank {rank} ended with status {status}") from None

    def end(self) -> None:
        """End all ranks, in peace if they reply."""
        for pipe in self.pipes:
            try:
                pipe.send(("", {}))
            except OSError:
                continue
        for process in self.processes:
            process.join(15)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes.clear()

    @property
    def alive(self) -> bool:
        """True until the end."""
        return bool(self.processes)


def serve(pipe: Connection, kind: str, rank: int, ranks: int, store: str, bound: bool) -> None:
    """A rank: runs functions until the request to end."""
    # As programs have it: the tests of ranks on one GPU set another mode.
    os.environ.pop("CUDA_MODULE_LOADING", None)
    # Compilation without processes of its own, which are slow to start.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    from torch import distributed

    import weft.torch

    on_gpu = kind == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        weft.torch.device.kind = "twin"
        torch.set_num_threads(1)
    distributed.init_process_group(
        "weft",
        store=distributed.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=device if bound and on_gpu else None,
    )
    context = Context(rank, ranks, device, on_gpu)
    while True:
        name, arguments = pipe.recv()
        if not name:
            distributed.destroy_process_group()
            return
        try:
            pipe.send((False, globals()[name](context, **arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def outcome(call: Callable[[], Any]) -> str:
    """First line of a call's error, with its class; "none" without one."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "none"


def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Small numbers, so that products stay in range."""
    import torch

    source = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-3, 4, (count,), generator=source)
    if dtype == torch.bool:
        return drawn > 0
    if dtype.is_floating_point:
        return (drawn + torch.rand(count, generator=source)).to(dtype)
    return drawn.abs().to(dtype) if dtype == torch.uint8 else drawn.to(dtype)


def reduced(op: str, contributions: list[torch.Tensor]) -> torch.Tensor:
    """Reduction on the CPU, for two ranks exactly that of the kernels."""
    import torch

    one, two = contributions
    if one.dtype == torch.bool:
        op = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op, op)
    steps: dict[str, Callable[..., torch.Tensor]] = {
        "SUM": torch.add,
        "AVG": lambda a, b: ((a + b) / 2).to(a.dtype),
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    return steps[op](one, two)


def reductions(at: Context) -> int:
    """Reductions by all operations that have them; the number of compared cases."""
    import torch
    from torch import distributed

    # Compilation of kernels takes about a second for each pair.
    pairs = {
        torch.float32: ["SUM", "AVG", "PRODUCT", "MIN", "MAX"],
        torch.int32: ["SUM", "MIN", "BAND", "BOR", "BXOR"],
        torch.bfloat16: ["SUM", "AVG"],
        torch.float16: ["SUM"],
        torch.int64: ["SUM"],
        torch.uint8: ["SUM"],
        torch.bool: ["SUM"],
    }
    compared = 0
    for dtype, ops in pairs.items():
        for op in ops:
            reduction = getattr(distributed.ReduceOp, op)
            sizes = (1, 130, 40_001) if op in ("SUM", "BXOR") else (1026,)
            for size in sizes:
                whole = [values(dtype, size * at.ranks, 7 * rank) for rank in range(at.ranks)]
                expected = reduced(op, whole)
                part = expected.chunk(at.ranks)[at.rank]
                mine = whole[at.rank].to(at.device)

                result = mine.clone()
                distributed.all_reduce(result, reduction)
                same(f"all_reduce {op}", result, expected)
                result = mine.clone()
                distributed.reduce(result, 1, reduction)
                same(f"reduce {op}", result, expected if at.rank == 1 else mine.cpu())
                result = torch.empty_like(part, device=at.device)
                distributed.reduce_scatter_tensor(result, mine, reduction)
                same(f"reduce_scatter_tensor {op}", result, part)
                result.zero_()
                distributed.reduce_scatter(result, list(mine.chunk(at.ranks)), reduction)
                same(f"reduce_scatter {op}", result, part)
                compared += 4
    average = torch.tensor([-2 - at.rank, 5 + at.rank], device=at.device)
    distributed.all_reduce(average, distributed.ReduceOp.AVG)
    same("average of integers", average, torch.tensor([-2, 5]))
    number = torch.tensor([1.0 + 2j], device=at.device) * (at.rank + 1)
    distributed.all_reduce(number)
    same("sum of complex numbers", number, torch.tensor([3 + 6j]))
    return compared


def movements(at: Context) -> int:
    """All operations without arithmetic, of several dtypes and lengths; compared cases."""
    import torch
    from torch import distributed

    compared = 0
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex64):
        for rows in (1, 17, 30_000):
            sources = [
                values(torch.float32, rows * at.ranks * 2, 3 * rank).to(dtype).view(-1, 2)
                for rank in range(at.ranks)
            ]
            mine = sources[at.rank].to(at.device)
            share = mine[:rows]
            every = torch.cat([each[:rows] for each in sources])
            moved = torch.cat([each[at.rank * rows : (at.rank + 1) * rows] for each in sources])

            result = mine.clone()
            distributed.broadcast(result, 1)
            same("broadcast", result, sources[1])
            result = torch.empty_like(every, device=at.device)
            distributed.all_gather_into_tensor(result, share)
            same("all_gather_into_tensor", result, every)
            result.zero_()
            result[at.rank * rows : (at.rank + 1) * rows] = share
            distributed.all_gather_into_tensor(result, result[at.rank * rows :][:rows])
            same("all_gather_into_tensor in place", result, every)
            parts = [torch.empty_like(share) for _ in range(at.ranks)]
            distributed.all_gather(parts, share)
            same("all_gather", torch.cat(parts), every)
            result = torch.empty_like(mine)
            distributed.all_to_all_single(result, mine)
            same("all_to_all_single", result, moved)
            parts = [torch.empty_like(share) for _ in range(at.ranks)]
            distributed.all_to_all(parts, list(mine.chunk(at.ranks)))
            same("all_to_all", torch.cat(parts), moved)
            # Rank r sends r + 1 rows to rank 0 and all others to rank 1.
            sent = [at.rank + 1, rows * at.ranks - at.rank - 1]
            splits = [[each + 1, rows * at.ranks - each - 1] for each in range(at.ranks)]
            received = [each[at.rank] for each in splits]
            result = torch.empty((sum(received), 2), dtype=dtype, device=at.device)
            distributed.all_to_all_single(result, mine, received, sent)
            pairs = zip(sources, splits, strict=True)
            uneven = torch.cat([each.split(split)[at.rank] for each, split in pairs])
            same("uneven all_to_all_single", result, uneven)
            parts = [torch.empty_like(share) for _ in range(at.ranks)]
            distributed.gather(share, parts if at.rank == 1 else None, 1)
            if at.rank == 1:
                same("gather", torch.cat(parts), every)
            result = torch.empty_like(share)
            distributed.scatter(result, list(mine.chunk(at.ranks)) if at.rank == 0 else None, 0)
            same("scatter", result, sources[0].chunk(at.ranks)[at.rank])
            compared += 9
    grid = torch.arange(12.0, device=at.device).reshape(3, 4) + at.rank
    distributed.all_reduce(grid.t())
    same("all_reduce of a transposed tensor", grid, torch.arange(12.0).reshape(3, 4) * 2 + 1)
    objects: list[Any] = [None] * at.ranks
    distributed.all_gather_object(objects, {"rank": at.rank})
    assert objects == [{"rank": rank} for rank in range(at.ranks)], objects
    return compared


def same(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless two tensors are equal."""
    import torch

    found = found.detach().cpu()
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    assert torch.equal(found, expected), f"{what} of {found.dtype}: {found}, expected {expected}"


def groups(at: Context) -> dict[str, Any]:
    """Coalesced operations, groups of some ranks, and a device mesh."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    found: dict[str, Any] = {}
    shares = [torch.full((n,), float(at.rank), device=at.device) for n in (1, 3)]
    wholes = [torch.empty(at.ranks * len(each), device=at.device) for each in shares]
    with distributed._coalescing_manager(async_ops=True) as works:
        for share, whole in zip(shares, wholes, strict=True):
            distributed.all_gather_into_tensor(whole, share)
    works.wait()
    found["gathered"] = [each.tolist() for each in wholes]
    with distributed._coalescing_manager():
        for share, whole in zip(shares, wholes, strict=True):
            distributed.reduce_scatter_tensor(share, whole)
    found["scattered"] = [each.sum().item() for each in shares]
    with distributed._coalescing_manager(async_ops=True) as works:
        for share in shares:
            distributed.all_reduce(share)
    works.wait()
    found["reduced"] = [each.sum().item() for each in shares]
    values = [torch.full((2,), float(at.rank), device=at.device) for _ in range(2)]
    with distributed._coalescing_manager(device=at.device, async_ops=True) as works:
        for root, value in enumerate(values):
            works.append(distributed.broadcast(value, root, async_op=True))
    works.wait()
    found["broadcast"] = [each.tolist() for each in values]
    alone = [distributed.new_group([each]) for each in range(at.ranks)]
    value = torch.tensor([at.rank + 1.0], device=at.device)
    distributed.all_reduce(value, group=alone[at.rank])
    found["alone"] = value.item()
    second = distributed.new_group()
    result = torch.empty(2, device=at.device)
    distributed.all_gather_into_tensor(result, value, group=second)
    found["second"] = result.tolist()
    mesh = init_device_mesh(at.device.type, (at.ranks, 1), mesh_dim_names=("row", "column"))
    distributed.all_reduce(value, group=mesh.get_group("row"))
    found["mesh"] = value.item()
    # Operations in flight end before their group does.
    live = [distributed.all_reduce(result, group=second, async_op=True) for _ in range(3)]
    distributed.destroy_process_group(second)
    for each in live:
        each.wait()
    found["live"] = result.tolist()
    distributed.barrier()
    return found


def busy(seconds: float = BUSY_SECONDS) -> None:
    """Keep the current stream busy for a while."""
    import torch

    # Cycles at the clock of a GPU under load.
    torch.cuda._sleep(int(seconds * 1.7e9))


def streams(at: Context) -> dict[str, Any]:
    """Host times of operations behind a busy stream, and the order of their results."""
    import torch
    from torch import distributed

    found: dict[str, Any] = {}
    value = torch.zeros(50_000, device=at.device)
    distributed.all_reduce(value)
    distributed.all_reduce(value, async_op=True).wait()
    # The first use of a kernel may wait for the stream.
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
    # Independent work of the current stream.
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
    found["short wait"] = outcome(lambda: work.wait(timedelta(milliseconds=20)))
    work.wait()
    at.synchronise()
    return found


def memory(at: Context) -> list[float]:
    """Results of asynchronous operations whose tensors are dropped at once."""
    import torch
    from torch import distributed

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
    import torch
    from torch import distributed

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

    found["unprepared"] = outcome(unprepared)
    at.synchronise()
    distributed.destroy_process_group(fresh)
    return found


def barriers(at: Context) -> float:
    """Host seconds of a barrier for which the GPU of rank 1 is busy."""
    import torch
    from torch import distributed

    distributed.all_reduce(torch.ones(1, device=at.device))
    at.synchronise()
    distributed.barrier()
    if at.rank == 1:
        busy()
    began = time.perf_counter()
    distributed.barrier(device_ids=[at.rank])
    return time.perf_counter() - began


def errors(at: Context) -> dict[str, str]:
    """Errors of operations that a GPU lacks; the group still works after them."""
    import torch
    from torch import distributed

    ones = torch.ones(2, device=at.device)
    distributed.all_reduce(ones)
    elsewhere = torch.ones(2, device=torch.device("cuda", 1 - at.rank))
    found = {
        "send": outcome(lambda: distributed.send(ones, 1 - at.rank)),
        "recv": outcome(lambda: distributed.recv(ones, 1 - at.rank)),
        "factor": outcome(
            lambda: distributed.all_reduce(ones, distributed._make_nccl_premul_sum(2.0))
        ),
        "mixed": outcome(lambda: distributed.all_gather_into_tensor(torch.ones(4), ones)),
        "device": outcome(lambda: distributed.all_reduce(elsewhere)),
        "sparse": outcome(lambda: distributed.all_reduce(ones.to_sparse())),
    }
    value = torch.ones(2, device=at.device)
    distributed.all_reduce(value)
    same("all_reduce after errors", value, torch.full((2,), 2.0))
    return found


def late(at: Context) -> dict[str, Any]:
    """Errors of rank 0 in a group whose rank 1 does not come in time."""
    import torch
    from torch import distributed

    group = distributed.new_group(timeout=timedelta(seconds=3))
    value = torch.ones(3, device=at.device)
    distributed.all_reduce(value, group=group)
    at.synchronise()
    distributed.barrier()
    found: dict[str, Any] = {}
    if at.rank == 0:
        began = time.perf_counter()
        # On a GPU the call returns, and its kernel gives up.
        found["first"] = outcome(lambda: distributed.all_reduce(value, group=group))
        at.synchronise()
        found["seconds"] = time.perf_counter() - began
        found["value"] = value.tolist()
        found["later"] = outcome(lambda: distributed.broadcast(value, 0, group=group))
    distributed.barrier()
    if at.rank == 1:
        found["later"] = outcome(lambda: distributed.broadcast(value, 0, group=group))
    distributed.destroy_process_group(group)
    distributed.all_reduce(torch.ones(1, device=at.device))
    at.synchronise()
    return found


def ended(at: Context, how: str) -> dict[str, Any]:
    """Rank 0 aborts or destroys a group whose kernel waits for rank 1."""
    import torch
    from torch import distributed

    from weft.torch import device

    device.DeviceCalls.end_grace = 1.0
    group: Any = distributed.new_group()
    value = torch.ones(3, device=at.device)
    distributed.all_reduce(value, group=group)
    at.synchronise()
    distributed.barrier()
    found: dict[str, Any] = {}
    if at.rank == 0:
        distributed.all_reduce(value, group=group)
        began = time.perf_counter()
        if how == "abort":
            group.abort()
        else:
            distributed.destroy_process_group(group)
        at.synchronise()
        found["seconds"] = time.perf_counter() - began
    distributed.barrier()
    if at.rank == 1 or how == "abort":
        found["error"] = outcome(lambda: distributed.all_reduce(value, group=group))
        distributed.destroy_process_group(group)
    device.DeviceCalls.end_grace = 30.0
    distributed.all_reduce(value)
    at.synchronise()
    return found


def network(at: Context) -> Any:
    """A small model with the same parameters on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    return layers.append(nn.Linear(64, 8)).to(at.device)


def trained(
    at: Context, model: Any, ranks: list[int], backward: Callable[[Any], None] | None = None
) -> list[float]:
    """Losses of steps on the batches of some ranks."""
    import torch
    from torch import nn

    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(5):
        batches = []
        for rank in ranks:
            source = torch.Generator().manual_seed(100 * step + rank)
            inputs = torch.randn(6, 24, generator=source)
            batches.append((inputs, inputs[:, :8].sin()))
        inputs, targets = (torch.cat(each).to(at.device) for each in zip(*batches, strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if backward is not None:
            backward(model)
        optimizer.step()
        losses.append(loss.detach())
    return [each.item() for each in losses]


def training(at: Context) -> dict[str, Any]:
    """Losses and gradients of one process, DistributedDataParallel and FSDP2."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    gradients: dict[str, list[Any]] = {"alone": [], "ddp": []}

    def keep(name: str) -> Callable[[Any], None]:
        def of(model: Any) -> None:
            flat = [each.grad.detach().reshape(-1) for each in model.parameters()]
            gradients[name].append(torch.cat(flat).clone())

        return of

    def mean(losses: list[float]) -> Any:
        value = torch.tensor(losses, device=at.device)
        distributed.all_reduce(value, distributed.ReduceOp.AVG)
        return value.tolist()

    everyone = list(range(at.ranks))
    found = {"alone": trained(at, network(at), everyone, keep("alone"))}
    # Buckets of 4 kB: several are reduced while the backward pass goes on.
    replica = DistributedDataParallel(
        network(at),
        bucket_cap_mb=0.004,
        device_ids=[at.device.index] if at.on_gpu else None,
    )
    found["ddp"] = mean(trained(at, replica, [at.rank], keep("ddp")))
    mesh = init_device_mesh(at.device.type, (at.ranks,))
    sharded = network(at)
    for layer in sharded:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    found["fsdp"] = mean(trained(at, sharded, [at.rank]))
    pairs = list(zip(gradients["alone"], gradients["ddp"], strict=True))
    found["difference"] = max((a - b).abs().max().item() for a, b in pairs)
    for _, gradient in pairs:
        both = torch.empty(at.ranks * len(gradient), device=at.device)
        distributed.all_gather_into_tensor(both, gradient)
        assert torch.equal(*both.chunk(2)), "gradients of the ranks differ"
    whole = torch.cat([each.full_tensor().reshape(-1) for each in sharded.parameters()])
    other = torch.cat([each.detach().reshape(-1) for each in replica.parameters()])
    found["parameters"] = (whole - other).abs().max().item()
    return found


def compiled(at: Context, backend: str) -> dict[str, Any]:
    """Functional collectives, alone and in a compiled function."""
    import torch
    import torch.distributed._functional_collectives as functional
    from torch import distributed

    world = distributed.group.WORLD

    def forward(value: Any) -> Any:
        total = functional.all_reduce(value * 2, "sum", world)
        whole = functional.all_gather_tensor(value, 0, world)
        share = functional.reduce_scatter_tensor(whole, "sum", 0, world)
        moved = functional.all_to_all_single(value, None, None, world)
        pair = functional.all_reduce_coalesced([value, value + 1], "max", world)
        return total + share, whole, moved, pair[0] + pair[1]

    value = torch.arange(float(2 * at.ranks), device=at.device) + at.rank
    eager = [each.tolist() for each in forward(value)]
    traced = torch.compile(forward, backend=backend, fullgraph=True)
    return {"eager": eager, "compiled": [each.tolist() for each in traced(value)]}


def bound(at: Context) -> dict[str, Any]:
    """Groups of ranks whose default group is bound to their GPU, and the operator."""
    import torch
    from torch import distributed

    alone = distributed.new_group([1])
    value = torch.ones(2, device=at.device)
    if at.rank == 1:
        distributed.all_reduce(value, group=alone)
    distributed.barrier()
    distributed.all_reduce(value)
    result = value.tolist()
    torch.ops.weft.all_reduce_(value, "max", distributed.group.WORLD.group_name)
    return {"sum": result, "max": value.tolist()}


def lost(at: Context) -> dict[str, Any]:
    """Rank 1 is killed between operations; rank 0 names it."""
    import torch
    from torch import distributed

    value = torch.ones(200_000, device=at.device)
    distributed.all_reduce(value)
    at.synchronise()
    distributed.barrier()
    if at.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.perf_counter()
    error = "none"
    while error == "none" and time.perf_counter() - began < 30:
        error = outcome(lambda: distributed.all_reduce(value, distributed.ReduceOp.MAX))
        at.synchronise()
    seconds = time.perf_counter() - began
    on_cpu = outcome(lambda: distributed.barrier())
    # The GPU still computes.
    total = torch.ones(1000, device=at.device).sum().item()
    return {"error": error, "barrier": on_cpu, "seconds": seconds, "total": total}
