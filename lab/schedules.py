"""Schedules for a network's hosts: operations by host, bytes by link and step."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from lab.errors import LabError
from weft import _native
from weft.sim import schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.network import Link, Plan

__all__ = [
    "ALGORITHMS",
    "host_programs",
    "one_connection",
    "ping",
    "placement",
    "program",
    "rank_hosts",
    "step_bytes",
]

ALGORITHMS: Final = ("ring", "hd", "hdrm")
#: Vector elements are 32-bit floats.
ELEMENT: Final = 4


def program(algorithm: str, ranks: int) -> dict[str, Any]:
    """All-reduce schedule, as Weft builds it."""
    return schedule({"algorithm": algorithm, "ranks": ranks, "bytes": ELEMENT})


def ping(ranks: int, peer: int) -> dict[str, Any]:
    """Schedule that writes one block from rank 0 to a peer and back; the other ranks are idle."""
    block = {"buffer": "output", "first": 0, "blocks": 1}

    def write(to: int, lane: int) -> dict[str, Any]:
        return {"write": {"to": to, "source": block, "target": block, "lane": lane, "step": lane}}

    def wait(source: int, lane: int) -> dict[str, Any]:
        return {"wait": {"from": source, "lane": lane, "count": 1}}

    operations: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    operations[0] = [write(peer, 0), wait(peer, 1)]
    operations[peer] = [wait(0, 0), write(0, 1)]
    return {
        "name": "ping",
        "blocks": 1,
        "scratch_blocks": [0] * ranks,
        "steps": 2,
        "lanes": 2,
        "operations": operations,
    }


def rank_hosts(plan: Plan, shuffle: int | None = None) -> list[int]:
    """Host by rank: in order, or shuffled with this seed."""
    hosts = list(range(len(plan.hosts)))
    if shuffle is not None:
        random.Random(shuffle).shuffle(hosts)
    return hosts


def placement(plan: Plan, algorithm: str, hosts: Sequence[int] | None = None) -> list[int]:
    """Host at each schedule position.

    HDRM's map, alternating halves for a ring, else host order.

    Args:
        plan: the network.
        algorithm: name.
        hosts: host by rank, from which HDRM's map is computed; by default host order.

    Raises:
        LabError: for HDRM on another network than a BiGraph.
    """
    ranks = len(plan.hosts)
    if algorithm == "hdrm":
        if plan.name != "bigraph":
            raise LabError(f"hdrm on a {plan.name}: its rank map is for a bigraph; use hd")
        hosts = range(ranks) if hosts is None else hosts
        positions = _native.hdrm_positions(plan.shape, [plan.hosts[host] for host in hosts])
        places = dict(zip(positions, hosts, strict=True))
        return [places[position] for position in range(ranks)]
    if algorithm == "ring" and plan.name == "bigraph":
        return alternating(ranks, len(plan.switches))
    return list(range(ranks))


def alternating(ranks: int, switches: int) -> list[int]:
    """BiGraph endpoints, from both halves in turn, so that ring neighbours have one path.

    Ports on one upper switch go to different lower switches: no cable is used twice.
    """
    half, ports = switches // 2, ranks // switches
    found = []
    for port in range(ports):
        for switch in range(half):
            found.append(switch * ports + port)
            found.append((half + (switch + port) % half) * ports + port)
    return found


def host_programs(
    program: dict[str, Any], places: Sequence[int], hosts: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Operations by host, in host order, with ranks in place of positions.

    A wait has the `blocks` count that it waits for.

    Args:
        program: the schedule.
        places: host at each schedule position.
        hosts: host by rank; by default host order.

    Raises:
        LabError: for several writes between two ranks on one lane.
    """
    blocks = lengths(program)
    rank_of = {host: rank for rank, host in enumerate(hosts or range(len(places)))}
    peers = [rank_of[host] for host in places]
    found: list[dict[str, Any]] = [{} for _ in places]
    for rank, operations in enumerate(program["operations"]):
        found[places[rank]] = {
            "blocks": program["blocks"],
            "scratch_blocks": program["scratch_blocks"][rank],
            "lanes": program["lanes"],
            "operations": [with_ranks(each, rank, peers, blocks) for each in operations],
        }
    return found


def lengths(program: dict[str, Any]) -> dict[tuple[int, int, int], int]:
    """Block count per write, by source, destination and lane."""
    found: dict[tuple[int, int, int], int] = {}
    for rank, operations in enumerate(program["operations"]):
        for operation in operations:
            if write := operation.get("write"):
                key = rank, write["to"], write["lane"]
                if key in found:
                    raise LabError(
                        f"schedule {program['name']}: rank {rank} writes twice to rank {key[1]} on "
                        f"lane {key[2]}; use one of {', '.join(ALGORITHMS)}"
                    )
                found[key] = write["source"]["blocks"]
    return found


def with_ranks(
    operation: dict[str, Any],
    position: int,
    peers: Sequence[int],
    blocks: dict[tuple[int, int, int], int],
) -> dict[str, Any]:
    """An operation at a position with ranks in place of positions."""
    ((kind, fields),) = operation.items()
    changed = dict(fields)
    if kind == "write":
        changed["to"] = peers[fields["to"]]
    elif kind == "wait":
        changed["from"] = peers[fields["from"]]
        changed["blocks"] = blocks[fields["from"], position, fields["lane"]]
    return {kind: changed}


def step_bytes(
    plan: Plan,
    program: dict[str, Any],
    places: Sequence[int],
    size: int,
    megabits: float,
    seed: int,
) -> list[dict[Link, int]]:
    """Predicted bytes by link and step, without headers.

    Args:
        plan: the network.
        program: the schedule.
        places: endpoint by rank.
        size: vector bytes.
        megabits: link rate.
        seed: for the hash that selects among several shortest paths.
    """
    found: list[dict[Link, int]] = [defaultdict(int) for _ in range(program["steps"])]
    spec = plan.spec(megabits)
    paths: dict[tuple[int, int], tuple[Link, ...]] = {}
    for rank, operations in enumerate(program["operations"]):
        for operation in operations:
            if "write" not in operation:
                continue
            write = operation["write"]
            pair = places[rank], places[write["to"]]
            if pair not in paths:
                paths[pair] = path(plan, spec, pair, seed)
            for link in paths[pair]:
                bytes_ = size * write["source"]["blocks"] // program["blocks"]
                found[write["step"]][link] += bytes_
    return [dict(step) for step in found]


def one_connection(program: dict[str, Any], size: int) -> list[int]:
    """Bytes in the longest write by step."""
    found = [0] * program["steps"]
    for operations in program["operations"]:
        for operation in operations:
            if write := operation.get("write"):
                length = size * write["source"]["blocks"] // program["blocks"]
                found[write["step"]] = max(found[write["step"]], length)
    return found


def path(plan: Plan, spec: str, pair: tuple[int, int], seed: int) -> tuple[Link, ...]:
    """Links between two hosts: the only path, or the one that the simulator's hash selects."""
    source, target = plan.hosts[pair[0]], plan.hosts[pair[1]]
    if (only := plan.path(source, target)) is not None:
        return only
    report = json.loads(_native.topology_path(spec, source, target, "ecmp", seed))
    ends = (link.split("->") for link in report["links"])
    return tuple((one, other) for one, other in ends)
