"""Direct collectives on registered tensors between processes, on the CPU twin or on GPUs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import weft
from tests.gpu.collective_calls import DIRECT, EXCHANGES, Call, Prepared, draw_call
from tests.workers.backend.forked import message
from weft import cuda

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.gpu.registered import Registered

#: Arena bytes, enough for the tensors in any call here.
ARENA = 6 << 20
#: Elements in a vector whose call is direct by default.
LONG = 500_000


def begin(communicator: weft.Communicator, device: str = "twin") -> cuda.Collectives:
    if device == "cuda":
        torch.cuda.set_device(communicator.rank % torch.cuda.device_count())
    return cuda.Collectives(communicator, device=device, num_sms=4, skew_timeout=20.0)


def registered(
    communicator: weft.Communicator,
    count: int,
    dtype: torch.dtype,
    shift: int = 0,
    device: str = "twin",
) -> tuple[torch.Tensor, Registered]:
    """A registered tensor at another place in its memory on each rank.

    Args:
        communicator: the ranks'.
        count: elements.
        dtype: element dtype.
        shift: bytes from a multiple of 64 to the tensor.
        device: "twin" or "cuda".
    """
    at = 64 * (1 + communicator.rank) + shift
    place = "cpu" if device == "twin" else device
    whole = torch.zeros(at + count * dtype.itemsize, dtype=torch.uint8, device=place)
    if device == "twin":
        whole.share_memory_()
    tensor = whole[at:].view(dtype)
    return tensor, weft.symmetric_register(tensor)


def direct_calls(chance: np.random.Generator, ranks: int, count: int) -> Iterator[Call]:
    """Random direct calls, some by copy engines."""
    while count:
        call = draw_call(chance, ranks, allocate=False)
        if call.name not in DIRECT or call.splits is not None:
            continue
        call.symmetric, call.mixed = True, False
        if call.name == "scatter":
            call.mode = "out"
        call.options = {"algorithm": "direct"}
        if call.name in EXCHANGES and chance.random() < 0.5:
            call.options = {"copy_engine": True}
        if chance.random() < 0.2:
            call.options["num_sms"] = 1
        count -= 1
        yield call


def results(seed: int, calls: int, device: str = "twin") -> int:
    """Every call with all memory pairs for its source and its target; the count.

    Each is compared with the reference, bit by bit, so that the pairs have equal results too.
    """
    chance = np.random.default_rng(seed)
    with weft.init() as communicator, begin(communicator, device) as collectives:
        rank, ranks = communicator.rank, communicator.world_size
        heap = [collectives.symmetric_empty(ARENA, torch.uint8) for _ in range(2)]
        lent = [registered(communicator, ARENA, torch.uint8, 0, device) for _ in range(2)]
        arenas = [(heap[source], lent[source][0]) for source in range(2)]
        for call in direct_calls(chance, ranks, calls):
            given = call.draw(chance, ranks)
            expected = call.results(given)

            def verify(prepared: Prepared, right: Any = expected[rank]) -> None:
                result = prepared.make(collectives)
                if device == "cuda":
                    torch.cuda.synchronize()
                prepared.check(result, right)

            for pair in range(4):
                # Views of the arenas, at any multiple of 16.
                at = 16 * int(chance.integers(1000))
                memory = [arenas[0][pair % 2][at:], arenas[1][pair // 2][at:]]
                verify(Prepared(call, rank, given[rank], collectives, memory))
            # One registration holds both.
            memory = [lent[0][0], lent[0][0][ARENA // 2 :]]
            verify(Prepared(call, rank, given[rank], collectives, memory))
            communicator.barrier()
        collectives.check()
        for _, made in lent:
            made.close()
    return 5 * calls


def differing(what: str) -> str:
    """Error in a call on rank 1 at a place other than the others'."""
    with weft.init() as communicator:
        collectives = begin(communicator)
        is_other = communicator.rank == 1
        tensor, _ = registered(communicator, LONG, torch.float32)
        second, _ = registered(communicator, LONG, torch.float32)
        in_heap = collectives.symmetric_empty(LONG, torch.float32)
        given = {"registration": second, "heap": in_heap, "offset": tensor[4:]}[what]
        given = (given if is_other else tensor)[: LONG - 8]
        # Direct by default: only direct calls compare their places.
        error = message(lambda: collectives.all_reduce(given.fill_(1)))
        unchanged = float(tensor[LONG - 4 :].sum() + second[LONG - 4 :].sum())
        return error if unchanged == 0 else "written behind the tensor"


def misaligned(shift: int) -> dict[str, Any]:
    """Registrations that begin `shift` bytes later on rank 1: refused as direct, else by chunks."""
    with weft.init() as communicator, begin(communicator) as collectives:
        rank, ranks = communicator.rank, communicator.world_size
        shift *= rank == 1
        source, first = registered(communicator, LONG, torch.int32, shift)
        target, second = registered(communicator, LONG, torch.int32)
        calls = {
            "input": lambda: collectives.all_reduce(source, out=target, algorithm="direct"),
            "output": lambda: collectives.all_reduce(target, out=source, algorithm="direct"),
            "unused": lambda: collectives.reduce(target, 0, algorithm="direct"),
        }
        errors = {name: message(call) for name, call in calls.items()}
        source.copy_(torch.arange(LONG)).add_(rank)
        collectives.all_reduce(source, out=target)
        right = torch.arange(LONG) * ranks + sum(range(ranks))
        # Copies have no units that must be aligned.
        collectives.all_to_all(target, out=source, copy_engine=True)
        copied = target.view(ranks, -1)[rank].repeat(ranks)
        first.close()
        second.close()
    found = {"right": bool((target == right).all()), "copied": bool((source == copied).all())}
    return errors | found


def ended() -> dict[str, Any]:
    """Registrations that end: before calls, and while a call uses them."""
    with weft.init() as communicator, begin(communicator) as collectives:
        rank, ranks = communicator.rank, communicator.world_size
        total = sum(range(ranks))
        tensor, made = registered(communicator, LONG, torch.int64)
        other, second = registered(communicator, LONG, torch.int64)

        def reduced(vector: torch.Tensor, **options: Any) -> list[int]:
            vector.fill_(rank)
            unique: list[int] = collectives.all_reduce(vector, **options).unique().tolist()
            return unique

        direct = reduced(tensor, algorithm="direct")
        made.close()
        refused = message(lambda: collectives.all_reduce(tensor, algorithm="direct"))
        by_chunks, still = reduced(tensor), reduced(other, algorithm="direct")
        # The memory may be registered anew.
        again = weft.symmetric_register(tensor)
        anew = reduced(tensor, algorithm="direct")
        in_use: list[list[int]] = []
        if rank == 0:
            thread = threading.Thread(target=lambda: in_use.append(reduced(tensor)))
            thread.start()
            # The call waits for the other ranks now.
            time.sleep(0.5)
            again.close()
            thread.join(60)
        else:
            time.sleep(1.0)
            in_use.append(reduced(tensor))
            again.close()
        second.close()
    return {
        "results": [direct, by_chunks, still, anew, *in_use] == [[total]] * 5,
        "refused": refused,
    }


def closed() -> list[str]:
    """Errors and results from tensors whose communicator was closed, and from a second one."""
    with weft.init() as communicator:
        collectives = begin(communicator)
        tensor, made = registered(communicator, 64, torch.float32)
        collectives.all_reduce(tensor.fill_(1), algorithm="direct")
        value = tensor[0].item()
    found = [str(value), message(lambda: made.peer(0))]
    found.append(message(lambda: collectives.all_reduce(tensor, algorithm="direct")))
    return found
