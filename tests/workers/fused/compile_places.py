"""Graphs that differ between ranks, compiled with the `weft.fused` pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed
from torch.nn.functional import linear

import weft.fused
from tests.workers.fused.compile_common import compiled, counted


def places(rank: int, group: str) -> dict[str, Any]:
    """Five places, two alike on all ranks; a graph with one more collective on rank 1."""
    ranks = distributed.get_world_size()
    x, w = torch.randn(2 * ranks, 16), torch.randn(6, 24, 16)
    # Another inner size on rank 1.
    y, v = torch.randn(2 * ranks, 16 + 8 * rank), torch.randn(24, 16 + 8 * rank)

    def scattered(z: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional.reduce_scatter_tensor(z, "sum", 0, group)
        return made

    def different(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        first = scattered(linear(x, w[0]))
        # Not a GEMM on rank 1.
        second = scattered(linear(x, w[1]) if rank == 0 else x.sum(1, keepdim=True) + w[1, :, 0])
        result = linear(x, w[2])
        # With another user on rank 1.
        third = scattered(result) + (0 if rank == 0 else result.sum())
        fourth = scattered(linear(y, v))
        fifth = scattered(linear(first.repeat(ranks, 1)[:, :16], w[4]))
        return [first, second, third, fourth, fifth]

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        """A GEMM between two exchanges, which is in two places."""
        made: torch.Tensor = functional.all_to_all_single(
            linear(functional.all_to_all_single(x.relu(), None, None, group), w[0]),
            None,
            None,
            group,
        )
        return made

    def reduced(x: torch.Tensor) -> torch.Tensor:
        z = scattered(linear(x, w[5]))
        made: torch.Tensor = functional.all_reduce(z, "sum", group) if rank == 1 else z
        return made

    found = {}
    weft.fused.enable(force=True, timeout=20)
    for name, function, inputs in (
        ("different", different, (x, y)),
        ("exchanged", lambda x: [exchanged(x)], (x,)),
    ):
        weft.fused.reset_report()
        with torch.no_grad():
            pairs = zip(compiled(function)(*inputs), function(*inputs), strict=True)
            close = [torch.allclose(own, its, atol=1e-3) for own, its in pairs]
        found[name] = [close, counted()]
    weft.fused.reset_report()
    with torch.no_grad():
        z = compiled(reduced)(x)
        if rank != 1:
            z = functional.all_reduce(z, "sum", group)
        expected = functional.all_reduce(scattered(linear(x, w[5])), "sum", group)
    found["longer"] = [torch.allclose(z, expected, atol=1e-3), counted()]
    weft.fused.disable()
    return found
