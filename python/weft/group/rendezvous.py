"""Rendezvous for groups whose ranks can already exchange bytes.

They exchange small records in three all-gathers, over a torch.distributed group or over a
communicator that is being split: the group that each rank joins; rank 0's addresses in each group;
which addresses each other rank reaches. An error on one rank travels with them, so that no other
rank waits for one that has raised.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import secrets
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from weft import _native
from weft.base.addresses import family, inet6_addresses, joined, loopback
from weft.base.environment import text
from weft.base.errors import (
    AddressError,
    ConfigurationError,
    ConfigurationMismatchError,
    ListenError,
    RendezvousError,
    UnknownError,
)
from weft.base.threads import unavailable
from weft.base.timeout import seconds
from weft.group.group import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Outer", "meet", "over_torch"]

#: Documentation addresses, which belong to no host (RFC 3849,
#: https://www.rfc-editor.org/rfc/rfc5737). A datagram socket toward one gets the default route's
#: source address.
ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
#: Flags on IPv6 addresses that no other host reaches: failed or tentative duplicate detection.
UNUSABLE: Final = 0x08 | 0x40
#: Seconds to try connecting to a rank 0 address: a firewall may drop packets without a response.
PROBE: Final = 2.0
SECRET_BYTES: Final = 32
#: Asks Linux for an interface's IPv4 address.
SIOCGIFADDR: Final = 0x8915


class Outer(NamedTuple):
    """Ranks that exchange records: all callers of `meet`."""

    #: Each rank's bytes, in rank order.
    gather: Callable[[bytes], list[bytes]]
    rank: int
    world_size: int
    #: This rank's host identity.
    host: str
    #: Key that only these ranks share.
    key: bytes = b""
    #: The caller can pass `address`.
    takes_address: bool = True


def meet(
    outer: Outer,
    ranks: Sequence[int],
    options: dict[str, Any],
    *,
    address: str | None = None,
    timeout: float,
) -> _native.Communicator | None:
    """Form groups among the ranks in `outer`, all of which call this.

    Args:
        outer: all ranks.
        ranks: the ranks in this rank's group, in new rank order; a list without this rank if it is
            in no group.
        options: for `_native.init`.
        address: where the group's rank 0 listens, as seen from the others.
        timeout: seconds for everything except `outer.gather`.

    Returns:
        This rank's group; `None` if it is in none.
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

        def probe() -> list[bool | None]:
            if led is None or listener is not None:
                return []
            # All in parallel: each takes as long as a firewall makes it.
            with ThreadPoolExecutor(len(led["names"])) as threads:
                try:
                    return list(threads.map(lambda name: reaches(name, led["port"]), led["names"]))
                except RuntimeError as error:
                    raise unavailable("weft probe", error) from None

        reached = exchange(outer, probe)
        check_listening([] if led is None else [reached[each] for each in ranks[1:]], ranks)
        if led is None:
            return None
        name = common_name(
            led["names"],
            [reached[each] for each in ranks[1:]],
            ranks,
            takes_address=outer.takes_address,
        )
        given: dict[str, Any] = {} if listener is None else {"listener": listener.detach()}
        return _native.init(
            **options,
            **given,
            rank=list(ranks).index(outer.rank),
            world_size=len(ranks),
            address=joined(name, led["port"]),
            secret=hmac.digest(outer.key, bytes.fromhex(led["nonce"]), "sha256"),
            host_id=outer.host,
            timeout=max(until - time.monotonic(), 0.0),
        )


def exchange(outer: Outer, make: Callable[[], Any]) -> list[Any]:
    """`make()` results from all ranks, in rank order; exchanged as JSON.

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
    """Raise unless these are distinct ranks in a group with `world_size` ranks.

    Raises:
        ConfigurationError: if there are none, or one twice.
        UnknownError: if one is not in the group.
    """
    if not ranks or len(set(ranks)) != len(ranks):
        raise ConfigurationError(f"ranks={list(ranks)}: expected distinct ranks, at least one")
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise UnknownError(f"ranks={list(ranks)}: rank {rank} is none of 0 to {world_size - 1}")


def check_plans(plans: Sequence[Sequence[int]]) -> None:
    """Raise unless each group's members name the same ranks in the same order.

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
    """Listening socket, and names or addresses at which others may reach it, best first.

    Args:
        address: `host` or `host:port`, if the caller has named it.
        alone: all ranks in the group are on this host.

    Raises:
        AddressError: if the address cannot be understood.
        ListenError: if it is not on this host, or the port is in use.
    """
    bind = text("WEFT_BIND")
    advertised = text("WEFT_ADVERTISE") or bind
    if address is not None:
        host, port = host_and_port(address)
        names, place = [host], host if is_address(host) else bind
    elif alone and not advertised:
        place, port = loopback(), 0
        names = [place]
    else:
        names = [advertised] if advertised else own_addresses()
        place, port = bind, 0
    try:
        return open_listener(place, port), names
    except OSError as error:
        remedy = "is the interface lo up?"
        if address is not None:
            remedy = "pass address= of this host with a free port, or port 0"
        elif bind:
            remedy = "set WEFT_BIND to an address of this host"
        where = place or "every address"
        raise ListenError(f"{where}, port {port}: {error.strerror or error}; {remedy}") from error


def open_listener(place: str, port: int) -> socket.socket:
    """Socket that listens at an address, or at all addresses if `place` is empty."""
    if place:
        return socket.create_server((place, port), family=family(place))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def own_addresses() -> list[str]:
    """This host's addresses in order: default route, host name, interfaces; loopback last."""
    found: list[str] = []
    for elsewhere in ELSEWHERE:
        with (
            contextlib.suppress(OSError),
            socket.socket(family(elsewhere), socket.SOCK_DGRAM) as route,
        ):
            # No packet leaves: this only looks the route up.
            route.connect((elsewhere, 9))
            found.append(route.getsockname()[0])
    with contextlib.suppress(OSError):
        named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(each[4][0]) for each in named]
    found += interface_addresses()
    outside = [each for each in found if is_reachable(ipaddress.ip_address(each))]
    return [*dict.fromkeys(outside), loopback()]


def is_reachable(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """True for an address that other hosts may reach without an interface name."""
    return not (address.is_loopback or (address.version == 6 and address.is_link_local))


def interface_addresses() -> list[str]:
    """IPv4 address for each network interface that has one, and IPv6 addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            # An interface without an address is an error.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return found + [each for each, flags, _ in inet6_addresses() if not flags & UNUSABLE]


def reaches(name: str, port: int) -> bool | None:
    """True if rank 0 accepts a connection at this name; `None` if it has no listener there."""
    try:
        socket.create_connection((name, port), PROBE).close()
    except ConnectionRefusedError:
        return None
    except OSError:
        return False
    return True


def check_listening(reached: Sequence[Sequence[bool | None]], ranks: Sequence[int]) -> None:
    """Raise if rank 0 has closed its listener, which it opened before sending addresses.

    Raises:
        RendezvousError: on every rank in the group alike; names a rank that came too late.
    """
    for rank, each in enumerate(reached, 1):
        if all(one is None for one in each):
            error = RendezvousError(
                f"rank {rank} (rank {ranks[rank]} of those that met) came when rank 0 no longer "
                "listened: rank 0 has given up, for example after its timeout; start the ranks "
                "together, or pass a longer timeout"
            )
            error.rank = 0
            raise error


def common_name(
    names: Sequence[str],
    reached: Sequence[Sequence[bool]],
    ranks: Sequence[int],
    *,
    takes_address: bool = True,
) -> str:
    """First name for rank 0 that all others reach.

    Raises:
        RendezvousError: on every rank in the group alike, if there is none; names a rank that
            cannot connect.
    """
    for name, each in zip(names, zip(*reached, strict=True), strict=True) if reached else ():
        if all(each):
            return name
    if not reached:
        return names[0]
    rank = 1 + next(at for at, each in enumerate(reached) if not each[0])
    error = RendezvousError(
        f"rank {rank} (rank {ranks[rank]} of those that met) cannot connect to rank 0 at "
        f"{', '.join(names)}: no address of it is reached by all; "
        + ("pass address= with one that is, or " if takes_address else "")
        + "set WEFT_ADVERTISE (and WEFT_BIND, if it listens there only) on its host to one that is"
    )
    error.rank = rank
    raise error


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port in `host`, `host:port`, `[v6]:port` or an IPv6 address; port 0 if not given.

    Raises:
        AddressError: if it is none of these.
    """
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if is_address(bare):
        return bare, 0
    host, _, port = address.rpartition(":") if ":" in address else (address, "", "0")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise AddressError(f"address={address!r}: expected HOST, HOST:PORT or [IPV6]:PORT")
    return host.strip("[]"), int(port)


def is_address(host: str) -> bool:
    """True for an IP address, as opposed to a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def over_torch(group: Any, host: str | None) -> Outer:
    """Ranks in a torch.distributed group, which exchange records over it.

    Args:
        group: a process group; `None` for the default one.
        host: this rank's host identity; by default the machine's.

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

    key = _native.environment_key("rendezvous") or b""
    return Outer(gather, rank, world_size, host or _native.host_id(), key)
