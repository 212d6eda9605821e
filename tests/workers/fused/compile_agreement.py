"""Rank agreement on fused operators: disagreement, cache keys, groups' communicators."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import distributed
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import weft.fused
from tests.workers.fused.compile_common import compiled, counted, renew
from tests.workers.fused.compile_graphs import linear_reduce_scatter
from weft.fused import operators, tables, tuning
from weft.group.group import OPEN


def disagreement(rank: int, group: str) -> dict[str, Any]:
    """A rank without the pass, ranks with other flags, and a rank with another graph in its cache.

    Results are right in each case, and no rank runs the fused operator.
    """
    ranks = distributed.get_world_size()
    x, w = torch.randn(2 * ranks, 16), torch.randn(24, 16)
    with torch.no_grad():
        expected = linear_reduce_scatter(x, w, w, group)

    def run() -> list[Any]:
        weft.fused.reset_report()
        with torch.no_grad():
            y = compiled(linear_reduce_scatter)(x, w, w, group)
        return [torch.allclose(y, expected, atol=1e-3), counted()]

    found = {}
    if rank == 0:
        weft.fused.enable(force=True, timeout=1)
    found["absent"] = run()
    weft.fused.disable()
    # Only rank 0 has counted a comparison.
    renew(group)
    weft.fused.enable(
        force=True, operators=["matmul_reduce_scatter", "gemv_all_reduce"][: 1 + rank]
    )
    found["flags"] = run()
    # Other sizes: the graph is not in the cache.
    x, w = torch.randn(2 * ranks, 8), torch.randn(24, 8)
    with torch.no_grad():
        expected = linear_reduce_scatter(x, w, w, group)
    weft.fused.enable(force=True)
    found["miss"], found["hit"] = run(), run()
    renew(group)
    before = operators.SITE_TIMEOUT[0]
    operators.SITE_TIMEOUT[0] = 1.0
    if rank == 1:
        weft.fused.disable()
    found["loaded"] = run()
    operators.SITE_TIMEOUT[0] = before
    weft.fused.disable()
    renew(group)
    return found


def cache_keys() -> dict[str, Any]:
    """Inductor cache keys with several flags, and passes before and around this one."""

    class Other(CustomGraphPass):  # type: ignore[misc]
        calls = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.calls += 1

        def uuid(self) -> Any:
            return "other"

    def uuid() -> Any:
        return config.post_grad_custom_pre_pass.uuid()

    def enabled(**flags: Any) -> Any:
        weft.fused.enable(**flags)
        return uuid()

    plain, force, again = enabled(), enabled(force=True), enabled()
    some = enabled(operators=["matmul_all_reduce"])
    distributed.barrier()
    tables.renew_salt()
    distributed.barrier()
    salted = enabled()
    tuning_file = tuning.tuning_file()
    tuning_file.parent.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    shape = tuning.Shape(8, 8, 8)
    key = tuning.Table.key("matmul_all_reduce", shape, torch.float32, 2, "cpu")
    table = tuning.Table({key: {"choice": "unfused", "tiling": None, "microseconds": {}}})
    if distributed.get_rank() == 0:
        tuning_file.write_text(table.text())
    distributed.barrier()
    measured = enabled()
    distributed.barrier()
    tuning_file.unlink(missing_ok=True)
    weft.fused.disable()
    other = config.post_grad_custom_pre_pass = Other()
    chained = enabled()
    # Each rank compiles a separate graph.
    compiled(torch.relu)(torch.randn(2, 3 + distributed.get_rank()))
    calls = other.calls
    weft.fused.disable()
    restored = config.post_grad_custom_pre_pass is other
    config.post_grad_custom_pre_pass = lambda graph: None
    without = enabled()
    weft.fused.disable()
    config.post_grad_custom_pre_pass = None
    return {
        "distinct": len({plain, force, some, salted, measured, chained}),
        "again": plain == again,
        "calls": calls,
        "restored": restored,
        "without": without,
    }


def groups(group: str) -> dict[str, Any]:
    """Two groups' communicators; the second one ends with its group."""

    ranks = distributed.get_world_size()
    own = weft.fused.communicator_of(group)
    other = distributed.new_group(list(range(ranks)))
    made = weft.fused.communicator_of(other.group_name)
    found = {
        "same": weft.fused.communicator_of(group) is own,
        "distinct": made is not own,
        "ranks": [made.rank, made.world_size],
        "open": made in OPEN,
    }
    distributed.destroy_process_group(other)
    del other
    gc.collect()
    found["closed"] = made not in OPEN
    return found
