"""Environment for the ranks in a launch."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.base.addresses import LOOPBACKS, family, loopback
from weft.launch.outcome import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.launch.config import LaunchConfig

# For a group on several machines; would disturb a group on loopback with a separate secret.
OVERRIDDEN: Final = frozenset({"WEFT_ADVERTISE", "WEFT_BIND", "WEFT_SECRET_FILE"})

#: Linux port range for outgoing connections, and the default first port.
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_EPHEMERAL: Final = 32_768


def environments(config: LaunchConfig) -> Iterator[dict[str, str]]:
    """Each rank's environment."""
    hosts = config.pretended_hosts or 1
    host_of = list(config.hosts or ()) or [
        f"pretended-{rank * hosts // config.ranks}" for rank in range(config.ranks)
    ]
    address = loopback()
    common = {
        **{name: value for name, value in os.environ.items() if name not in OVERRIDDEN},
        "WEFT_WORLD_SIZE": str(config.ranks),
        "WEFT_ADDR": address,
        "WEFT_PORT": str(free_port(address)),
        "WEFT_SECRET": secrets.token_hex(32),
    }
    sizes = Counter(host_of)
    before: Counter[str] = Counter()
    for rank, host in enumerate(host_of):
        environment = common | {
            "WEFT_RANK": str(rank),
            "WEFT_LOCAL_RANK": str(before[host]),
            "WEFT_LOCAL_WORLD_SIZE": str(sizes[host]),
        }
        before[host] += 1
        if config.hosts is not None or config.pretended_hosts is not None:
            environment["WEFT_HOST_ID"] = host
        yield environment | dict(config.environment)


def free_port(address: str = LOOPBACKS[0]) -> int:
    """A free TCP port on a loopback address.

    It lies below the kernel's range for outgoing connections, so that no connection takes it before
    the ranks listen.

    Raises:
        LaunchError: if there is none, for example without the interface lo.
    """
    first_ephemeral = FIRST_EPHEMERAL
    last = OSError()
    # A container may have no /proc/sys.
    with contextlib.suppress(OSError, ValueError, IndexError):
        first_ephemeral = int(PORT_RANGE.read_text(encoding="ascii").split()[0])
    candidates = (
        random.sample(range(10_000, first_ephemeral), 64) if first_ephemeral > 11_000 else []
    )
    for port in [*candidates, 0]:
        try:
            with socket.socket(family(address)) as probe:
                probe.bind((address, port))
                return int(probe.getsockname()[1])
        except OSError as error:
            last = error
    raise LaunchError(f"no TCP port of {address} can be had; is the interface lo up?", last)
