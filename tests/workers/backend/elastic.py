"""Training under torchrun whose workers are killed and started again by the agent."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.workers.backend.process_group import TIMEOUT
from tests.workers.backend.training import batch, model

STEPS, LOST_STEP = 6, 3


def step(network: Any, optimizer: Any, batches: list[Any]) -> float:
    """One step on some batches; the loss before it."""
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    loss = nn.functional.mse_loss(network(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def alone(ranks: int) -> list[float]:
    """Losses in one process that trains on all ranks' batches."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)
    return [
        step(network, optimizer, [batch(each, rank) for rank in range(ranks)])
        for each in range(STEPS)
    ]


def run() -> dict[str, Any]:
    """Train with a checkpoint after each step; rank 1 kills itself within a step, once."""
    distributed.init_process_group("weft", timeout=TIMEOUT)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    path = Path(os.environ["TEST_RESULTS"], "checkpoint")
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)
    losses: list[float] = []
    if path.exists():
        state = torch.load(path)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    first = len(losses)
    replica = DistributedDataParallel(network)
    for each in range(first, STEPS):
        if restarts == 0 and rank == 1 and each == LOST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.tensor(step(replica, optimizer, [batch(each, rank)]))
        distributed.all_reduce(loss, distributed.ReduceOp.AVG)
        losses.append(loss.item())
        if rank == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"losses": losses}, f"{path}.new")
            os.rename(f"{path}.new", path)
        # The next step begins once this one is kept.
        distributed.barrier()
    # The store outlives the group, whose names in it are used again.
    distributed.destroy_process_group()
    distributed.init_process_group("weft", timeout=TIMEOUT)
    world: Any = distributed.group.WORLD
    half = world.split_group(
        [1, 0], timeout=TIMEOUT, opts=None, group_name="half", group_desc="half"
    )
    value = torch.ones(2)
    half.allreduce([value], distributed.AllreduceOptions()).wait()
    distributed.destroy_process_group()
    return {
        "restarts": restarts,
        "first": first,
        "losses": losses,
        "alone": alone(ranks),
        "value": value.tolist(),
    }
