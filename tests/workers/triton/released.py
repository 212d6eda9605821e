"""Kernels whose stores to a window reach memory by a release, under the interpreter."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from triton._C.libtriton import ir
from triton.runtime import interpreter

import weft
import weft.triton
from tests.workers.triton import kernels
from tests.workers.triton.calls import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

Builder = interpreter.InterpreterBuilder


class Stores:
    """A program's stores to a window that a NIC does not see yet.

    Args:
        window: tensor that programs store to and do not load from.
    """

    def __init__(self, window: torch.Tensor) -> None:
        self._range = (window.data_ptr(), window.data_ptr() + window.nbytes)
        self._program: Any = None
        #: Pointers, values and masks, and the count before a block barrier.
        self._stored: list[tuple[Any, Any, Any]] = []
        self._met = 0

    def store(self, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._turn(builder)
        first, last = self._range
        inside = (pointers.data >= first) & (pointers.data < last)
        if not inside.any():
            return _STORE(builder, pointers, value, mask, *rest)
        assert inside.all()
        self._stored.append((pointers, value, mask))
        return None

    def barrier(self, builder: Any) -> None:
        self._turn(builder)
        self._met = len(self._stored)

    def exchange(self, builder: Any, *arguments: Any) -> Any:
        """Releases before an atomic operation with release at system scope."""
        self._turn(builder)
        *_, order, scope = arguments
        order_of, scopes = ir.MEM_SEMANTIC, ir.MEM_SYNC_SCOPE
        if order in (order_of.RELEASE, order_of.ACQUIRE_RELEASE) and scope == scopes.SYSTEM:
            for pointers, value, mask in self._stored[: self._met]:
                _STORE(builder, pointers, value, mask, None, None)
            del self._stored[: self._met]
            self._met = 0
        return _EXCHANGE(builder, *arguments)

    def _turn(self, builder: Any) -> None:
        """A program's release is none for the program before."""
        if self._program != builder.grid_idx:
            self._program, self._stored, self._met = builder.grid_idx, [], 0


_STORE, _EXCHANGE = Builder.create_masked_store, Builder.create_atomic_rmw


@contextlib.contextmanager
def withheld(window: torch.Tensor, *, fences: bool) -> Iterator[None]:
    """Kernels store to `window` by releases only; with `fences=False` not at all."""
    stores = Stores(window)
    patches: dict[str, Any] = {
        "create_masked_store": lambda *all: stores.store(*all),
        "create_barrier": lambda builder: stores.barrier(builder) if fences else None,
        "create_atomic_rmw": lambda *all: stores.exchange(*all),
    }
    with mock.patch.multiple(Builder, **patches):
        yield


def puts(programs: int, rounds: int, fences: bool) -> list[list[int]]:
    """Values that have arrived in each round, by program."""
    block = 16
    with weft.init() as communicator:
        place = Place(communicator, "twin")
        peer = 1 - place.rank
        sizes = [programs * block * 4] * 2
        found = []
        with weft.triton.Proxy(communicator, sizes, device="twin", timeout=60.0) as proxy:
            outbox, inbox = (window.view(torch.int32) for window in proxy.windows)
            outputs, arrived = place.zeros(programs), place.zeros(1)
            for round in range(rounds):
                value = 1000 * place.rank + 100 * round + 1
                with withheld(outbox, fences=fences):
                    kernels.remote_store[(programs,)](
                        proxy.context, outbox, outputs, peer, value, block
                    )
                count = programs * (round + 1)
                kernels.remote_receive[(1,)](proxy.context, arrived, peer, 0, count)
                assert outputs.tolist() == [1] * programs
                assert arrived.tolist() == [1]
                rows = inbox.view(programs, block).numpy()
                assert np.all(rows == rows[:, :1])
                found.append(rows[:, 0].tolist())
                communicator.barrier()
            proxy.check()
        return found
