"""Networks and rank placements that the EFLOPS article compares."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = [
    "BIGRAPH",
    "BY_NODE",
    "FAT_TREE",
    "IN_TURN",
    "LOCAL",
    "SINGLE_NIC",
    "placement",
    "topology",
]

#: A NIC for each GPU, a node's four GPUs on one virtual switch.
BIGRAPH: Final = "bigraph"
#: The same NICs on a two-tier fat tree without oversubscription, a leaf for each node.
FAT_TREE: Final = "fat-tree"
#: A fat tree with as many nodes, and one NIC for a node's four GPUs.
SINGLE_NIC: Final = "single-nic"
#: GPUs per node.
LOCAL: Final = 4
#: Rank order: node after node.
BY_NODE: Final = "node by node"
#: Rank order: one on each node in turn, as with round-robin host files.
IN_TURN: Final = "in turn"


class Layout(NamedTuple):
    """Switches per BiGraph half, and endpoints per switch."""

    half: int
    endpoints: int


def layout(ranks: int) -> Layout:
    """BiGraph with `ranks` GPUs: four on a switch up to the article's 64, then more.

    HDRM needs at most as many endpoints on a switch as there are switches in a half.

    Raises:
        ValueError: if `ranks` is no power of two from 8 to 4096.
    """
    if ranks.bit_count() != 1 or not 8 <= ranks <= 4096:
        raise ValueError(f"ranks {ranks}: expected a power of two from 8 to 4096")
    endpoints = 2
    while 2 * endpoints <= LOCAL and ranks // (2 * endpoints) >= 4 * endpoints:
        endpoints *= 2
    # Switches have 64 ports: a half has at most 64 switches.
    while ranks // (2 * endpoints) > 64:
        endpoints *= 2
    return Layout(ranks // (2 * endpoints), endpoints)


def topology(network: str, ranks: int, latency_us: float) -> dict[str, Any]:
    """A network as a scenario's topology; 100 Gb/s links."""
    half, endpoints = layout(ranks)
    link = {"gbps": 100, "latency_us": latency_us}
    if network == BIGRAPH:
        return {"bigraph": {"switches": 2 * half, "endpoints": endpoints} | link}
    nodes = ranks // LOCAL
    if network == FAT_TREE:
        return {"fat-tree": {"leaves": nodes, "spines": LOCAL, "hosts": LOCAL} | link}
    leaves = max(nodes // LOCAL, 2)
    shape = {"leaves": leaves, "spines": LOCAL, "hosts": nodes // leaves, "gpus_per_nic": LOCAL}
    return {"fat-tree": shape | link}


def placement(network: str, ranks: int, algorithm: str, order: str) -> object:
    """An algorithm's rank placement, as in a scenario.

    On a BiGraph, HDRM has its rank map; other algorithms have neighbouring switches in different
    halves, so that the links between ring neighbours are disjoint.
    """
    if network == BIGRAPH and algorithm == "hdrm":
        return "map"
    nodes = ranks // LOCAL
    in_turn = [rank % nodes * LOCAL + rank // nodes for rank in range(ranks)]
    slots = list(range(ranks)) if order == BY_NODE else in_turn
    if network != BIGRAPH:
        return {"endpoints": slots}
    half, ports = layout(ranks)

    def endpoint(slot: int) -> int:
        switch, port = divmod(slot, ports)
        return (switch // 2 + switch % 2 * half) * ports + port

    return {"endpoints": [endpoint(slot) for slot in slots]}
