"""Group membership: peers, control-plane collectives, progress and closing."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import weakref
from typing import TYPE_CHECKING, Final, Self

from weft.base.arguments import expect_bytes, expect_list, expect_text
from weft.base.environment import text
from weft.base.errors import WeftError
from weft.base.timeout import seconds
from weft.group.route import Route, Statistics
from weft.report.collect import ArrivalRecord, RankTrace, WriteRecord
from weft.report.events import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from weft import _native
    from weft.group.resource import Resource

__all__ = ["OPEN", "Group"]

#: Maximum length, in characters, when an exception's text is sent to other ranks.
MAX_DETAIL: Final = 200


class Group:
    """Base for `Communicator`: everything except memory and writes."""

    def __init__(self, native: _native.Communicator) -> None:
        self._native = native
        self._process = os.getpid()
        self._all_to_alls: weakref.WeakSet[Resource] = weakref.WeakSet()
        #: For the functions in `weft.fused`, by device; made by the first call that needs them.
        self._collectives: dict[torch.device, Resource] = {}
        #: Peers may write to these, so they live until they are closed.
        self._registered: set[Resource] = set()
        #: True if it serves an object that was made on another communicator.
        self.is_internal = False
        OPEN.add(self)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._native.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self._native.world_size

    @property
    def generation(self) -> int:
        """Re-formation count."""
        return self._native.generation

    @property
    def hosts(self) -> list[str]:
        """Host identity by rank."""
        return self._native.hosts

    def routes(self) -> list[str | None]:
        """Provider by rank, such as "shm"; `None` for this rank."""
        return self._native.routes()

    def provider_details(self) -> dict[str, dict[str, str]]:
        """Libraries and devices of this communicator's providers, for records.

        Returns:
            By provider, names and values. "ofi" has "provider" (in libfabric), "libfabric" (the
            version), "library" (the file) and "domains" (NICs, with commas). Providers without
            details are left out.
        """
        return self._native.provider_details()

    def route(self, peer: int) -> Route:
        """Route to a peer: provider and limits per part.

        Raises:
            UnknownError: if there is no such peer; there is no route to this rank itself.
        """
        return Route(*self._native.route(peer))

    def parts(self, peer: int, lengths: Iterable[int] = ()) -> int:
        """Lane raises by a write with these page lengths.

        A tcp write longer than the part limit raises the lane once per part, and the owner waits
        for all of them. Both ends compute the same number. `Counter.wait` takes lengths itself; for
        a round with several writes, sum over them::

            counter.wait({source: sum(communicator.parts(source, [each]) for each in lengths)})

        Args:
            peer: the other end, whichever end writes.
            lengths: bytes in each page, in order; none for a signal.

        Returns:
            Number of parts, at least 1.
        """
        return self._native.parts(peer, expect_list(lengths, "lengths"))

    def barrier(self, *, timeout: float = 30.0) -> None:
        """Every rank has entered before any leaves. It orders control, not data.

        Args:
            timeout: seconds; finite. After `WaitTimeoutError` a repeat continues the same barrier.

        Raises:
            StageError: if another thread in this process is in a barrier on this communicator; that
                barrier continues.
        """
        self._native.barrier(seconds(timeout))

    def all_gather(self, payload: bytes, *, timeout: float = 30.0) -> list[bytes]:
        """Each rank's bytes, in rank order, over the control plane: for small things."""
        return self._native.all_gather(expect_bytes(payload, "payload"), seconds(timeout))

    def raised(self) -> list[tuple[int, int, int]]:
        """Lanes that rose since this was last asked.

        Returns:
            For each, `Counter.number`, the peer, and the raises in the oldest round without a
            credit. Lanes whose wait has succeeded meanwhile are left out.
        """
        return self._native.raised()

    def fileno(self) -> int:
        """A descriptor to wait on in an event loop: readable, once armed, when `poll` has work.

        A communicator can therefore be registered with `selectors` directly, or with asyncio
        (https://docs.python.org/3/library/asyncio-eventloop.html#watching-file-descriptors). Poll
        until `arm` returns true, then sleep, and poll again::

            def turn():
                while True:
                    for counter, peer, count in communicator.poll():
                        ...  # a lane has risen: read, then give credit
                    if communicator.arm():
                        return

            asyncio.get_running_loop().add_reader(communicator, turn)
            turn()

        Poll a few times a second even without events: a broken connection is detected up to a
        second later. With `init(progress="thread")` a thread makes progress on tcp, and this
        descriptor only signals arrivals.
        """
        return self._native.fileno()

    def arm(self) -> bool:
        """Arm `fileno`; true if there is no work: the caller may sleep until it is readable.

        It stays armed until `poll` or `disarm`, across other calls on any thread. If such a call
        finds raises, credits, finished requests or callbacks, `fileno` becomes readable. In a
        poisoned group `arm` returns `False`, and `poll` raises the error. While armed, peers make a
        system call to wake this rank.
        """
        return self._native.arm()

    def disarm(self) -> None:
        """Undo `arm`: the caller is awake. `poll` does it too."""
        self._native.disarm()

    def poll(self) -> list[tuple[int, int, int]]:
        """Make progress without waiting: `disarm`, then what `raised` returns.

        Raises:
            GroupPoisonedError: or a subclass, if the group is dead.
        """
        self._native.disarm()
        rose = self._native.raised()
        self._native.check()
        return rose

    def statistics(self) -> list[Statistics]:
        """Traffic with each peer."""
        return [Statistics(*row) for row in self._native.statistics()]

    def take_trace(self) -> RankTrace:
        """Records since the last call; `init(trace_limit=...)` turns recording on."""
        writes, arrivals, phases, dropped = self._native.take_trace()
        ahead, error = self._native.clock_offsets()[self.rank]
        return RankTrace(
            self.rank,
            text("WEFT_HOST_ID") or platform.node(),
            ahead,
            error,
            [WriteRecord(*write) for write in writes],
            [ArrivalRecord(*arrival) for arrival in arrivals],
            [Phase(*phase) for phase in phases],
            dropped,
        )

    def check(self) -> None:
        """Raise the error that ended the group, if there is one."""
        self._native.check()

    def poison(self, detail: str) -> None:
        """Kill the group at every rank; they raise `GroupPoisonedError`."""
        self._native.poison(expect_text(detail, "detail"))

    def close(self) -> None:
        """Leave the group and free all resources. A second call has no effect.

        Any thread may call it, even a signal handler: all threads' waits end with `ClosedError`.
        Memory behind a live array stays until that array is gone. Every later call on this
        communicator, or on objects made on it, raises `ClosedError`. In a child forked after `init`
        it has no effect: the communicator belongs to the parent.
        """
        OPEN.discard(self)
        if os.getpid() != self._process:
            return
        # A thread that waits in an all-to-all holds it: that wait ends first.
        self._native.end_waits()
        for all_to_all in list(self._all_to_alls):
            all_to_all._abandon()
        for registered in list(self._registered):
            registered._abandon()
        self._registered.clear()
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is not None and not is_success(error):
            # A closed or superseded group, or a forked parent's, cannot be poisoned.
            with contextlib.suppress(WeftError):
                self._native.poison(one_line(error).encode(errors="replace").decode())
        self.close()


def is_success(error: BaseException) -> bool:
    """True for an exception with which a program ends successfully, such as `SystemExit(0)`."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def one_line(error: BaseException) -> str:
    """An exception's class and text, on one line, at most `MAX_DETAIL` characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(it has no text)"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= MAX_DETAIL else line[: MAX_DETAIL - 3] + "..."


#: Groups in this process that were not closed.
OPEN: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Leave every group in peace when the program ends: peers would take it for dead."""
    for communicator in list(OPEN):
        communicator.close()
