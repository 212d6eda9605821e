"""Counters for decisions by the compiler pass and torch operators; `report` returns them.

For example, `report().refusals` shows why a GEMM was not fused.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Report", "add", "report", "reset_report"]

logger = logging.getLogger("weft.fused")


@dataclass(frozen=True)
class Report:
    """Counts since the process started, or since `reset_report`.

    Attributes:
        matches: by operator: places in compiled graphs with a GEMM or embedding bags beside a
            collective.
        substitutions: by operator: `matches` that became a fused operator.
        refusals: by operator and reason: the other matches.
        fused_calls: by operator: torch operator calls that ran a fused kernel.
        unfused_calls: by operator and reason: calls that ran torch's operators instead.

    Graphs that Inductor loads from the cache only count as calls.
    """

    matches: Counter[str] = field(default_factory=Counter)
    substitutions: Counter[str] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    fused_calls: Counter[str] = field(default_factory=Counter)
    unfused_calls: Counter[tuple[str, str]] = field(default_factory=Counter)


_COUNTS: Final = Report()
_LOCK: Final = threading.Lock()


def add(kind: str, operator: str, reason: str | None = None, place: str = "") -> None:
    """Count an event, and log it: compilation at level INFO, calls once for each reason at DEBUG.

    Args:
        kind: name of a `Report` field.
        operator: name.
        reason: for refusals and unfused calls.
        place: shapes and group, for the log.
    """
    counter: Counter[object] = getattr(_COUNTS, kind)
    key = operator if reason is None else (operator, reason)
    with _LOCK:
        counter[key] += 1
        is_first = counter[key] == 1
    if kind == "substitutions":
        logger.info("%s: substituted for %s", operator, place)
    elif kind == "refusals":
        logger.info("%s: refused for %s: %s", operator, place, reason)
    elif kind == "unfused_calls" and is_first:
        logger.debug("%s: unfused: %s", operator, reason)


def report() -> Report:
    """A copy of the counts."""
    with _LOCK:
        return Report(*(Counter(getattr(_COUNTS, name)) for name in _COUNTS.__annotations__))


def reset_report() -> None:
    """Set all counts to zero."""
    with _LOCK:
        for name in _COUNTS.__annotations__:
            getattr(_COUNTS, name).clear()
