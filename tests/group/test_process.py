"""Ranks as processes: forks, signals, threads, idleness, silence, exceptions."""

import inspect

import pytest

from tests import ranks
from weft import _native, errors

#: Limit until Ctrl-C ends a wait, on a busy machine.
PROMPT_SECONDS = 20.0


def test_a_fork_after_init_is_refused_and_the_parent_goes_on() -> None:
    assert ranks.run("group.process.fork", 2) == [{"reports": ["ForkError"] * 3}] * 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("drop", [False, True])
def test_a_child_forked_while_a_thread_waits_can_exit(transport: str, drop: bool) -> None:
    first, _ = ranks.run("group.process.fork_while_waiting", 2, transport, drop=drop)
    assert first["ends"] == ["exit 7", "WaitTimeoutError"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("wait", ["dispatch", "signal", "all_gather", "construct"])
def test_control_c_ends_a_wait(transport: str, wait: str) -> None:
    took, _ = ranks.run("group.process.interrupt", 2, transport, wait=wait)
    assert len(took) == 1, "no KeyboardInterrupt came"
    assert took[0] < PROMPT_SECONDS


def test_control_c_ends_the_wait_for_ranks_that_never_come() -> None:
    [took] = ranks.run("group.process.interrupt_init", 1)
    assert len(took) == 1, "no KeyboardInterrupt came"
    assert took[0] < PROMPT_SECONDS


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_waiting_rank_leaves_the_core_and_the_interpreter_to_others(transport: str) -> None:
    result, _ = ranks.run("group.process.waiting", 2, transport, seconds=2.5)
    assert result["waited"] > 2
    # Ten a second on an idle machine.
    assert result["steps"] >= 8
    # It sleeps without spinning; the few wake-ups cost 0.3 % on an idle machine.
    assert result["share"] < 0.05


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nothing_is_printed_unless_asked_for(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_LOG", raising=False)
    ranks.run("group.process.talkative", 2, transport)
    with pytest.raises(AssertionError, match="DEBUG"):
        ranks.run("group.process.talkative", 2, transport, environment={"WEFT_LOG": "debug"})


def test_every_error_has_a_class_and_every_class_an_error() -> None:
    classes = dict(inspect.getmembers(errors, inspect.isclass))
    assert set(_native.error_classes()) == classes.keys() - {"WeftError"}
    assert all(issubclass(each, errors.WeftError) for each in classes.values())


def test_a_panic_of_the_native_module_is_an_error() -> None:
    panic = _native.PanicException
    assert issubclass(panic, errors.InternalError)
    with pytest.raises(Exception, match="index"):
        raise panic("index out of bounds")
