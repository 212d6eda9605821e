"""Rendezvous of groups whose ranks can already exchange bytes.

They exchange them over a group of torch.distributed, or over a communicator that is split, in three
all-gathers of small records: the group that each rank joins; the addresses of rank 0 of each group;
those of them that each of the others reaches. An error of one rank travels with them, so that no
other rank waits for one that has raised.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from weft import _native
from weft._group import one_line
from weft._timeout import seconds
from weft.errors import (
    AddressError,
    ConfigurationError,
    ConfigurationMismatchError,
    ListenError,
    RendezvousError,
    UnknownError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Outer", "meet", "over_torch"]

LOOPBACK: Final = "127.0.0.1"
#: An address of no host (RFC 5737): a datagram socket toward it has the default route's source.
ELSEWHERE: Final = ("192.0.2.1", 9)
#: Seconds for a connection to an address of rank 0: a firewall may drop it without a response.
PROBE: Final = 2.0
SECRET_BYTES: Final = 32
#: Asks Linux for an interface's IPv4 address.
SIOCGIFADDR: Final = 0x8915


class Outer(NamedTuple):
    """The ranks that exchange the records: all callers of `meet`."""

    #: Each rank's bytes, in rank order.
    gather: Callable[[bytes], list[bytes]]
    rank: int
    world_size: int
    #: Host identity of this rank.
    host: str
    #: Key shared by the ranks alone.
    key: bytes = b""


def meet(
    outer: Outer,
    ranks: Sequence[int],
    options: dict[str, Any],
    *,
    address: str | None = None,
    timeout: float,
) -> _native.Communicator | None:
    """Form groups of some of the ranks of `outer`, all of which call this.

    Args:
        outer: all ranks.
        ranks: those of this rank's group, in the order of their new ranks; a list without this rank
            if it is in none.
        options: of `_native.init`.
        address: where rank 0 of the group listens, as seen from the others.
        timeout: seconds for all of it, apart from what `outer.gather` takes.

    Returns:
        The group of this rank; `None` if it is in none.
    """
    until = time.monotonic() + seconds(timeout)

    def plan() -> dict[str, Any]:
        check_ranks(ranks, outer.world_size)
        if options.get("providers"):
            _native.check_providers(list(options["providers"]))
        return {"ranks": list(ranks), "host": outer.host}

    plans = exchange(outer, plan)
    check_plans([each["ranks"] for each in plans])
    mine = outer.rank in ranks
    hosts = {plans[each]["host"] for each in ranks}
    with contextlib.ExitStack() as stack:
        listener: socket.socket | None = None

        def lead() -> dict[str, Any] | None:
            nonlocal listener
            if not mine or ranks[0] != outer.rank:
                return None
            listener, names = listen(address, alone=len(hosts) == 1)
            stack.callback(listener.close)
            port = listener.getsockname()[1]
            return {"port": port, "names": names, "nonce": secrets.token_hex(SECRET_BYTES)}

        leaders = exchange(outer, lead)
        led = leaders[ranks[0]] if mine else None

        def probe() -> list[bool]:
            if led is None or listener is not None:
                return []
            # All at once: each may take as long as a firewall makes it.
            with ThreadPoolExecutor(len(led["names"])) as threads:
                return list(threads.map(lambda name: reaches(name, led["port"]), led["names"]))

        reached = exchange(outer, probe)
        if led is None:
            return None
        name = common_name(led["names"], [reached[each] for each in ranks[1:]], ranks)
        given: dict[str, Any] = {} if listener is None else {"listener": listener.detach()}
        return _native.init(
            **options,
            **given,
            rank=list(ranks).index(outer.rank),
            world_size=len(ranks),
            address=f"[{name}]:{led['port']}" if ":" in name else f"{name}:{led['port']}",
            secret=hmac.digest(outer.key, bytes.fromhex(led["nonce"]), "sha256"),
            host_id=outer.host,
            timeout=max(until - time.monotonic(), 0.0),
        )


def exchange(outer: Outer, make: Callable[[], Any]) -> list[Any]:
    """Results of `make` on all ranks, in rank order; exchanged as JSON.

    Raises:
        RendezvousError: if it raised on another rank; names the rank and the error.
    """
    failure: Exception | None = None
    try:
        record = {"value": make()}
    except Exception as error:
        failure, record = error, {"error": one_line(error)}
    gathered = [json.loads(each) for each in outer.gather(json.dumps(record).encode())]
    if failure is not None:
        raise failure
    for peer, each in enumerate(gathered):
        if "error" in each:
            refused = RendezvousError(f"rank {peer} cannot join: {each['error']}")
            refused.rank = peer
            raise refused
    return [each["value"] for each in gathered]


def check_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Raise unless these are distinct ranks of a group of `world_size`.

    Raises:
        ConfigurationError: if there are none, or one twice.
        UnknownError: if one is no rank of the group.
    """
    if not ranks or len(set(ranks)) != len(ranks):
        raise ConfigurationError(f"ranks={list(ranks)}: expected distinct ranks, at least one")
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise UnknownError(f"ranks={list(ranks)}: rank {rank} is none of 0 to {world_size - 1}")


def check_plans(plans: Sequence[Sequence[int]]) -> None:
    """Raise unless the members of each group name the same ranks in the same order.

    Raises:
        ConfigurationMismatchError: on every rank alike; names two that contradict each other.
    """
    for rank, ranks in enumerate(plans):
        if rank not in ranks:
            continue
        for member in ranks:
            if plans[member] != ranks:
                mismatch = ConfigurationMismatchError(
                    f"split: rank {rank} passed ranks={list(ranks)}, rank {member} passed "
                    f"ranks={list(plans[member])}; pass the same list, in the same order, on every "
                    "member of a group"
                )
                mismatch.rank = member
                raise mismatch


def listen(address: str | None, *, alone: bool) -> tuple[socket.socket, list[str]]:
    """A socket that listens, and names or addresses at which others may reach it, best first.

    Args:
        address: `host` or `host:port`, if the caller has named it.
        alone: all ranks of the group are on this host.

    Raises:
        AddressError: if the address cannot be understood.
        ListenError: if it is not of this host, or its port is in use.
    """
    bind = os.environ.get("WEFT_BIND", "").strip()
    advertised = os.environ.get("WEFT_ADVERTISE", "").strip() or bind
    if address is not None:
        host, port = host_and_port(address)
        names, place = [host], host if is_address(host) else bind
    elif alone and not advertised:
        names, place, port = [LOOPBACK], LOOPBACK, 0
    else:
        names = [advertised] if advertised else own_addresses()
        place, port = bind, 0
    try:
        return open_listener(place, port), names
    except OSError as error:
        where = place or "every address"
        raise ListenError(
            f"{where}, port {port}: {error.strerror or error}; pass address= of this host with a "
            "free port, or port 0"
        ) from error


def open_listener(place: str, port: int) -> socket.socket:
    """A socket that listens at an address, or at all of them if `place` is empty."""
    if place:
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        return socket.create_server((place, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def own_addresses() -> list[str]:
    """Addresses of this host, loopback last.

    First that of its default route, then those of its name, then those of its interfaces.
    """
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        # No packet leaves: this only looks the route up.
        route.connect(ELSEWHERE)
        found.append(route.getsockname()[0])
    with contextlib.suppress(OSError):
        named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(each[4][0]) for each in named]
    found += interface_addresses()
    outside = [each for each in found if not ipaddress.ip_address(each).is_loopback]
    return [*dict.fromkeys(outside), LOOPBACK]


def interface_addresses() -> list[str]:
    """The IPv4 address of each network interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            # An interface without an address is an error.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def reaches(name: str, port: int) -> bool:
    """True if rank 0 accepts a connection at this name."""
    try:
        socket.create_connection((name, port), PROBE).close()
    except OSError:
        return False
    return True


def common_name(
    names: Sequence[str], reached: Sequence[Sequence[bool]], ranks: Sequence[int]
) -> str:
    """The first name of rank 0 that all others reach.

    Raises:
        RendezvousError: on every rank of the group alike, if there is none; names a rank that does
            not reach it.
    """
    for name, each in zip(names, zip(*reached, strict=True), strict=True) if reached else ():
        if all(each):
            return name
    if not reached:
        return names[0]
    rank = 1 + next(at for at, each in enumerate(reached) if not each[0])
    error = RendezvousError(
        f"rank {rank} (rank {ranks[rank]} of those that met) cannot connect to rank 0 at "
        f"{', '.join(names)}: no address of it is reached by all; pass address= with one that is"
    )
    error.rank = rank
    raise error


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host`, `host:port`, `[v6]:port` or an IPv6 address; port 0 if there is none.

    Raises:
        AddressError: if it is none of these.
    """
    if is_address(address):
        return address, 0
    host, _, port = address.rpartition(":") if ":" in address else (address, "", "0")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise AddressError(f"address={address!r}: expected HOST or HOST:PORT")
    return host.strip("[]"), int(port)


def is_address(host: str) -> bool:
    """True for an IP address, as opposed to a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def over_torch(group: Any, host: str | None) -> Outer:
    """The ranks of a group of torch.distributed, which exchange records over it.

    Args:
        group: a process group; `None` for the default one.
        host: the host identity of this rank; by default the machine's.

    Raises:
        ConfigurationError: if there is no torch or no such group, or this process is not in it.
    """
    try:
        import torch
        from torch import distributed
    except ModuleNotFoundError as error:
        raise ConfigurationError("from_group needs PyTorch: pip install 'weft[torch]'") from error
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigurationError(
            "from_group: torch.distributed has no process group; call "
            "torch.distributed.init_process_group first, or weft.init without one"
        )
    rank, world_size = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise ConfigurationError(
            "from_group: this process is no member of the process group; call it on members only"
        )
    backends = distributed.get_backend_config(group)
    kinds = [each.partition(":")[0] for each in backends.split(",")]
    kind = "cpu" if "cpu" in kinds else kinds[0]
    device = torch.device("cpu" if kind == "cpu" else kind)

    def gather(payload: bytes) -> list[bytes]:
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        lengths = [torch.empty_like(length) for _ in range(world_size)]
        distributed.all_gather(lengths, length, group=group)
        sizes = [int(each) for each in lengths]
        padded = bytearray(payload.ljust(max(sizes), b"\0"))
        sent = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        received = [torch.empty_like(sent) for _ in range(world_size)]
        distributed.all_gather(received, sent, group=group)
        return [
            bytes(each.cpu().numpy()[:size]) for each, size in zip(received, sizes, strict=True)
        ]

    return Outer(gather, rank, world_size, host or _native.host_id())
