"""Result tables: times beside predictions, and connections per link and step."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.experiment import Record

__all__ = ["Table", "connections", "most_connections", "tables"]

#: Title, headers and rows.
Table = tuple[str, tuple[str, ...], list[list[Any]]]

TIMES = (
    "network",
    "algorithm",
    "bytes",
    "measured",
    "range",
    "predicted",
    "ratio",
    "CPU: lab",
    "all",
)
STEPS = ("network", "algorithm", "bytes", "steps", "most connections on a link", "predicted")


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """Tables with the results from `experiment`."""
    yield "Times", TIMES, time_rows(records)
    yield "Connections", STEPS, step_rows(records)


def time_rows(records: Sequence[Record]) -> list[list[Any]]:
    """Median times, by network, algorithm and size."""
    groups: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for record in records:
        if record["kind"] == "time":
            groups[record["network"], record["algorithm"], record["bytes"]].append(record)
    rows = []
    for (network, algorithm, size), group in groups.items():
        times = sorted(record["seconds"] for record in group)
        measured, predicted = median(times), median(record["predicted_s"] for record in group)
        rows.append(
            [
                network,
                algorithm,
                binary(size),
                f"{measured:.3f} s",
                f"{times[0]:.3f} to {times[-1]:.3f}",
                f"{predicted:.3f} s",
                f"{measured / predicted:.2f}",
                f"{max(record['lab_cpu'] for record in group):.0%}",
                f"{max(record['cpu'] for record in group):.0%}",
            ]
        )
    return rows


def step_rows(records: Sequence[Record]) -> list[list[Any]]:
    """Most connections on a link in any step."""
    return [
        [
            record["network"],
            record["algorithm"],
            binary(record["bytes"]),
            len(record["measured"]),
            f"{most_connections(record, 'measured'):.2f}",
            f"{most_connections(record, 'predicted'):.0f}",
        ]
        for record in records
        if record["kind"] == "steps"
    ]


def connections(record: Record, name: str) -> list[list[float]]:
    """Bytes on each link between switches by step, in units of one connection's.

    Args:
        record: a "steps" record.
        name: "measured" or "predicted".
    """
    return [
        [each / one for each in step]
        for step, one in zip(record[name], record["connection_bytes"], strict=True)
    ]


def most_connections(record: Record, name: str) -> float:
    """The largest value in `connections`."""
    return max(max(step) for step in connections(record, name))


def binary(size: int) -> str:
    """A size with a binary unit, if it is whole in that."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
