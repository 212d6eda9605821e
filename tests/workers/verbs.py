"""Ranks over RDMA NICs."""

import time
from pathlib import Path
from typing import Any

import numpy as np

import weft
from workers import loss


def until_lost(started: str, limit: float = 60.0) -> dict[str, Any]:
    """Rounds of dispatch and combine until a rank is lost; the loss.

    Args:
        started: file that rank 0 makes after the first rounds.
        limit: seconds after which the ranks give up.

    Returns:
        Rank that the error names, its text, and the longest time of a round in seconds.
    """
    with weft.init() as communicator:
        assert communicator.route(1 - min(communicator.rank, 1)).provider == "verbs"
        random = np.random.default_rng(communicator.rank)
        all_to_all = weft.moe.AllToAll(communicator, experts=8, top_k=2, hidden=16, max_tokens=32)
        end = time.monotonic() + limit
        rounds = 0
        while time.monotonic() < end:
            begin = time.monotonic()
            try:
                different = loss.load(all_to_all, random)
            except weft.errors.PeerLostError as error:
                seconds = time.monotonic() - begin
                return {"rank": error.rank, "error": str(error), "seconds": seconds}
            assert different is None, different
            rounds += 1
            if rounds == 10 and communicator.rank == 0:
                Path(started).touch()
    raise AssertionError(f"no rank was lost in {limit:g} s and {rounds} rounds")
