"""This host's addresses, for both families: a host may have IPv6 only."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path
from typing import Final

__all__ = ["LOOPBACKS", "family", "inet6_addresses", "joined", "loopback"]

#: IPv4 and IPv6 loopback.
LOOPBACKS: Final = ("127.0.0.1", "::1")


def family(address: str) -> socket.AddressFamily:
    """Address family for an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def loopback() -> str:
    """This host's loopback address: 127.0.0.1, or ::1 on a host with IPv6 only."""
    for address in LOOPBACKS:
        with contextlib.suppress(OSError), socket.socket(family(address)) as probe:
            probe.bind((address, 0))
            return address
    return LOOPBACKS[0]


def joined(host: str, port: int | str) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def inet6_addresses() -> list[tuple[str, int, str]]:
    """This host's IPv6 addresses with flags (linux/if_addr.h) and interfaces."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, _, flags, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            found.append((str(address), int(flags, 16), name))
    return found
