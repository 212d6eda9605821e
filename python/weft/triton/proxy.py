"""Proxy: a host thread that sends kernels' puts to ranks on any host."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
import torch

from weft import _native
from weft.base import environment
from weft.base.arguments import expect, expect_list, expect_number, expect_range, expect_text, shown
from weft.base.errors import (
    ConfigurationError,
    ShapeError,
    WeftError,
)
from weft.base.timeout import seconds
from weft.gpu.device import place_of
from weft.gpu.errors import ON_DEVICES
from weft.group.communicator import Communicator
from weft.group.sharing import check_equal
from weft.triton import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weft.group.region import Region, RemoteRegion

__all__ = ["Proxy"]

logger = logging.getLogger("weft")

#: Longest put by default, in bytes, where all routes carry that in one part.
_PUT_BYTES: Final = 1 << 20
#: Rounds of a word toward one rank that may be open.
_ROUNDS: Final = 16
#: Homes of the words.
_HOMES: Final = ("auto", "gdrcopy", "pinned", "gpu")
#: Puts in the proxy that wait for a round, or whose source is still read.
_OUTSTANDING = 1024


class Proxy:
    """Windows that ranks on all hosts put into, and the thread that sends kernels' puts.

    A kernel on any rank puts with `weft.triton.remote_put_signal` and waits with `remote_wait`; the
    bytes go from window to window by counted writes, over the communicator's providers. A GPU
    cannot start a transfer on most NICs; within a host, stores over NVLink
    (`weft.triton.put_signal`) are faster. For example::

        with weft.triton.Proxy(communicator, [4096, 4096], words=2) as proxy:
            outbox, inbox = (window.view(torch.int32) for window in proxy.windows)
            kernel[1,](proxy.context, outbox, inbox, ...)
            torch.cuda.synchronize()
            proxy.check()

    A word counts the rounds that a rank has put toward it, and 16 rounds toward one word at one
    rank may be open. A round is given back to its source when the word rises, so the destination's
    kernel says by a word of its own when it has read the bytes; or, with `hold`, by
    `remote_release`.

    All ranks make it together, with equal `words`, `hold` and `max_put_bytes` and as many windows.
    They close it together, or the communicator is closed first. Keep it while kernels and graphs
    with its `context` exist, also once it was closed.

    Args:
        communicator: ranks on any number of hosts.
        windows: memory on `device`, as many on each rank: a number allocates that many zeroed
            bytes; a contiguous tensor is registered as `Communicator.register` does, where the
            routes to all peers allow it as a destination. Windows on a GPU need WEFT_STAGED=1,
            copy, or NICs that reach the GPU.
        words: number of words, 1 to 64, for each source.
        hold: words that kernels give back by `remote_release`; the others are given back at once.
        templates: for `remote_scatter`, lists with `(rank, source_offset, offset)` for each
            destination, another rank each time: bytes added to the command's offsets. They may
            differ between ranks.
        lengths: entries in the list of lengths that `remote_scatter` names; by default 16 for each
            destination in the longest template.
        device: where the kernels run: a GPU, or "twin" for the interpreter.
        slots: commands in the ring, a power of two from 2 to 65,536.
        max_put_bytes: longest put in bytes; by default 1 MiB, or less if a route's longest part is
            shorter.
        timeout: time limit in seconds for a wait in a kernel.
        idle: "nap": without work for 10 ms the thread sleeps for 100 µs between polls, which adds
            as much to the next put; "spin": it always polls. Where ranks share cores, it naps after
            64 polls with both. By default WEFT_PROXY_IDLE, or "nap".
        core: the thread's core, another for each rank; "auto": one in this process's affinity mask
            on the GPU's NUMA node, where the kernel names the node, or else any; "any": where the
            system runs it. By default WEFT_PROXY_CORE, or "auto".
        words_home: memory for the words. "auto": "gdrcopy" where that works, else "pinned".
            "gdrcopy": on the GPU, where the thread raises a word by a store through GDRCopy's
            mapping, and every wait polls its own GPU. It needs x86-64, `/dev/gdrdrv` and libgdrapi
            (`weft doctor`), and has not run on GDRCopy yet. "pinned": on the host, where the thread
            raises a word by a store; of the programs that wait for one word, one reads it over PCIe
            for all. "gpu": on the GPU, where the thread raises it by a write on a CUDA stream. That
            is a call of CUDA for each word, which waits where other threads keep the context
            locked. Bursts of many puts did not end with it on a GPU (docs/triton.md).
        setup_timeout: seconds to wait for all ranks.

    Attributes:
        context: int64 tensor, the kernels' argument.
        windows: tensors; uint8 `[bytes]` for those that were numbers.
        local: communicator with this host's ranks. The contexts of its symmetric tensors
            (`weft.symmetric_empty(..., communicator=proxy.local)`) also serve as `context`.
        max_put_bytes: longest put in bytes.
        words_home: memory that the words are in: "gdrcopy", "pinned" or "gpu".

    Raises:
        ConfigurationError: if an argument is out of range.
        ConfigurationMismatchError: if ranks pass different arguments.
        RegionError: if a provider cannot reach a window's memory.
        ProviderError, DeviceError: with `words_home="gdrcopy"`, if GDRCopy is missing, or cannot
            map the GPU's memory. The other ranks then wait until `setup_timeout`.
        WaitTimeoutError: if other ranks do not come within `setup_timeout`.
    """

    def __init__(
        self,
        communicator: Communicator,
        windows: Sequence[Any],
        *,
        words: int = 8,
        hold: Sequence[int] = (),
        templates: Sequence[Sequence[tuple[int, int, int]]] = (),
        lengths: int | None = None,
        device: object = "cuda",
        slots: int = 1024,
        max_put_bytes: int | None = None,
        timeout: float = 10.0,
        idle: Literal["nap", "spin"] | None = None,
        core: int | Literal["auto", "any"] | None = None,
        words_home: Literal["auto", "gdrcopy", "pinned", "gpu"] = "auto",
        setup_timeout: float = 60.0,
    ) -> None:
        expect(communicator, Communicator, "communicator")
        windows = expect_list(windows, "windows")
        words = expect_range(words, "words", 1, 64)
        held = [expect_range(word, "hold", 0, words - 1) for word in expect_list(hold, "hold")]
        listed = _templates(templates, communicator)
        longest = max(map(len, listed), default=0)
        if lengths is None:
            lengths = _ROUNDS * longest
        lengths = expect_range(lengths, "lengths", longest, 1 << 20)
        slots = expect_range(slots, "slots", 2, 1 << 16)
        if slots & (slots - 1):
            raise ConfigurationError(f"slots={slots}: expected a power of two; pass 1024")
        if max_put_bytes is not None:
            max_put_bytes = expect_range(max_put_bytes, "max_put_bytes", 1, 1 << 40)
        chosen_idle, chosen_core = _idle(idle), _core(core)
        if expect_text(words_home, "words_home") not in _HOMES:
            names = ", ".join(f'"{name}"' for name in _HOMES)
            raise ConfigurationError(f"words_home={shown(words_home)}: expected one of {names}")
        limit, until = seconds(timeout), time.monotonic() + seconds(setup_timeout)
        name, place = place_of(device)
        if not 1 <= len(windows) <= 1 << 16:
            raise ConfigurationError(f"{len(windows)} windows: expected 1 to 65536")
        for window in windows:
            _check_window(window, place)

        def left() -> float:
            return max(until - time.monotonic(), 0.0)

        settings = {"words": words, "hold": sorted(set(held)), "windows": len(windows)}
        settings["max_put_bytes"] = max_put_bytes
        check_equal(communicator, settings, left())
        with contextlib.ExitStack() as made:
            self._group, self.local = _split(communicator, made, left)
            self._memory = _native.SymmetricMemory(
                self.local._native, device=name, memory="fd", bytes=1, timeout=left()
            )
            self._memory.prepare_waits(limit)
            lent = [_window(self._group, window, place) for window in windows]
            self._regions = [region for region, _ in lent]
            self.windows = [tensor for _, tensor in lent]
            counters = [self._group.counter(window=_ROUNDS) for _ in range(words)]
            theirs = self._group.share(self._regions, counters, timeout=left())
            self.max_put_bytes = _longest_put(self._group, max_put_bytes, left())
            number = chosen_core if isinstance(chosen_core, int) else None
            claim = _native.DeviceProxy.core_claim(self._memory, number, chosen_core == "auto")
            claims = self.local._native.all_gather(claim, left())
            self._native = _native.DeviceProxy(
                self._group._native,
                self._memory,
                communicator._native,
                counters=[counter.number for counter in counters],
                hold=[word in held for word in range(words)],
                rounds=_ROUNDS,
                windows=_numbered(self._regions, theirs),
                templates=listed,
                list_lengths=lengths,
                max_put_bytes=self.max_put_bytes,
                max_outstanding=_OUTSTANDING,
                slots=slots,
                idle=chosen_idle,
                core=number,
                core_claims=claims,
                place=self.local.rank,
                words_home=words_home,
            )
            made.callback(self._native.stop)
            self.words_home = self._native.word_home()
            self._group.barrier(timeout=left())
            made.pop_all()
        state = np.zeros(layout.CONTEXT_BYTES // 8, np.uint64)
        state[layout.CONTEXT_TABLE // 8] = self._memory.table
        self.context = torch.from_numpy(state.view(np.int64)).to(place)
        self._closed, self._has_raised, self._place = False, False, place
        self._process, self._communicator = os.getpid(), communicator
        ON_DEVICES.add(self)
        # Closed with the communicator, as all-to-alls are.
        communicator._all_to_alls.add(self)

    def check(self) -> None:
        """Raise the error that ended waits in kernels, or the proxy; `weft.check` also does.

        Raises:
            WaitTimeoutError: a wait in a kernel expired; the error has the rank.
            OutOfRangeError: a kernel's command was out of range.
            GroupPoisonedError: and its kinds: a rank was lost, or the group has ended.
        """
        try:
            # Its errors number ranks as the user does.
            if not self._closed:
                self._communicator.check()
            self._native.check()
        except WeftError:
            self._has_raised = True
            raise

    def close(self, *, timeout: float = 30.0) -> None:
        """Send what is in the ring, wait for the other ranks, and end the thread.

        Kernels that put or wait have been launched, and this waits for them. Kernels that start
        later, such as a graph's replay, put nothing, and their waits fail. After an error it does
        not wait for other ranks.

        Raises:
            WaitTimeoutError: if puts, or other ranks, take longer than `timeout`.
            WeftError: an error of `check`, which has not been called since.
        """
        if self._closed or os.getpid() != self._process:
            return
        until = time.monotonic() + seconds(timeout)
        try:
            if not self._has_raised:
                if self._place.type == "cuda":
                    torch.cuda.synchronize(self._place)
                self._native.drain(max(until - time.monotonic(), 0.0))
                self._group.barrier(timeout=max(until - time.monotonic(), 0.0))
        finally:
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Close on this rank only."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        ON_DEVICES.discard(self)
        try:
            self._native.stop()
        except WeftError as error:
            # Of CUDA, after an earlier error.
            logger.warning("proxy of rank %d: %s", self._communicator.rank, error)
        self._group.close()
        self.local.close()


def _templates(
    given: Sequence[Sequence[tuple[int, int, int]]], communicator: Communicator
) -> list[list[tuple[int, int, int]]]:
    """Templates with ranks and offsets checked."""
    templates: list[list[tuple[int, int, int]]] = []
    for template in expect_list(given, "templates"):
        members: list[tuple[int, int, int]] = []
        for member in expect_list(template, "templates"):
            numbers = expect_list(member, "templates")
            if len(numbers) != 3:
                raise ConfigurationError(
                    f"templates: {shown(member)}: expected (rank, source_offset, offset)"
                )
            rank = expect_range(numbers[0], "templates", 0, communicator.world_size - 1)
            if rank == communicator.rank:
                raise ConfigurationError(f"templates: rank {rank} is this rank: name others")
            offsets = [expect_range(offset, "templates", 0, 1 << 48) for offset in numbers[1:]]
            members.append((rank, offsets[0], offsets[1]))
        if not members:
            raise ConfigurationError("templates: an empty one: expected at least one destination")
        if len({rank for rank, _, _ in members}) < len(members):
            raise ConfigurationError("templates: a rank twice in one: expected another each time")
        templates.append(members)
    return templates


def _check_window(window: object, place: torch.device) -> None:
    if not isinstance(window, torch.Tensor):
        expect_range(window, "windows", 1, 1 << 48)
    elif window.device.type != place.type or (window.device.index or 0) != (place.index or 0):
        raise ConfigurationError(f"windows: a tensor on {window.device}: expected one on {place}")
    elif not window.is_contiguous():
        raise ShapeError("windows: a tensor that is not contiguous; pass tensor.contiguous()")


def _idle(given: str | None) -> str:
    named = environment.text("WEFT_PROXY_IDLE") or "nap"
    if given is None and named not in ("nap", "spin"):
        raise environment.invalid("WEFT_PROXY_IDLE", named, "nap or spin")
    chosen = named if given is None else expect_text(given, "idle")
    if chosen not in ("nap", "spin"):
        raise ConfigurationError(f'idle={shown(chosen)}: expected "nap" or "spin"')
    return chosen


def _core(given: int | str | None) -> int | str:
    """The thread's core: a number, "auto" or "any"."""
    if isinstance(given, str):
        if given not in ("auto", "any"):
            expected = 'expected a core\'s number, "auto" or "any"'
            raise ConfigurationError(f"core={shown(given)}: {expected}")
        return given
    if given is not None:
        return expect_range(given, "core", 0, 1 << 20)
    named = environment.text("WEFT_PROXY_CORE") or "auto"
    if named in ("auto", "any"):
        return named
    if not (named.isdecimal() and len(named) <= 9):
        raise environment.invalid("WEFT_PROXY_CORE", named, "a core's number, auto or any")
    return int(named)


def _split(
    communicator: Communicator, made: contextlib.ExitStack, left: Callable[[], float]
) -> tuple[Communicator, Communicator]:
    """A group with all ranks, and one with this host's."""
    hosts = communicator.hosts
    host = hosts[communicator.rank]
    groups = []
    for ranks in (range(len(hosts)), [rank for rank, name in enumerate(hosts) if name == host]):
        group = communicator.split(ranks, timeout=left())
        assert group is not None, "this rank is in its list"
        made.callback(group.close)
        group.is_internal = True
        groups.append(group)
    return groups[0], groups[1]


def _numbered(
    regions: Sequence[Region], theirs: Sequence[Sequence[RemoteRegion]]
) -> list[tuple[_native.Region | None, list[tuple[int, int] | None]]]:
    """By window: this rank's region, and the peers' keys and lengths by rank."""

    def place(granted: Sequence[RemoteRegion], number: int) -> tuple[int, int] | None:
        return (granted[number].key, granted[number].length) if granted else None

    return [
        (region._native, [place(granted, number) for granted in theirs])
        for number, region in enumerate(regions)
    ]


def _window(group: Communicator, given: object, place: torch.device) -> tuple[Region, torch.Tensor]:
    """Region and tensor for a window."""
    if isinstance(given, torch.Tensor):
        return group.register(given), given
    length = expect_number(given, "windows")
    if place.type != "cuda":
        region = group.alloc(length)
        return region, torch.from_numpy(region.bytes)
    region = group.alloc(length, device=place)
    return region, torch.as_tensor(region.cuda)


def _longest_put(group: Communicator, wanted: int | None, timeout: float) -> int:
    """Longest put that every route carries in one part; the same at all ranks."""
    if wanted is not None:
        return wanted
    peers = [peer for peer in range(group.world_size) if peer != group.rank]
    longest = _PUT_BYTES
    while longest > 1 and any(group._native.parts(peer, [longest]) > 1 for peer in peers):
        longest //= 2
    gathered = group._native.all_gather(str(longest).encode(), timeout)
    return min(int(each) for each in gathered)
