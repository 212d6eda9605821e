"""Rank descriptors, ports and limits."""

import collections
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import weft
from tests.workers.group.transfer import ring


def descriptors() -> dict[str, int]:
    """Open descriptors in this process by kind."""
    kinds: collections.Counter[str] = collections.Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            kinds[re.sub(r"\[\d+\]", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
        except FileNotFoundError:  # the descriptor for the folder itself
            continue
    return kinds


def groups(count: int) -> dict[str, Any]:
    """Descriptors that the second of two groups takes, and that `count` groups take."""
    first = weft.init()
    first.barrier()
    before = descriptors()
    everyone = range(first.world_size)
    second = first.split(everyone)
    assert second is not None
    second.barrier()
    after = descriptors()
    taken = {kind: after[kind] - before[kind] for kind in after if after[kind] != before[kind]}
    more = [first.split(everyone) for _ in range(count)]
    for each in (second, *more):
        assert each is not None
        each.barrier()
    first.barrier()
    return {"taken": taken, "total": sum(taken.values())}


def limited(descriptors: int) -> dict[str, Any]:
    """A ring among ranks with few descriptors: its result, or the error and its time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    began = time.monotonic()
    try:
        right = ring(1000, 2)["right"]
    except weft.WeftError as error:
        return {"error": f"{type(error).__name__}: {error}", "after": time.monotonic() - began}
    return {"right": right}


def until_full(descriptors: int) -> dict[str, Any]:
    """Groups that form before the descriptor limit, and the next one's error."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = weft.init()
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    groups: list[weft.Communicator] = []
    while True:
        began = time.monotonic()
        try:
            group = first.split(range(first.world_size))
            assert group is not None
            group.barrier()
        except weft.WeftError as error:
            after = time.monotonic() - began
            return {
                "groups": len(groups),
                "error": f"{type(error).__name__}: {error}",
                "after": after,
            }
        groups.append(group)


def address_space(more: int) -> dict[str, Any]:
    """A ring, and a region, within `more` bytes address space beyond those in use."""
    used = int(re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, hard))
    began = time.monotonic()
    try:
        right = ring(1000, 2)["right"]
        weft.init().alloc(1 << 30)
    except (weft.WeftError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}", "after": time.monotonic() - began}
    return {"right": right}
