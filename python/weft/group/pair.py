"""Pairs: groups with two ranks, formed at run time between any two processes."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import weakref
from typing import TYPE_CHECKING, Literal, Protocol, Self

from weft import _native
from weft.base.arguments import expect, expect_bytes, expect_names, expect_text
from weft.base.environment import check_variables
from weft.base.environment import providers as named_providers
from weft.base.errors import ConfigurationError
from weft.base.timeout import seconds
from weft.group.communicator import Communicator
from weft.group.options import show_nvrtc_to_copies

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["Listener", "connect", "connect_async", "listen"]

Provider = Literal["copy", "copy-twin", "shm", "verbs", "ofi", "tcp"]


class Listener:
    """A port that other processes connect to, made by `listen`.

    One listener serves any number of pairs. As a context manager it closes itself at the end of the
    block; accepted pairs stay.
    """

    def __init__(self, native: _native.Listener) -> None:
        self._native = native
        #: One task per loop waits for the port at a time.
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def address(self) -> str:
        """`host:port` to give to `connect`, with the port that the system chose for port 0."""
        return self._native.address

    def accept(self, *, timeout: float = 30.0) -> Communicator:
        """The next pair: a communicator with two ranks, in which this process is rank 0.

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

        Call it until it returns None, then wait until `fileno` is readable. If a peer stops in the
        last forming step, this call is held up for at most 2 s.

        Raises:
            LimitError, ClosedError: as in `accept`.
        """
        native = self._native.try_accept()
        return None if native is None else Communicator(native)

    async def accept_async(self) -> Communicator:
        """`accept` without a time limit and without blocking the running asyncio loop.

        While a pair forms, a thread in this listener takes the steps; the loop's executor is not
        used. Cancel it to give up: a pair in the last step then goes to the next `accept`.

        Raises:
            LimitError, ClosedError: as in `accept`.
        """
        loop = asyncio.get_running_loop()
        async with self._turns.setdefault(loop, asyncio.Lock()):
            while True:
                if not self._native.has_formed():
                    # A separate descriptor: other loops may accept, too.
                    with (
                        os.fdopen(os.dup(self.fileno()), "rb", buffering=0) as port,
                        contextlib.suppress(TimeoutError),
                    ):
                        # wait_for of Python 3.11 loses a cancellation that comes with the result.
                        async with asyncio.timeout(POLL):
                            await _readable(port)
                step = self._native.step()
                await _readable(step)
                if (native := step.take()) is not None:
                    return Communicator(native)

    def fileno(self) -> int:
        """A descriptor that is readable when `try_accept` has work."""
        return self._native.fileno()

    def close(self) -> None:
        """Stop listening. A second call has no effect. Accepted pairs stay."""
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


#: Seconds between checks in `accept_async` for a closed listener and stalled peers.
POLL = 0.5


def listen(
    address: str = "localhost:0",
    *,
    secret: bytes | None = None,
    providers: Sequence[Provider] | None = None,
) -> Listener:
    """Listen for processes that `connect`. All pairs from this listener share one port.

    Args:
        address: `host:port` on this host, `[v6]:port` for an IPv6 address; port 0 is any free port
            (`Listener.address`). `localhost` is 127.0.0.1, or ::1 on a host with IPv6 only.
        secret: shared by both ends; by default WEFT_SECRET or WEFT_SECRET_FILE. Needed unless the
            address is loopback on this host, where without a secret only processes that run as this
            user or as root can connect.
        providers: copy, shm, verbs, ofi and tcp are allowed: copy within a host where both ends
            have it, for GPU memory ("copy-twin" has CPU memory in place of GPUs, for tests), then
            shm, then verbs where both ends have RDMA NICs, then ofi where libfabric reaches the
            peer, then tcp. By default WEFT_PROVIDERS, else shm and tcp.

    Raises:
        SecretError: the address can be reached from other hosts, and there is no secret.
        ListenError: the address is not on this host, or the port is in use.
        ConfigurationError: the address or a provider cannot be understood.
        ProviderError: verbs or ofi lacks a library or a NIC, or is the only provider while
            payloads use TLS; copy lacks a CUDA driver.
    """
    expect_text(address, "address")
    return Listener(_native.listen(address, secret=_secret(secret), providers=_names(providers)))


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
    communicator from `init`. Losing a peer poisons only its own pair, within 2 s after the process
    ends, or WEFT_SILENCE_TIMEOUT after the process was stopped or the host fell silent. One thread
    in the process detects losses for all pairs. `Communicator.reform` refuses a pair: connect
    again.

    Args:
        address: the listener's `host:port`, for example "10.0.0.2:29600".
        source: IP address on this host to connect from, if there are several NICs; by default the
            system chooses. Over verbs the pair uses the RDMA NIC that has the address.
        secret: shared by both ends; by default WEFT_SECRET or WEFT_SECRET_FILE.
        providers: as in `listen`; the two ends need one in common.
        timeout: seconds, finite. Until then, a listener that is not there yet is dialled again.

    Raises:
        RendezvousError: the listener did not respond in time.
        SecretError: it holds another secret; or it is on another host, and there is no secret.
        WireVersionError: it uses another version of the pair protocol.
        NoRouteError: no provider that both have reaches it.
        LimitError: this process has no descriptor left (`ulimit -n`).
        ConfigurationError: `source` is no IP address, or not on this host.
        ProviderError: verbs or ofi is among the providers, and this host has no library or NIC; or
            no NIC has the address `source`, which efa does not look at.
    """
    expect_text(address, "address")
    names = _names(providers)
    return Communicator(
        _native.connect(
            address,
            timeout=seconds(timeout),
            source=_ip_address(source),
            secret=_secret(secret),
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
    """`connect` without blocking the running asyncio loop: a separate thread dials.

    Cancel it to give up: that thread, and the half-formed pair, is gone within 0.1 s. A name lookup
    keeps a resolver thread until the name server has responded.

    Raises:
        RendezvousError, SecretError, WireVersionError, NoRouteError, LimitError,
        ConfigurationError: as in `connect`.
    """
    expect_text(address, "address")
    names = _names(providers)
    dial = _native.dial(
        address,
        timeout=seconds(timeout),
        source=_ip_address(source),
        secret=_secret(secret),
        providers=names,
    )
    try:
        await _readable(dial)
        return Communicator(dial.take())
    finally:
        # No effect once the pair was taken.
        dial.cancel()


class _Descriptor(Protocol):
    def fileno(self) -> int: ...


async def _readable(source: _Descriptor) -> None:
    """Wait in the running loop until a descriptor is readable."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(source.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        # A task dropped after the loop ended gets here, too.
        if not loop.is_closed():
            loop.remove_reader(source.fileno())


def _secret(secret: bytes | None) -> bytes | None:
    return None if secret is None else expect_bytes(secret, "secret")


def _ip_address(source: str | None) -> str | None:
    if source is None:
        return None
    expect(source, str, "source")
    try:
        address = ipaddress.ip_address(source)
    except ValueError:
        address = None
    # An IPv6 address may name an interface, which system calls take separately.
    if address is None or getattr(address, "scope_id", None) is not None:
        raise ConfigurationError(
            f"source={source!r}: expected an IP address of this host, such as 10.0.0.1"
        )
    return str(address)


def _names(providers: Sequence[Provider] | None) -> list[str] | None:
    """The given providers, else WEFT_PROVIDERS, else None."""
    check_variables()
    named = named_providers() if providers is None else expect_names(providers, "providers")
    names = None if named is None else list(named)
    show_nvrtc_to_copies(names)
    return names
