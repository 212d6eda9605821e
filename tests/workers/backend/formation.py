"""Ranks that, while a process group forms, wait for others that never come."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import distributed

import weft.torch
from tests.workers.backend.forked import message
from weft import _native
from weft.group import rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tests.workers.backend.forked import Place


def held() -> list[int]:
    """Open descriptors and threads in this process."""
    gc.collect()
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def attempt(
    place: Place,
    call: Callable[[], Any],
    abort: Callable[[], None] | None = None,
    within: ModuleType = rendezvous,
) -> dict[str, Any]:
    """A call's error, its duration, and new things that the process holds after it.

    `abort`: called by another thread, again and again, while the call is in a module.
    """
    before, start, ended = held(), time.monotonic(), threading.Event()
    caller = threading.get_ident()

    def repeat() -> None:
        while abort is not None and not ended.wait(0.5):
            if is_within(caller, within):
                with contextlib.suppress(ValueError):
                    abort()

    thread = threading.Thread(target=repeat)
    thread.start()
    error = message(call)
    seconds = time.monotonic() - start
    Path(place.directory, f"ended-{place.rank}").touch()
    ended.set()
    thread.join()
    # Threads that were joined may be visible for a moment.
    deadline = time.monotonic() + 20
    while any(a > b for a, b in zip(held(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [a - b for a, b in zip(held(), before, strict=True)]
    return {"error": error, "seconds": seconds, "left": left}


def is_within(thread: int, module: ModuleType) -> bool:
    """True while a function in the module runs."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals["__name__"] == module.__name__:
            return True
        frame = frame.f_back
    return False


def meet(place: Place) -> None:
    """Wait until all ranks but the last one have begun."""
    Path(place.directory, f"begun-{place.rank}").touch()
    for rank in range(place.ranks - 1):
        while not Path(place.directory, f"begun-{rank}").exists():
            time.sleep(0.01)


def wait_for_others(place: Place) -> None:
    """Wait until the attempts on all ranks except the last have ended."""
    for rank in range(place.ranks - 1):
        while not Path(place.directory, f"ended-{rank}").exists():
            time.sleep(0.01)


def absent_in_init(place: Place) -> Any:
    """The last rank comes after the others' timeout; then all form the group again."""
    if place.rank == place.ranks - 1:
        wait_for_others(place)
    else:
        meet(place)
    found = attempt(place, lambda: place.join(timeout=4.5))
    place.join()
    value = torch.ones(2)
    distributed.all_reduce(value)
    distributed.destroy_process_group()
    return found | {"again": value.tolist()}


def aborted_init(place: Place) -> Any:
    if place.rank == place.ranks - 1:
        return None
    return attempt(place, place.join, weft.torch.abort if place.rank == 0 else None)


def aborted_new_group(place: Place) -> Any:
    """Rank 0 aborts its groups while it waits in new_group; the last rank comes later."""
    place.join()
    if place.rank == place.ranks - 1:
        wait_for_others(place)
    abort = distributed.distributed_c10d._abort_process_group
    return attempt(place, distributed.new_group, abort if place.rank == 0 else None)


def aborted_split(place: Place) -> Any:
    place.join()
    if place.rank == place.ranks - 1:
        wait_for_others(place)
        return None
    abort = weft.torch.abort if place.rank == 0 else None
    return attempt(place, lambda: split(place, 20), abort)


def absent_in_split(place: Place) -> Any:
    place.join()
    if place.rank == place.ranks - 1:
        wait_for_others(place)
        return None
    return attempt(place, lambda: split(place, 4.5))


def split(place: Place, seconds: float) -> Any:
    group: Any = distributed.group.WORLD
    return group.split_group(
        list(range(place.ranks)),
        timeout=timedelta(seconds=seconds),
        opts=None,
        group_name="whole",
        group_desc="whole",
    )


class Late:
    """The native module, whose `NAME` waits until the other ranks have given up."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name

    def __getattr__(self, name: str) -> Any:
        if name != self.name:
            return getattr(_native, name)

        def late(*_: Any, **__: Any) -> None:
            wait_for_others(self.place)
            raise AssertionError("the others gave up before")

        return late


def aborted_connection(place: Place) -> Any:
    """The last rank comes to the store, and not to the connections."""
    if place.rank == place.ranks - 1:
        with mock.patch.object(rendezvous, "_native", Late(place, "init")):
            return message(place.join)
    return attempt(place, place.join, weft.torch.abort if place.rank == 0 else None)


def aborted_collectives(place: Place) -> Any:
    """The last rank connects, and does not set up collectives."""
    if place.rank == place.ranks - 1:
        with mock.patch.object(weft.torch.backend, "_native", Late(place, "collectives_table")):
            return message(place.join)
    abort = weft.torch.abort if place.rank == 0 else None
    return attempt(place, place.join, abort, weft.torch.backend)


def closed_store(place: Place) -> Any:
    """Rank 0, which holds the store, ends while rank 1 waits."""
    port = os.path.join(place.directory, "port")
    if place.rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(f"{port}.new", "w", encoding="utf-8") as file:
            file.write(str(store.port))
        os.rename(f"{port}.new", port)
        while not os.path.exists(f"{port}.used"):
            time.sleep(0.01)
        # Soon after, rank 1 waits.
        time.sleep(1)
        return None
    while not os.path.exists(port):
        time.sleep(0.01)
    with open(port, encoding="utf-8") as file:
        store = distributed.TCPStore("127.0.0.1", int(file.read()))
    Path(f"{port}.used").touch()
    return message(
        lambda: distributed.init_process_group("weft", store=store, rank=1, world_size=2)
    )
