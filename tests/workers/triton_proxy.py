"""Puts of Triton kernels to ranks of any host, by a proxy of the host."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import weft
import weft.triton
from workers import device_native
from workers import triton_kernels as kernels
from workers.triton_calls import Place

#: Epochs before the first round: at zero, and before a place where int32 wraps around.
FIRST = (0, 2**31 - 3)
PROGRAMS = 3


def rings(rounds: int, slots: int = 4, device: str = "twin") -> dict[str, Any]:
    """Arrivals of each round, from each first epoch."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        found = [_ring(place, first, rounds, slots) for first in FIRST]
        return {"ring": found, "hosts": len(set(communicator.hosts))}


def _ring(place: Place, first: int, rounds: int, slots: int) -> list[list[int]]:
    # Fewer slots than puts of a round: they are reused within it.
    length = 1024 if place.on_gpu else 16
    with weft.triton.Proxy(
        place.communicator,
        bytes=PROGRAMS * length * 4,
        words=2 * PROGRAMS,
        device=place.device,
        slots=slots,
        slot_bytes=4 * length,
        timeout=60.0,
    ) as proxy:
        proxy.words.fill_(first)
        data = proxy.data.view(torch.int32)
        epochs = place.words(*[first] * PROGRAMS)
        outputs = place.zeros(PROGRAMS * length)
        place.meet()
        found = []
        for _ in range(rounds):
            kernels.staged_ring[(PROGRAMS,)](
                proxy.state,
                data,
                proxy.words,
                outputs,
                epochs,
                place.rank,
                place.ranks,
                PROGRAMS,
                length,
            )
            found.append(sorted(set(outputs.tolist())))
        proxy.check()
        place.meet()
    return found


def failures(device: str = "twin") -> dict[str, Any]:
    """Errors of a wait that expires, of wrong descriptors, of wrong arguments."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        outputs = place.words(5)
        found: dict[str, Any] = {}

        def proxy(**changed: Any) -> weft.triton.Proxy:
            # Long enough that an error ends a wait before its limit on a busy machine.
            options: dict[str, Any] = {"bytes": 64, "words": 2, "device": device, "timeout": 60.0}
            return weft.triton.Proxy(communicator, **options | changed)

        wrong = {"words": 0, "slot_bytes": 100}
        for name, value in wrong.items():
            found[name] = device_native.named(lambda: proxy(**{name: value}))  # noqa: B023
        made = proxy()
        data = made.data.view(torch.int32)
        kernels.staged_put[(1,)](made.state, data, made.words, 1, 2, place.rank, 16)
        kernels.staged_receive[(1,)](made.state, made.words, outputs, 1, place.rank)
        found["own"] = [data[:4].tolist(), outputs.tolist()]
        made.close()
        made = proxy(timeout=0.3)
        kernels.staged_receive[(1,)](made.state, made.words[1:], outputs, 7, 1)
        found["expired"] = [*device_native.named(made.check), outputs.tolist()]
        kernels.staged_receive[(1,)](made.state, made.words[1:], outputs, 8, 1)
        found["again"] = outputs.tolist()
        made.close()
        for name, (offset, count, rank) in {
            "rank": (0, 1, 9),
            "offset": (15, 2, 0),
            "length": (0, 4097, 0),
        }.items():
            made = proxy()
            data = made.data.view(torch.int32)
            kernels.staged_put[(1,)](made.state, data, made.words, offset, count, rank, 8192)
            # The wait ends by the error.
            kernels.staged_receive[(1,)](made.state, made.words[1:], outputs, 7, 1)
            found[name] = [*device_native.named(made.check), outputs.tolist()]
            made.close()
        place.communicator.barrier()
        return found


def lost(device: str = "twin") -> dict[str, Any]:
    """Rank 1 fails after a put of rank 0; the wait of that ends before its limit."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ZeroDivisionError), weft.init() as communicator:
        place = Place(communicator, device)
        made = weft.triton.Proxy(communicator, bytes=64, words=2, device=device, timeout=60.0)
        outputs = place.words(5)
        if place.rank == 0:
            data = made.data.view(torch.int32)
            kernels.staged_put[(1,)](made.state, data, made.words, 0, 1, 1, 16)
        kernels.staged_receive[(1,)](made.state, made.words, outputs, 1, 1 - place.rank)
        if place.rank == 1:
            raise ZeroDivisionError("a failure")
        found = {"error": device_native.named(made.check), "outputs": outputs.tolist()}
        made.close()
    return found
