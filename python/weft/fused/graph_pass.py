"""Pass of torch.compile that substitutes fused operators for products beside collectives."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from weft.fused import counts, gains, sequence, tables
from weft.fused.groups import group_of
from weft.fused.matches import Match, find
from weft.fused.operators import refusal

if TYPE_CHECKING:
    from torch.fx import Graph

    from weft.fused.tables import Table

__all__ = ["Pass"]

logger = logging.getLogger("weft.fused")


class Pass(CustomGraphPass):  # type: ignore[misc]
    """Custom pass of Inductor's graphs, before its own ones; `enable` puts it there.

    Args:
        previous: the pass that was there, which runs first.
        chosen: names of operators.
        force: substitute without an expected gain.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(self, previous: Any, chosen: frozenset[str], force: bool, timeout: float) -> None:
        self.previous, self._chosen, self._force, self._timeout = previous, chosen, force, timeout
        self.is_active = True
        self._table: Table = tables.own_table()
        self._salt = tables.salt()

    def __call__(self, graph: Graph) -> None:
        """Substitute in place."""
        if self.previous is not None:
            self.previous(graph)
        if not (self.is_active and distributed.is_initialized()):
            return
        if sequence.NAME in self._chosen:
            ranks = {name: group_of(name).ranks for name in set(sequence.groups_of(graph))}
            self._substitute(graph, sequence.find(graph, ranks))
        self._substitute(graph, find(graph))

    def uuid(self) -> Any:
        """Key of Inductor's caches: sources of this module, ranks, device, flags, measurements.

        And a text that changes when ranks did not agree, so that later processes compile again.
        `None`, which turns the caches off, if the previous pass has none.
        """
        before = None
        if self.previous is not None:
            before = self.previous.uuid() if isinstance(self.previous, CustomGraphPass) else None
            if before is None or not self.is_active:
                return before
        return repr((before, _sources(), self.settings(), self._salt))

    def settings(self) -> str:
        """All that decisions depend on beside the graph."""
        ranks = distributed.get_world_size() if distributed.is_initialized() else 0
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        flags = (self.is_active, sorted(self._chosen), self._force, self._table.digest())
        return repr((ranks, local, device, *flags))

    def _substitute(self, graph: Graph, matches: list[Match]) -> None:
        by_group: dict[str, list[Match]] = {}
        for match in matches:
            by_group.setdefault(match.group, []).append(match)
        for name, its in by_group.items():
            self._group(name, its)
        if by_group:
            stable_topological_sort(graph)

    def _group(self, name: str, matches: list[Match]) -> None:
        reasons = [self._refusal(match) for match in matches]
        listed = [
            f"{match.text()}: {'refused' if reason else 'fused'}"
            for match, reason in zip(matches, reasons, strict=True)
        ]
        digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]
        other = None
        if any(match.substitute is not None for match in matches):
            values = {"settings": self.settings(), "sources": _sources(), "graph": digest}
            other = group_of(name).compare(values, self._timeout)
        if other is not None:
            tables.renew_salt()
            logger.info("ranks do not agree on group %s; here: %s", name, "; ".join(listed))
        for match, own in zip(matches, reasons, strict=True):
            counts.add("matches", match.operator)
            reason = own or (None if other is None else f"ranks do not agree: {other}")
            if reason is not None or match.substitute is None:
                counts.add("refusals", match.operator, reason, match.text())
                continue
            match.substitute(digest)
            counts.add("substitutions", match.operator, place=match.text())

    def _refusal(self, match: Match) -> str | None:
        if match.reason is not None:
            return match.reason
        if match.operator not in self._chosen:
            return "operator not enabled"
        group = group_of(match.group)
        device = match.device
        reason = refusal(match.operator, *match.shape, match.dtype, group.ranks, device.type)
        if reason is not None or self._force:
            return reason
        return gains.doubt(
            match.kernel or match.operator,
            match.shape,
            match.dtype,
            group.ranks,
            device,
            self._table,
        )


def _sources() -> str:
    """Digest of the sources that decide."""
    folder = Path(__file__).parent
    names = sorted(str(path) for path in folder.rglob("*.py"))
    return str(get_hash_for_files(tuple(names)).hex()[:16])
