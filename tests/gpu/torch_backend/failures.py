"""Errors from operations, late and lost ranks, and ending groups."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from tests.gpu.torch_backend.operations import same
from tests.workers.backend.forked import message
from weft.torch import device

if TYPE_CHECKING:
    from tests.gpu.torch_backend.ranks import Context


def errors(at: Context) -> dict[str, str]:
    """Errors from operations that a GPU lacks; the group still works after them."""
    ones = torch.ones(2, device=at.device)
    distributed.all_reduce(ones)
    elsewhere = torch.ones(2, device=torch.device("cuda", 1 - at.rank))
    found = {
        "recv": message(lambda: distributed.recv(ones)),
        "factor": message(
            lambda: distributed.all_reduce(ones.int(), distributed._make_nccl_premul_sum(2.0))
        ),
        "mixed": message(lambda: distributed.all_gather_into_tensor(torch.ones(4), ones)),
        "device": message(lambda: distributed.all_reduce(elsewhere)),
        "sparse": message(lambda: distributed.all_reduce(ones.to_sparse())),
    }
    value = torch.ones(2, device=at.device)
    distributed.all_reduce(value)
    same("all_reduce after errors", value, torch.full((2,), 2.0))
    return found


def begun(at: Context, **options: Any) -> tuple[Any, torch.Tensor]:
    """A group with all ranks, which has operated on a value."""
    group = distributed.new_group(**options)
    value = torch.ones(3, device=at.device)
    distributed.all_reduce(value, group=group)
    at.synchronise()
    distributed.barrier()
    return group, value


def unmatched(at: Context) -> dict[str, Any]:
    """Errors from a receive whose message does not come, in a separate group."""
    group, value = begun(at, timeout=timedelta(seconds=3))
    found: dict[str, Any] = {}
    if at.rank == 0:
        began = time.perf_counter()
        # On a GPU the call returns, and its kernel gives up.
        found["first"] = message(lambda: distributed.recv(value, 1, group=group))
        at.synchronise()
        found["seconds"] = time.perf_counter() - began
        found["value"] = value.tolist()
        found["later"] = message(lambda: distributed.send(value, 1, group=group))
    distributed.barrier()
    distributed.destroy_process_group(group)
    distributed.barrier()
    return found


def late(at: Context) -> dict[str, Any]:
    """Errors on rank 0 in a group whose rank 1 does not come in time."""
    group, value = begun(at, timeout=timedelta(seconds=3))
    found: dict[str, Any] = {}
    if at.rank == 0:
        began = time.perf_counter()
        # On a GPU the call returns, and its kernel gives up.
        found["first"] = message(lambda: distributed.all_reduce(value, group=group))
        at.synchronise()
        found["seconds"] = time.perf_counter() - began
        found["value"] = value.tolist()
        found["later"] = message(lambda: distributed.broadcast(value, 0, group=group))
    distributed.barrier()
    if at.rank == 1:
        # The barrier may come before the failure report.
        time.sleep(1)
        found["later"] = message(lambda: distributed.broadcast(value, 0, group=group))
    distributed.destroy_process_group(group)
    distributed.all_reduce(torch.ones(1, device=at.device))
    at.synchronise()
    return found


def ended(at: Context, how: str) -> dict[str, Any]:
    """Rank 0 aborts or destroys a group whose kernel waits for rank 1."""
    device.DeviceCalls.end_grace = 1.0
    group, value = begun(at)
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
        found["error"] = message(lambda: distributed.all_reduce(value, group=group))
        distributed.destroy_process_group(group)
    device.DeviceCalls.end_grace = 30.0
    distributed.all_reduce(value)
    at.synchronise()
    return found


def lost(at: Context) -> dict[str, Any]:
    """Rank 1 is killed between operations; rank 0 names it."""
    value = torch.ones(200_000, device=at.device)
    distributed.all_reduce(value)
    at.synchronise()
    distributed.barrier()
    if at.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.perf_counter()
    error = "none"
    while error == "none" and time.perf_counter() - began < 30:
        error = message(lambda: distributed.all_reduce(value, distributed.ReduceOp.MAX))
        at.synchronise()
    seconds = time.perf_counter() - began
    on_cpu = message(lambda: distributed.barrier())
    # The GPU still computes.
    total = torch.ones(1000, device=at.device).sum().item()
    return {"error": error, "barrier": on_cpu, "seconds": seconds, "total": total}
