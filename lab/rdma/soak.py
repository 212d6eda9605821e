"""Counted writes between two guests whose links lose frames, checked byte for byte.

Each rank writes to the other in rounds with up to eight writes of random sizes, over both NICs in
turn, so that they arrive in any order. The receiver waits for a round's raises, checks that there
are no more, and compares every byte (`weft-bench-fabric soak`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lab.errors import LabError
from lab.rdma.fabric import MEMORY_MIB, ranks
from lab.rdma.guests import guests

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["check", "soak"]

#: Packets are repeated after 67 ms.
LOSSY: Final = {"WEFT_VERBS_ACK_TIMEOUT": "14"}
#: A rank's figures; memory figures need a longer run.
FIGURES: Final = ("writes", "bytes", "raises", "wrong_counts", "wrong_writes", "seconds")
#: Seconds for the group to form and end, beside the writes.
MARGIN: Final = 90


def soak(program: Path, writes: int, drop: float, seed: int, limit_s: int) -> dict[str, Any]:
    """Write and check; one record with the results of both ranks and the lost frames.

    Args:
        program: `weft-bench-fabric`.
        writes: least writes per rank.
        drop: probability that a frame is lost.
        seed: seed for sizes and lost frames.
        limit_s: seconds for the writes.

    Raises:
        LabError: if an argument is out of range, a rank fails, a count or a byte is wrong,
            or there were fewer writes.
    """
    for name, value, least in (("writes", writes, 1), ("seed", seed, 0), ("seconds", limit_s, 1)):
        if value < least:
            raise LabError(f"{name} {value}: expected at least {least}")
    command = [str(program), "soak", "--path=verbs", f"--seconds={limit_s}"]
    command += [f"--writes={writes}", f"--seed={seed}"]
    with guests(2, drop, seed=seed, switched=True, memory_mib=MEMORY_MIB) as lab:
        results = ranks(lab, command, limit_s + MARGIN, LOSSY)
        frames = [
            {
                "forwarded": switch.forwarded,
                "dropped": switch.dropped,
                "overflows": switch.overflows,
            }
            for switch in lab.switches
        ]
    check(results, writes, drop, [network["dropped"] for network in frames])
    return {
        "benchmark": "rdma_soak",
        "path": "verbs",
        "seed": seed,
        "drop": drop,
        "networks": frames,
        "ranks": [{name: result[name] for name in FIGURES} for result in results],
    }


def check(
    results: Sequence[dict[str, Any]], writes: int, drop: float, dropped: Sequence[int]
) -> None:
    """Reject results with a wrong count or byte, too few writes, or links that lost no frame.

    Raises:
        LabError: with the rank or the network, and the figure.
    """
    for rank, result in enumerate(results):
        for name in ("wrong_counts", "wrong_writes"):
            if result[name] != 0:
                raise LabError(f"rank {rank}: {name} {result[name]}: expected 0")
        if result["writes"] < writes:
            raise LabError(
                f"rank {rank}: {result['writes']} writes in {result['seconds']:.0f} s: expected"
                f" {writes}; allow more --seconds"
            )
    for network, frames in enumerate(dropped):
        if drop > 0 and frames == 0:
            raise LabError(f"network {network}: lost no frame: expected some; raise --drop")
