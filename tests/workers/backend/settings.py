"""Torch process groups with other settings: debugging, backends, compilation, FSDP2, hosts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft.torch
from tests.workers.backend.forked import message
from weft.group import rendezvous

if TYPE_CHECKING:
    from datetime import timedelta

    from tests.workers.backend.forked import Place


def detail(place: Place) -> Any:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: torch's wrapper compares collectives over gloo."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    distributed.set_debug_level_from_env()
    place.join()
    group: Any = distributed.group.WORLD
    value, rank = torch.ones(3), place.rank
    distributed.all_reduce(value)
    work = distributed.all_reduce(value, async_op=True)
    work.wait()
    half = distributed.new_group([0])
    received = torch.empty(3)
    works = [distributed.isend(value, 1 - rank), distributed.irecv(received, 1 - rank)]
    for each in works:
        each.wait()
    objects: list[Any] = [None, None]
    distributed.all_gather_object(objects, rank)
    kinds = [lambda: distributed.all_reduce(value), lambda: distributed.broadcast(value, 0)]
    sizes = [torch.ones(3), torch.ones(4)]
    found = {
        "wrapper": type(group._get_backend(torch.device("cpu"))).__name__,
        "value": value.tolist(),
        "received": received.tolist(),
        "objects": objects,
        "kind": message(kinds[rank]),
        "size": message(lambda: distributed.all_reduce(sizes[rank])),
        "half": distributed.get_rank(half),
    }
    distributed.all_reduce(value)
    found["after"] = value.tolist()
    distributed.destroy_process_group()
    return found


def other_plugin(place: Place) -> Any:
    """Another plugin, registered before weft: alone, and for another device in the same group."""
    weft_plugin = distributed.Backend._plugins.pop("WEFT")

    def other(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        from torch._C._distributed_c10d import FakeProcessGroup

        return FakeProcessGroup._create_internal(rank, size)

    distributed.Backend.register_backend("another", other, devices=["cpu", "cuda"])
    distributed.Backend._plugins["WEFT"] = weft_plugin
    found: dict[str, Any] = {"order": list(distributed.Backend._plugins)[-2:]}
    found["devices"] = distributed.Backend.default_device_backend_map["cpu"]
    place.join()
    first = torch.ones(2)
    distributed.all_reduce(first)
    group = distributed.new_group(backend="another")
    distributed.barrier(group=group)
    mixed = distributed.new_group(backend="cpu:weft,cuda:gloo")
    second = torch.ones(2)
    distributed.all_reduce(second, group=mixed)
    distributed.barrier(group=mixed)
    found["values"] = [first.tolist(), second.tolist()]
    found["mixed"] = mixed._get_backend(torch.device("cpu")).name()
    distributed.destroy_process_group()
    distributed.init_process_group(
        "cpu:weft,cuda:gloo", store=place.store("again"), rank=place.rank, world_size=place.ranks
    )
    third = torch.ones(2)
    distributed.all_reduce(third)
    works = [
        distributed.P2POp(distributed.isend, third, 1 - place.rank),
        distributed.P2POp(distributed.irecv, second, 1 - place.rank),
    ]
    for each in distributed.batch_isend_irecv(works):
        each.wait()
    found["values"] += [third.tolist(), second.tolist()]
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def waits_outside(place: Place) -> Any:
    """Functional collectives that compiled code starts, and that are awaited outside it."""
    place.join()
    name = distributed.group.WORLD.group_name
    operators = torch.ops._c10d_functional

    def started(value: Any) -> Any:
        total = operators.all_reduce(value * 2, "sum", name)
        whole = operators.all_gather_into_tensor(value, place.ranks, name)
        share = operators.reduce_scatter_tensor(value, "sum", place.ranks, name)
        moved = operators.all_to_all_single(value, [2, 2], [2, 2], name)
        return total, whole, share, moved

    traced = torch.compile(started, backend="aot_eager", fullgraph=True)
    found = []
    for _ in range(3):
        value = torch.arange(4.0) + place.rank
        results = traced(value)
        found.append([operators.wait_tensor(each).tolist() for each in reversed(results)])
    # Dropped without a wait.
    traced(torch.ones(4))
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def gradients(place: Place) -> Any:
    """FSDP2 gradients, whose reduce-scatter averages, or divides by a factor."""
    place.join()
    found = {}
    mesh = init_device_mesh("cpu", (place.ranks,))
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (None, 1.0, 5.0):
            torch.manual_seed(3)
            layer = nn.Linear(4, 6, bias=False).to(dtype)
            expected = torch.zeros(6, 4)
            inputs = [torch.arange(4.0) + each for each in range(place.ranks)]
            for each in inputs:
                expected += each.expand(6, 4)
            fully_shard(layer, mesh=mesh)
            if factor is not None:
                layer.set_gradient_divide_factor(factor)
            layer(inputs[place.rank].to(dtype)[None]).sum().backward()
            gradient = layer.weight.grad.full_tensor().float()
            right = torch.allclose(gradient, expected / (factor or place.ranks), rtol=1e-2)
            found[f"{dtype} {factor}"] = right
    distributed.destroy_process_group()
    return found


gradients_alone = gradients


def hosts(place: Place) -> Any:
    """Route providers between ranks on two hosts, whose launcher names another locality."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if place.rank < 2 else "4"
    os.environ["LOCAL_RANK"] = str(place.rank % 2)
    os.environ["WEFT_HOST_ID"] = f"host-{place.rank // 2}"
    os.environ["WEFT_BIND"] = "127.0.0.1"
    routes: list[Any] = []
    meet = rendezvous.meet

    def watched(*arguments: Any, **options: Any) -> Any:
        communicator = meet(*arguments, **options)
        assert communicator is not None
        routes.append(communicator.routes())
        return communicator

    with mock.patch.object(weft.torch.backend, "meet", watched):
        place.join()
        across = distributed.new_group([0, 2])
        within = distributed.new_group([2, 3])
    value = torch.ones(100_000)
    for group in (None, across, within):
        if distributed.get_rank(group) >= 0:
            distributed.all_reduce(value, group=group)
    distributed.barrier()
    distributed.destroy_process_group()
    return {"routes": routes, "value": value.unique().tolist()}
