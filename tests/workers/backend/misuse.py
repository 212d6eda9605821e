"""Torch process groups whose threads, processes and tensors are unusual."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader

from tests.workers.backend.forked import message

if TYPE_CHECKING:
    from tests.workers.backend.forked import Place

#: Longer than the silence after which a rank counts as lost, in this test.
HELD_SECONDS = float(os.environ.get("WEFT_TEST_GIL_SECONDS", "10"))
SILENCE = "4"


class Held:
    """The GIL on rank 1, held until another rank permits its release, and for `HELD_SECONDS` then.

    A pipe with a name carries the permission: a C call reads it without releasing the GIL.
    """

    def __init__(self, place: Place) -> None:
        path = os.path.join(place.directory, "permission")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        # For both, so that no rank waits for the other one.
        self.pipe = os.open(path, os.O_RDWR)

    def hold(self) -> bool:
        """Hold the GIL; true if the permission came."""
        library, byte = ctypes.PyDLL(None), ctypes.create_string_buffer(1)
        permitted = bool(library.read(self.pipe, byte, ctypes.c_size_t(1)) == 1)
        library.usleep(ctypes.c_uint(int(HELD_SECONDS * 1e6)))
        return permitted

    def permit(self) -> None:
        os.write(self.pipe, b"x")


def gil_held_beside_works(place: Place) -> Any:
    """Rank 1 starts works and holds the GIL; the others end theirs meanwhile."""
    os.environ["WEFT_SILENCE_TIMEOUT"] = SILENCE
    place.join()
    held = Held(place)
    others = distributed.new_group([0, 2])
    distributed.barrier()
    works = [distributed.all_reduce(torch.ones(50_000), async_op=True) for _ in range(3)]
    # Longer than the message ring.
    received, sent = torch.empty(1_000_000), torch.ones(1_000_000)
    if place.rank < 2:
        works.append(distributed.isend(sent, 1 - place.rank))
        works.append(distributed.irecv(received, 1 - place.rank))
    permitted = held.hold() if place.rank == 1 else None
    for work in works:
        work.wait()
    for _ in range(10 if place.rank != 1 else 0):
        distributed.all_reduce(sent, group=others)
    # Rank 2 has ended its works before it took part in the last sum.
    if place.rank == 0:
        held.permit()
    distributed.barrier()
    distributed.destroy_process_group()
    return permitted


def gil_held_beside_a_wait(place: Place) -> Any:
    """Rank 1 waits in a collective while another of its threads holds the GIL."""
    os.environ["WEFT_SILENCE_TIMEOUT"] = SILENCE
    place.join()
    held, holds = Held(place), Path(place.directory, "holds")
    permitted = []

    def hold() -> None:
        # The other thread waits by then.
        time.sleep(0.5)
        holds.touch()
        permitted.append(held.hold())

    value = torch.ones(300_000)
    distributed.barrier()
    thread = threading.Thread(target=hold)
    if place.rank == 1:
        thread.start()
    else:
        while not holds.exists():
            time.sleep(0.01)
        time.sleep(0.5)
    distributed.all_reduce(value)
    if place.rank == 1:
        thread.join()
    else:
        held.permit()
    distributed.barrier()
    distributed.destroy_process_group()
    return permitted


def child_of_a_group(place: Place) -> Any:
    """A forked process cannot use the group, and destroys its copy; the parent goes on."""
    place.join()
    value = torch.ones(5)
    work = distributed.irecv(value, 1 - place.rank)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls = (lambda: distributed.all_reduce(value), work.wait, work.is_completed)
        text = "\n".join(message(call) for call in calls)
        distributed.destroy_process_group()
        del work, calls
        gc.collect()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as file:
        errors = file.read().splitlines()
    _, status = os.waitpid(child, 0)
    distributed.send(torch.full((5,), 7.0), 1 - place.rank)
    work.wait()
    distributed.destroy_process_group()
    return {"errors": errors, "status": status, "value": value.tolist()}


def reduction_threads(place: Place) -> Any:
    """Reduction threads in a group and in one split from it, beside a forked child."""
    os.environ["WEFT_REDUCTION_THREADS"] = "2"
    place.join()
    world: Any = distributed.group.WORLD
    values = torch.arange(1_000_000.0)
    found: dict[str, Any] = {"before": count_threads("weft-reduce-")}
    for name, group in (("default", world), ("split", world.split_group([0, 1]))):
        value = values * (place.rank + 1)
        distributed.all_reduce(value, group=group)
        found[name] = [bool(torch.equal(value, 3 * values)), count_threads("weft-reduce-")]
    child = os.fork()
    if child == 0:
        distributed.destroy_process_group()
        del world, group
        gc.collect()
        os._exit(0)
    found["status"] = os.waitpid(child, 0)[1]
    distributed.destroy_process_group()
    # Its last reference frees a group.
    del world, group
    gc.collect()
    found["after"] = count_threads("weft-reduce-")
    return found


def count_threads(prefix: str) -> int:
    """Threads with such a name in this process, counted."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        # The thread may end meanwhile.
        with contextlib.suppress(OSError):
            count += (task / "comm").read_text(encoding="utf-8").startswith(prefix)
    return count


def data_loaders(place: Place) -> Any:
    """A DataLoader's forked workers beside collectives."""
    place.join()
    total = 0
    for batch in DataLoader(list(range(32)), batch_size=8, num_workers=2):
        value = batch.sum()
        distributed.all_reduce(value)
        total += int(value)
    distributed.destroy_process_group()
    return total


def coalescing(place: Place) -> Any:
    """Blocking operations while operations are coalesced, in this thread and in another."""
    place.join()
    other = distributed.new_group()
    group: Any = distributed.group.WORLD
    peer, values = 1 - place.rank, [torch.full((200_000,), float(place.rank)) for _ in range(3)]
    received = [torch.empty_like(each) for each in values]
    group._start_coalescing(torch.device("cpu"))
    parts = [group.send([values[0]], peer, 0), group.recv([received[0]], peer, 0)]
    distributed.all_to_all_single(received[1], values[1], group=group)
    here = received[1].mean().item()
    there: list[float] = []

    def run() -> None:
        distributed.all_to_all_single(received[2], values[2], group=group)
        there.append(received[2].mean().item())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    group._end_coalescing(torch.device("cpu")).wait()
    found = {
        "here": here,
        "there": there,
        "coalesced": received[0].unique().tolist(),
        "parts": [each.is_completed() for each in parts],
        "unmatched": message(lambda: group._end_coalescing(torch.device("cpu"))),
    }
    # Their end is skipped, as by an exception.
    group._start_coalescing(torch.device("cpu"))
    for _ in range(200):
        group.send([values[0]], peer, 1)
        group.recv([received[0]], peer, 1).wait()
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([values[0]], distributed.AllreduceOptions())
    group._end_coalescing(torch.device("cpu")).wait()
    found["again"] = values[0].unique().tolist()
    distributed.barrier(group=other)
    distributed.destroy_process_group()
    return found


def views(place: Place) -> Any:
    """Tensors whose memory is not their values, without dimensions, or shared by two arguments."""
    place.join()
    ranks, rank = place.ranks, place.rank
    found: dict[str, Any] = {}
    values = torch.tensor([1.0, 2.0]) + rank
    # Lazily negated: the memory has the opposite sign.
    negated = torch.complex(values, values).conj().imag
    found["negated"] = negated.is_neg()
    gathered = torch.empty(2 * ranks)
    distributed.all_gather_into_tensor(gathered, negated)
    found["gathered"] = gathered.tolist()
    scalar, scalars = torch.tensor(float(rank + 1)), torch.empty(ranks)
    distributed.all_gather_into_tensor(scalars, scalar)
    distributed.all_reduce(scalar)
    found["scalar"] = [scalar.item(), scalars.tolist()]
    share = torch.empty(())
    distributed.reduce_scatter_tensor(share, torch.arange(float(ranks)))
    found["share"] = share.item()
    for size in (5, 100_000):
        whole = torch.zeros(ranks * size)
        mine = whole[rank * size : (rank + 1) * size]
        mine.fill_(rank + 1)
        distributed.all_gather_into_tensor(whole, mine)
        found[f"gathered in place {size}"] = whole.view(ranks, size).unique(dim=1).tolist()
        whole.fill_(rank + 1)
        distributed.reduce_scatter_tensor(mine, whole)
        found[f"reduced in place {size}"] = mine.unique().tolist()
    found["expanded"] = message(lambda: distributed.all_reduce(torch.ones(1).expand(4)))
    parameter = torch.nn.Parameter(torch.ones(2))
    distributed.all_reduce(parameter)
    found["parameter"] = parameter.tolist()
    doubled = torch.ones(3, dtype=torch.complex64)
    distributed.all_reduce(doubled)
    found["complex"] = torch.view_as_real(doubled).tolist()
    distributed.destroy_process_group()
    return found


def lazy_values(place: Place) -> Any:
    """Contiguous tensors that torch has conjugated or negated lazily, as inputs and as outputs.

    Torch's dispatcher writes process group outputs to copies, so the backend is called.
    """
    place.join()
    ranks, peer, found = place.ranks, 1 - place.rank, {}
    world: Any = distributed.group.WORLD
    group = world._get_backend(torch.device("cpu"))
    for size in (2, 50_000):
        base = torch.full((size,), complex(place.rank + 1, 1))
        conjugated, whole = base.conj(), torch.empty(ranks * size, dtype=base.dtype)
        assert conjugated.is_conj()
        assert conjugated.is_contiguous()
        group._allgather_base(whole, conjugated).wait()
        moved = torch.empty(ranks * size, dtype=base.dtype).conj()
        group.alltoall_base(moved, whole.conj(), [], []).wait()
        received = torch.empty_like(base).conj()
        works = [group.send([conjugated], peer, 0), group.recv([received], peer, 0)]
        for work in works:
            work.wait()
        share = torch.empty(size, dtype=base.dtype).conj()
        group._reduce_scatter_base(share, whole.conj()).wait()
        summed = base.clone().conj()
        group.allreduce([summed]).wait()
        sent = (base if place.rank == 0 else torch.empty_like(base)).conj()
        group.broadcast(sent, 0).wait()
        values = (whole, moved, received, share, summed, sent)
        found[size] = [numbers(each) for each in values]
        negative = torch._neg_view(torch.full((size,), place.rank + 1.0))
        assert negative.is_neg()
        real = torch.empty(ranks * size)
        distributed.all_gather_into_tensor(real, negative)
        group.allreduce([negative]).wait()
        found[size] += [real.unique().tolist(), negative.unique().tolist()]
    distributed.destroy_process_group()
    return found


def numbers(values: torch.Tensor) -> list[list[float]]:
    """Real and imaginary parts for a tensor's different values, in order."""
    parts = torch.view_as_real(values.resolve_conj()).unique_consecutive(dim=0)
    return [[float(real), float(imaginary)] for real, imaginary in parts]


def long_timeouts(place: Place) -> Any:
    """Timeouts beyond what the C++ clock represents."""
    place.join()
    millennium = timedelta(days=365_000)
    group = distributed.new_group(timeout=millennium)
    value = torch.ones(2)
    distributed.all_reduce(value, group=group)
    distributed.all_reduce(value, async_op=True).wait(millennium)
    distributed.destroy_process_group()
    return value.tolist()


def senders(place: Place) -> Any:
    """Receives from any rank that two threads wait for; both then have the sender."""
    place.join()
    group: Any = distributed.group.WORLD
    wrong = 0
    for _ in range(300):
        if place.rank != 0:
            distributed.send(torch.ones(1), 0)
            continue
        work = group.recv_anysource([torch.empty(1)], 0)
        found: list[int] = []

        def run(work: Any = work, found: list[int] = found) -> None:
            work.wait()
            found.append(work._source_rank())

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wrong += found != [1, 1]
    distributed.barrier()
    distributed.destroy_process_group()
    return wrong


def destroyed(place: Place) -> Any:
    """Works that are pending, or are awaited by another thread, when the group is destroyed."""
    place.join()
    works = [distributed.irecv(torch.empty(3), 1 - place.rank) for _ in range(3)]
    future = works[0].get_future()
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(message(works[1].wait)))
    thread.start()
    # A receive from a rank that has left raises at once.
    store = place.store("posted")
    store.set(str(place.rank), "")
    store.wait([str(1 - place.rank)])
    time.sleep(0.2)
    distributed.destroy_process_group()
    thread.join()
    errors += [message(works[2].wait), message(future.wait)]
    return errors


def callbacks(place: Place) -> Any:
    """Callbacks that raise, wait for another work, and destroy the group."""
    place.join()
    found: dict[str, Any] = {}
    raised = distributed.all_reduce(torch.ones(2), async_op=True).get_future()
    found["raised"] = message(raised.then(lambda _: 1 / 0).wait)
    distributed.all_reduce(torch.ones(2), async_op=True).get_future().add_done_callback(
        lambda _: 1 / 0
    )

    def again(future: Any) -> Any:
        value = future.value()[0]
        distributed.all_reduce(value)
        return value

    value = torch.ones(2)
    chained = distributed.all_reduce(value, async_op=True).get_future().then(again)
    found["chained"] = chained.wait().tolist()
    distributed.barrier()
    ended = threading.Event()

    def destroy(_: Any) -> None:
        distributed.destroy_process_group()
        ended.set()

    distributed.all_reduce(torch.ones(2), async_op=True).get_future().add_done_callback(destroy)
    found["destroyed"] = ended.wait(20)
    return found


def rings(place: Place) -> Any:
    """Each rank sends all its messages to the next before it receives any.

    A rank's buffers take 64 MiB in messages without a receive.
    """
    place.join()
    short = distributed.new_group(timeout=timedelta(seconds=5))
    after, before = (place.rank + 1) % place.ranks, (place.rank - 1) % place.ranks
    values = [torch.full((1 << 20,), float(place.rank + each)) for each in range(12)]
    for each in values:
        distributed.send(each, after)
    received = torch.empty(1 << 20)
    found: list[bool] = []
    for _ in values:
        distributed.recv(received, before)
        found.append(received.unique().tolist() == [float(before + len(found))])
    distributed.barrier()

    def beyond() -> None:
        for _ in range(40):
            distributed.send(values[0], after, group=short)

    return {"found": all(found), "beyond": message(beyond)}


def factors(place: Place) -> Any:
    """Addends multiplied by a factor, and a reduction that lacks it."""
    place.join()
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        value = torch.full((7,), float(place.rank + 1), dtype=dtype)
        distributed.all_reduce(value, distributed._make_nccl_premul_sum(0.5))
        share = torch.empty(2, dtype=dtype)
        source = torch.full((2 * place.ranks,), 3.0, dtype=dtype)
        distributed.reduce_scatter_tensor(
            share, source, distributed._make_nccl_premul_sum(torch.tensor([0.25]))
        )
        found[str(dtype)] = [value.unique().tolist(), share.tolist()]
    half = distributed._make_nccl_premul_sum(0.5)
    pair = torch.empty(2, dtype=torch.complex64)
    distributed.reduce_scatter_tensor(
        pair, torch.full((2 * place.ranks,), 3 - 1j, dtype=torch.complex64), half
    )
    found["complex64"] = torch.view_as_real(pair).tolist()
    found["product"] = message(
        lambda: distributed.reduce_scatter_tensor(pair, pair.repeat(place.ranks), ReduceOp.PRODUCT)
    )
    found["int8"] = message(
        lambda: distributed.all_reduce(torch.ones(2, dtype=torch.int8), ReduceOp.AVG)
    )
    found["int64"] = message(lambda: distributed.all_reduce(torch.ones(2, dtype=torch.int64), half))
    distributed.destroy_process_group()
    return found


def unequal_gathers(place: Place) -> Any:
    """Gathers to rank 0: a tensor that is longer there than elsewhere, and a shorter one."""
    place.join()
    found = []
    for first, second in ((4, 40), (40, 4)):
        own = torch.ones((first, second)[place.rank])
        into = [torch.empty(first) for _ in range(place.ranks)] if place.rank == 0 else None
        found.append(message(partial(distributed.gather, own, into, dst=0)))
    distributed.barrier()
    distributed.destroy_process_group()
    return found
