"""Rank placement at launch: ranks of HDRM for processes on named hosts of a BiGraph."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from weft import _native
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["hdrm_hosts", "hdrm_ranks"]

#: Number of hosts that an error names.
NAMED: Final = 4


def hdrm_hosts(
    network: str, ranks: int | None = None, names: Sequence[str] | None = None
) -> list[str]:
    """The host of each rank in HDRM's placement.

    Args:
        network: a BiGraph, as `bigraph:switches=8,endpoints=3` or the path of its JSON file.
        ranks: number of ranks; by default as many as the network has places for.
        names: names of its hosts: with one NIC for each in the order of endpoints, else in the
            order of ranks. By default those of the network: `U0.0` is port 0 of switch U0.

    Raises:
        ConfigurationError: if the network is no BiGraph or has too few endpoints for the ranks.
    """
    try:
        text = _native.topology_bigraph(network, None if names is None else list(names))
    except ConfigurationError as error:
        if "expected bigraph:" not in str(error):
            raise
        raise ConfigurationError(
            f"network {network}: HDRM needs a BiGraph, expected bigraph:... or a JSON file with its"
            " options; on other networks use ring or hd, whose ranks need no placement"
        ) from error
    report = json.loads(text)
    hosts: list[str] = [place["host"] for place in report["places"]["ranks"]]
    if ranks is None:
        return hosts
    if not 1 <= ranks <= len(hosts):
        why = f" ({report['reason']})" if report["reason"] else ""
        raise ConfigurationError(
            f"ranks {ranks}: expected 1 to {len(hosts)}, the endpoints of {network} with a place in"
            f" HDRM{why}; start fewer ranks or name a larger network"
        )
    return hosts[:ranks]


def hdrm_ranks(network: str, hosts: Sequence[str], names: Sequence[str] | None = None) -> list[int]:
    """The HDRM rank of each process, so that each step's pairs of ranks have links of their own.

    The processes of a host take its ranks in their order. All processes that pass the same
    arguments compute the same ranks: pass `hosts` in one order everywhere.

    Args:
        network: as in `hdrm_hosts`.
        hosts: host of each process.
        names: as in `hdrm_hosts`.

    Returns:
        A permutation of `range(len(hosts))`: `rank=` of `weft.init` or of
        `torch.distributed.init_process_group` for each process.

    Raises:
        ConfigurationError: if the network is no BiGraph, a host is missing, or a host has another
            number of processes than ranks in the placement.
    """
    places = hdrm_hosts(network, len(hosts), names)
    every = set(hdrm_hosts(network, None, names))
    unknown = sorted(set(hosts) - every)
    if unknown:
        raise ConfigurationError(
            f"host {some(unknown)}: expected hosts of {network}, such as {some(sorted(every))};"
            " name them as the network does, or pass the names of its hosts"
        )
    wanted, present = Counter(places), Counter(hosts)
    unequal = [host for host in dict.fromkeys([*places, *hosts]) if wanted[host] != present[host]]
    if unequal:
        counts = [f"{host} has {present[host]} instead of {wanted[host]}" for host in unequal]
        raise ConfigurationError(
            f"processes per host of {len(hosts)} ranks: expected those of HDRM's placement on"
            f" {network}, but {some(counts)}; start that many on each host"
        )
    free: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(places):
        free[host].append(rank)
    taken = {host: iter(ranks) for host, ranks in free.items()}
    return [next(taken[host]) for host in hosts]


def some(items: Sequence[str]) -> str:
    """The first few items, and the number of the others."""
    more = len(items) - NAMED
    return ", ".join(items[:NAMED]) + (f" and {more} more" if more > 0 else "")
