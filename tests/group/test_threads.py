"""Any thread may call a communicator at any time, and no call waits for another thread's wait."""

import os
import socket
import subprocess
import sys

import pytest

from tests import ranks

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_signal_is_sent_while_another_thread_waits(transport: str) -> None:
    # A past version waited until the other thread's wait had timed out.
    assert ranks.run("group.threads.signals_while_another_waits", 2, transport) == [True, True]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("call", "wait", "within", "ended"),
    [
        ("statistics", "short", "NoneType", "WaitTimeoutError"),
        ("poison", "counter", "NoneType", "GroupPoisonedError"),
        ("close", "counter", "NoneType", "ClosedError"),
        ("close", "dispatch", "NoneType", "ClosedError"),
        # The peer is in another collective call.
        ("all_to_all.close", "short", "ConfigurationMismatchError", "WaitTimeoutError"),
    ],
)
def test_a_signal_handler_calls_during_a_wait_of_its_thread(
    transport: str, call: str, wait: str, within: str, ended: str
) -> None:
    worker = "group.threads.handler_calls"
    first, _ = ranks.run(worker, 2, transport, quiet=False, call=call, wait=wait)
    assert first == [within, ended]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_eight_threads_and_an_event_loop_all_come_through(transport: str) -> None:
    for result in ranks.run("group.threads.eight_beside_a_loop", 2, transport, rounds=50):
        assert result == {"made": [50] * 8, "arrived": 50}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_callback_of_the_progress_thread_wakes_an_armed_loop(transport: str) -> None:
    assert ranks.run("group.threads.callbacks_wake_the_loop", 2, transport, count=20) == [20, 20]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collective_calls_go_on_while_another_thread_waits(transport: str) -> None:
    assert ranks.run("group.threads.control_while_another_waits", 2, transport) == [True, True]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_ends_the_wait_of_the_main_thread_alone(transport: str) -> None:
    assert ranks.run("group.threads.interrupted", 2, transport) == [["KeyboardInterrupt"], []]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_interpreter_ends_while_a_thread_waits(transport: str) -> None:
    run = ranks.run(
        "group.threads.exits_while_a_thread_waits", 2, transport, timeout=30, quiet=False
    )
    assert run == [True, True]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_of_an_all_to_all_go_on_beside_a_wait_for_another(transport: str) -> None:
    assert ranks.run("group.threads.rounds_beside_a_wait", 2, transport) == [True, True]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_on_several_threads_come_out_right(transport: str) -> None:
    run = ranks.run("group.threads.rounds_on_threads", 2, transport, rounds=60, channels=3)
    assert run == [list(range(60))] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_close_of_the_all_to_all_ends_the_wait_of_another_thread(transport: str) -> None:
    assert ranks.run("group.threads.closed_beside_a_wait", 2, transport) == [["ClosedError"], [""]]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_second_barrier_at_once_is_refused(transport: str) -> None:
    assert ranks.run("group.threads.barriers_at_once", 2, transport) == [["StageError"], []]


#: One of two ranks; it cannot start a thread, since its user may have no further process. The limit
#: does not hold for root, which becomes another user.
WITHOUT_THREADS = """
import os, resource, sys
import weft, weft.qdl
from weft.errors import WeftError
if os.getuid() == 0:
    os.setuid(int(sys.argv[3]))
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
calls = {
    "init": lambda: weft.init(rank=int(sys.argv[1]), world_size=2, address=sys.argv[2], timeout=5),
    "ask": lambda: weft.qdl.ask(["127.0.0.1:1"], [[b""]]),
    "connect": lambda: weft.connect("a-name.invalid:1", secret=b"x", timeout=5),
}
for name, call in calls.items():
    try:
        call()
    except WeftError as error:
        print(name, type(error).__name__, "RLIMIT_NPROC" in str(error))
"""


def test_without_a_thread_left_every_rank_raises_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # A user without other processes.
    user = str(1_000_000 + os.getpid())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_THREADS, str(rank), address, user],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    names = []
    for process in processes:
        printed, errors = process.communicate(timeout=60)
        init, *others = printed.splitlines()
        assert others == ["ask LimitError True", "connect LimitError True"], printed + errors
        names.append(init)
    # A rank that comes after the other has given up does not find it.
    assert "init LimitError True" in names
    assert set(names) <= {"init LimitError True", "init RendezvousError False"}
