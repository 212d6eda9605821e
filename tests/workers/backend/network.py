"""Torch process groups on a network: HDRM for ranks on its hosts in any order."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.workers.backend.process_group import start
from tests.workers.backend.tuning import Kept
from weft.torch import Options

LENGTH = 1 << 20


def sums(hosts: list[str] | None, network: Any, groups: list[list[int]]) -> dict[str, Any]:
    """True for each group whose sums are right, and the tuner's messages.

    Args:
        hosts: each rank's host; by default as the launcher named it.
        network: the default group's option.
        groups: ranks in further groups, without a separate option.
    """
    kept = Kept()
    logging.getLogger("weft.tuner").addHandler(kept)
    if hosts is not None:
        os.environ["WEFT_HOST_ID"] = hosts[int(os.environ["WEFT_RANK"])]
    rank, ranks = start("weft", options=Options(network=network))
    right = [is_right(None, list(range(ranks)), rank)]
    for members in groups:
        group = distributed.new_group(members, backend="weft")
        if rank in members:
            right.append(is_right(group, members, rank))
    distributed.destroy_process_group()
    # A thread passes the records on.
    end = time.monotonic() + 20
    while len(kept.messages) < len(right) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    return {"right": right, "messages": kept.messages}


def is_right(group: Any, members: list[int], rank: int) -> bool:
    """True for an all-reduce of whole numbers, whose sums are exact, and for its average."""
    base = torch.arange(LENGTH, dtype=torch.int64)
    value = base * (rank + 1)
    distributed.all_reduce(value, group=group)
    return bool(torch.equal(value, base * sum(member + 1 for member in members)))


def splits(hosts: list[str], first: Any, second: Any) -> dict[str, Any]:
    """True for each group whose sums are right, and the tuner's messages about HDRM's order.

    The default group has no network, two others have one each, and then each of the three is split.
    """
    kept = Kept()
    logging.getLogger("weft.tuner").addHandler(kept)
    os.environ["WEFT_HOST_ID"] = hosts[int(os.environ["WEFT_RANK"])]
    rank, ranks = start("weft")
    members = list(range(ranks))
    options = [Options(network=network) for network in (first, second)]
    groups = [distributed.new_group(members, backend="weft", pg_options=each) for each in options]
    default: Any = distributed.group.WORLD
    groups += [group.split_group(members) for group in (default, *groups)]
    right = [is_right(group, members, rank) for group in groups]
    distributed.destroy_process_group()
    # A thread passes the records on.
    end = time.monotonic() + 20
    while len(kept.messages) < len(right) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    return {"right": right, "orders": orders_of(kept)}


def split_of_others(hosts: list[str], files: list[str]) -> dict[str, Any]:
    """Sums and HDRM's order in a group with the default one's ranks except its first.

    Each rank names a separate file, which is gone when the group is split.
    """
    kept = Kept()
    logging.getLogger("weft.tuner").addHandler(kept)
    own = int(os.environ["WEFT_RANK"])
    os.environ["WEFT_HOST_ID"] = hosts[own]
    rank, ranks = start("weft", options=Options(network=files[own]))
    if rank == 0:
        for file in files:
            Path(file).unlink()
    distributed.barrier()
    members = list(range(1, ranks))
    default: Any = distributed.group.WORLD
    group = default.split_group(members)
    found = {"right": rank == 0 or is_right(group, members, rank)}
    distributed.destroy_process_group()
    # A thread passes the records on.
    end = time.monotonic() + 20
    while rank == 1 and not orders_of(kept) and time.monotonic() < end:
        time.sleep(0.01)
    return found | {"orders": orders_of(kept)}


def orders_of(kept: Kept) -> list[str]:
    """The tuner's messages about HDRM's order."""
    return [text for text in kept.messages if text.startswith("hdrm ")]


def rejected(network: Any) -> str:
    """Error from a group that cannot be made."""
    try:
        start("weft", options=Options(network=network))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
