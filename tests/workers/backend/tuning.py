"""Algorithm selection in process groups: by a file, and for reproducible sums."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import distributed

from tests.workers.backend.process_group import start
from weft.torch import Options

LENGTH = 3000


class Kept(logging.Handler):
    """A logger's messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def sums(backend: str) -> dict[str, Any]:
    """For each group: true if a float sum has the bits of the rank-order sum."""
    kept = Kept()
    logging.getLogger("weft.tuner").addHandler(kept)
    rank, ranks = start(backend)
    ordered = distributed.new_group(backend=backend, pg_options=Options(reproducible=True))
    split = ordered.split_group(list(range(ranks)))
    found = {
        name: is_in_rank_order(group, rank, ranks)
        for name, group in (("default", None), ("option", ordered), ("split", split))
    }
    distributed.destroy_process_group()
    # A thread passes the records on.
    end = time.monotonic() + 20
    while len(kept.messages) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    return {"found": found, "messages": kept.messages}


def addends(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(LENGTH, generator=generator) * 10 ** torch.randn(LENGTH, generator=generator)


def is_in_rank_order(group: Any, rank: int, ranks: int) -> bool:
    expected = addends(0)
    for each in range(1, ranks):
        expected += addends(each)
    value = addends(rank)
    distributed.all_reduce(value, group=group)
    return bool(torch.equal(value, expected))


def rejected(backend: str) -> str:
    """Error from a group that cannot be made."""
    try:
        start(backend)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
