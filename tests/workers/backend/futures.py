"""Future callbacks that call torch.distributed, and wait for what they call."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.workers.backend.process_group import named, start

#: Seconds that a good outcome may take.
PATIENCE = 60.0


def summed(value: float, group: Any = None) -> torch.futures.Future[Any]:
    """Future from a one-element all-reduce."""
    return distributed.all_reduce(torch.tensor([value]), group=group, async_op=True).get_future()


def nested(group: Any, depth: int) -> float:
    """The sum from an all-reduce in another's callback, and so on."""

    def inner(_: Any) -> float:
        return nested(group, depth - 1) if depth > 1 else summed(1.0, group).wait()[0].item()

    return float(summed(1.0, group).then(inner).wait())


def within(call: Callable[[], Any]) -> Any:
    """A call's result in a thread; an error if it takes longer than `PATIENCE`."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert results, "the call has raised or goes on"
    return results[0]


def chained(backend: str) -> dict[str, Any]:
    """Callbacks that wait for operations in their group and in another, also far inside."""
    rank, ranks = start(backend)
    other = distributed.new_group(backend=named(backend))
    found: dict[str, Any] = {
        "one deep": within(lambda: nested(None, 1)),
        "five deep": within(lambda: nested(None, 5)),
    }

    def crossed(_: Any) -> float:
        return float(summed(2.0, other).then(lambda _: summed(3.0).wait()[0].item()).wait())

    found["groups"] = within(lambda: summed(1.0).then(crossed).wait())

    def gathered(future: Any) -> list[float]:
        parts = [torch.empty(1) for _ in range(ranks)]
        work = distributed.all_gather(parts, future.value()[0] + rank, async_op=True)
        work.wait()
        distributed.barrier()
        return [part.item() for part in parts]

    found["gathered"] = within(lambda: summed(1.0).then(gathered).wait())
    # The first one's callback waits for the second and for what its callback does.
    event = threading.Event()
    first, second = summed(1.0), summed(2.0)

    def sibling(_: Any) -> float:
        value = second.wait()[0].item()
        assert event.wait(PATIENCE)
        return float(value)

    second.then(lambda _: event.set())
    waiting = first.then(sibling)
    found["sibling"] = within(waiting.wait)
    alone = [distributed.new_group([each], backend=named(backend)) for each in range(ranks)]
    return found | order(alone[rank]) | raised()


def order(alone: Any) -> dict[str, Any]:
    """Many works' callbacks that start and wait for operations in a group on this rank."""
    begun: list[int] = []
    inside: list[int] = []
    overlaps = 0

    def twice(each: int) -> Callable[[Any], float]:
        def call(_: Any) -> float:
            nonlocal overlaps
            # A work that is complete before its future exists has its callback here.
            if threading.get_ident() != caller:
                overlaps += len(inside)
                begun.append(each)
                inside.append(each)
            value = summed(float(each), alone).wait()[0].item()
            value += summed(100.0 * each, alone).wait()[0].item()
            if threading.get_ident() != caller:
                inside.remove(each)
            return float(value)

        return call

    caller = threading.get_ident()
    works = [summed(1.0).then(twice(each)) for each in range(40)]
    values = within(lambda: [work.wait() for work in works])
    return {
        "in order": begun == sorted(begun) and overlaps == 0,
        "values": values == [101.0 * each for each in range(40)],
    }


def raised() -> dict[str, Any]:
    """A callback's exception ends only its future."""

    def fail(_: Any) -> None:
        raise ZeroDivisionError("in a callback")

    failed = summed(1.0).then(fail)
    try:
        within(failed.wait)
        text = ""
    except AssertionError:
        text = str(failed.value) if failed.done() else "goes on"
    return {"raised": bool(text) and text != "goes on", "after": within(lambda: nested(None, 2))}


def hooks(backend: str) -> dict[str, list[float]]:
    """Parameters after steps with communication hooks, which chain collectives by callbacks."""
    rank, _ = start(backend)
    return {
        "power": within(lambda: trained(rank, power)),
        # gloo's parameters vary with this hook; without one DDP computes the same mean.
        "quantized": within(lambda: trained(rank, plain if backend == "gloo" else quantized)),
    }


def power(model: DistributedDataParallel) -> None:
    """The hook PowerSGD, whose callbacks wait for all-reduces."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def quantized(model: DistributedDataParallel) -> None:
    """A hook whose callback waits for an all-gather."""
    # Buckets are reduced while callbacks gather.
    model.register_comm_hook(distributed.new_group(), averaged)


def plain(model: DistributedDataParallel) -> None:
    """No hook: DDP averages the buckets."""


def averaged(group: Any, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A bucket's mean, by a reduction and a gather that its callback waits for."""
    tensor, ranks = bucket.buffer(), distributed.get_world_size()

    def gather(future: Any) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        mean = future.value()[0] / ranks
        distributed.all_gather(parts, mean, group, async_op=True).get_future().wait()
        return torch.stack(parts).mean(0)

    return distributed.all_reduce(tensor, async_op=True).get_future().then(gather)


def trained(rank: int, register: Callable[[DistributedDataParallel], None]) -> list[float]:
    """Some parameters of a small model after four steps, in several buckets."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(6)]
    # PowerSGD callbacks use their buckets' group, so there is one bucket.
    cap = 25 if register is power else 0.005
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=cap)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=generator)).square().mean().backward()
        optimizer.step()
    return [each.sum().item() for each in model.parameters()]


def ended(backend: str) -> dict[str, Any]:
    """Groups that end while callbacks wait, and by callbacks."""
    rank, _ = start(backend)
    waiting = distributed.new_group(backend=named(backend))
    reached, errors = threading.Event(), []

    def wait(_: Any) -> None:
        try:
            future = distributed.all_reduce(
                torch.ones(1), group=waiting, async_op=True
            ).get_future()
            reached.set()
            future.wait()
        except Exception as error:
            errors.append(str(error).splitlines()[0])

    if rank == 0:
        # The peer never calls the second one. It calls the first one behind the barrier: a
        # callback for a future that has ended would run, and wait, in this thread.
        future = summed(1.0, waiting).then(wait)
        distributed.barrier()
        assert reached.wait(PATIENCE)
    else:
        distributed.barrier()
        summed(1.0, waiting).wait()
    distributed.barrier()
    within(lambda: distributed.destroy_process_group(waiting) or True)
    if rank == 0:
        within(lambda: future.wait() or True)
    ending = distributed.new_group(backend=named(backend))
    closed = summed(1.0, ending).then(lambda _: distributed.destroy_process_group(ending))
    within(lambda: closed.wait() or True)
    found = {"errors": errors, "after": within(lambda: nested(None, 1))}
    distributed.destroy_process_group()
    return found
