"""Other libraries in `bench`, where their programs are installed: UCX and libfabric.

A UCX message is a put from registered memory, which its receiver polls for or, in a stream, does
not notice. A libfabric message is sent and received. Both poll, as Weft and perftest do.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lab.errors import LabError
from lab.rdma.check import waiting_client
from lab.rdma.guests import address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lab.rdma.guests import Guests

__all__ = ["LIMIT", "MESSAGES", "PEERS", "Peer", "Times", "figure", "installed", "messages"]

#: Microseconds per message by pattern, size and side.
Times = dict[tuple[str, int, str], float]

#: Seconds for one program.
LIMIT: Final = 120.0
#: Messages per ping-pong.
MESSAGES: Final = 200
#: Bytes that a stream moves.
STREAM_BYTES: Final = 16 << 20


def messages(size: int) -> int:
    """Messages per stream."""
    return max(16, min(2000, STREAM_BYTES // size))


@dataclass(frozen=True)
class Peer:
    """A library and the program that measures it.

    Attributes:
        name: column name.
        program: program name in PATH.
        package: the program's Debian package.
        measure: times by two guests, the program's path, sizes and the GID index.
    """

    name: str
    program: str
    package: str
    measure: Callable[[Guests, str, Sequence[int], int], Times]


def installed(report: Callable[[str], None]) -> list[tuple[Peer, str]]:
    """Peers whose programs are in PATH, with their paths; the others are reported by name."""
    found = []
    for peer in PEERS:
        path = shutil.which(peer.program)
        if path is None:
            report(f"{peer.name} is skipped: no {peer.program} in PATH (package {peer.package})")
        else:
            found.append((peer, path))
    return found


def ucx(lab: Guests, program: str, sizes: Sequence[int], index: int) -> Times:
    """Puts by UCX's transport layer over reliable connections.

    Its protocol layer connects by datagrams, whose endpoints do not connect over rxe.
    """
    found: Times = {}
    for size in sizes:
        for pattern, test, count, column in (
            # iterations, median, average, overall microseconds, ...
            ("ping-pong", "put_lat", MESSAGES, 1),
            ("stream", "put_bw", messages(size), 3),
        ):
            command = [program, "-d", "rxe0:1", "-x", "rc_verbs", "-D", "zcopy", "-f"]
            command += ["-t", test, "-s", str(size), "-n", str(count), "-w", "10"]
            text = client_output(lab, command, {"UCX_IB_GID_INDEX": str(index)})
            found[pattern, size, "ucx"] = figure(text, program, 8, column)
    return found


def libfabric(lab: Guests, program: str, sizes: Sequence[int], _index: int) -> Times:
    """Messages by libfabric over its verbs provider; the program has no stream."""
    found: Times = {}
    for size in sizes:
        command = [program, "-p", "'verbs;ofi_rxm'", "-e", "rdm"]
        command += ["-S", str(size), "-I", str(MESSAGES)]
        text = client_output(lab, command, {"FI_UNIVERSE_SIZE": "2"})
        # bytes, sent, acknowledged, total, time, MB/s, microseconds, millions of messages a second
        found["ping-pong", size, "libfabric"] = figure(text, program, 8, 6)
    return found


def client_output(lab: Guests, command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Output from a program in guest 1 that connects to the same in guest 0."""
    server = ["sh", "-c", " ".join(command)]
    client = ["sh", "-c", waiting_client(list(command), address(0))]
    return lab.run({0: server, 1: client}, LIMIT, variables)[1].stdout


def figure(text: str, program: str, columns: int, column: int) -> float:
    """Number in a column of a program's last output line.

    Raises:
        LabError: if the line has another column count, or no number in this one.
    """
    lines = text.strip().splitlines()
    fields = lines[-1].split() if lines else []
    if len(fields) != columns or not re.fullmatch(r"\d+(\.\d+)?", fields[column]):
        raise LabError(f"{program}: expected a number in column {column + 1} of {columns}:\n{text}")
    return float(fields[column])


PEERS: Final = (
    Peer("ucx", "ucx_perftest", "ucx-utils", ucx),
    Peer("libfabric", "fi_pingpong", "libfabric-bin", libfabric),
)
