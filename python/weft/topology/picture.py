"""A BiGraph drawn: both halves, the ranks on each switch, and the cables between."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from weft.base.output_files import write_output

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["draw_bigraph"]

#: Ranks listed at a switch; what is beyond is counted.
LISTED: Final = 16
#: Switches drawn per half; the rest is counted.
DRAWN: Final = 64


def draw_bigraph(report: dict[str, Any], *paths: Path) -> None:
    """Draw the native module's report on a BiGraph to files, for example `plan.svg`.

    `ModuleNotFoundError` without matplotlib: `pip install 'weft[plot]'`.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    half = min(report["half"], DRAWN)
    ranks: dict[str, list[int]] = {}
    for place in (report["places"] or {"ranks": []})["ranks"]:
        ranks.setdefault(place["switch"], []).append(place["rank"])
    figure = Figure(figsize=(max(6.0, 1.1 * half + 2), 5.2), layout="constrained")
    axes = figure.add_subplot()
    cables = [((upper, 1.0), (lower, 0.0)) for upper in range(half) for lower in range(half)]
    axes.add_collection(LineCollection(cables, colors="#7f9fbf", linewidths=0.6, zorder=1))
    for name, height, beyond in (("U", 1.0, 1), ("L", 0.0, -1)):
        axes.scatter(range(half), [height] * half, s=340, marker="s", color="#1f4e79", zorder=2)
        for switch in range(half):
            label = f"{name}{switch}"
            axes.text(
                switch, height, label, color="white", ha="center", va="center", fontsize=7, zorder=3
            )
            listed = sorted(ranks.get(label, []))
            lines = [str(rank) for rank in listed[:LISTED]]
            if len(listed) > LISTED:
                lines.append(f"+{len(listed) - LISTED}")
            axes.text(
                switch,
                height + 0.1 * beyond,
                "\n".join(lines) or "-",
                ha="center",
                va="bottom" if beyond > 0 else "top",
                fontsize=7,
            )
    trunks = report["trunks"]
    axes.set_title(
        f"BiGraph of {report['switches']} switches, {report['endpoints']} endpoints on each,"
        " with the ranks of HDRM"
        + (f"; each line is {trunks} cables" if trunks > 1 else "")
        + (f"; the first {half} of each half" if half < report["half"] else ""),
        fontsize=9,
    )
    deepest = 0.12 + 0.075 * min(LISTED + 1, max((len(r) for r in ranks.values()), default=1))
    axes.set_xlim(-0.8, half - 0.2)
    axes.set_ylim(-deepest, 1 + deepest)
    axes.axis("off")
    for path in paths:
        # The date would make every run's file another one.
        kind = path.suffix.lstrip(".")
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
        write_output(path, picture.getvalue())
