"""Transfers between two guests over rxe: Weft beside perftest, UCX and libfabric, interleaved.

All poll, one process in each guest with one processor. A round runs each once for every size, each
first in turn; figures are medians over rounds. Times between guests are software NIC times: only
the ratios are results. See also https://github.com/linux-rdma/perftest.
"""

from __future__ import annotations

import math
import re
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lab.errors import LabError
from lab.rdma.check import gid_index, waiting_client
from lab.rdma.fabric import MEMORY_MIB, ranks
from lab.rdma.guests import address, guests
from lab.rdma.peers import LIMIT, MESSAGES, PEERS, Times, installed, messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab.rdma.guests import Guests

__all__ = ["RATIOS", "SIZES", "bench", "records"]

#: Message sizes in bytes.
SIZES: Final = (8, 4096, 65536, 1048576)
#: Ratio name for each other library in a record.
RATIOS: Final = {"perftest": "ratio"} | {peer.name: f"{peer.name}_ratio" for peer in PEERS}
#: Most runs per perftest program for one figure.
TRIES: Final = 10


def bench(
    program: Path, perftest: Path, rounds: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure Weft, perftest and the installed peers; a record for each pattern and size.

    Args:
        program: `weft-bench-fabric`.
        perftest: folder with `ib_write_lat` and `ib_write_bw` that have `--write_with_imm`.
        rounds: measured rounds; medians over 30 are comparable.
        report: takes a line on each round's progress, and on each missing peer.

    Raises:
        LabError: if a program fails.
    """
    found: dict[tuple[str, int, str], list[float]] = {}
    others = installed(report)
    with guests(count=2, memory_mib=MEMORY_MIB) as lab:
        index = gid_index(lab, 0, 0)
        sides = [partial(weft, lab, program), partial(reference, lab, perftest, index)]
        sides += [partial(each.measure, lab, path, SIZES, index) for each, path in others]
        for number in range(rounds):
            first = number % len(sides)
            for measure in sides[first:] + sides[:first]:
                for key, us in measure().items():
                    found.setdefault(key, []).append(us)
            report(f"round {number + 1} of {rounds}")
    return records(found)


def records(found: dict[tuple[str, int, str], list[float]]) -> list[dict[str, Any]]:
    """Medians over the rounds; a ratio is another library's message time divided by Weft's."""
    lines = []
    for pattern, size, side in found:
        if side != "weft":
            continue
        ours = found[pattern, size, side]
        line: dict[str, Any] = {
            "benchmark": "rdma_lab",
            "pattern": pattern,
            "bytes": size,
            "rounds": len(ours),
            "weft_us": round(statistics.median(ours), 3),
        }
        for name, ratio in RATIOS.items():
            if (pattern, size, name) not in found:
                continue
            theirs = found[pattern, size, name]
            ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
            line |= {
                f"{name}_us": round(statistics.median(theirs), 3),
                ratio: round(statistics.median(ratios), 3),
            }
        lines.append(line)
    return lines


def weft(lab: Guests, program: Path) -> Times:
    """Weft's microseconds per message by pattern and size, on the slower rank."""
    sizes = ",".join(map(str, SIZES))
    command = [str(program), "transfer", "--path=verbs", "--rounds=1", f"--sizes={sizes}"]
    samples = ranks(lab, command, LIMIT, {"WEFT_VERBS_DEVICES": "rxe0"})
    found: Times = {}
    for one, other in zip(*samples, strict=True):
        if one["wrong"] + other["wrong"]:
            raise LabError(f"weft: messages of {one['bytes']} bytes: wrong bytes")
        times = [
            statistics.median(each["one_way_ns"]) for each in (one, other) if each["one_way_ns"]
        ]
        found[one["pattern"], one["bytes"], "weft"] = max(times) / 1000
    return found


def reference(lab: Guests, perftest: Path, index: int) -> Times:
    """Microseconds per perftest message by pattern and size."""
    found: Times = {}
    for size in SIZES:
        common = ["-d", "rxe0", "-x", str(index), "-s", str(size), "--write_with_imm", "-F"]
        lat = [str(perftest / "ib_write_lat"), *common, "-n", str(MESSAGES)]
        # bytes, iterations, least, most, typical, ...
        found["ping-pong", size, "perftest"] = result(lab, lat, size, 4)
        stream = [str(perftest / "ib_write_bw"), *common, "-n", str(messages(size))]
        stream += ["--report_gbits"]
        # bytes, iterations, peak, average, ...
        found["stream", size, "perftest"] = size * 8 / (result(lab, stream, size, 3) * 1000)
    return found


def result(lab: Guests, command: list[str], size: int, column: int) -> float:
    """Figure that a perftest program prints for a size.

    On a busy machine perftest fails to measure the processor's frequency, and prints 0 or inf: it
    then runs again.

    Raises:
        LabError: if the program fails, or has no figure after `TRIES` runs.
    """
    for _ in range(TRIES):
        outcomes = lab.run(
            {0: command, 1: ["sh", "-c", waiting_client(command, address(0))]}, LIMIT
        )
        match = re.search(rf"^ ?{size}\s.*$", outcomes[1].stdout, re.M)
        if match is None:
            raise LabError(f"{command[0]}: expected a line of {size} bytes\n{outcomes[1]}")
        found = float(match[0].split()[column])
        if 0 < found < math.inf:
            return found
    raise LabError(
        f"{command[0]}, {size} bytes: no figure in {TRIES} runs; repeat on an idle machine\n"
        f"{outcomes[1]}"
    )
