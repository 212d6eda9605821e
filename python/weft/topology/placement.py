"""Rank placement: hosts of HDRM's map, and ranks on named hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft import _native

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["hdrm_hosts", "hdrm_ranks"]


def hdrm_hosts(
    network: str, ranks: int | None = None, names: Sequence[str] | None = None
) -> list[str]:
    """The host of each rank in HDRM's placement.

    Args:
        network: a BiGraph, as `bigraph:switches=8,endpoints=3` or the path of its JSON file, or a
            JSON file with a rank map, as `weft topo bigraph --out` writes it.
        ranks: number of ranks; by default as many as the network has places for.
        names: names of its hosts: with one NIC for each in the order of endpoints, else in the
            order of ranks. By default those of the network: `U0.0` is port 0 of switch U0.

    Raises:
        ConfigurationError: if the network is no BiGraph or has too few endpoints for the ranks.
    """
    return _native.hdrm_hosts(network, ranks, None if names is None else list(names))


def hdrm_ranks(network: str, hosts: Sequence[str], names: Sequence[str] | None = None) -> list[int]:
    """The HDRM rank of each process, so that each step's pairs of ranks have links of their own.

    The processes of a host take its ranks in their order. All processes that pass the same
    arguments compute the same ranks: pass `hosts` in one order everywhere.

    Args:
        network: as in `hdrm_hosts`.
        hosts: host of each process: all hosts of the network, or a part of them that HDRM's map
            fits, such as those of its first ranks.
        names: as in `hdrm_hosts`.

    Returns:
        A permutation of `range(len(hosts))`: `rank=` of `weft.init` or of
        `torch.distributed.init_process_group` for each process.

    Raises:
        ConfigurationError: if the network has no such map, a host is unknown or has more processes
            than endpoints, or the hosts are no part that fits; with the reason.
    """
    return _native.hdrm_positions(network, list(hosts), None if names is None else list(names))
