"""Training, functional collectives, and groups that are bound to a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.torch_backend.ranks import Context


def network(at: Context) -> Any:
    """A small model with the same parameters on all ranks."""
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    return layers.append(nn.Linear(64, 8)).to(at.device)


def trained(
    at: Context,
    model: Any,
    ranks: list[int],
    backward: Callable[[Any], None] | None = None,
    rate: float = 0.2,
) -> list[float]:
    """Step losses on some ranks' batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
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
    """Losses and gradients in one process, DistributedDataParallel and FSDP2."""
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
    # 4 kB buckets: several are reduced while the backward pass goes on.
    replica = DistributedDataParallel(
        network(at),
        bucket_cap_mb=0.004,
        device_ids=[at.device.index] if at.on_gpu else None,
    )
    found["ddp"] = mean(trained(at, replica, [at.rank], keep("ddp")))
    mesh = init_device_mesh(at.device.type, (at.ranks,))

    def shard() -> Any:
        model = network(at)
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    halved = shard()
    # Half the average, by PREMUL_SUM, and twice the learning rate.
    for layer in [*halved, halved]:
        if hasattr(layer, "set_gradient_divide_factor"):
            layer.set_gradient_divide_factor(2.0 * at.ranks)
    found["factor"] = mean(trained(at, halved, [at.rank], rate=0.4))
    sharded = shard()
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
    """Functional collectives, plain and in a compiled function."""
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
    """Rank groups whose default group is bound to their GPU, and the operator."""
    alone = distributed.new_group([1])
    value = torch.ones(2, device=at.device)
    if at.rank == 1:
        distributed.all_reduce(value, group=alone)
    distributed.barrier()
    distributed.all_reduce(value)
    result = value.tolist()
    torch.ops.weft.all_reduce_(value, "max", distributed.group.WORLD.group_name)
    return {"sum": result, "max": value.tolist()}
