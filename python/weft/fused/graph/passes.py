"""Compiler pass that substitutes fused operators beside collectives in torch.compile's graphs.

The pass works on functional collectives, such as `torch.ops._c10d_functional.all_reduce`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from weft.base.environment import text
from weft.fused import counts, gains, tables
from weft.fused.agreement import Place
from weft.fused.graph import sequence
from weft.fused.graph.matches import SEARCHED, Match, find
from weft.fused.graph.matches_scaled import find_scaled
from weft.fused.graph.nodes import collectives
from weft.fused.groups import group_of
from weft.fused.operators import refusal
from weft.fused.scaled_operators import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.fx import Graph, Node

    from weft.fused.tables import Table

__all__ = ["Pass"]

logger = logging.getLogger("weft.fused")


class Pass(CustomGraphPass):  # type: ignore[misc]
    """Custom pass on Inductor's graphs, before Inductor's own; `enable` installs it.

    Args:
        previous: the pass that was installed before, which runs first.
        chosen: operator names.
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
            ranks = {name: group_of(name).ranks for name in collectives(graph)}
            self._substitute(graph, sequence.find(graph, ranks), is_rewrite=True)
        self._substitute(graph, [*find(graph), *find_scaled(graph)], is_rewrite=False)

    def uuid(self) -> Any:
        """Key for Inductor's caches: sources of this module, ranks, device, flags, measurements.

        It also has a text that changes when ranks did not agree, so that later processes compile
        again. It is `None`, which turns the caches off, if the previous pass has none, and for
        graphs that may become sequence-parallel.
        """
        if sequence.NAME in self._chosen:
            # A loaded graph has no unfused form for ranks that compile it again.
            return None
        before = None
        if self.previous is not None:
            before = self.previous.uuid() if isinstance(self.previous, CustomGraphPass) else None
            if before is None or not self.is_active:
                return before
        return repr((before, _sources(), self.settings(), self._salt))

    def settings(self) -> str:
        """Everything besides the graph that decisions depend on."""
        ranks = distributed.get_world_size() if distributed.is_initialized() else 0
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        local = text("LOCAL_WORLD_SIZE")
        flags = (self.is_active, sorted(self._chosen), self._force, self._table.digest())
        return repr((ranks, local, device, *flags))

    def _substitute(self, graph: Graph, matches: list[Match], *, is_rewrite: bool) -> None:
        """Substitute at matches that all ranks accept.

        Ranks compare each group that has a searched collective, in the same order.
        """
        taken = set()
        for match in matches:
            match.reason = self._refusal(match)
            if match.reason is None and match.matmul is not None:
                if match.matmul in taken:
                    match.reason = "the matmul is in another place"
                taken.add(match.matmul)
        order = {node: place for place, node in enumerate(graph.nodes)}
        by_group = collectives(graph)
        every = [node for nodes in by_group.values() for node in nodes]
        for name, nodes in sorted(by_group.items()):
            if any(node.target in SEARCHED for node in nodes):
                its = [each for each in matches if each.group == name]
                self._agree(name, nodes, every, its, order, is_rewrite)
        for match in matches:
            counts.add("matches", match.operator)
            if match.reason is not None or match.substitute is None:
                counts.add("refusals", match.operator, match.reason, match.text())
                continue
            match.substitute(match.site)
            counts.add("substitutions", match.operator, place=match.text())
        if matches:
            stable_topological_sort(graph)

    def _agree(
        self,
        name: str,
        nodes: list[Node],
        every: list[Node],
        matches: list[Match],
        order: Mapping[Any, int],
        is_rewrite: bool,
    ) -> None:
        """Set reasons for matches that not all ranks accept, and sites for the others.

        Args:
            name: group name.
            nodes: the group's collectives.
            every: collectives in all groups.
            matches: the group's matches.
            order: each node's place in the graph.
            is_rewrite: the collectives come before a rewrite.
        """
        position = {node: place for place, node in enumerate(nodes)}
        places = {}
        for match in sorted(matches, key=lambda match: order[match.before or match.node]):
            at = position[match.node]
            turn = sum(order[node] < order[match.before or match.node] for node in every)
            places[at] = Place(at, turn, match.kind(), match.reason, match.detail)
        listed = [str(node.target) for node in nodes]
        values = {
            "settings": self.settings(),
            "sources": _sources(),
            "collectives": _digest(listed),
        }
        verdict = group_of(name).compare(
            values, list(places.values()), self._timeout, is_rewrite=is_rewrite
        )
        if verdict.reason is not None:
            tables.renew_salt()
            logger.info(
                "ranks do not agree on group %s; here are %s; %s",
                name,
                ", ".join(f"{count} {each}" for each, count in sorted(Counter(listed).items())),
                "; ".join(f"{each.text}: {each.reason or 'accepted'}" for each in places.values()),
            )
        site = _digest([*listed, verdict.digest])
        for match in matches:
            match.site = f"{site}/{position[match.node]}"
            if match.reason is None:
                match.reason = verdict.refusals.get(position[match.node])
                if verdict.reason is not None:
                    match.reason = f"ranks do not agree: {verdict.reason}"

    def _refusal(self, match: Match) -> str | None:
        if match.reason is not None:
            return match.reason
        if match.operator not in self._chosen:
            return "operator not enabled"
        group = group_of(match.group)
        device = match.device
        operator = PLAIN.get(match.operator, match.operator)
        reason = refusal(operator, *match.shape, match.dtype, group.ranks, device.type)
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


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _sources() -> str:
    """Digest over the sources that decide."""
    folder = Path(__file__).parent.parent
    names = sorted(str(path) for path in folder.rglob("*.py"))
    return str(get_hash_for_files(tuple(names)).hex()[:16])
