"""Environment of the ranks of a launch."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.launch.config import LaunchConfig

# Meant for a group of several machines, and in the way of one on loopback with a secret of its own.
OVERRIDDEN: Final = frozenset({"WEFT_ADVERTISE", "WEFT_BIND", "WEFT_SECRET_FILE"})

#: Linux's range of ports for outgoing connections, and the default of its first port.
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_EPHEMERAL: Final = 32_768


def environments(config: LaunchConfig) -> Iterator[dict[str, str]]:
    """Each rank's environment."""
    hosts = config.pretended_hosts or 1
    host_of = list(config.hosts or ()) or [
        f"pretended-{rank * hosts // config.ranks}" for rank in range(config.ranks)
    ]
    common = {
        **{name: value for name, value in os.environ.items() if name not in OVERRIDDEN},
        "WEFT_WORLD_SIZE": str(config.ranks),
        "WEFT_ADDR": "127.0.0.1",
        "WEFT_PORT": str(free_port()),
        "WEFT_SECRET": secrets.token_hex(32),
    }
    for rank, host in enumerate(host_of):
        environment = common | {
            "WEFT_RANK": str(rank),
            "WEFT_LOCAL_RANK": str(host_of[:rank].count(host)),
            "WEFT_LOCAL_WORLD_SIZE": str(host_of.count(host)),
        }
        if config.hosts is not None or config.pretended_hosts is not None:
            environment["WEFT_HOST_ID"] = host
        yield environment | dict(config.environment)


def free_port() -> int:
    """A free TCP port of loopback.

    From below the kernel's range for outgoing connections, so that none of those takes it before
    the ranks listen.
    """
    first_ephemeral = FIRST_EPHEMERAL
    # A container may have no /proc/sys.
    with contextlib.suppress(OSError, ValueError, IndexError):
        first_ephemeral = int(PORT_RANGE.read_text(encoding="ascii").split()[0])
    candidates = (
        random.sample(range(10_000, first_ephemeral), 64) if first_ephemeral > 11_000 else []
    )
    for port in [*candidates, 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("no TCP port of 127.0.0.1 is free")
