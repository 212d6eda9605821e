"""Triton kernels' puts to ranks on any host, by a proxy on the host."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any
from unittest import mock

import torch

import weft
import weft.triton
import weft.triton.proxy
from tests.workers.cuda import device_native
from tests.workers.triton import kernels
from tests.workers.triton.calls import Place

PROGRAMS = 3


def rings(rounds: int, slots: int = 4, device: str = "twin", graph: bool = False) -> dict[str, Any]:
    """Each round's arrivals, with fewer slots than commands in a round."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        length = 1024 if place.on_gpu else 16
        sizes = [PROGRAMS * length * 4] * 2
        with weft.triton.Proxy(
            communicator, sizes, words=2 * PROGRAMS, device=device, slots=slots, timeout=60.0
        ) as proxy:
            outbox, inbox = (window.view(torch.int32) for window in proxy.windows)
            outputs, epochs = place.zeros(PROGRAMS * length), place.zeros(PROGRAMS)

            def launch() -> None:
                kernels.remote_ring[(PROGRAMS,)](
                    proxy.context, outbox, inbox, outputs, epochs, PROGRAMS, length
                )

            replay = launch
            found = []
            if graph:
                # Also compiles it.
                launch()
                place.finish()
                found.append(sorted(set(outputs.tolist())))
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    launch()
                replay = captured.replay
            while len(found) < rounds:
                replay()
                place.finish()
                found.append(sorted(set(outputs.tolist())))
            proxy.check()
        return {"ring": found, "hosts": len(set(communicator.hosts))}


def local_context(device: str = "twin") -> list[Any]:
    """A put by the context of a symmetric tensor on `proxy.local`, and a second proxy there."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        with weft.triton.Proxy(communicator, [64, 64], device=device, timeout=60.0) as proxy:
            tensor = weft.symmetric_empty(
                (4,), torch.int32, device=device, communicator=proxy.local
            )
            context = weft.triton.context(tensor, timeout=60.0)
            outputs = place.words(5)
            proxy.windows[0][:] = 7 + place.rank
            kernels.remote_put[(1,)](context, 1 - place.rank, 0, 1, 16, 8, 1, outputs)
            kernels.remote_receive[(1,)](context, outputs, 1 - place.rank, 0, 1)
            place.finish()
            found = [outputs.tolist(), proxy.windows[1].tolist(), proxy.local.world_size]
            communicator.barrier()
        # Kernels that start later put nothing; out of range they wait for nothing.
        kernels.remote_receive[(1,)](context, outputs, 1 - place.rank, 0, 1)
        return [*found, outputs.tolist()]


def lifetimes() -> dict[str, Any]:
    """Tensors as windows, waits out of range, wrong arguments, and an early close."""
    with weft.init() as communicator:
        place = Place(communicator, "twin")
        peer = 1 - place.rank
        outbox, inbox = place.range(16) + 100 * place.rank, place.zeros(16)
        made = weft.triton.Proxy(communicator, [outbox, inbox], device="twin", timeout=60.0)
        # The default communicator is still this one.
        place.symmetric(4)
        outputs = place.words(5)
        kernels.remote_put[(1,)](made.context, peer, 0, 1, 0, 64, 1, outputs)
        kernels.remote_receive[(1,)](made.context, outputs, peer, 0, 1)
        found: dict[str, Any] = {"arrived": [outputs.item(), inbox.tolist()], "outside": []}
        for source, word in ((2, 0), (-1, 0), (peer, 8)):
            kernels.remote_receive[(1,)](made.context, outputs, source, word, 0)
            found["outside"].append(outputs.item())

        def refused(*windows: Any) -> tuple[str, int | None, str]:
            return device_native.named(
                lambda: weft.triton.Proxy(communicator, windows, device="twin")
            )

        found["wrong"] = [refused(outbox.view(4, 4).t()), refused(0)]
        found["variables"] = {}
        for name in ("WEFT_PROXY_IDLE", "WEFT_PROXY_CORE"):
            with mock.patch.dict(os.environ, {name: "off"}):
                found["variables"][name] = refused(64)
        communicator.barrier()
        communicator.close()
        kernels.remote_receive[(1,)](made.context, outputs, peer, 0, 2)
        found["after"] = outputs.item()
        made.close()
        return found


def holds(device: str = "twin") -> dict[str, Any]:
    """Rounds that kernels give back: a window of 16, then more only behind a release."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        with weft.triton.Proxy(
            communicator, [256, 256], words=2, hold=[1], device=device, timeout=60.0
        ) as proxy:
            outbox, inbox = (window.view(torch.int32) for window in proxy.windows)
            outputs, peer = place.words(5), 1 - place.rank
            state = (proxy.context, place.rank, outbox, peer, 1)
            kernels.remote_put_held[(1,)](*state, 100 * place.rank, 16)
            kernels.remote_receive[(1,)](proxy.context, outputs, peer, 1, 16)
            place.finish()
            first = [outputs.tolist(), inbox[peer * 16 :][:16].tolist()]
            # The seventeenth round has no credit: it stays here.
            kernels.remote_put_held[(1,)](*state, 100 * place.rank + 50, 1)
            place.meet()
            time.sleep(0.1)
            word = torch.tensor(inbox.tolist())[peer * 16].item()
            place.meet()
            kernels.remote_give_back[(1,)](proxy.context, outputs, peer, 1, 16)
            kernels.remote_receive[(1,)](proxy.context, outputs, peer, 1, 17)
            place.finish()
            second = [outputs.tolist(), inbox[peer * 16].item()]
            kernels.remote_give_back[(1,)](proxy.context, outputs, peer, 1, 1)
            proxy.check()
            place.meet()
        return {"first": first, "kept": word, "second": second}


def failures(device: str = "twin") -> dict[str, Any]:
    """Errors from waits that expire, commands out of range, a full ring, wrong arguments."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        outputs, peer = place.words(5), 1 - communicator.rank
        found: dict[str, Any] = {}

        def proxy(**changed: Any) -> weft.triton.Proxy:
            # Long enough that an error ends a wait before its limit on a busy machine.
            options: dict[str, Any] = {"words": 2, "device": device, "timeout": 60.0}
            options |= {"windows": [64, 64]} | changed
            return weft.triton.Proxy(communicator, options.pop("windows"), **options)

        wrong = {"words": 0, "slots": 100, "hold": [2], "windows": [], "idle": "off", "core": 9999}
        for name, value in wrong.items():
            found[name] = device_native.named(lambda: proxy(**{name: value}))  # noqa: B023
        differs = {"words": 3 + place.rank}
        found["differs"] = device_native.named(lambda: proxy(**differs))
        made = proxy(timeout=0.3)
        found["longest"] = made.max_put_bytes
        communicator.barrier()
        kernels.remote_receive[(1,)](made.context, outputs, peer, 1, 7)
        place.finish()
        found["expired"] = [*device_native.named(made.check), outputs.tolist()]
        kernels.remote_receive[(1,)](made.context, outputs, peer, 1, 8)
        place.finish()
        found["again"] = [*device_native.named(made.check), outputs.tolist()]
        made.close()
        communicator.barrier()
        # Held rounds without a release: puts fill the window, what the thread keeps, and the ring.
        with mock.patch.object(weft.triton.proxy, "_OUTSTANDING", 8):
            made = proxy(timeout=0.3, slots=2, hold=[0])
        communicator.barrier()
        kernels.remote_put[(1,)](made.context, peer, 0, 1, 0, 4, 99, outputs, hold=True)
        place.finish()
        found["full"] = [*device_native.named(made.check), outputs.tolist()]
        made.close()
        communicator.barrier()
        for name, (given, word, window, offset, length) in {
            "rank": (9, 0, 1, 0, 4),
            "word": (peer, 2, 1, 0, 4),
            "window": (peer, 0, 2, 0, 4),
            "offset": (peer, 0, 1, 61, 4),
            "length": (peer, 0, 1, 0, 1 << 21),
        }.items():
            made = proxy()
            # The other rank has left the constructor too.
            communicator.barrier()
            if place.rank == 0:
                put = (made.context, given, word, window, offset, length, 1, outputs)
                kernels.remote_put[(1,)](*put)
            # The wait ends by the error.
            kernels.remote_receive[(1,)](made.context, outputs, peer, 1, 7)
            place.finish()
            found[name] = [*device_native.named(made.check), outputs.tolist()]
            made.close()
            communicator.barrier()
        return found


def lost(device: str = "twin") -> dict[str, Any]:
    """Rank 1 fails after rank 0's put; the put's wait ends before its limit."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ZeroDivisionError), weft.init() as communicator:
        place = Place(communicator, device)
        made = weft.triton.Proxy(communicator, [64, 64], words=2, device=device, timeout=60.0)
        communicator.barrier()
        outputs = place.words(5)
        if place.rank == 0:
            kernels.remote_put[(1,)](made.context, 1, 1, 1, 0, 4, 1, outputs)
        kernels.remote_receive[(1,)](made.context, outputs, 1 - place.rank, 1, 1)
        if place.rank == 1:
            raise ZeroDivisionError("a failure")
        place.finish()
        found = {"error": device_native.named(made.check), "outputs": outputs.tolist()}
        made.close()
    return found
