"""Torch operators in `weft.fused`: results, gradients, torch's own checks, CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

import weft
import weft.fused
from tests.workers.fused.compile_common import OPS, counted, first, plain
from weft.fused import operators
from weft.fused.scaled_operators import PLAIN


def operator(name: str, group: str) -> dict[str, Any]:
    """Calls, gradients and torch's own checks on an operator."""
    ranks = distributed.get_world_size()
    call, arguments = getattr(OPS, name), (group,)
    x = torch.randn(4 * ranks, 16, requires_grad=True)
    weight = torch.randn(24, 16, requires_grad=True)
    weft.fused.reset_report()
    close, gradients = True, True
    for each in (weight, torch.randn(16, 24).t().requires_grad_()):
        y, expected = first(call(x, each, *arguments)), plain(name, x, each, group)
        close &= torch.allclose(y, expected, atol=1e-4)
        scale = torch.rand_like(y)
        own = torch.autograd.grad((y * scale).sum(), (x, each))
        theirs = torch.autograd.grad((expected * scale).sum(), (x, each))
        gradients &= all(torch.allclose(*pair, atol=1e-3) for pair in zip(own, theirs, strict=True))
    fused = weft.fused.report().fused_calls[name]
    torch.library.opcheck(call.default, (x, weight, *arguments))
    return {"close": close, "gradients": gradients, "fused": fused}


def scaled(name: str, group: str) -> dict[str, Any]:
    """Calls of a float8 operator with row and tensor scales, and torch's own checks.

    The last call is one that the kernel does not take.
    """
    ranks = distributed.get_world_size()
    call, base, close = getattr(OPS, name), PLAIN[name], []
    x = torch.randn(4 * ranks, 32).to(torch.float8_e4m3fn)
    weight = torch.randn(48, 32).to(torch.float8_e4m3fn)
    weft.fused.reset_report()
    for shapes, dtype in (
        (((4 * ranks, 1), (1, 48)), torch.float16),
        (((1,), (1, 1)), torch.float16),
        (((1,), (1,)), torch.float32),
    ):
        of_rows, of_columns = (torch.rand(shape) + 0.5 for shape in shapes)
        if of_rows.numel() == 1:
            of_rows = torch.full_like(of_rows, 0.75)
        expected = plain(base, x.float() * of_rows, weight.float() * of_columns.t(), group)
        if of_rows.numel() > 1 and base.endswith("_matmul"):
            # The received rows' scales.
            of_rows = plain(base, of_rows, torch.ones(1, 1), group)
        given = (x, weight, of_rows, of_columns, group)
        y = first(call(*given, out_dtype=dtype))
        close.append(y.dtype == dtype and torch.allclose(y.float(), expected, 4e-3, 3e-2))
        if of_rows.numel() > 1:
            # The schema check compares inputs, which torch does not for float8.
            checks = ["test_faketensor", "test_autograd_registration"]
            if name == "scaled_matmul_reduce_scatter":
                checks.append("test_aot_dispatch_dynamic")
            torch.library.opcheck(call.default, given, {"out_dtype": dtype}, test_utils=checks)
    if name == "all_gather_scaled_matmul":
        whole = plain(base, x.float(), torch.eye(32), group)
        for dtype in (torch.float16, torch.float32):
            gathered = call(*given, return_gathered=True, out_dtype=dtype)[1]
            close.append(torch.equal(gathered.float(), whole))
    return {"close": close, **counted()}


def embedding(group: str, columns: int) -> dict[str, Any]:
    """Three tables' bags on two ranks, an uneven batch, gradients, and torch's own checks."""
    rank, batch = distributed.get_rank(), 5
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    modes = [["sum", "mean"], ["weighted_sum"]]
    tables = [
        [torch.randn(9, columns, generator=generator, requires_grad=True) for _ in its]
        for its in modes
    ]
    lengths = [torch.randint(0, 4, (len(its) * batch,), generator=generator) for its in modes]
    bags = []
    for each in lengths:
        offsets = torch.cat((each.new_zeros(1), each.cumsum(0)))
        total = int(offsets[-1])
        indices = torch.randint(0, 9, (total,), generator=generator)
        bags.append((indices, offsets, torch.rand(total, generator=generator)))
    every = []
    for its, own, (indices, offsets, factors) in zip(modes, tables, bags, strict=True):
        for place, (mode, table) in enumerate(zip(its, own, strict=True)):
            part = offsets[place * batch : (place + 1) * batch + 1]
            mine = slice(int(part[0]), int(part[-1]))
            weighted = mode == "weighted_sum"
            every.append(
                nn.functional.embedding_bag(
                    indices[mine],
                    table,
                    part - part[0],
                    mode="sum" if weighted else mode,
                    per_sample_weights=factors[mine] if weighted else None,
                    include_last_offset=True,
                )
            )
    whole = torch.cat(every, 1)
    scale = torch.rand(whole.shape, generator=generator)
    expected_grad = torch.autograd.grad((whole * scale).sum(), tables[rank])
    weft.fused.reset_report()
    indices, offsets, factors = bags[rank]
    weights = factors if rank == 1 else None
    sizes = [2 * columns, columns]
    arguments = (tables[rank], indices, offsets, weights, modes[rank], sizes, batch, torch.float32)
    y = OPS.embedding_all_to_all(*arguments, group)
    mine = slice(0, 3) if rank == 0 else slice(3, 5)
    grad = torch.autograd.grad((y * scale[mine]).sum(), tables[rank])
    counts = counted()
    torch.library.opcheck(OPS.embedding_all_to_all.default, (*arguments, group))
    return {
        "close": torch.allclose(y, whole[mine], atol=1e-4),
        "gradients": all(
            torch.allclose(*pair, atol=1e-4) for pair in zip(grad, expected_grad, strict=True)
        ),
        "fused": counts["fused_calls"],
        "unfused": counts["unfused_calls"],
    }


def fallbacks(group: str) -> list[Any]:
    """Calls that the kernels do not take; some in float64 and in integers."""
    ranks = distributed.get_world_size()
    found = []
    for name, rows, dtype in (
        ("matmul_all_reduce", 3, torch.float64),
        ("matmul_all_reduce", 0, torch.float32),
        ("gemv_all_reduce", 40, torch.float32),
        ("matmul_reduce_scatter", 2 * ranks, torch.float64),
    ):
        weft.fused.reset_report()
        x, weight = torch.randn(rows, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
        y = getattr(OPS, name)(x, weight, group)
        close = torch.allclose(y, plain(name, x, weight, group), atol=1e-4)
        (reason,) = weft.fused.report().unfused_calls
        found.append([close, *reason])
    return found


def replays(group: str) -> dict[str, bool]:
    """Each operator in a CUDA graph that is replayed with other inputs."""
    found = {}
    for name in operators.OPERATORS:
        x, w = torch.zeros(16, 512).bfloat16(), torch.randn(256, 512).bfloat16()
        call = getattr(OPS, name)
        call(x, w, group)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = first(call(x, w, group))
        close = True
        for _ in range(20):
            x.copy_(torch.randn(16, 512))
            graph.replay()
            expected = plain(name, x, w, group)
            close &= torch.allclose(y.float(), expected.float(), atol=1.0, rtol=2e-2)
        found[name] = close
        torch.cuda.synchronize()
        weft.check()
    return found
