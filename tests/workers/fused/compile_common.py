"""Parts for checking fused torch operators: unfused results, compilation, counts."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.functional import linear

import weft.fused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Operators by name; calls take x, a weight and the group's name.
OPS = torch.ops.weft_fused


def plain(name: str, x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    """Operator by functional collectives, with torch's gradients."""
    collectives, ranks = torch.ops._c10d_functional, distributed.get_world_size()
    if name == "all_gather_matmul":
        x = wait(collectives.all_gather_into_tensor(x, ranks, group))
    if name == "all_to_all_matmul":
        x = exchanged(x, group)
    y = linear(x, weight)
    if name.endswith("all_reduce"):
        return wait(collectives.all_reduce(y, "sum", group))
    if name == "matmul_reduce_scatter":
        return wait(collectives.reduce_scatter_tensor(y, "sum", ranks, group))
    return exchanged(y, group) if name == "matmul_all_to_all" else y


def exchanged(x: torch.Tensor, group: str) -> torch.Tensor:
    ranks = distributed.get_world_size()
    sizes = [x.shape[0] // ranks] * ranks
    return wait(torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, group))


def wait(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


class Recorder(logging.Handler):
    """A logger's messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[list[str]]:
    logger, recorder = logging.getLogger("weft.fused"), Recorder()
    before = logger.level
    logger.addHandler(recorder)
    logger.setLevel(logging.INFO)
    try:
        yield recorder.messages
    finally:
        logger.removeHandler(recorder)
        logger.setLevel(before)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By Inductor, without C++ for pointwise operators on the CPU, which is slow to compile."""
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(
        function, fullgraph=True, options={"fallback_by_default": True}
    )
    return made


def counted() -> dict[str, Any]:
    report = weft.fused.report()
    return {
        "matches": sum(report.matches.values()),
        "substitutions": dict(report.substitutions),
        "refusals": [[*key, count] for key, count in sorted(report.refusals.items())],
        "fused_calls": sum(report.fused_calls.values()),
        "unfused_calls": [[*key, count] for key, count in sorted(report.unfused_calls.items())],
    }


def renew(group: str) -> None:
    """Drop groups, as new processes have none; all ranks."""
    weft.fused.groups.group_of(group)
    distributed.barrier()
    weft.fused.groups._GROUPS.clear()
    weft.fused.groups.group_of(group)
