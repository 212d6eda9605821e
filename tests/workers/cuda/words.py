"""Words that streams and the host share, on a GPU."""

import ctypes
import threading
from typing import Any

import torch

import weft

#: cuStreamWaitValue32: wait until the difference is not negative.
GREATER_OR_EQUAL = 0
LONG_SECONDS = 60.0


class Driver:
    """Memory operations on torch's current stream."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def wait(self, word: weft.Word, value: int) -> None:
        """Have the stream wait for a word."""
        self._call(self._library.cuStreamWaitValue32_v2, word, value, GREATER_OR_EQUAL)

    def write(self, word: weft.Word, value: int) -> None:
        """Have the stream store to a word."""
        self._call(self._library.cuStreamWriteValue32_v2, word, value, 0)

    def _call(self, function: Any, word: weft.Word, value: int, flags: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(word.address)
        code = function(stream, address, ctypes.c_uint32(value), ctypes.c_uint(flags))
        assert code == 0, code


def streams(rounds: int, home: str) -> dict[str, Any]:
    """A stream sends each round by raising a word, and waits for the peer's by another."""
    torch.cuda.set_device(0)
    with weft.init() as communicator:
        driver, peer = Driver(), 1 - communicator.rank
        inbox, outbox = (communicator.alloc(4096, device="cuda:0") for _ in range(2))
        counter = communicator.counter()
        target = communicator.share([inbox], [counter])[peer][0]
        ready = weft.Word("cuda:0")
        arrived = weft.Word("cuda:0", home=home)  # type: ignore[arg-type]
        sent = threading.Semaphore(0)

        def send(_: int, round: int) -> None:
            counter.wait_for_credit(peer, round - 1, timeout=LONG_SECONDS)
            communicator.write(peer, counter, [weft.Page(outbox, 0, target, 0, 4096)]).wait()
            sent.release()

        watch = ready.on_change(send)
        mine, theirs = torch.as_tensor(outbox.cuda), torch.as_tensor(inbox.cuda)
        right = torch.zeros((), dtype=torch.int64, device="cuda:0")
        # A kernel that is loaded behind one that waits would hold up copies.
        mine.fill_(0)
        right += (theirs == 251).all()
        torch.cuda.synchronize()
        for round in range(rounds):
            counter.set_word({peer: [4096]}, arrived, round + 1, failure_value=round + 1)
            mine.fill_((round + communicator.rank) % 251)
            driver.write(ready, round + 1)
            driver.wait(arrived, round + 1)
            right += (theirs == (round + peer) % 251).all()
            torch.cuda.synchronize()
            assert sent.acquire(timeout=LONG_SECONDS)
            counter.credit(peer).wait()
        communicator.barrier()
        arrived.check()
        watch.close()
        return {"right": int(right), "home": arrived.home}
