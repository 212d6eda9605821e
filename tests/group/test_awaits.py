"""Awaits in asyncio loops for requests, arrivals and credits."""

import asyncio
import os
import signal
import threading

import pytest

import weft
from tests import ranks
from tests.group.test_pairs import Transport, dialler
from tests.workers.group.pairs import End
from weft.errors import ClosedError, PeerLostError


@pytest.mark.parametrize("transport", ["shm", "tcp", "mixed"])
@pytest.mark.parametrize("length", [64, 3 << 20])
def test_a_loop_awaits_requests_arrivals_and_credits(transport: str, length: int) -> None:
    rounds = 20
    for result in ranks.run(
        "group.awaits.fed", 4, transport, length=length, rounds=rounds, progress="caller"
    ):
        assert result == {"ended": rounds, "right": rounds, "ticked": True}


@pytest.mark.parametrize("progress", ["thread", "epoll"])
def test_awaits_work_with_every_progress(progress: str) -> None:
    for result in ranks.run("group.awaits.fed", 2, "tcp", length=64, rounds=20, progress=progress):
        assert result == {"ended": 20, "right": 20, "ticked": True}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_await_ends_by_release_timeout_or_cancellation(transport: str) -> None:
    for rank, found in enumerate(ranks.run("group.awaits.idle", 2, transport)):
        assert f"rank {1 - rank} raised 0 of 2" in found["text"]
        assert "a wait on a counter did not finish within" in found["text"]
        assert found["cancelled"]
        assert found["credit"] == "WaitTimeoutError"
        assert found["released"] == "UnknownError"
        assert found["idle"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("how", "error"),
    [("poison", "GroupPoisonedError"), ("close", "ClosedError"), ("leave", "PeerLeftError")],
)
def test_awaits_and_callbacks_end_with_the_group(transport: str, how: str, error: str) -> None:
    arrival, credit, request, later, called = ranks.run(
        "group.awaits.ended", 2, transport, how=how, length=64
    )[0]
    assert (arrival, credit, later, called) == (error,) * 4
    assert request in ("nothing", error)


@pytest.mark.parametrize("how", ["poison", "close"])
def test_an_unread_request_ends_with_the_group(how: str) -> None:
    first, _ = ranks.run("group.awaits.ended", 2, "tcp", how=how, length=200 << 20)
    assert first[2] == ("GroupPoisonedError" if how == "poison" else "ClosedError")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_loops_on_several_threads_share_a_communicator(transport: str) -> None:
    for result in ranks.run("group.awaits.loops", 2, transport, rounds=50):
        assert result["right"] == [50] * 4


def test_a_forked_child_leaves_its_parents_awaits_alone() -> None:
    for result in ranks.run("group.awaits.forked", 2, "tcp"):
        assert result == {"child": "exit 7", "count": 1}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_awaits_leave_a_programs_own_reader_its_events(transport: str) -> None:
    for result in ranks.run("group.awaits.beside_a_reader", 2, transport, messages=50):
        assert result["seen"] == 50


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_process_ends_the_awaits_on_its_pair(transport: Transport) -> None:
    with (
        weft.listen(providers=[transport]) as listener,
        dialler(listener.address, transport, 1) as process,
        listener.accept() as pair,
    ):
        end = End(pair)
        end.answer()

        async def lost() -> None:
            wait = asyncio.ensure_future(end.arrived.wait_async({1: [8]}))
            await asyncio.sleep(0)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(PeerLostError, match="rank 1"):
                await wait

        asyncio.run(lost())


def test_a_loop_that_ended_leaves_its_awaits_behind() -> None:
    with weft.listen() as listener:
        accepted: list[weft.Communicator] = []
        accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
        accepting.start()
        with weft.connect(listener.address) as pair:
            accepting.join()
            (other,) = accepted
            making = threading.Thread(target=End, args=(other,))
            making.start()
            end = End(pair)
            making.join()
            loop = asyncio.new_event_loop()
            task = loop.create_task(end.arrived.wait_async({0: [8]}))
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
            del loop, task

            async def next_loop() -> None:
                wait = asyncio.ensure_future(end.arrived.wait_async({0: [8]}))
                await asyncio.sleep(0)
                pair.close()
                with pytest.raises(ClosedError):
                    await wait

            asyncio.run(next_loop())
            other.close()
