"""Lab check: rxe and siw devices on two guests, and a ping-pong between them."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final

from lab.errors import LabError
from lab.rdma.guest import NETWORKS
from lab.rdma.guests import address, guests

if TYPE_CHECKING:
    from lab.rdma.guests import Guests

__all__ = ["check", "devices", "gid_index", "pingpong"]

#: Seconds for each step.
LIMIT: Final = 30.0
#: Messages per ping-pong.
ITERATIONS: Final = 1000


def check() -> dict[str, Any]:
    """Boot two guests and check them; measured figures.

    Raises:
        LabError: if a device is missing or the ping-pong fails.
    """
    begin = time.monotonic()
    with guests(count=2) as lab:
        boot = time.monotonic() - begin
        found = {f"guest{guest}": devices(lab, guest) for guest in (0, 1)}
        siw = {f"siw{network}" for network in range(NETWORKS)}
        lab.run(
            {guest: ["sh", "-ec", add_siw()] for guest in (0, 1)},
            LIMIT,
        )
        if missing := siw - set(devices(lab, 0)):
            raise LabError(
                f"guest 0: devices {' '.join(sorted(missing))}: missing from ibv_devinfo"
            )
        results = {
            f"rxe{network}": pingpong(lab, network, "--iters", str(ITERATIONS))
            for network in range(NETWORKS)
        }
        end = time.monotonic()
    return {
        "boot_s": round(boot, 3),
        "halt_s": round(time.monotonic() - end, 3),
        "devices": found,
        "siw": sorted(siw),
        "pingpong_us": results,
    }


def add_siw() -> str:
    """Script that adds an iWARP device to each NIC on a guest."""
    return "\n".join(
        f"rdma link add siw{network} type siw netdev vec{network}" for network in range(NETWORKS)
    )


def devices(lab: Guests, guest: int) -> dict[str, dict[str, str]]:
    """A guest's RDMA devices as `ibv_devinfo` lists them, with attributes by name."""
    text = lab.run({guest: ["ibv_devinfo"]}, LIMIT)[guest].stdout
    found: dict[str, dict[str, str]] = {}
    for name, body in re.findall(r"hca_id:\t(\S+)\n((?:.+\n)*)", text):
        found[name] = {
            key: value.strip() for key, value in re.findall(r"^\s+(\w+):\s+(.+)$", body, re.M)
        }
    return found


def gid_index(lab: Guests, guest: int, network: int) -> int:
    """GID index for a NIC's IPv4 address, with RoCEv2.

    Raises:
        LabError: if there is none.
    """
    folder = f"/sys/class/infiniband/rxe{network}/ports/1/gids"
    text = lab.run({guest: ["grep", "-r", "0000:ffff", folder]}, LIMIT, check=False)[guest].stdout
    indices = [int(found) for found in re.findall(r"/gids/(\d+):", text)]
    if not indices:
        raise LabError(f"guest {guest}: rxe{network}: no GID of an IPv4 address in {folder}")
    return min(indices)


def pingpong(lab: Guests, network: int, *options: str) -> float:
    """Microseconds per round trip by `ibv_rc_pingpong` from guest 1 to guest 0.

    Raises:
        LabError: if it fails.
    """
    index = gid_index(lab, 0, network)
    # Events: a poller would take the processor from the guest kernel.
    command = ["ibv_rc_pingpong", "-e", "-d", f"rxe{network}", "-g", str(index), *options]
    outcomes = lab.run(
        {0: command, 1: ["sh", "-c", waiting_client(command, address(0, network))]}, LIMIT
    )
    match = re.search(r"= ([\d.]+) usec/iter", outcomes[1].stdout)
    if match is None:
        raise LabError(f"ibv_rc_pingpong: expected its time\n{outcomes[1]}")
    return float(match[1])


def waiting_client(command: list[str], server: str) -> str:
    """Script for a client that tries until the server listens."""
    tries = f"{' '.join(command)} {server} && exit 0; sleep 0.1"
    return f"for i in $(seq 50); do {tries}; done; exit 1"
