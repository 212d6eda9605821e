"""Lab command line: `python -m lab`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lab.experiment import MOST_CPU, NETWORKS, Settings, experiment
from lab.namespaces import missing
from lab.program import UNAVAILABLE, guarded
from lab.report import tables
from lab.schedules import ALGORITHMS
from weft.bench.record import append_records, origin
from weft.cli.table import format_table
from weft.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.experiment import Record

__all__ = ["main"]

DEFAULT: Final = Settings()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the arguments name; returns the exit status."""
    parsed = parser().parse_args(arguments)
    if reason := missing():
        print(f"bigraph-lab cannot run here: {reason}", file=sys.stderr)
        return UNAVAILABLE
    return guarded("bigraph-lab", lambda: run(parsed))


def parser() -> argparse.ArgumentParser:
    """Options."""
    made = argparse.ArgumentParser(
        prog="python -m lab", description="All-reduces on a network of namespaces (needs root)"
    )
    add = made.add_argument
    add(
        "--switches",
        type=int,
        default=DEFAULT.switches,
        metavar="N",
        help="switches, half in each BiGraph half (default %(default)s)",
    )
    add(
        "--ports",
        type=int,
        default=DEFAULT.ports,
        metavar="N",
        help="hosts on each BiGraph switch (default %(default)s)",
    )
    add(
        "--rate",
        type=rate,
        default=DEFAULT.megabits,
        metavar="MBIT",
        help="rate per link in Mbit/s (default %(default)s)",
    )
    add(
        "--mtu",
        type=int,
        default=DEFAULT.mtu,
        metavar="BYTES",
        help="longest IP packet (default %(default)s)",
    )
    add(
        "--sizes",
        type=listed(size),
        default=DEFAULT.sizes,
        metavar="SIZES",
        help="vectors, with commas (default 64KiB,256KiB,1MiB,4MiB)",
    )
    add(
        "--algorithms",
        type=listed(one_of(ALGORITHMS)),
        default=DEFAULT.algorithms,
        metavar="NAMES",
        help="of ring, hd, hdrm (default all)",
    )
    add(
        "--networks",
        type=listed(one_of(NETWORKS)),
        default=tuple(NETWORKS),
        metavar="NAMES",
        help="of bigraph, fat-tree (default both)",
    )
    add(
        "--rounds",
        type=int,
        default=DEFAULT.rounds,
        metavar="N",
        help="repetitions with new connections (default %(default)s)",
    )
    add(
        "--step-size",
        type=size,
        default=DEFAULT.step_size,
        metavar="SIZE",
        help="vector for the run in single steps, 0 for none (default 1MiB)",
    )
    add(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="random rank order on the hosts (default: host order)",
    )
    add("--json", action="store_true", help="one JSON line for each result")
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="file to append the results to, as one JSON line",
    )
    return made


def run(parsed: argparse.Namespace) -> int:
    """Run the experiments, and print or record the results."""
    settings = Settings(
        switches=parsed.switches,
        ports=parsed.ports,
        megabits=parsed.rate,
        mtu=parsed.mtu,
        sizes=parsed.sizes,
        algorithms=parsed.algorithms,
        rounds=parsed.rounds,
        step_size=parsed.step_size,
        shuffle=parsed.shuffle,
    )
    records: list[Record] = []
    for network in parsed.networks:
        for record in experiment(network, settings, lambda text: print(text, file=sys.stderr)):
            records.append(record)
            if parsed.json:
                print(json.dumps(record), flush=True)
    if not parsed.json:
        show(records)
    if parsed.record is not None:
        append_records(parsed.record, [{"origin": origin(), "results": records}])
    return int(any(record["wrong"] for record in records))


def show(records: Sequence[Record]) -> None:
    """Print time and connection tables."""
    for title, headers, rows in tables(records):
        print(f"{title}\n\n{format_table(headers, rows)}\n")
    if any(record.get("cpu", 0) > MOST_CPU for record in records):
        print("warning: the processor was above 50 % busy; repeat on an idle machine")


def listed(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Parser for a comma-separated list, such as `ring,hd`."""
    return lambda text: tuple(parse(each.strip()) for each in text.split(","))


def one_of(names: Sequence[str] | dict[str, Any]) -> Callable[[str], str]:
    """Parser for one of these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(names)}")
        return text

    return parse


def size(text: str) -> int:
    """Size in bytes, with a unit."""
    try:
        return 0 if text == "0" else int(parse_size(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rate(text: str) -> float:
    """Rate in Mbit/s."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"rate {text!r}: expected 0.1 to 1000 Mbit/s")
    return value
