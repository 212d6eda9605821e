"""Makes docs/eflops.md, docs/moe-rdma.md and docs/dlrm.md: blocks from the result files.

`python -m reproductions.NAME --out DIRECTORY` writes the results as DIRECTORY/NAME.json;
`benchmarks/results` has the pages' results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from reproductions import dlrm, eflops, moe_rdma  # noqa: E402
from reproductions.report import Table, markdown, percent  # noqa: E402
from weft.sim import dlrm_records  # noqa: E402
from weft.units import format_seconds  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reproductions.command import Reproduction

RESULTS = ROOT / "benchmarks" / "results"
REPRODUCTIONS: dict[str, Reproduction] = {
    "eflops": eflops,
    "moe-rdma": moe_rdma,
    "dlrm": dlrm,
}
#: Blocks by page: how the table's title begins.
TITLES = {
    "eflops": {
        "comparison": "Beside what was published",
        "constants": "Constants",
        "sensitivity": "Sensitivity",
    },
    "moe-rdma": {
        "cx7-decode": "ConnectX-7, decode",
        "cx7-prefill": "ConnectX-7, prefill",
        "verbs-decode": "Weft over verbs on ConnectX-7, decode",
        "verbs-prefill": "Weft over verbs on ConnectX-7, prefill",
        "efa-decode": "EFA, decode",
        "efa-prefill": "EFA, prefill",
        "constants": "Constants",
        "sensitivity": "Sensitivity",
    },
    "dlrm": {"result": "128 nodes", "assumptions": "Assumptions", "sensitivity": "Sensitivity"},
}


def read(page: str) -> dict[str, Any]:
    """Results behind a page."""
    found: dict[str, Any] = json.loads((RESULTS / f"{page}.json").read_text(encoding="utf-8"))
    return found


def blocks(page: str) -> dict[str, str]:
    """A page's tables and notes, by block name."""
    found, reproduction = read(page), REPRODUCTIONS[page]
    tables = list(reproduction.tables(found))
    made = {block: table(tables, title) for block, title in TITLES[page].items()}
    if page == "eflops":
        return made | {"all": other_tables(tables, tuple(TITLES[page].values()))}
    if page == "dlrm":
        made["measured"] = measured(RESULTS / "gpu_fused.jsonl")
    return made | {"notes": "\n".join(f"- {note}" for note in reproduction.notes(found))}


def measured(path: Path) -> str:
    """Constants fitted to measurements between GPUs, and the simulator's error in each case."""
    cases = dlrm_records.read(path) if path.exists() else []
    if not cases:
        return "None measured yet."
    constants = dlrm_records.calibrate(cases)
    rows = [
        (
            *(each.name, each.what),
            *(format_seconds(each.measured_s), format_seconds(each.simulated_s)),
            percent(each.error),
        )
        for each in dlrm_records.compare(cases, constants)
    ]
    fitted = [
        ("latency of pooling", format_seconds(constants.launch_s)),
        ("rate of gathering", f"{constants.gather_bytes_per_s * 1e-9:.0f} GB/s"),
        ("latency of the exchange", format_seconds(constants.message_latency_s)),
        ("rate of a link", f"{constants.link_bytes_per_s * 1e-9:.0f} GB/s"),
    ]
    return "\n\n".join(
        (
            markdown(("fitted", "value"), fitted),
            markdown(("case", "", "measured", "simulated", "error"), rows),
        )
    )


def table(tables: Sequence[Table], beginning: str) -> str:
    """Table whose title begins like this, without the title."""
    headers, rows = next(
        (headers, rows) for title, headers, rows in tables if title.startswith(beginning)
    )
    return markdown(headers, [with_unpublished(headers, row) for row in rows])


def other_tables(tables: Sequence[Table], shown: tuple[str, ...]) -> str:
    """All other tables, under their titles."""
    return "\n\n".join(
        f"### {title}\n\n{markdown(headers, rows)}"
        for title, headers, rows in tables
        if not title.startswith(shown)
    )


def with_unpublished(headers: Sequence[str], row: Sequence[object]) -> list[object]:
    """Row of the EFLOPS comparison, with `not published` in empty cells."""
    comparison = tuple(headers[:2]) == ("figure", "published")
    return [
        "not published" if comparison and header == "published" and cell is None else cell
        for header, cell in zip(headers, row, strict=True)
    ]
