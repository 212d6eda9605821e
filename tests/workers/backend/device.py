"""Process groups whose tensors are on a GPU, by the kernels' twin on the CPU."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import ReduceOp

from tests.workers.backend.forked import message
from tests.workers.backend.process_group import TIMEOUT, start
from weft import WeftError
from weft.gpu.errors import ON_DEVICES
from weft.group.group import OPEN, Group
from weft.torch import Options, abort, all_reduce_, device

if TYPE_CHECKING:
    from collections.abc import Callable

#: Operations whose kernels ran, in order.
launched: list[str] = []


def begin(timeout: timedelta = TIMEOUT, options: Options | None = None) -> tuple[int, int]:
    """Make the default group with the twin, whose calls are listed."""
    run = device.DeviceCalls.run

    def listed(self: device.DeviceCalls, operation: str, *arguments: Any) -> None:
        launched.append(operation)
        run(self, operation, *arguments)

    device.DeviceCalls.run = listed  # type: ignore[method-assign, assignment]
    return start("twin", timeout, options)


def operations() -> dict[str, Any]:
    """The kernel for each torch operation, the collectives' life, and barriers."""
    rank, ranks = begin()
    found: dict[str, Any] = {}
    distributed.barrier()
    found["before"] = [len(ON_DEVICES), list(launched)]
    rows = torch.arange(float(2 * ranks)).reshape(ranks, 2) + rank
    row, whole = torch.empty(2), torch.empty(ranks, 2)
    lists = [torch.empty(2) for _ in range(ranks)]
    is_root = rank == ranks - 1
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: distributed.all_reduce(rows.clone()),
        "reduce": lambda: distributed.reduce(rows.clone(), ranks - 1),
        "broadcast": lambda: distributed.broadcast(row, 0),
        "all_gather": lambda: distributed.all_gather(lists, row),
        "all_gather_into_tensor": lambda: distributed.all_gather_into_tensor(whole, row),
        "reduce_scatter": lambda: distributed.reduce_scatter(row, list(rows)),
        "reduce_scatter_tensor": lambda: distributed.reduce_scatter_tensor(row, rows),
        "all_to_all": lambda: distributed.all_to_all(lists, list(rows)),
        "all_to_all_single": lambda: distributed.all_to_all_single(whole, rows),
        "gather": lambda: distributed.gather(row, lists if is_root else None, ranks - 1),
        "scatter": lambda: distributed.scatter(row, list(rows) if is_root else None, ranks - 1),
        "barrier": distributed.barrier,
    }
    for name, call in calls.items():
        launched.clear()
        call()
        found[name] = list(launched)
    found["during"] = len(ON_DEVICES)
    distributed.destroy_process_group()
    found["after"] = len(ON_DEVICES)
    return found


def rejected() -> list[str]:
    """Errors from arguments; the group still works after them."""
    rank, ranks = begin()
    ones, buffer = torch.ones(2), torch.ones(ranks * 2)
    longer = [torch.ones(3) for _ in range(ranks)] if rank == 0 else None
    splits = [2 * ranks, *[0] * (ranks - 1)]
    calls: list[Callable[[], Any]] = [
        lambda: distributed.all_reduce(ones, ReduceOp.BAND),
        lambda: distributed.all_reduce(ones > 0, ReduceOp.AVG),
        lambda: all_reduce_(ones.to(torch.complex64), "max"),
        lambda: distributed.all_reduce(ones.to(torch.float8_e4m3fnuz)),
        lambda: distributed.all_reduce(ones > 0, distributed._make_nccl_premul_sum(2.0)),
        lambda: distributed.all_gather_into_tensor(buffer, buffer[1:3]),
        lambda: distributed.all_to_all_single(buffer, buffer),
        lambda: distributed.all_to_all_single(
            torch.ones(2 * ranks), buffer, splits, [2] * ranks, async_op=True
        ),
        lambda: distributed.gather(ones, longer) if rank == 0 else raised(),
    ]
    launched.clear()
    found = [message(call) for call in calls]
    assert launched == [], launched
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def messages() -> dict[str, Any]:
    """Message batches, the first operation in the group, and their works and errors."""
    rank, ranks = begin()
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    sent = torch.arange(3.0) + rank
    received = [torch.empty(3) for _ in range(2)]
    batch = [
        distributed.P2POp(distributed.irecv, received[0], left),
        distributed.P2POp(distributed.irecv, received[1], right),
        distributed.P2POp(distributed.isend, sent, right),
        distributed.P2POp(distributed.isend, sent, left),
    ]
    works = distributed.batch_isend_irecv(batch)
    found: dict[str, Any] = {"works": [each.wait() for each in works]}
    found["received"] = [each[0].item() for each in received]
    found["launched"] = list(launched)
    group: Any = distributed.group.WORLD
    total, given, into = torch.ones(2), torch.full((2,), float(rank)), torch.empty(2)
    # Collectives among coalesced messages run first.
    with distributed._coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
        part = group.send([given], right, 0)
        found["early"] = [message(part.wait), part.is_completed()]
        group.recv([into], left, 0)
        distributed.all_reduce(total, async_op=True)
    works.wait()
    found["mixed"] = [total.tolist(), into.tolist(), part.wait(), part.is_completed()]
    found["future"] = part.get_future().wait()[0].tolist()
    whole = torch.ones(4)
    overlapping = [
        distributed.P2POp(distributed.irecv, whole[:3], left),
        distributed.P2POp(distributed.isend, whole[2:], right),
    ]
    found["errors"] = [
        message(lambda: group.send([given], rank, 0)),
        message(lambda: group.recv([given], ranks, 0)),
        message(lambda: distributed.recv(given)),
        message(lambda: distributed.batch_isend_irecv(overlapping)),
    ]
    # Batches after an error, and a group with some ranks, whose messages the others do not see.
    pair = distributed.new_group([0, 1])
    if rank < 2:
        distributed.barrier(pair)
        value = torch.full((2,), rank + 5.0)
        if rank == 0:
            distributed.send(value, 1, group=pair)
        else:
            distributed.recv(value, 0, group=pair)
        found["pair"] = value.tolist()
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def raised() -> None:
    """The error on rank 0, on a rank where a call would wait for it."""
    raise ValueError("gather: output of 3 elements: expected 2")


def dtypes() -> dict[str, Any]:
    """Dtypes and reductions that operations on the CPU lack, and bytes in any dtype."""
    rank, _ = begin()
    found: dict[str, Any] = {}
    for name in ("int16", "uint16", "uint32", "uint64"):
        value = torch.tensor([3 + rank, 5], dtype=getattr(torch, name))
        distributed.all_reduce(value)
        found[name] = value.tolist()
    value = torch.tensor([-2 - rank, 5 + rank])
    distributed.all_reduce(value, ReduceOp.AVG)
    found["avg"] = value.tolist()
    codes = torch.tensor([1.0 + rank, 2.0]).to(torch.float8_e4m3fn)
    distributed.broadcast(codes, 1)
    found["float8"] = codes.float().tolist()
    distributed.all_reduce(codes)
    found["float8 sum"] = codes.float().tolist()
    parameter = torch.nn.Parameter(torch.ones(2))
    distributed.all_reduce(parameter)
    found["parameter"] = parameter.tolist()
    negated = torch.tensor([1 + 1j]).conj().imag
    results = [torch.empty(1) for _ in range(2)]
    distributed.all_gather(results, negated)
    found["negated"] = [each.item() for each in results]
    distributed.destroy_process_group()
    return found


def factors() -> dict[str, bool]:
    """By case: true if sums of products with a factor have the CPU group's bits."""
    rank, ranks = begin()
    # The same operations without the twin.
    device.kind = "cuda"
    host = distributed.new_group()
    device.kind = "twin"
    random = torch.Generator().manual_seed(rank)
    half = distributed._make_nccl_premul_sum(1 / 3)
    found: dict[str, bool] = {}
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ):
        given = torch.randn(ranks * 301, generator=random, dtype=torch.float64).to(dtype) * 9
        given[:3] = torch.tensor([torch.inf, torch.nan, -0.0]).to(dtype)
        for factor in (1 / 3, torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64)):
            op = distributed._make_nccl_premul_sum(factor)
            for name, group in (("twin", None), ("cpu", host)):
                whole, part = given.clone(), torch.empty(301, dtype=dtype)
                distributed.all_reduce(whole, op, group=group)
                distributed.reduce_scatter_tensor(part, given, op, group=group)
                rooted, kept = given.clone(), given.clone()
                distributed.reduce(rooted, 1, op, group=group)
                results = [whole, part, rooted]
                bits = [torch.view_as_real(each) if dtype.is_complex else each for each in results]
                codes = torch.cat([each.reshape(-1).view(torch.uint8) for each in bits])
                if name == "twin":
                    expected = codes
            found[f"{dtype} {factor}"] = torch.equal(codes, expected)
            unchanged = torch.equal(given.view(torch.uint8), kept.view(torch.uint8))
            assert rank == 1 or torch.equal(rooted.view(torch.uint8), kept.view(torch.uint8))
            assert unchanged
    grid = torch.arange(6.0).reshape(2, 3)
    distributed.all_reduce(grid.t(), half)
    found["transposed"] = torch.allclose(grid, torch.arange(6.0).reshape(2, 3) * ranks / 3)
    empty = torch.empty(0)
    distributed.all_reduce(empty, half)
    scalar = torch.tensor(3.0)
    distributed.all_reduce(scalar, half, async_op=True).wait()
    found["scalar"] = scalar.item() == ranks
    distributed.destroy_process_group()
    return found


def coalesced() -> dict[str, Any]:
    """Coalesced operations, and asynchronous ones' works."""
    rank, ranks = begin()
    found: dict[str, Any] = {}
    shares, wholes = [torch.full((n,), float(rank)) for n in (1, 3)], []
    with distributed._coalescing_manager(async_ops=True) as works:
        for share in shares:
            wholes.append(torch.empty(ranks * len(share)))
            distributed.all_gather_into_tensor(wholes[-1], share)
    works.wait()
    found["gathered"] = [each.tolist() for each in wholes]
    with distributed._coalescing_manager():
        for share, whole in zip(shares, wholes, strict=True):
            distributed.reduce_scatter_tensor(share, whole)
    found["scattered"] = [each.tolist() for each in shares]
    values = [torch.full((2,), float(rank)) for _ in range(2)]
    with distributed._coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
        works.append(distributed.broadcast(values[0], 1, async_op=True))
        works.append(distributed.broadcast(values[1], 0, async_op=True))
    works.wait()
    found["broadcast"] = [each.tolist() for each in values]
    work = distributed.all_reduce(values[0], async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    found["future"] = doubled.wait().tolist()
    found["work"] = [work.wait(), work.is_completed(), work.result()[0].tolist()]
    found["timeout"] = work.wait(timedelta(seconds=1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        distributed.all_reduce(values[0])
    found["profiled"] = [each.name for each in profile.events() if "weft:" in each.name]
    torch.ops.weft.all_reduce_(values[1], "max", distributed.group.WORLD.group_name)
    found["operator"] = [values[1].tolist(), launched[-1]]
    distributed.destroy_process_group()
    return found


def wait_for(file: Path) -> None:
    """Wait until a file exists."""
    while not file.exists():
        time.sleep(0.01)


def is_in(thread: threading.Thread, module: str) -> bool:
    """True while the thread runs a function of the module."""
    assert thread.is_alive()
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def has_failed(group: Group) -> bool:
    """True if the group has ended by an error."""
    try:
        group.check()
    except WeftError:
        return True
    return False


def wait_for_failure() -> None:
    """Wait until this rank has heard that a group failed; before, a call may succeed."""
    while not any(has_failed(each) for each in list(OPEN)):
        time.sleep(0.01)


def late() -> list[str]:
    """Errors on both ranks after rank 1 came too late to an operation."""
    rank, _ = begin()
    group = distributed.new_group(timeout=timedelta(seconds=4))
    distributed.all_reduce(torch.ones(1), group=group)
    distributed.barrier()
    expired = Path(os.environ["TEST_RESULTS"], "expired")
    if rank == 1:
        wait_for(expired)
        wait_for_failure()
    errors = [message(lambda: distributed.all_reduce(torch.ones(2), group=group)) for _ in range(2)]
    expired.touch()
    errors.append(message(lambda: distributed.barrier(group=group)))
    distributed.barrier()
    distributed.destroy_process_group()
    return errors


def lost() -> dict[str, Any]:
    """The last rank dies within a group; the others name it and go on in a new group."""
    rank, ranks = begin()
    distributed.all_reduce(torch.ones(2))
    if rank == ranks - 1:
        Path(os.environ["TEST_RESULTS"], str(rank)).write_text("{}", encoding="utf-8")
        os._exit(0)
    errors = [message(lambda: distributed.broadcast(torch.ones(2), ranks - 1)) for _ in range(2)]
    survivors = distributed.new_group(list(range(ranks - 1)), use_local_synchronization=True)
    value = torch.tensor([rank + 1])
    distributed.all_reduce(value, group=survivors)
    distributed.destroy_process_group()
    return {"errors": errors, "value": value.item(), "open": len(ON_DEVICES)}


def ended(how: str) -> dict[str, Any]:
    """Rank 0 aborts or destroys a group while one of its threads waits in an operation."""
    rank, _ = begin()
    device.DeviceCalls.end_grace = 1.0
    group = distributed.new_group()
    value = torch.ones(4)
    done = distributed.all_reduce(value, group=group, async_op=True)
    distributed.barrier()
    found: dict[str, Any] = {}
    has_ended = Path(os.environ["TEST_RESULTS"], "ended")
    if rank == 0:

        def wait() -> None:
            found["error"] = message(lambda: distributed.all_reduce(torch.ones(4), group=group))

        thread = threading.Thread(target=wait)
        thread.start()
        # It may begin the operation late, and only a begun one has this error.
        while not is_in(thread, device.DeviceCalls.__module__):
            time.sleep(0.01)
        time.sleep(0.3)
        began = time.monotonic()
        if how == "abort":
            abort()
        else:
            distributed.destroy_process_group(group)
        thread.join(20)
        found["seconds"] = time.monotonic() - began
        has_ended.touch()
    else:
        wait_for(has_ended)
        wait_for_failure()
        found["error"] = message(lambda: distributed.all_reduce(torch.ones(4), group=group))
    found["kept"] = [done.wait(), done.is_completed(), done.get_future().value()[0].sum().item()]
    distributed.destroy_process_group()
    found["open"] = len(ON_DEVICES)
    return found


def options() -> dict[str, Any]:
    """Options for groups, for one split from them, and for unequal ones."""
    rank, _ = begin(options=Options(num_sms=3, copy_engine=True))
    world = distributed.group.WORLD
    assert world is not None
    distributed.all_reduce(torch.ones(1))
    known: set[Any] = set(ON_DEVICES)
    found: dict[str, Any] = {"group": [each.num_sms for each in known]}
    part = world.split_group([0, 1], group_name="part")
    part.allreduce([torch.ones(1)]).wait()
    more: set[Any] = set(ON_DEVICES)
    found["split"] = [each.num_sms for each in more - known]
    unequal = distributed.new_group(pg_options=Options(num_sms=2 + rank))
    found["unequal"] = message(lambda: distributed.all_reduce(torch.ones(1), group=unequal))
    other = distributed.new_group(pg_options=Options(copy_engine=rank == 0))
    found["copies"] = message(lambda: distributed.all_reduce(torch.ones(1), group=other))
    invalid: list[Any] = [0, 2.5]
    found["invalid"] = [message(partial(Options, num_sms=each)) for each in invalid]
    part.shutdown()
    distributed.destroy_process_group()
    return found


def left() -> dict[str, Any]:
    """Rank 0 leaves between the others' operations, once while they wait for it."""
    rank, _ = begin()
    distributed.all_reduce(torch.ones(1))
    group = distributed.new_group()
    value = torch.ones(4)
    distributed.all_reduce(value, group=group)
    found: dict[str, Any] = {"before": value.tolist()}
    if rank == 0:
        # The others wait within an operation by then.
        time.sleep(1)
        distributed.destroy_process_group(group)
    else:
        began = time.monotonic()
        found["errors"] = [
            message(lambda: distributed.all_reduce(torch.ones(4), group=group)) for _ in range(2)
        ]
        found["seconds"] = time.monotonic() - began
    # A departure that no operation waits for leaves the group as it was.
    idle = distributed.new_group()
    distributed.all_reduce(value, group=idle)
    if rank == 0:
        distributed.destroy_process_group(idle)
    else:
        time.sleep(2)
        found["checks"] = [message(each.check) for each in list(ON_DEVICES)]
        found["late"] = message(lambda: distributed.all_reduce(value, group=idle))
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def left_by_a_sender() -> dict[str, Any]:
    """Rank 0 leaves while rank 1 waits for its message, and rank 2 for none."""
    rank, _ = begin()
    group = distributed.new_group()
    value = torch.ones(4)
    distributed.all_reduce(value, group=group)
    found: dict[str, Any] = {}
    began = time.monotonic()
    if rank == 0:
        distributed.send(value, 1, group=group)
        # Rank 1 waits for a second message by then.
        time.sleep(1)
        distributed.destroy_process_group(group)
    elif rank == 1:
        received = torch.empty(4)
        distributed.recv(received, 0, group=group)
        found["received"] = received.tolist()
        found["error"] = message(lambda: distributed.recv(received, 0, group=group))
    found["seconds"] = time.monotonic() - began
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def groups() -> dict[str, Any]:
    """Groups that are split from another one, one-rank groups, and a second default group."""
    rank, ranks = begin()
    world = distributed.group.WORLD
    assert world is not None
    pair = world.split_group([0, 1], group_name="pair")
    alone = [distributed.new_group([each]) for each in range(ranks)]
    found: dict[str, Any] = {"pair": None}
    launched.clear()
    if rank < 2:
        value = torch.tensor([rank + 1])
        pair.allreduce([value]).wait()
        found["pair"] = [value.item(), list(launched)]
        pair.shutdown()
    value = torch.tensor([rank + 1])
    distributed.all_reduce(value, group=alone[rank])
    found["alone"] = value.item()
    # Works outlive their group, and groups may be made anew.
    live = [distributed.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    distributed.destroy_process_group()
    found["live"] = [each.wait() for each in live]
    start("twin")
    distributed.all_reduce(value)
    found["again"] = value.item()
    distributed.destroy_process_group()
    found["open"] = len(ON_DEVICES)
    return found


def apart(hosts: list[str]) -> dict[str, Any]:
    """Operations on ranks at these hosts: results, and errors from the ones that are lacking."""
    rank = int(os.environ["WEFT_RANK"])
    os.environ["WEFT_HOST_ID"] = hosts[rank]
    begin()
    ranks = distributed.get_world_size()
    own = torch.arange(6.0) + rank
    found: dict[str, Any] = {"refused": message(lambda: distributed.all_reduce(own.clone()))}
    if "Error" in found["refused"]:
        distributed.barrier()
        distributed.destroy_process_group()
        return found
    averaged, parts = own.clone(), torch.arange(2.0 * ranks).to(torch.bfloat16) * (1 + rank)
    works = [distributed.all_reduce(averaged, ReduceOp.AVG, async_op=True)]
    part, whole = torch.empty(2, dtype=torch.bfloat16), torch.empty(6 * ranks)
    distributed.reduce_scatter_tensor(part, parts)
    works.append(distributed.all_gather_into_tensor(whole, own, async_op=True))
    for work in works:
        work.wait()
    sent = torch.full((3,), rank, dtype=torch.float8_e5m2)
    distributed.broadcast(sent, 1)
    rows = [torch.empty(6) for _ in range(ranks)]
    distributed.all_gather(rows, own)
    value = torch.tensor([1 + rank, 1j * rank])
    distributed.all_reduce(value)
    distributed.barrier()
    found |= {
        "averaged": averaged.tolist(),
        "part": part.tolist(),
        "whole": whole.tolist() == torch.cat(rows).tolist(),
        "rows": [row[0].item() for row in rows],
        "sent": sent.float().tolist(),
        "complex": [value[0].real.item(), value[1].imag.item()],
        "launched": sorted(set(launched)),
    }
    lists = [torch.empty(1) for _ in range(ranks)]
    found["lacking"] = [
        message(lambda: distributed.all_to_all(lists, [torch.ones(1)] * ranks)),
        message(lambda: distributed.reduce(own, 0)),
        message(lambda: distributed.all_reduce(torch.ones(2, dtype=torch.uint16))),
    ]
    distributed.all_reduce(averaged)
    found["after"] = averaged[0].item()
    distributed.destroy_process_group()
    found["open"] = len(ON_DEVICES)
    return found


def timed(calls: int) -> dict[str, float]:
    """Microseconds for a call with one rank, where no kernel waits."""
    begin()
    value, whole = torch.ones(1), torch.ones(1)
    options = distributed.AllreduceOptions()
    options.asyncOp = False
    group: Any = distributed.group.WORLD
    measured: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: distributed.all_reduce(value),
        "all_reduce, async": lambda: distributed.all_reduce(value, async_op=True).wait(),
        "all_gather_into_tensor": lambda: distributed.all_gather_into_tensor(whole, value),
        "group.allreduce": lambda: group.allreduce([value], options),
        "operator": lambda: torch.ops.weft.all_reduce_(value, "sum", group.group_name),
    }
    for call in measured.values():
        call()
    collectives: Any = next(iter(ON_DEVICES))
    measured["Collectives.all_reduce"] = lambda: collectives.all_reduce(value)
    found = {}
    for name, call in measured.items():
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(calls):
                call()
            best = min(best, (time.perf_counter() - began) / calls)
        found[name] = best * 1e6
    distributed.destroy_process_group()
    return found
