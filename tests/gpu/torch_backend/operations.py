"""Operations on all dtypes and in all forms, beside results on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.torch_backend.ranks import Context


def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Small numbers, so that products stay in range."""
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-3, 4, (count,), generator=source)
    if dtype == torch.bool:
        return drawn > 0
    if dtype.is_floating_point:
        return (drawn + torch.rand(count, generator=source)).to(dtype)
    return drawn.abs().to(dtype) if dtype == torch.uint8 else drawn.to(dtype)


def reduced(op: str, contributions: list[torch.Tensor]) -> torch.Tensor:
    """Reduction on the CPU, for two ranks exactly the kernels' result."""
    one, two = contributions
    if one.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return reduced(op, [one.float(), two.float()]).to(one.dtype)
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


def same(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless two tensors are equal."""
    found = found.detach().cpu()
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    # torch has no 8-bit float comparison.
    wide = expected.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    one, two = (found.float(), expected.float()) if wide else (found, expected)
    assert torch.equal(one, two), f"{what} of {found.dtype}: {found}, expected {expected}"


def reductions(at: Context) -> int:
    """Reductions by all operations that have them; the number of compared cases."""
    # Compiling kernels takes about a second for each pair.
    pairs = {
        torch.float32: ["SUM", "AVG", "PRODUCT", "MIN", "MAX"],
        torch.int32: ["SUM", "MIN", "BAND", "BOR", "BXOR"],
        torch.bfloat16: ["SUM", "AVG"],
        torch.float16: ["SUM"],
        torch.float8_e4m3fn: ["SUM"],
        torch.float8_e5m2: ["MAX"],
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


def factors(at: Context) -> int:
    """Sums of products with a factor, on the host and the device; the number of compared cases."""
    compared = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in (1, 130, 40_001):
            whole = [values(dtype, size * at.ranks, 5 * rank) for rank in range(at.ranks)]
            # The table's arithmetic on the CPU: float32, or float64 for that dtype.
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            factor = torch.tensor(1 / 3, dtype=torch.float64)
            products = [(each.to(wide) * factor.to(wide)).to(dtype) for each in whole]
            expected = reduced("SUM", products)
            part = expected.chunk(at.ranks)[at.rank]
            mine = whole[at.rank].to(at.device)
            for given in (1 / 3, factor, factor.to(at.device)):
                op = distributed._make_nccl_premul_sum(given)
                result = mine.clone()
                distributed.all_reduce(result, op)
                same("all_reduce PREMUL_SUM", result, expected)
                result = mine.clone()
                distributed.reduce(result, 1, op)
                same("reduce PREMUL_SUM", result, expected if at.rank == 1 else mine.cpu())
                result = torch.empty_like(part, device=at.device)
                distributed.reduce_scatter_tensor(result, mine, op, async_op=True).wait()
                same("reduce_scatter_tensor PREMUL_SUM", result, part)
                compared += 3
    if at.on_gpu:
        number = torch.full((), 0.25, device=at.device)
        value, given = torch.empty(500, device=at.device), torch.empty(500, device=at.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value.copy_(given)
            distributed.all_reduce(value, distributed._make_nccl_premul_sum(number))
        for step in range(3):
            given.fill_(4.0 * (at.rank + step))
            number.fill_(0.25 * (step + 1))
            graph.replay()
            same("captured PREMUL_SUM", value, torch.full((500,), (step + 1.0) * (1 + 2 * step)))
        at.synchronise()
    return compared


def movements(at: Context) -> int:
    """All operations without arithmetic, in several dtypes and lengths; compared cases."""
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


def messages(at: Context) -> int:
    """Single, asynchronous and batched sends and receives; the number of compared tensors."""
    compared, left, right = 0, (at.rank - 1) % at.ranks, (at.rank + 1) % at.ranks
    distributed.barrier()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex64):
        for count in (0, 1, 17, 300_001):
            sources = [
                values(torch.float32, 2 * count, 5 * rank + 1).to(dtype).view(-1, 2)
                for rank in range(at.ranks)
            ]
            mine = sources[at.rank].to(at.device)
            # A pipeline: blocking calls, whose order differs between ranks.
            result = torch.zeros_like(mine)
            if at.rank > 0:
                distributed.recv(result, at.rank - 1)
                same("recv", result, sources[at.rank - 1])
            if at.rank + 1 < at.ranks:
                distributed.send(mine, at.rank + 1)
            # A ring in both directions: longer than all buffers.
            results = [torch.zeros_like(mine) for _ in range(4)]
            works = distributed.batch_isend_irecv(
                [
                    distributed.P2POp(distributed.isend, mine, right),
                    distributed.P2POp(distributed.irecv, results[0], left),
                    distributed.P2POp(distributed.isend, mine, left),
                    distributed.P2POp(distributed.irecv, results[1], right),
                ]
            )
            for work in works:
                work.wait()
            same("batch from the left", results[0], sources[left])
            same("batch from the right", results[1], sources[right])
            # Asynchronous ones, matched by their order: even ranks send first.
            turned = mine.t()
            first = distributed.isend(mine, right) if at.rank % 2 == 0 else None
            into = distributed.irecv(results[2].t(), left)
            works = [distributed.isend(mine, right)] if first is None else [first]
            works += [distributed.isend(turned, right)] if at.rank % 2 == 0 else []
            more = distributed.irecv(results[3].t(), left)
            works += [distributed.isend(turned, right)] if at.rank % 2 else []
            for work in (*works, into, more):
                work.wait()
            same("irecv", results[2].t().reshape(-1, 2), sources[left])
            same("irecv of a transposed tensor", results[3], sources[left])
            compared += 5
    # Several messages for a pair and in other dtypes in one batch, in list order.
    tensors = [values(kind, 50, 3) for kind in (torch.int32, torch.bool, torch.float16)]
    given = [each.to(at.device) for each in tensors]
    received = [torch.zeros_like(each) for each in given]
    batch = [distributed.P2POp(distributed.irecv, each, left) for each in received]
    batch += [distributed.P2POp(distributed.isend, each, right) for each in given]
    for work in distributed.batch_isend_irecv(batch):
        work.wait()
    for one, expected in zip(received, tensors, strict=True):
        same("several messages in a batch", one, expected)
    objects: list[Any] = [{"rank": 0}] if at.rank == 0 else [None]
    if at.rank == 0:
        distributed.send_object_list(objects, 1, device=at.device)
    elif at.rank == 1:
        distributed.recv_object_list(objects, 0, device=at.device)
    assert at.rank > 1 or objects == [{"rank": 0}], objects
    return compared + len(received)


def groups(at: Context) -> dict[str, Any]:
    """Coalesced operations, groups with some ranks, and a device mesh."""
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
