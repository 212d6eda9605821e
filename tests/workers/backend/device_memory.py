"""Tensors that process groups allocate in symmetric memory, on the kernels' twin."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.workers.backend.forked import message
from tests.workers.backend.process_group import start
from weft.cuda import Collectives
from weft.torch import device

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.torch.device_memory import Pool

CPU = torch.device("cpu")
#: Input and output addresses for all operations on the GPU, in order.
launched: list[tuple[int, int]] = []
#: The group under test.
calls: list[device.DeviceCalls] = []


def begin(backend: str = "twin") -> tuple[int, int]:
    """Make the default group, whose operations are listed."""
    run = device.DeviceCalls.run

    def listed(self: device.DeviceCalls, operation: str, given: int, into: int, *more: Any) -> None:
        calls[:] = [self]
        launched.append((given, into))
        run(self, operation, given, into, *more)

    device.DeviceCalls.run = listed  # type: ignore[method-assign, assignment]
    return start(backend)


def backend() -> Any:
    world = distributed.group.WORLD
    assert world is not None
    return world._get_backend(CPU)


def allocate(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made: torch.Tensor = backend().allocate_tensor(count, dtype=dtype, device=CPU)
    return made


def collectives() -> Collectives:
    made = calls[0]._collectives
    assert isinstance(made, Collectives)
    return made


def pool() -> Pool:
    made = calls[0]._pool
    assert made is not None
    return made


def is_symmetric(tensor: torch.Tensor) -> bool:
    """True if a direct all-reduce on the tensor gives the sum."""
    tensor.fill_(distributed.get_rank() + 1)
    error = message(lambda: collectives().all_reduce(tensor, algorithm="direct"))
    ranks = distributed.get_world_size()
    return error == "none" and tensor.unique().tolist() == [ranks * (ranks + 1) // 2]


def shared() -> dict[str, Any]:
    """Tensors, views, dtypes and lengths, and groups that have none."""
    begin()
    distributed.all_reduce(torch.ones(1))
    found: dict[str, Any] = {"supported": backend().supports_tensor_alloc(CPU)}
    tensors = [
        allocate(count, dtype)
        for count, dtype in ((0, torch.int64), (1, torch.int8), (5000, torch.float64))
    ]
    found["shapes"] = [[list(each.shape), str(each.dtype)] for each in tensors]
    found["direct"] = [is_symmetric(each) for each in (tensors[1], tensors[2], tensors[2][7:])]
    found["ordinary"] = message(
        lambda: collectives().all_reduce(torch.ones(64), algorithm="direct")
    )
    found["negative"] = message(lambda: allocate(-1))
    kept = tensors[2].fill_(7)
    # A rank that leaves ends the others' calls.
    distributed.barrier()
    distributed.destroy_process_group()
    # Memory lives as long as its tensors.
    found["kept"] = kept.unique().tolist()
    device.kind = "cuda"
    start("weft")
    found["on the CPU"] = backend().supports_tensor_alloc(CPU)
    distributed.destroy_process_group()
    return found


def reused() -> dict[str, Any]:
    """Tensors that ranks drop in other orders, and at other times."""
    rank, ranks = begin()
    distributed.all_reduce(torch.ones(1))
    count = 3000
    tensors: list[torch.Tensor | None] = [allocate(count) for _ in range(4)]
    addresses = {number: each.data_ptr() for number, each in enumerate(tensors) if each is not None}
    for step in range(3):
        tensors[(step + rank) % 3] = None
    if rank == 0:
        tensors[3] = None
    gc.collect()
    again = [allocate(count) for _ in range(4)]
    at = [each.data_ptr() for each in again]
    found: dict[str, Any] = {
        "first three": at[:3] == [addresses[number] for number in range(3)],
        "held elsewhere": addresses[3] not in at,
        "direct": [is_symmetric(each) for each in again],
    }
    held = tensors[3]
    found["unchanged"] = held is None or held.data_ptr() == addresses[3]
    before = pool()._made
    # A loop takes the same blocks again and again, with few exchanges.
    exchanges = pool()._exchanges
    for _ in range(20):
        pair = [allocate(count), allocate(count)]
        distributed.all_gather_into_tensor(
            pair[0][: count // ranks * ranks], pair[1][: count // ranks]
        )
        del pair
    found["blocks"] = pool()._made - before
    found["exchanges"] = pool()._exchanges - exchanges
    distributed.destroy_process_group()
    return found


def differing() -> list[str]:
    """Errors from ranks that ask for tensors with other sizes."""
    rank, _ = begin()
    distributed.all_reduce(torch.ones(1))
    errors = [message(lambda: allocate(10_000 * (1 + rank)))]
    distributed.destroy_process_group()
    return errors


def no_room() -> dict[str, Any]:
    """One rank has no room for a block: all take ordinary memory, and operations go on."""
    rank, ranks = begin()
    distributed.all_reduce(torch.ones(1))
    count = 24 << 20
    small = allocate(2000)
    free = allocate(2000)
    del free
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        # Room for a torch tensor, not for all ranks' parts.
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        used = resource.getpagesize() * pages
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * count * 3 // 2, limits[1]))
    large = allocate(count)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    found: dict[str, Any] = {"length": large.numel()}
    found["refused"] = not is_symmetric(large[:4096])
    large[:64] = rank + 1
    distributed.all_reduce(large[:64])
    found["sum"] = large[:64].unique().tolist() == [ranks * (ranks + 1) / 2]
    found["small"] = is_symmetric(small)
    # With room again, the same size is symmetric.
    del large
    found["again"] = is_symmetric(allocate(count)[:5000])
    distributed.destroy_process_group()
    return found


def trained(sharded: Any, rank: int) -> list[Any]:
    """Losses and parameters after some steps."""
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05)
    found = []
    for step in range(4):
        values = torch.Generator().manual_seed(10 * step + rank)
        loss = sharded(torch.randn(4, 256, generator=values)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [found, [each.full_tensor() for each in sharded.parameters()]]


def fsdp() -> dict[str, Any]:
    """FSDP2 with the group's buffers and with its own: the same bits."""
    rank, ranks = begin()
    mesh = init_device_mesh("cpu", (ranks,))
    results, found = [], {}
    for allocates in (False, True):
        torch.manual_seed(5)
        sharded: Any = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.Linear(256, 8)
        )
        for layer in (sharded[0], sharded[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        if allocates:
            for layer in (sharded, sharded[0], sharded[2]):
                layer.set_allocate_memory_from_process_group_for_comm(True)
        launched.clear()
        results.append(trained(sharded, rank))
        if allocates:
            inside: Callable[[int], bool] = lambda at: pool()._at(at) is not None  # noqa: E731
            operations = [inside(given) and inside(into) for given, into in launched]
            # The last all-gathers come from `full_tensor`.
            found["symmetric"] = operations.count(True)
            found["blocks"] = pool()._made
            found["exchanges"] = pool()._exchanges
    found["losses"] = results[0][0] == results[1][0]
    same = zip(results[0][1], results[1][1], strict=True)
    found["parameters"] = all(torch.equal(one, other) for one, other in same)
    distributed.destroy_process_group()
    return found
