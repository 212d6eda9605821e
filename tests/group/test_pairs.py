"""Pairs that processes form at run time: echo, loss, goodbye, secrets, asyncio, forks."""

import asyncio
import contextlib
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest

import weft
from tests import ROOT, ranks
from tests.workers.group.pairs import End
from weft.diagnosis import ofi as diagnosis
from weft.errors import (
    ClosedError,
    ConfigurationError,
    ForkError,
    ListenError,
    PeerLeftError,
    PeerLostError,
    RendezvousError,
    SecretError,
    WaitTimeoutError,
)
from weft.group import pair

Transport = Literal["copy-twin", "shm", "tcp", "ofi"]
OFI = diagnosis.report()["providers"]["tcp;ofi_rxm"]
#: ofi needs libfabric.
WITHOUT_OFI = pytest.mark.skipif(not OFI["offers"], reason=f"needs libfabric: {OFI['error']}")
TRANSPORTS = ["copy-twin", "shm", "tcp", pytest.param("ofi", marks=WITHOUT_OFI)]


@contextmanager
def dialler(address: str, transport: str, messages: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that connects and sends numbers, expects their doubles, then waits."""
    code = (
        f"from tests.workers.group import pairs; pairs.ask({address!r}, {transport!r}, {messages})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_are_answered_and_a_goodbye_ends_the_pair_in_peace(transport: Transport) -> None:
    with (
        weft.listen(providers=[transport]) as listener,
        dialler(listener.address, transport, 10) as process,
        listener.accept() as pair,
    ):
        assert (pair.rank, pair.world_size) == (0, 2)
        assert pair.routes() == [None, transport.removesuffix("-twin")]
        end = End(pair)
        for _ in range(10):
            end.answer()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
        with pytest.raises(PeerLeftError, match="a wait on a counter of rank 0 was not complete; "):
            end.arrived.wait({1: 1}, timeout=30)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_process_poisons_its_pair_alone(transport: Transport) -> None:
    with (
        weft.listen(providers=[transport]) as listener,
        dialler(listener.address, transport, 1) as first,
        listener.accept() as one,
        dialler(listener.address, transport, 2) as _second,
        listener.accept() as other,
    ):
        lost, alive = End(one), End(other)
        lost.answer()
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 1") as caught:
            lost.arrived.wait({1: [8]}, timeout=30)
        assert caught.value.rank == 1
        assert "no sign of life" not in str(caught.value)
        alive.answer()
        alive.answer()
        with pytest.raises(ConfigurationError, match="connect a new pair"):
            one.reform()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_process_poisons_its_pair_alone(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that a busy machine does not silence the other process.
    monkeypatch.setenv("WEFT_SILENCE_TIMEOUT", "3")
    with (
        weft.listen(providers=[transport]) as listener,
        dialler(listener.address, transport, 1) as first,
        listener.accept() as one,
        dialler(listener.address, transport, 2) as _second,
        listener.accept() as other,
    ):
        silent, alive = End(one), End(other)
        silent.answer()
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(PeerLostError, match="no sign of life") as caught:
            silent.arrived.wait({1: [8]}, timeout=30)
        assert caught.value.rank == 1
        alive.answer()
        alive.answer()


def test_ctrl_c_ends_a_connect_to_an_address_that_does_not_answer() -> None:
    with socket.socket() as silent, contextlib.ExitStack() as queued:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):
            waiting = queued.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        # A shell's background job ignores Ctrl-C.
        code = (
            "import signal, weft; signal.signal(signal.SIGINT, signal.default_int_handler);"
            f"print(flush=True); weft.connect('127.0.0.1:{silent.getsockname()[1]}')"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.3)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            assert "KeyboardInterrupt" in errors
            assert time.monotonic() - began < 20


def test_an_asyncio_server_answers_several_clients() -> None:
    async def serve(listener: weft.Listener) -> list[int]:
        pairs = [await listener.accept_async() for _ in range(4)]
        ends = await asyncio.gather(*(asyncio.to_thread(End, pair) for pair in pairs))
        return await asyncio.gather(*(end.answer_async(20) for end in ends))

    async def ask(address: str) -> int:
        pair = await weft.connect_async(address)
        end = await asyncio.to_thread(End, pair)
        return await end.ask_async(20)

    async def main() -> tuple[list[int], list[int]]:
        with weft.listen() as listener:
            server = asyncio.create_task(serve(listener))
            asked = await asyncio.gather(*(ask(listener.address) for _ in range(4)))
            return await server, asked

    answered, asked = asyncio.run(asyncio.wait_for(main(), 40))
    assert answered == asked == [20] * 4


def test_an_accept_that_is_cancelled_leaves_the_listener_usable() -> None:
    async def main() -> int:
        with weft.listen() as listener:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(listener.accept_async(), 0.01)
            accepting = asyncio.create_task(listener.accept_async())
            pair = await weft.connect_async(listener.address)
            return pair.rank + (await accepting).rank

    assert asyncio.run(asyncio.wait_for(main(), 40)) == 1


def absent() -> str:
    """Address at which no process listens."""
    with weft.listen() as listener:
        return listener.address


def test_a_dial_that_is_given_up_leaves_the_loop_free() -> None:
    async def main() -> None:
        loop, address = asyncio.get_running_loop(), absent()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(weft.connect_async(address), 0.1)
        # More dials than an executor on few cores has threads.
        dials = [asyncio.create_task(weft.connect_async(address)) for _ in range(40)]
        await asyncio.wait_for(loop.getaddrinfo("localhost", 1), 10)
        assert not any(dial.done() for dial in dials)
        for dial in dials:
            dial.cancel()
        ended = await asyncio.gather(*dials, return_exceptions=True)
        assert {type(each) for each in ended} == {asyncio.CancelledError}

    began = time.monotonic()
    asyncio.run(main())
    # Far below the dial timeout.
    assert time.monotonic() - began < 20
    assert threads_of_jobs() == set()


def test_ctrl_c_ends_a_program_that_dials() -> None:
    code = (
        "import asyncio, signal, weft; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "async def main():\n"
        f"    dial = asyncio.create_task(weft.connect_async({absent()!r}))\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(flush=True)\n"
        "    await dial\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert "KeyboardInterrupt" in errors
        assert process.returncode == -signal.SIGINT
        assert time.monotonic() - began < 20


def test_an_accept_that_is_cancelled_as_a_connection_comes_ends() -> None:
    async def main(listener: weft.Listener) -> None:
        accepting: asyncio.Task[weft.Communicator]
        original, calls = pair._readable, 0

        async def readable(source: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                await original(source)
                return
            # The cancellation comes between the arrival and the accepting task's next step.
            asyncio.get_running_loop().call_soon(accepting.cancel)
            await asyncio.sleep(0)

        with mock.patch.object(pair, "_readable", readable):
            accepting = asyncio.create_task(listener.accept_async())
            done, _ = await asyncio.wait([accepting], timeout=10)
        assert accepting in done
        assert accepting.cancelled()

    with weft.listen() as listener:
        asyncio.run(main(listener))


@pytest.mark.parametrize("transport", ["copy-twin", "shm", "tcp"])
def test_dials_and_accepts_that_are_cancelled_at_random_leave_nothing(transport: Transport) -> None:
    seed = int(os.environ.get("WEFT_SEED", "1"))
    count = int(os.environ.get("WEFT_TEST_CANCELLED_DIALS", "100"))
    draw = random.Random(seed)

    async def given_up(call: Coroutine[Any, Any, weft.Communicator]) -> None:
        task = asyncio.create_task(call)
        await asyncio.sleep(draw.expovariate(500))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).close()

    async def main(listener: weft.Listener) -> int:
        for _ in range(0, count, 20):
            dial = functools.partial(weft.connect_async, listener.address, providers=[transport])
            dials = (given_up(dial()) for _ in range(20))
            await asyncio.gather(*dials, *(given_up(listener.accept_async()) for _ in range(10)))

        async def dialled() -> End:
            pair = await weft.connect_async(listener.address, providers=[transport])
            return await asyncio.to_thread(End, pair)

        # The listener goes on; it may have formed pairs whose dialler was cancelled then.
        dialling = asyncio.create_task(dialled())
        while True:
            accepting = asyncio.create_task(listener.accept_async())
            await asyncio.wait([accepting, dialling], return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                # It has failed, or its pair comes.
                await dialling
            with await accepting as accepted:
                try:
                    theirs = await asyncio.to_thread(End, accepted)
                except (PeerLeftError, PeerLostError):
                    continue
                mine = await dialling
                mine.send(4)
                number = await theirs.receive_async()
                mine.pair.close()
                return number

    # The first pair opens descriptors in the process, and they stay.
    with weft.listen(providers=[transport]) as listener, ThreadPoolExecutor() as pool:
        first = pool.submit(weft.connect, listener.address, providers=[transport])
        with listener.accept(), first.result():
            pass
    before = descriptors()
    with weft.listen(providers=[transport]) as listener:
        assert asyncio.run(asyncio.wait_for(main(listener), 60)) == 4
    assert threads_of_jobs() == set()
    # The pair thread ends a second after the last one.
    until = time.monotonic() + 10
    while descriptors() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert descriptors() <= before, f"WEFT_SEED={seed}"


def descriptors() -> int:
    """Open descriptors in this process."""
    return len(os.listdir("/proc/self/fd"))


def threads_of_jobs() -> set[str]:
    """Names of this process's threads that dial and accept, once they have had time to end."""
    until = time.monotonic() + 10
    while True:
        names = set()
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                names.add((thread / "comm").read_text(encoding="ascii").strip())
        names &= {"weft-dial", "weft-accept"}
        if not names or time.monotonic() > until:
            return names
        time.sleep(0.01)


def test_what_cannot_be_formed_is_refused_by_name() -> None:
    with pytest.raises(SecretError, match="secret="):
        weft.listen("0.0.0.0:0")
    with pytest.raises(SecretError, match="secret="):
        weft.connect("192.0.2.1:1")
    with pytest.raises(ConfigurationError, match="copy, shm, verbs, ofi or tcp"):
        weft.listen(providers=["sim"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="copy and copy-twin"):
        weft.listen(providers=["copy", "copy-twin"])
    with pytest.raises(ConfigurationError, match="no port"):
        weft.connect("127.0.0.1")
    with pytest.raises(ConfigurationError, match="expected an IP address of this host"):
        weft.connect("127.0.0.1:1", source="fe80::1%eth0")
    with pytest.raises(ConfigurationError, match="of another family"):
        weft.connect("127.0.0.1:1", source="::1", providers=["ofi"])
    with pytest.raises(ConfigurationError, match="this host does not have it"):
        weft.connect("127.0.0.1:1", source="203.0.113.9")
    with weft.listen(secret=b"apple") as listener:
        with pytest.raises(ListenError):
            weft.listen(listener.address)
        with pytest.raises(WaitTimeoutError):
            listener.accept(timeout=0)
    with pytest.raises(RendezvousError, match="its process listens"):
        weft.connect(listener.address, timeout=0.1)
    with pytest.raises(ClosedError):
        listener.accept(timeout=1)


def test_a_pair_forms_from_a_chosen_address() -> None:
    with weft.listen(providers=["tcp"]) as listener:
        options: Any = {"source": "127.0.0.2", "providers": ["tcp"]}
        with ThreadPoolExecutor() as pool:
            dialled = pool.submit(weft.connect, listener.address, **options)
            with listener.accept() as here, dialled.result() as there:
                both = [pool.submit(end.barrier) for end in (here, there)]
                assert [each.result() for each in both] == [None, None]
                # Control and payloads.
                assert connections_from(socket.inet_aton("127.0.0.2")) >= 2


def connections_from(address: bytes) -> int:
    """Established connections over tcp from an address on this host."""
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    # Numbers in the machine's byte order; 01 is established.
    prefix = f"{int.from_bytes(address, sys.byteorder):08X}:"
    return sum(each.split()[1].startswith(prefix) and each.split()[3] == "01" for each in lines)


def test_another_secret_is_refused() -> None:
    async def main() -> None:
        with weft.listen(secret=b"apple") as listener:
            accepting = asyncio.create_task(listener.accept_async())
            with pytest.raises(SecretError):
                await weft.connect_async(listener.address, secret=b"pear")
            connected = await weft.connect_async(listener.address, secret=b"apple")
            (await accepting).close()
            connected.close()

    asyncio.run(asyncio.wait_for(main(), 40))


def test_pairs_stand_beside_a_communicator() -> None:
    assert ranks.run("group.pairs.beside_a_group", 2) == [[5, 5]] * 2


def test_a_forked_child_is_refused() -> None:
    with weft.listen() as listener:
        child = os.fork()
        if child == 0:
            try:
                listener.try_accept()
            except ForkError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert listener.try_accept() is None


def test_arrays_and_pages_work_as_in_any_group() -> None:
    async def main() -> None:
        with weft.listen() as listener:
            accepting = asyncio.create_task(listener.accept_async())
            one = await weft.connect_async(listener.address)
            other = await accepting
        ends = await asyncio.gather(asyncio.to_thread(End, one), asyncio.to_thread(End, other))
        ends[0].send(3)
        assert np.array_equal(ends[1].receive(), 3)
        one.close()
        other.close()

    asyncio.run(asyncio.wait_for(main(), 40))
