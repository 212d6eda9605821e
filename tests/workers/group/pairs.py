"""Pair ends: eight-byte messages, with their doubles as replies."""

import asyncio
import ctypes
import sys
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import weft
from weft import Communicator


class End:
    """One end's memory and counter; both pair ends make one."""

    def __init__(self, pair: Communicator) -> None:
        self.pair = pair
        self.peer = 1 - pair.rank
        # Over copy on twins of GPUs, whose memory is the CPU's.
        device = "cuda:3" if pair.route(self.peer).provider == "copy" else None
        self.inbox = pair.alloc(8, device=device)
        self.outbox = pair.alloc(8, device=device)
        self.arrived = pair.counter()
        (self.theirs,) = pair.share([self.inbox], [self.arrived])[self.peer]
        self.round = 0

    def send(self, number: int) -> None:
        """One message, in the next round."""
        self.arrived.wait_for_credit(self.peer, self.round)
        _number(self.outbox)[0] = number
        page = weft.Page(self.outbox, 0, self.theirs, 0, 8)
        self.pair.write(self.peer, self.arrived, self.round, [page]).wait()
        self.round += 1

    def receive(self) -> int:
        """The next message, waited for."""
        self.arrived.wait({self.peer: [8]})
        return self.take()

    def take(self) -> int:
        """The received message."""
        number = int(_number(self.inbox)[0])
        self.arrived.credit(self.peer)
        return number

    def answer(self) -> None:
        """Receive a number and send its double."""
        self.send(2 * self.receive())

    async def receive_async(self) -> int:
        """The next message, waited for by the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            if any(counter == self.arrived.number for counter, _, _ in self.pair.poll()):
                return self.take()
            if self.pair.arm():
                readable = asyncio.Event()
                loop.add_reader(self.pair, readable.set)
                await readable.wait()
                loop.remove_reader(self.pair)

    async def answer_async(self, messages: int) -> int:
        """Reply to `count` messages; the reply count."""
        for _ in range(messages):
            self.send(2 * await self.receive_async())
        return messages

    async def ask_async(self, messages: int) -> int:
        """Send `count` numbers; the correct reply count."""
        right = 0
        for number in range(messages):
            self.send(number)
            right += await self.receive_async() == 2 * number
        return right


def _number(region: weft.Region) -> NDArray[np.int64]:
    """The number in a region, also on a twin's device."""
    return np.ctypeslib.as_array((ctypes.c_int64 * 1).from_address(region.address))


def ask(address: str, transport: Literal["copy-twin", "shm", "tcp"], messages: int) -> None:
    """Connect, send numbers, and wait until standard input ends."""
    with weft.connect(address, providers=[transport]) as pair:
        end = End(pair)
        for number in range(messages):
            end.send(number)
            assert end.receive() == 2 * number
        sys.stdin.read()


def beside_a_group() -> list[int]:
    """Messages over a pair, with group barriers in between; then only the group."""
    with weft.init() as group:
        return _beside(group)


def _beside(group: Communicator) -> list[int]:
    if group.rank == 0:
        listener = weft.listen()
        group.all_gather(listener.address.encode())
        pair = listener.accept()
        listener.close()
    else:
        address, _ = group.all_gather(b"")
        pair = weft.connect(address.decode())
    end = End(pair)
    done = 0
    for number in range(5):
        if pair.rank == 0:
            end.answer()
        else:
            end.send(number)
            assert end.receive() == 2 * number
        group.barrier()
        done += 1
    pair.close()
    for _ in range(5):
        group.barrier()
    return [done, 5]
