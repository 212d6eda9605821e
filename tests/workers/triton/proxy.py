"""Triton kernels' puts to ranks on any host, by a proxy on the host."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

import weft
import weft.triton
import weft.triton.proxy
from tests.workers.cuda import device_native
from tests.workers.triton import kernels
from tests.workers.triton.calls import Place

PROGRAMS = 3


def thread_cores(rank: int) -> list[int]:
    """Cores on which this rank's proxy may run its thread."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text(encoding="ascii").strip() == f"weft-proxy-{rank}":
            return sorted(os.sched_getaffinity(int(task.name)))
    return []


def rings(
    rounds: int,
    slots: int = 4,
    device: str = "twin",
    graph: bool = False,
    words_home: Literal["auto", "gdrcopy", "pinned", "gpu"] = "auto",
) -> dict[str, Any]:
    """Each round's arrivals, with fewer slots than commands in a round."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        length = 1024 if place.on_gpu else 16
        sizes = [PROGRAMS * length * 4] * 2
        options: dict[str, Any] = {"device": device, "slots": slots, "words_home": words_home}
        with weft.triton.Proxy(
            communicator, sizes, words=2 * PROGRAMS, timeout=60.0, **options
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
            home = proxy.words_home
        return {"ring": found, "hosts": len(set(communicator.hosts)), "home": home}


def homes(words_home: Literal["auto", "gdrcopy"]) -> dict[str, Any]:
    """Home of the words, a put, and a forked child that drops the proxy."""
    recorder = Recorder()
    logging.getLogger("weft").addHandler(recorder)
    with weft.init() as communicator:
        peer, outputs = 1 - communicator.rank, torch.zeros(1, dtype=torch.int32)
        found: dict[str, Any] = {}

        def check() -> None:
            proxy = weft.triton.Proxy(
                communicator, [64, 64], device="twin", timeout=60.0, words_home=words_home
            )
            found["home"] = proxy.words_home
            child = os.fork()
            if child == 0:
                proxy.close()
                del proxy
                gc.collect()
                os._exit(0)
            found["child"] = os.waitpid(child, 0)[1]
            kernels.remote_put[(1,)](proxy.context, peer, 0, 1, 0, 4, 1, outputs)
            kernels.remote_receive[(1,)](proxy.context, outputs, peer, 0, 1)
            found["arrived"] = outputs.item()
            proxy.close()

        found["error"] = device_native.named(check)
        communicator.barrier()
    if words_home == "auto" and found["home"] == "pinned":
        recorder.wait()
    return found | {"logged": recorder.messages}


class Recorder(logging.Handler):
    """Log messages about the words' home."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "words are in" in record.getMessage():
            self.messages.append(record.getMessage())

    def wait(self) -> None:
        """Wait for a message, which another thread delivers."""
        until = time.monotonic() + 30
        while not self.messages and time.monotonic() < until:
            time.sleep(0.01)


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
        found["cores"] = thread_cores(place.rank)
        for source, word in ((2, 0), (-1, 0), (peer, 8)):
            kernels.remote_receive[(1,)](made.context, outputs, source, word, 0)
            found["outside"].append(outputs.item())

        def refused(*windows: Any, **options: Any) -> tuple[str, int | None, str]:
            return device_native.named(
                lambda: weft.triton.Proxy(communicator, windows, device="twin", **options)
            )

        found["wrong"] = [refused(outbox.view(4, 4).t()), refused(0), refused(64, core="near")]
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
            cores = [thread_cores(place.rank), sorted(os.sched_getaffinity(0))]
            kernels.remote_give_back[(1,)](proxy.context, outputs, peer, 1, 1)
            proxy.check()
            place.meet()
        return {"first": first, "kept": word, "second": second, "cores": cores}


def scatters(rounds: int, device: str = "twin") -> dict[str, Any]:
    """Templates with all other ranks, from the next one on, and with the first two of these."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        rank, ranks, cell = place.rank, place.ranks, 64
        others = [(rank + step) % ranks for step in range(1, ranks)]
        # The source has a cell for each destination, and the destination one for each source.
        template = [(other, other * cell, rank * cell) for other in others]
        options: dict[str, Any] = {"words": 2, "device": device, "timeout": 60.0, "slots": 8}
        with weft.triton.Proxy(
            communicator, [2 * ranks * cell] * 2, templates=[template, template[:2]], **options
        ) as proxy:
            outbox, inbox = proxy.windows
            outputs, found, raised = place.words(5), [], [0] * ranks
            for number in range(rounds):
                outbox[:] = 10 * rank + number + 1
                # In turn to all others, two, one, with both templates.
                which, count = number % 2, min([len(others), 2, 1][number % 3], len(others))
                count = min(count, 2) if which else count
                lengths = place.words(*[(number + step) % 3 * 20 for step in range(8)])
                kernels.remote_scatter[(1,)](
                    proxy.context, lengths, outputs, which, 0, 0, number % 2 * count, count, 8
                )
                place.finish()
                fine = outputs.tolist()
                raised[rank] += 1
                for source in range(ranks):
                    if source != rank:
                        raised[source] += (rank - source - 1) % ranks < count
                    kernels.remote_receive[(1,)](proxy.context, outputs, source, 0, raised[source])
                    place.finish()
                    fine += outputs.tolist()
                found.append([fine, count, lengths.tolist(), inbox.tolist()])
                inbox[:] = 0
                place.meet()
            proxy.check()
        wrong: dict[str, Any] = {}
        for name, (which, first, count) in {
            "template": (2, 0, 1),
            "count": (1, 0, 3),
            "list": (0, 16 * len(others), len(others)),
        }.items():
            made = weft.triton.Proxy(
                communicator, [1 << 10] * 2, templates=[template, template[:1]], **options
            )
            communicator.barrier()
            if rank == 0:
                lengths = place.words(*[4] * 8)
                kernels.remote_scatter[(1,)](
                    made.context, lengths, outputs, which, 0, 0, first, count, 8
                )
            kernels.remote_receive[(1,)](made.context, outputs, others[0], 0, 99)
            place.finish()
            wrong[name] = device_native.named(made.check)[2]
            made.close()
            communicator.barrier()
        refused: list[Any] = [[[]], [[(rank, 0, 0)]], [[(ranks, 0, 0)]], [[(others[0], 0)]]]
        for given in refused:
            wrong[str(given)] = device_native.named(
                lambda: weft.triton.Proxy(communicator, [64] * 2, templates=given, device=device)  # noqa: B023
            )[2]
        wrong["twice"] = device_native.named(
            lambda: weft.triton.Proxy(
                communicator, [64] * 2, templates=[[(others[0], 0, 0)] * 2], device=device
            )
        )[2]
        return {"rounds": found, "wrong": wrong}


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
        wrong["words_home"] = "disk"
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
