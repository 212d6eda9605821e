"""Measurements on one network: times by algorithm and size, and bytes by link and step."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from lab.counters import Processor, link_bytes, load, retransmissions
from lab.namespaces import built
from lab.network import bigraph, fat_tree
from lab.prediction import Constants, predicted_seconds, wire_efficiency
from lab.ranks import started
from lab.schedules import (
    ELEMENT,
    host_programs,
    one_connection,
    ping,
    placement,
    program,
    rank_hosts,
    step_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lab.network import Plan
    from lab.ranks import Ranks

__all__ = ["NETWORKS", "Record", "Settings", "experiment"]

NETWORKS: Final = {"bigraph": bigraph, "fat-tree": fat_tree}
#: Exchanges with the smallest message, to measure the message time.
PINGS: Final = 30
#: Runs per schedule before the first measured one: connections have left slow start then.
WARM_UP: Final = 2
WARM_UP_BYTES: Final = 1 << 16
#: The simulator's hash seed for the predicted bytes in single steps.
STEP_SEED: Final = 2
#: Processor use from which times measure the processor as well as the links.
MOST_CPU: Final = 0.5
#: Longest run time, as a multiple of the time for all bytes on one link.
PATIENCE: Final = 20

#: JSON object with a result.
Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Experiment settings."""

    switches: int = 8
    #: Hosts on each BiGraph switch.
    ports: int = 2
    #: Rate per directed link, in Mbit/s.
    megabits: float = 10.0
    #: Longest IP packet, in bytes.
    mtu: int = 9000
    sizes: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
    algorithms: tuple[str, ...] = ("ring", "hd", "hdrm")
    #: Repetitions, each with new connections: ports differ, and so do the hashed paths.
    rounds: int = 3
    #: Vector bytes for the run in single steps; 0 for none.
    step_size: int = 1 << 20
    #: Seed for the order in which hosts get ranks; None: host order.
    shuffle: int | None = None


def experiment(
    network: str, settings: Settings, progress: Callable[[str], None]
) -> Iterator[Record]:
    """Build a network, and yield the run results.

    Args:
        network: a name in `NETWORKS`.
        settings: choices.
        progress: called with a line for each run.
    """
    plan = NETWORKS[network](settings.switches, settings.ports)
    algorithms = [each for each in settings.algorithms if each != "hdrm" or network == "bigraph"]
    with built(plan, settings.megabits, settings.mtu):
        for number in range(settings.rounds):
            yield from one_round(plan, settings, algorithms, number, progress)


def one_round(
    plan: Plan,
    settings: Settings,
    algorithms: Sequence[str],
    number: int,
    progress: Callable[[str], None],
) -> Iterator[Record]:
    """Results from new ranks: times for all schedules and, in round 0, bytes in their steps."""
    longest = max(*settings.sizes, settings.step_size) * 8 / (settings.megabits * 1e6)
    hosts = rank_hosts(plan, settings.shuffle)
    with started(plan, PATIENCE * longest, hosts) as ranks:
        idle = idle_share(plan, settings)
        constants = {
            "wire_efficiency": wire_efficiency(settings.mtu),
            "message_latency_s": message_seconds(plan, ranks, hosts),
        }
        common = {"network": plan.name, "hosts": len(plan.hosts), "round": number} | {
            name: value
            for name, value in asdict(settings).items()
            if name in ("switches", "megabits", "mtu", "shuffle") and value is not None
        }
        progress(
            f"{plan.name}, round {number + 1}: a message takes "
            f"{constants['message_latency_s'] * 1e6:.0f} us"
        )
        for algorithm in algorithms:
            run = Run(plan, ranks, algorithm, settings.megabits, constants, hosts)
            for size in settings.sizes:
                record = common | run.timed(size) | {"constants": constants, "idle_share": idle}
                progress(line(record))
                yield record
            if number == 0 and settings.step_size:
                yield common | run.stepped(settings.step_size)


def idle_share(plan: Plan, settings: Settings) -> float:
    """Share of the busiest link that heartbeats take, over a second without a run."""
    before, start = link_bytes(plan), time.monotonic()
    time.sleep(1)
    after, seconds = link_bytes(plan), time.monotonic() - start
    busiest = max(after[link] - before[link] for link in after)
    return busiest * 8 / (seconds * settings.megabits * 1e6)


def message_seconds(plan: Plan, ranks: Ranks, hosts: Sequence[int]) -> float:
    """Time for a 4-byte message between hosts in different halves: median half round trip."""
    count = len(plan.hosts)
    programs = host_programs(ping(count, count - 1), range(count), hosts)
    ranks.command("prepare", [{"program": each} for each in programs], elements=1)
    found = []
    for _ in range(PINGS):
        times = ranks.run(lead=0.02)[0]
        found.append((times.end - times.start) / 2)
        ranks.command("finish", check=False)
    return statistics.median(found)


class Run:
    """One algorithm on a network's ranks."""

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        algorithm: str,
        megabits: float,
        constants: Constants,
        hosts: Sequence[int],
    ) -> None:
        self.plan, self.ranks, self.algorithm = plan, ranks, algorithm
        self.megabits, self.constants = megabits, constants
        self.program = program(algorithm, len(plan.hosts))
        self.hosts = hosts
        self.places = placement(plan, algorithm, hosts)

    def prepare(self, size: int) -> None:
        """Give the ranks the schedule for a vector with `size` bytes, and run it a few times."""
        programs = host_programs(self.program, self.places, self.hosts)
        least = self.program["blocks"] * ELEMENT
        each = [{"program": program} for program in programs]
        self.ranks.command("prepare", each, elements=max(WARM_UP_BYTES, least) // ELEMENT)
        for _ in range(WARM_UP):
            self.ranks.command("fill")
            self.ranks.run()
            self.ranks.command("finish", check=False)
        self.ranks.command("prepare", each, elements=max(size, least) // ELEMENT)
        self.ranks.command("fill")

    def timed(self, size: int) -> Record:
        """One all-reduce: time, bytes on each link between switches, and prediction."""
        self.prepare(size)
        before, resent, processor = (
            link_bytes(self.plan),
            retransmissions(self.plan),
            Processor.now(),
        )
        times = self.ranks.run()
        now = Processor.now()
        after, resent = link_bytes(self.plan), retransmissions(self.plan) - resent
        correct = all(each["correct"] for each in self.ranks.command("finish", check=True))
        predicted = predicted_seconds(
            self.plan, self.program, self.places, size, self.megabits, self.constants
        )
        return {
            "kind": "time",
            "algorithm": self.algorithm,
            "bytes": size,
            "seconds": max(each.end for each in times),
            "late_s": max(each.start for each in times),
            "predicted_s": statistics.median(predicted),
            "predicted_range_s": [predicted[0], predicted[-1]],
            "trunk_bytes": [after[link] - before[link] for link in self.plan.trunks],
            "retransmissions": resent,
            "cpu": now.share_since(processor),
            "lab_cpu": now.lab_share_since(processor, sum(each.cpu for each in times)),
            "load": load(),
            "wrong": not correct,
        }

    def stepped(self, size: int) -> Record:
        """One all-reduce in single steps: bytes on each link between switches, by step."""
        self.prepare(size)
        expected = step_bytes(
            self.plan, self.program, self.places, size, self.megabits, seed=STEP_SEED
        )
        measured = []
        for step in range(self.program["steps"]):
            before = link_bytes(self.plan)
            self.ranks.command("step", step=step)
            after = link_bytes(self.plan)
            measured.append([after[link] - before[link] for link in self.plan.trunks])
        correct = all(each["correct"] for each in self.ranks.command("finish", check=True))
        return {
            "kind": "steps",
            "algorithm": self.algorithm,
            "bytes": size,
            "connection_bytes": one_connection(self.program, size),
            "trunks": [f"{one}->{other}" for one, other in self.plan.trunks],
            "measured": measured,
            "predicted": [[step.get(link, 0) for link in self.plan.trunks] for step in expected],
            "wrong": not correct,
        }


def line(record: Record) -> str:
    """A run on one line."""
    ratio = record["seconds"] / record["predicted_s"]
    text = (
        f"{record['network']:8}  {record['algorithm']:5} {record['bytes']:>9} B "
        f"{record['seconds']:8.3f} s  predicted {record['predicted_s']:8.3f} s  ({ratio:.2f})  "
        f"CPU {record['lab_cpu']:.0%} of {record['cpu']:.0%}"
    )
    if record["wrong"]:
        text += "  WRONG SUM"
    if record["cpu"] > MOST_CPU:
        text += "  above 50 %: the time measures the processor too"
    return text
