"""Kernel counters: bytes by link, TCP retransmissions, processor use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab.namespaces import inside

if TYPE_CHECKING:
    from lab.network import Link, Plan

__all__ = ["Processor", "link_bytes", "retransmissions"]


def link_bytes(plan: Plan) -> dict[Link, int]:
    """Bytes that each directed link has carried: sent by the interface at the source.

    They include IP, TCP and Ethernet headers.
    """
    found: dict[Link, int] = {}
    for node in plan.nodes:
        with inside(node):
            sent = sent_bytes(Path("/proc/thread-self/net/dev").read_text(encoding="ascii"))
        for cable in plan.cables_of[node]:
            found[node, cable.other(node)] = sent[cable.interface]
    return found


def sent_bytes(text: str) -> dict[str, int]:
    """Sent bytes by interface, from the `/proc/net/dev` text."""
    rows = (line.partition(":") for line in text.splitlines()[2:])
    return {name.strip(): int(numbers.split()[8]) for name, _, numbers in rows}


def retransmissions(plan: Plan) -> int:
    """TCP segments that hosts have sent again since they were made."""
    total = 0
    for host in plan.hosts:
        with inside(host):
            text = Path("/proc/thread-self/net/snmp").read_text(encoding="ascii")
        names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        total += int(values[names.index("RetransSegs")])
    return total


@dataclass(frozen=True)
class Processor:
    """All cores' time since the machine started, in ticks."""

    busy: int
    #: The part of `busy` in interrupts, in which the kernel forwards packets.
    interrupts: int
    total: int

    @classmethod
    def now(cls) -> Processor:
        """Present times, from `/proc/stat`."""
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        user, nice, system, idle, waiting, hard, soft, stolen = map(int, line.split()[1:9])
        busy = user + nice + system + hard + soft + stolen
        return cls(busy, hard + soft, busy + idle + waiting)

    def share_since(self, before: Processor) -> float:
        """Share of all cores that was busy since `before`, including other programs."""
        return (self.busy - before.busy) / self._ticks(before)

    def lab_share_since(self, before: Processor, ranks: float) -> float:
        """Share of all cores that the lab took since `before`, at most.

        Args:
            before: the beginning.
            ranks: the ranks' processor time, in seconds. Interrupts that arrive while a rank
                runs may be counted twice.
        """
        ticks = ranks * os.sysconf("SC_CLK_TCK") + self.interrupts - before.interrupts
        return ticks / self._ticks(before)

    def _ticks(self, before: Processor) -> int:
        return max(self.total - before.total, 1)


def load() -> float:
    """Load average over the last minute."""
    return os.getloadavg()[0]
