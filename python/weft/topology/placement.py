"""Rank placement: hosts of HDRM's map, ranks on named hosts, and the network of a group."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft import _native

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["hdrm_hosts", "hdrm_ranks", "host_name", "network_source"]

#: Environment variable that names the network.
VARIABLE: Final = "WEFT_NETWORK"


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
    arguments compute the same ranks: pass `hosts` in one order everywhere. Process groups on a
    network do this by themselves.

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


def network_source(network: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, str]:
    """Name and text of a network, for the native module, which reads no file and checks the text.

    A file that cannot be read is passed by its name alone, which the native module rejects on all
    ranks.

    Args:
        network: a short form, the path of a JSON file, or the object that such a file contains.
    """
    if not isinstance(network, (str, os.PathLike)):
        return "object", json.dumps(network)
    name = os.fspath(network)
    try:
        return name, Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return name, name


def host_name() -> str:
    """Name of this rank's host in a network: `WEFT_HOST_ID`, else the host name of the machine."""
    return os.environ.get("WEFT_HOST_ID", "").strip() or socket.gethostname()
