"""Makes docs/algorithms: steps, writes and bytes by algorithm, counted in the schedules."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any, Final

from weft.sim import schedule

#: Collectives by page.
COLLECTIVES: Final = {
    "ring": ("all-reduce", "reduce-scatter", "all-gather"),
    "tree": ("all-reduce", "broadcast"),
    "hd": ("all-reduce", "reduce-scatter", "all-gather"),
    "hdrm": ("all-reduce",),
    "circulant": ("all-reduce", "reduce-scatter", "all-gather"),
    "one-shot": ("all-reduce",),
    "two-shot": ("all-reduce",),
    "direct": ("reduce-scatter", "all-gather", "all-to-all"),
    "direct-read": ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all"),
    "hierarchical": ("all-reduce",),
    "pairwise": ("all-to-all",),
    "binomial": ("broadcast",),
    "chain": ("broadcast",),
}
#: Rank counts in the table, and in the picture.
RANKS: Final = (4, 8, 16)
PICTURED: Final = 4
CHUNKS: Final = 2
LOCAL: Final = 2


def blocks(page: str) -> dict[str, str]:
    """Table and picture for the page `algorithm-NAME`."""
    algorithm = page.removeprefix("algorithm-")
    return {"numbers": numbers(algorithm), "picture": picture(algorithm)}


def made(algorithm: str, collective: str, ranks: int) -> dict[str, Any]:
    """Schedule for an algorithm."""
    job = {
        "algorithm": algorithm,
        "collective": collective,
        "ranks": ranks,
        "bytes": 1,
        "chunks": CHUNKS,
        "local": LOCAL,
    }
    return schedule(job)


def numbers(algorithm: str) -> str:
    """Steps, and a rank's most writes, bytes sent and bytes added."""
    lines = [
        "| collective | ranks | steps | writes | sent, in vectors | added, in vectors |",
        "|---|---|---|---|---|---|",
    ]
    for collective in COLLECTIVES[algorithm]:
        for ranks in RANKS:
            found = made(algorithm, collective, ranks)
            writes, sent, added = (
                max(counted(operations, kind, key) for operations in found["operations"])
                for kind, key in (("write", None), ("write", "source"), ("reduce", "target"))
            )
            whole = found["blocks"]
            lines.append(
                f"| {collective} | {ranks} | {found['steps']} | {writes}"
                f" | {Fraction(sent, whole)} | {Fraction(added, whole)} |"
            )
    return "\n".join(lines)


def counted(operations: list[dict[str, Any]], kind: str, span: str | None) -> int:
    """Operation count for a kind, or block count in its spans."""
    of_kind = [operation[kind] for operation in operations if kind in operation]
    return sum(each[span]["blocks"] if span else 1 for each in of_kind)


def picture(algorithm: str) -> str:
    """Writes in each step among few ranks, with vector shares."""
    collective = COLLECTIVES[algorithm][0]
    found = made(algorithm, collective, PICTURED)
    steps: defaultdict[int, list[str]] = defaultdict(list)
    for rank, operations in enumerate(found["operations"]):
        targets: defaultdict[tuple[int, Fraction], list[str]] = defaultdict(list)
        for operation in operations:
            if write := operation.get("write"):
                share = Fraction(write["source"]["blocks"], found["blocks"])
                targets[write["step"], share].append(str(write["to"]))
        for (step, share), peers in targets.items():
            steps[step].append(f"{rank}->{','.join(peers)} ({share})")
    lines = [f"step {step:2} | {'  '.join(writes)}" for step, writes in sorted(steps.items())]
    return "\n".join(["```text", f"{collective}, {PICTURED} ranks", *lines, "```"])
