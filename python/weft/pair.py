"""Pairs: groups of two that form at run time between any two processes."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from typing import TYPE_CHECKING, Literal, Self

from weft import _native
from weft._arguments import expect, expect_names
from weft._environment import check_variables
from weft._timeout import seconds
from weft.communicator import Communicator
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["Listener", "connect", "connect_async", "listen"]

Provider = Literal["shm", "verbs", "ofi", "tcp"]


class Listener:
    """A port that other processes connect to; `listen` makes it.

    One listener serves any number of pairs. As a context manager it closes itself at the end of the
    block; the pairs that it accepted stay.
    """

    def __init__(self, native: _native.Listener) -> None:
        self._native = native

    @property
    def address(self) -> str:
        """`host:port` to give to `connect`, with the port that the system chose for port 0."""
        return self._native.address

    def accept(self, *, timeout: float = 30.0) -> Communicator:
        """The next pair: a communicator of two, in which this process is rank 0.

        Connections that hold another secret, or stall, are closed and the wait goes on.

        Args:
            timeout: seconds to wait, finite.

        Raises:
            WaitTimeoutError: no pair was formed in time.
            LimitError: this process has no descriptor left; a pair takes about 8 (`ulimit -n`).
            ClosedError: the listener was closed.
        """
        return Communicator(self._native.accept(seconds(timeout)))

    def try_accept(self) -> Communicator | None:
        """The next pair if one has formed, else None; for event loops (`fileno`).

        Call it until it returns None, then wait until `fileno` is readable. A dialler that stops in
        the last step of forming holds this call up for at most 2 s.

        Raises:
            LimitError, ClosedError: as `accept`.
        """
        native = self._native.try_accept()
        return None if native is None else Communicator(native)

    async def accept_async(self) -> Communicator:
        """As `accept`, driven by the running asyncio loop; cancel it to give up.

        Raises:
            LimitError, ClosedError: as `accept`.
        """
        loop = asyncio.get_running_loop()
        while True:
            if (pair := self.try_accept()) is not None:
                return pair
            readable = asyncio.Event()
            # A descriptor of its own: several tasks may accept at once.
            descriptor = os.dup(self.fileno())
            try:
                loop.add_reader(descriptor, readable.set)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(readable.wait(), POLL)
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def fileno(self) -> int:
        """A descriptor that is readable when `try_accept` has work."""
        return self._native.fileno()

    def close(self) -> None:
        """Stop listening. A second call has no effect. Pairs that were accepted stay."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


#: Seconds after which `accept_async` checks that the listener is open.
POLL = 0.5


def listen(
    address: str = "127.0.0.1:0",
    *,
    secret: bytes | None = None,
    providers: Sequence[Provider] | None = None,
) -> Listener:
    """Listen for processes that `connect`. All pairs of this listener share its one port.

    Args:
        address: `host:port` of this host; port 0 is any free port (`Listener.address`).
        secret: shared by both ends; by default WEFT_SECRET or WEFT_SECRET_FILE. Needed unless the
            address is of this host's loopback.
        providers: of shm, verbs, ofi and tcp: shm within a host, then verbs where both ends have
            RDMA NICs, then ofi where libfabric reaches the peer, then tcp. By default those of
            WEFT_PROVIDERS, where copy stands for shm; else shm and tcp.

    Raises:
        SecretError: the address can be reached from other hosts, and there is no secret.
        ListenError: the address is not of this host, or its port is in use.
        ConfigurationError: the address or a provider cannot be understood.
        ProviderError: verbs or ofi without its library or a NIC, or alone with TLS of payloads.
    """
    expect(address, str, "address")
    return Listener(_native.listen(address, secret=secret, providers=_names(providers)))


def connect(
    address: str,
    *,
    source: str | None = None,
    secret: bytes | None = None,
    providers: Sequence[Provider] | None = None,
    timeout: float = 30.0,
) -> Communicator:
    """Form a pair with the process that listens at `address`: a communicator of two, here rank 1.

    The other end is rank 0. Any number of pairs may exist, next to each other and to the
    communicator of `init`; the loss of a peer poisons its pair alone, within 2 s of its process's
    end, or WEFT_SILENCE_TIMEOUT after the process was stopped or its host fell silent. One thread
    of the process finds it for all pairs. `Communicator.reform` refuses a pair: connect again.

    Args:
        address: `host:port` of the listener.
        source: IP address of this host to connect from, for one of several NICs; by default the
            system chooses. Over verbs the pair uses the RDMA NIC that has the address.
        secret: shared by both ends; by default WEFT_SECRET or WEFT_SECRET_FILE.
        providers: as for `listen`, which needs one of them, too.
        timeout: seconds, finite. Until then a listener that is not there yet is dialled again.

    Raises:
        RendezvousError: the listener did not respond in time.
        SecretError: it holds another secret; or it is on another host, and there is no secret.
        WireVersionError: it uses another version of the pair protocol.
        NoRouteError: no provider that both have reaches it.
        LimitError: this process has no descriptor left (`ulimit -n`).
        ConfigurationError: `source` is no IP address, or not one of this host.
        ProviderError: verbs or ofi is among the providers, and this host has no library or NIC; or
            no NIC has the address `source`, which efa does not look at.
    """
    expect(address, str, "address")
    names = _names(providers)
    return Communicator(
        _native.connect(
            address,
            timeout=seconds(timeout),
            source=_ip_address(source),
            secret=secret,
            providers=names,
        )
    )


async def connect_async(
    address: str,
    *,
    source: str | None = None,
    secret: bytes | None = None,
    providers: Sequence[Provider] | None = None,
    timeout: float = 30.0,
) -> Communicator:
    """As `connect`, without blocking the running asyncio loop: a thread of its executor dials.

    Raises:
        RendezvousError, SecretError, WireVersionError, NoRouteError, LimitError,
        ConfigurationError: as `connect`.
    """

    def dial() -> Communicator:
        return connect(address, source=source, secret=secret, providers=providers, timeout=timeout)

    dialling = asyncio.get_running_loop().run_in_executor(None, dial)
    try:
        return await asyncio.shield(dialling)
    except asyncio.CancelledError:
        dialling.add_done_callback(_close)
        raise


def _close(dialled: asyncio.Future[Communicator]) -> None:
    """Close a pair that formed after its task was cancelled."""
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()


def _ip_address(source: str | None) -> str | None:
    if source is None:
        return None
    expect(source, str, "source")
    try:
        address = ipaddress.ip_address(source)
    except ValueError:
        address = None
    # An IPv6 address may name an interface, which the system's calls take apart from it.
    if address is None or getattr(address, "scope_id", None) is not None:
        raise ConfigurationError(
            f"source={source!r}: expected an IP address of this host, such as 10.0.0.1"
        )
    return str(address)


def _names(providers: Sequence[Provider] | None) -> list[str] | None:
    """The providers given, else those of WEFT_PROVIDERS, where copy stands for shm, else None."""
    check_variables()
    if providers is not None:
        expect_names(providers, "providers")
        return list(providers)
    named = [name.strip() for name in os.environ.get("WEFT_PROVIDERS", "").split(",")]
    names = ["shm" if name.startswith("copy") else name for name in named if name]
    return list(dict.fromkeys(names)) or None
