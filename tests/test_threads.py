"""Any thread may call a communicator at any time, and no call waits for another thread's wait."""

import pytest

import ranks

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_signal_is_sent_while_another_thread_waits(transport: str) -> None:
    # A past version waited until the other thread's wait had timed out.
    assert ranks.run("threads.signals_while_another_waits", 2, transport) == [True, True]


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
    worker = "threads.handler_calls"
    first, _ = ranks.run(worker, 2, transport, quiet=False, call=call, wait=wait)
    assert first == [within, ended]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_eight_threads_and_an_event_loop_all_come_through(transport: str) -> None:
    for result in ranks.run("threads.eight_beside_a_loop", 2, transport, rounds=50):
        assert result == {"made": [50] * 8, "arrived": 50}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_callback_of_the_progress_thread_wakes_an_armed_loop(transport: str) -> None:
    assert ranks.run("threads.callbacks_wake_the_loop", 2, transport, count=20) == [20, 20]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collective_calls_go_on_while_another_thread_waits(transport: str) -> None:
    assert ranks.run("threads.control_while_another_waits", 2, transport) == [True, True]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_ends_the_wait_of_the_main_thread_alone(transport: str) -> None:
    assert ranks.run("threads.interrupted", 2, transport) == [["KeyboardInterrupt"], []]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_interpreter_ends_while_a_thread_waits(transport: str) -> None:
    run = ranks.run("threads.exits_while_a_thread_waits", 2, transport, timeout=30, quiet=False)
    assert run == [True, True]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_of_an_all_to_all_go_on_beside_a_wait_for_another(transport: str) -> None:
    assert ranks.run("threads.rounds_beside_a_wait", 2, transport) == [True, True]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_on_several_threads_come_out_right(transport: str) -> None:
    run = ranks.run("threads.rounds_on_threads", 2, transport, rounds=60, channels=3)
    assert run == [list(range(60))] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_close_of_the_all_to_all_ends_the_wait_of_another_thread(transport: str) -> None:
    assert ranks.run("threads.closed_beside_a_wait", 2, transport) == [["ClosedError"], [""]]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_second_barrier_at_once_is_refused(transport: str) -> None:
    assert ranks.run("threads.barriers_at_once", 2, transport) == [["StageError"], []]
