"""`weft.fused.tuning` choices, by a timer in the test and by GPU times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

import weft.fused
from tests.workers.fused.compile_common import OPS, counted, renew
from weft.fused import tuning

if TYPE_CHECKING:
    from collections.abc import Callable


def choices(rank: int, group: str) -> dict[str, Any]:
    """Choices by a timer in the test; the ranks' times differ."""
    tuning.tuning_file().unlink(missing_ok=True)
    renew(group)
    shape, device = tuning.Shape(40, 24, 16), torch.get_default_device()
    # The second tiling is the fastest on rank 0, and the slowest on rank 1.
    times = iter([40.0, 33.0, 30.0, 20.0, 25.0] if rank == 0 else [40.0, 33.0, 31.0, 90.0, 26.0])
    candidates = [None, {"rows": 16, "columns": 64}, {"rows": 32, "columns": 64}, {"lines": 3}]
    called: list[Any] = []

    def timer(function: Callable[[], object]) -> float:
        weft.fused.reset_report()
        function()
        called.append(next(times))
        return float(called[-1])

    w = torch.randn(24, 16)

    def tuned(operator: str, rows: int) -> Any:
        x = torch.randn(rows, 16)
        return tuning.tune(operator, x, w, group, candidates, timer=timer)

    choice = tuned("matmul_all_reduce", 40)
    timed = len(called)
    times = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    slow = tuned("matmul_all_to_all", 40)
    times = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    composed = tuned("all_gather_matmul", 40)
    distributed.barrier()
    weft.fused.reset_report()
    OPS.matmul_all_reduce(torch.randn(37, 16), w, group)
    fused = counted()["fused_calls"]
    OPS.matmul_all_to_all(torch.randn(36, 16), w, group)
    x = torch.randn(36, 16)
    result, gathered = OPS.all_gather_matmul(x, w, group, True)
    parts = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, x)
    right = torch.equal(gathered, torch.cat(parts))
    right &= torch.allclose(result, torch.cat(parts) @ w.t(), atol=1e-5)
    unfused = counted()["unfused_calls"]
    table = tuning.own_table()
    ranks = distributed.get_world_size()
    found = {
        "choice": choice,
        "slow": slow,
        "composed": [composed, right],
        "timed": timed,
        "fused": fused,
        "unfused": unfused,
        "stored": table.choice("matmul_all_reduce", shape, torch.float32, ranks, device),
        "class": table.choice(
            "matmul_all_reduce", shape._replace(rows=64), torch.float32, ranks, device
        ),
        "other": table.choice("matmul_reduce_scatter", shape, torch.float32, ranks, device),
        "doubts": [
            weft.fused.gains.doubt(name, shape, torch.float32, ranks, device, table)
            for name in ("matmul_all_reduce", "matmul_all_to_all", "matmul_reduce_scatter")
        ],
    }
    renew(group)
    tuning.tuning_file().unlink(missing_ok=True)
    return found


def choices_of_gpus(group: str) -> dict[str, Any]:
    """Choices by GPU times, with the default candidates."""
    w, found = torch.randn(2048, 1024).bfloat16(), dict[str, Any]()
    for name, rows in (("gemv_all_reduce", 4), ("matmul_all_reduce", 512)):
        x = torch.randn(rows, 1024).bfloat16()
        choice, _ = tuning.tune(name, x, w, group)
        found[name] = choice
    # The ranks share the file, which rank 0 writes.
    distributed.barrier()
    entries = tuning.own_table().entries.values()
    found["timed"] = sorted(len(each["microseconds"]) for each in entries)
    distributed.barrier()
    tuning.tuning_file().unlink(missing_ok=True)
    return found
