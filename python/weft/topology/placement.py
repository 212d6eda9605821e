"""Rank placement: hosts in HDRM's map, ranks on named hosts, and a group's network."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft import _native
from weft.base.arguments import expect_json, expect_names, expect_range, expect_text
from weft.base.environment import text
from weft.base.files import read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["hdrm_hosts", "hdrm_ranks", "host_name", "network_source"]

#: Environment variable that names the network.
VARIABLE: Final = "WEFT_NETWORK"
#: Most ranks for the native module; a network has fewer places.
MOST_RANKS: Final = 2**32 - 1


def hdrm_hosts(
    network: str, ranks: int | None = None, names: Sequence[str] | None = None
) -> list[str]:
    """Host by rank in HDRM's placement.

    Args:
        network: a BiGraph, such as `bigraph:switches=8,endpoints=3` or the path to its JSON file,
        or a
            JSON file with a rank map, as `weft topo bigraph --out` writes it.
        ranks: rank count; by default as many as the network has places for.
        names: host names: in endpoint order with one NIC per host, else in rank order. By default
        the network's names: `U0.0` is port 0 on switch U0.

    Raises:
        ConfigurationError: if the network is no BiGraph or has too few endpoints for the ranks.
    """
    return _native.hdrm_hosts(
        expect_text(network, "network"),
        None if ranks is None else expect_range(ranks, "ranks", 0, MOST_RANKS),
        None if names is None else expect_names(names, "names"),
    )


def hdrm_ranks(network: str, hosts: Sequence[str], names: Sequence[str] | None = None) -> list[int]:
    """HDRM rank by process, so that each step's rank pairs have separate links.

    The processes on a host take its ranks in order. All processes that pass the same arguments
    compute the same ranks: pass `hosts` in one order everywhere. Process groups on a network do
    this by themselves.

    Args:
        network: as in `hdrm_hosts`.
        hosts: host by process: all hosts in the network, or a part that HDRM's map fits, such as
        the first ranks' hosts.
        names: as in `hdrm_hosts`.

    Returns:
        A permutation of `range(len(hosts))`: `rank=` in `weft.init` or
        `torch.distributed.init_process_group` for each process.

    Raises:
        ConfigurationError: if the network has no such map, a host is unknown or has more processes
            than endpoints, or the hosts are no part that fits; with the reason.
    """
    return _native.hdrm_positions(
        expect_text(network, "network"),
        expect_names(hosts, "hosts"),
        None if names is None else expect_names(names, "names"),
    )


def network_source(network: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, str]:
    """Network name and text, for the native module, which reads no file and checks the text.

    A file that cannot be read is passed only by name, which the native module rejects on all ranks.

    Args:
        network: a short form, a JSON file path, or the object that such a file contains.
    """
    if not isinstance(network, (str, os.PathLike)):
        return "object", expect_json(network, "network")
    name = os.fspath(network)
    # The native module reports a file that cannot be read, to all ranks.
    try:
        return name, read_text(Path(name))
    except (OSError, ValueError):
        return name, name


def host_name() -> str:
    """This rank's host name in a network: `WEFT_HOST_ID`, else the machine's host name."""
    return text("WEFT_HOST_ID") or socket.gethostname()
