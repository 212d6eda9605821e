"""Wording budgets in tools/language.toml: for each area and kind a count, and a rate.

An area is over budget if its count and its rate are worse than the budget, and the rate is worse
than the target, too. For example, new text may hold some 'of' if it has fewer per word than its
area, and deleted text without any costs no budget.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from wording import KINDS

BUDGETS = Path("tools/language.toml")
#: Rate over the budget that passes, so that no single word fails a large area. It cannot add up.
TOLERANCE = 0.01
HEADING = """\
# Budgets for tools/language.py: `tools/language.py --lower` lowers them, never raises any.
# Kind = [count, rate per 10,000 words], one line per area. Merge conflict: keep either line, lower.
"""


class Budget(NamedTuple):
    """Bound for one kind in one area."""

    count: int
    #: Per 10,000 words.
    rate: float


Areas = dict[str, Counter[str]]
Budgets = dict[str, dict[str, Budget]]


def rate(counts: Counter[str], kind: str) -> float:
    """Count per 10,000 words."""
    return counts[kind] * 1e4 / max(1, counts["words"])


def read_budgets(root: Path) -> Budgets:
    """Budgets by area and kind; empty without a file."""
    path = root / BUDGETS
    table = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    return {
        area: {kind: Budget(*pair) for kind, pair in kinds.items()} for area, kinds in table.items()
    }


def write_budgets(root: Path, budgets: Budgets) -> None:
    """Write the file, one line per area, sorted."""
    lines = []
    for area, kinds in sorted(budgets.items()):
        cells = ", ".join(f"{kind} = [{each.count}, {each.rate}]" for kind, each in kinds.items())
        lines.append(f'"{area}" = {{ {cells} }}\n')
    (root / BUDGETS).write_text(HEADING + "".join(lines), "utf-8")


def is_over(kind: str, counts: Counter[str], budget: Budget) -> bool:
    """True if count and rate are worse than the budget, and the rate than the target."""
    target = KINDS[kind].target
    sign = -1 if KINDS[kind].is_floor else 1
    now = rate(counts, kind) * sign
    return (
        counts[kind] * sign > budget.count * sign
        and now > budget.rate * (sign + TOLERANCE)
        and (target is None or now > target * sign)
    )


def over_budget(areas: Areas, budgets: Budgets) -> list[str]:
    """A line for each kind over budget in an area, and for each area without a budget."""
    lines = []
    for area, counts in areas.items():
        if area not in budgets:
            lines.append(f"{area}: no budget; run `tools/language.py --lower`")
        for kind, budget in budgets.get(area, {}).items():
            if is_over(kind, counts, budget):
                bound = "at least" if KINDS[kind].is_floor else "at most"
                lines.append(
                    f"{area}, {KINDS[kind].title}: {counts[kind]},"
                    f" {rate(counts, kind):.1f} per 10,000 words: expected {bound}"
                    f" {budget.count} or {budget.rate:.1f} per 10,000;"
                    f" `tools/language.py --since main` lists new phrases"
                )
    return lines


def lowered(areas: Areas, budgets: Budgets) -> Budgets:
    """Budgets for the present areas: count and rate are the better one, old or present.

    A new area gets the present counts. An old one without files is dropped.
    """
    result: Budgets = {}
    for area, counts in areas.items():
        result[area] = {}
        for kind in KINDS:
            is_floor = KINDS[kind].is_floor
            # Rounded to the lenient side, so that the present counts keep the budget.
            tenths = (math.floor if is_floor else math.ceil)(rate(counts, kind) * 10)
            present = Budget(counts[kind], tenths / 10)
            old = budgets.get(area, {}).get(kind, present)
            better = max if is_floor else min
            result[area][kind] = Budget(
                better(old.count, present.count), better(old.rate, present.rate)
            )
    return result
