"""A network in training on one side: DistributedDataParallel or FSDP2, in bfloat16, by SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_models import BATCHES, MODELS

if TYPE_CHECKING:
    from harness.context import Context
    from training_cases import Case
    from training_sides import Group

__all__ = ["Training", "batches"]

RATE: Final = 0.01
MOMENTUM: Final = 0.9


def batches(context: Context, case: Case) -> list[tuple[Any, Any]]:
    """This rank's batches, the same on all sides."""
    torch.manual_seed(1000 + context.rank)
    with torch.device(context.device.name):
        return [MODELS[case.model].batch(case.shape) for _ in range(BATCHES)]


class Training:
    """A network in training over one group.

    Parameters, gradients and their reductions are float32; the forward and the backward pass are
    bfloat16, by autocast in DistributedDataParallel and by parameter copies in FSDP2.
    """

    def __init__(
        self, context: Context, case: Case, side: Group, data: list[tuple[Any, Any]]
    ) -> None:
        self.case, self.data, self.model = case, data, MODELS[case.model]
        self.device = torch.device(context.device.name)
        torch.manual_seed(1)
        with self.device:
            network, layers = self.model.make(case.shape)
        network = network.to(memory_format=self.model.memory_format)
        if case.kind == "ddp":
            network = DistributedDataParallel(
                network,
                device_ids=[self.device.index] if self.device.type == "cuda" else None,
                process_group=side.group,
                gradient_as_bucket_view=True,
            )
        else:
            shard(network, layers, side, self.device.type)
        self.network = network
        self.optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM)
        self.number = 0
        #: In the first checked steps: losses, and this rank's summed squared gradients.
        self.losses: list[Any] = []
        self.squares: list[Any] = []
        self.digest: Any = None
        self.last: Any = None

    def step(self) -> None:
        """Enqueue a step."""
        batch = self.data[self.number % len(self.data)]
        is_ddp = self.case.kind == "ddp"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_ddp):
            loss = self.model.loss(self.network, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.number += 1
        self.last = loss.detach()
        if self.number <= self.case.checked:
            self.losses.append(self.last)
            gradients = [local(each.grad) for each in self.network.parameters()]
            self.squares.append(torch.stack(torch._foreach_norm(gradients)).square().sum())
        if self.number == self.case.checked and is_ddp:
            sums = [
                each.detach().view(torch.int32).sum(dtype=torch.int64)
                for each in self.network.parameters()
            ]
            self.digest = torch.stack(sums).sum()

    def facts(self) -> dict[str, Any]:
        """Losses, gradients, and the replica's parameter digest; None if sharded."""
        return {
            "losses": torch.stack(self.losses).tolist(),
            "squares": torch.stack(self.squares).tolist(),
            "last_loss": self.last.item(),
            "digest": None if self.digest is None else self.digest.item(),
        }


def shard(network: Any, layers: list[Any], side: Group, device_type: str) -> None:
    """Shard each layer and a network's rest over the side's ranks."""
    mesh = DeviceMesh.from_group(side.group, device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*layers, network):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if side.is_symmetric:
            module.set_allocate_memory_from_process_group_for_comm(True)


def local(gradient: Any) -> Any:
    """This rank's part of a gradient; the whole in a replica."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
