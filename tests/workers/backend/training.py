"""Training over a torch.distributed backend, beside the same steps in one process."""

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.workers.backend.process_group import start

STEPS = 4


def model() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))


def batch(step: int, rank: int) -> tuple[Any, Any]:
    values = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 12, generator=values), torch.randn(6, 8, generator=values)


def train(network: Any, batches: Any) -> list[float]:
    """Losses over a few steps; `batches` has each step's batches."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        pairs = [batch(step, each) for each in batches]
        inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
        loss = nn.functional.mse_loss(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean(losses: list[float]) -> Any:
    value = torch.tensor(losses)
    distributed.all_reduce(value, distributed.ReduceOp.AVG)
    return value.tolist()


def run(backend: str) -> dict[str, list[float]]:
    """Losses by method; "alone" trains on all ranks' batches."""
    rank, ranks = start(backend)
    results = {"alone": train(model(), range(ranks))}
    # 1 kB buckets: several are reduced while the backward pass goes on.
    replica = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    results["ddp"] = mean(train(replica, [rank]))
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = model()
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    results["fsdp"] = mean(train(sharded, [rank]))
    split = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    results["tensor parallel"] = mean(train(split, range(ranks)))
    distributed.destroy_process_group()
    return results
