"""`weft run` with real processes: short shell scripts stand in for ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WEFT_RUN = [sys.executable, "-m", "weft", "run"]
# Limit for prompt events, on a busy machine.
SOON_SECONDS = 60


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WEFT_RUN, *arguments], capture_output=True, text=True, timeout=100, check=False, **options
    )


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*WEFT_RUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def shell(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


def summary(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])["ranks"]
    return ranks


def is_running(pid: int) -> bool:
    return state(pid) not in (None, "Z")


def state(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[0]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize(
    ("ranks", "hosts", "places"),
    [
        (1, None, ["0/1 0/1 -"]),
        (3, None, ["0/3 0/3 -", "1/3 1/3 -", "2/3 2/3 -"]),
        (2, 2, ["0/2 0/1 pretended-0", "1/2 0/1 pretended-1"]),
        (3, 2, ["0/3 0/2 pretended-0", "1/3 1/2 pretended-0", "2/3 0/1 pretended-1"]),
        (2, 1, ["0/2 0/2 pretended-0", "1/2 1/2 pretended-0"]),
    ],
)
def test_each_rank_is_told_its_place(ranks: int, hosts: int | None, places: list[str]) -> None:
    script = (
        "echo $WEFT_RANK/$WEFT_WORLD_SIZE $WEFT_LOCAL_RANK/$WEFT_LOCAL_WORLD_SIZE"
        " ${WEFT_HOST_ID:--}"
    )
    pretended = [] if hosts is None else ["--pretend-hosts", str(hosts)]
    result = run("-n", str(ranks), *pretended, *shell(script))
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [f"[{i}] {text}" for i, text in enumerate(places)]


def test_ranks_share_an_address_and_a_secret_of_their_own() -> None:
    environment = os.environ | {"WEFT_SECRET_FILE": "/no/such/file", "WEFT_BIND": "192.0.2.1"}
    script = "echo $WEFT_ADDR $WEFT_PORT $WEFT_SECRET ${WEFT_SECRET_FILE:-no file} ${WEFT_BIND:--}"
    one, other = (run("-n", "2", "--no-prefix", *shell(script), env=environment) for _ in range(2))
    assert len(set(one.stdout.splitlines())) == 1
    address, port, secret, *rest = one.stdout.splitlines()[0].split()
    assert address == "127.0.0.1"
    assert 0 < int(port) < 65536
    assert len(secret) == 64
    assert rest == ["no", "file", "-"]
    assert secret not in other.stdout


def test_variables_are_set_in_every_rank() -> None:
    result = run("-n", "2", "--env", "A=1=2", "--env", "B=", *shell("echo $A,$B,"))
    assert sorted(result.stdout.splitlines()) == ["[0] 1=2,,", "[1] 1=2,,"]


def test_lines_of_several_ranks_never_mix() -> None:
    script = "for i in $(seq 200); do printf abc; printf 'def\\n'; done; printf end; printf err >&2"
    result = run("-n", "3", *shell(script))
    assert set(result.stdout.splitlines()) == {
        f"[{rank}] {text}" for rank in range(3) for text in ("abcdef", "end")
    }
    assert sorted(result.stderr.splitlines()) == ["[0] err", "[1] err", "[2] err"]


def test_the_summary_says_how_each_rank_ended() -> None:
    script = 'case $WEFT_RANK in 0) kill -9 $$;; 1) sleep 0.01;; 2) echo "no newline";; esac'
    result = run("-n", "3", "--json", *shell(script))
    assert result.returncode == 128 + signal.SIGKILL
    ends = [(rank["rank"], rank["exit"], rank["signal"]) for rank in summary(result)]
    assert ends == [(0, None, 9), (1, 0, None), (2, 0, None)]
    assert all(rank["seconds"] >= 0 and rank["pid"] > 0 for rank in summary(result))


def test_after_a_failure_the_others_may_end_by_themselves(tmp_path: Path) -> None:
    # Rank 1 continues until the launcher has detected that rank 0 ended.
    script = """
        if [ $WEFT_RANK = 0 ]; then echo $$ > new && mv new failed && exit 7; fi
        until [ -e failed ]; do sleep 0.01; done
        while kill -0 $(cat failed); do sleep 0.01; done
        exit 3
    """
    result = run("-n", "2", "--json", *shell(script), cwd=tmp_path)
    assert result.returncode == 7
    assert [rank["exit"] for rank in summary(result)] == [7, 3]
    assert "rank 0 exited with status 7" in result.stderr


def test_after_the_grace_the_others_are_killed() -> None:
    script = "[ $WEFT_RANK = 1 ] && exit 5; trap '' TERM INT; while :; do sleep 1; done"
    result = run("-n", "3", "--grace", "0.1", "--json", *shell(script))
    assert result.returncode == 5
    assert [rank["signal"] for rank in summary(result)] == [9, None, 9]
    assert "killing rank 0, 2" in result.stderr


def test_the_grace_also_ends_for_a_rank_that_never_stops_writing() -> None:
    script = "[ $WEFT_RANK = 1 ] && exit 5; exec yes"
    with start("-n", "2", "--grace", "0.1", *shell(script)) as process:
        process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_rank(number: signal.Signals) -> None:
    script = "trap 'echo stopped; exit 4' INT TERM; echo ready; while :; do sleep 0.01; done"
    with start("-n", "2", *shell(script)) as process:
        assert sorted(read_line(process) for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(number)
        output, _ = process.communicate(timeout=SOON_SECONDS)
    assert sorted(output.splitlines()) == ["[0] stopped", "[1] stopped"]
    assert process.returncode == 4


def test_a_second_signal_does_not_wait_for_the_grace() -> None:
    script = "trap 'echo asked' INT; echo ready; while :; do sleep 0.01; done"
    with start("-n", "1", "--grace", "1000", *shell(script)) as process:
        assert read_line(process) == "[0] ready\n"
        process.send_signal(signal.SIGINT)
        assert read_line(process) == "[0] asked\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 128 + signal.SIGKILL


def test_signals_reach_ranks_while_others_are_started() -> None:
    with start("-n", "1000", "--json", *shell("echo ready; exec sleep 1000")) as process:
        assert read_line(process).endswith("ready\n")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    ends = json.loads(output.splitlines()[-1])["ranks"]
    assert 1 <= len(ends) < 1000, "a signal ends the start of ranks"
    assert {rank["signal"] for rank in ends} == {signal.SIGTERM}
    assert not any(is_running(rank["pid"]) for rank in ends)
    assert "Traceback" not in errors


def test_signals_that_ranks_handle_are_handed_on() -> None:
    names = ("USR1", "USR2", "QUIT")
    # A shell's child has its handlers for a moment, and would print a second line.
    script = f"""
import os, signal, time
def say(number, _):
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
    if number == signal.SIGHUP:
        os._exit(3)
for name in {(*names, "TSTP", "CONT", "HUP")}:
    signal.signal(getattr(signal, "SIG" + name), say)
os.write(1, b"ready\\n")
while True:
    time.sleep(1)
"""
    with start("-n", "1", "--", sys.executable, "-c", script) as process:
        assert read_line(process) == "[0] ready\n"
        for name in names:
            process.send_signal(getattr(signal, f"SIG{name}"))
            assert read_line(process) == f"[0] SIG{name}\n"
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state(process.pid) == "T")
        process.send_signal(signal.SIGCONT)
        # A busy rank has both at once.
        assert {read_line(process) for _ in range(2)} == {"[0] SIGTSTP\n", "[0] SIGCONT\n"}
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=SOON_SECONDS)[0] == "[0] SIGHUP\n"
    assert process.returncode == 3


def test_what_a_rank_started_ends_with_it() -> None:
    result = run("-n", "2", *shell("sleep 1000 & echo $!"))
    assert result.returncode == 0
    left = [int(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(left) == 2
    wait_until(lambda: not any(is_running(pid) for pid in left))


def test_nothing_survives_a_launcher_that_was_killed() -> None:
    with start("-n", "2", *shell("sleep 1000 & echo $$ $!; wait")) as process:
        left = [int(pid) for _ in range(2) for pid in read_line(process).split()[1:]]
        assert len(left) == 4
        assert all(is_running(pid) for pid in left)
        process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in left))


def test_nothing_survives_when_nobody_reads_the_output() -> None:
    with start("-n", "2", *shell("echo $$; exec yes")) as process:
        assert process.stdout is not None
        left = int(read_line(process).split()[-1])
        process.stdout.close()
        assert process.wait(timeout=SOON_SECONDS) == 128 + signal.SIGPIPE
    assert not is_running(left)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-n", "2", "--", "/no/such/program"], 127, "cannot start /no/such/program"),
        (["-n", "2", "--", "/"], 126, "cannot start /"),
        (["-n", "2"], 2, "no command"),
        (["-n", "0", "--", "true"], 2, "at least 1"),
        (["-n", "100000", "--", "true"], 2, "-n/--ranks: 100000: expected at most 65536"),
        (["-n", "2", "--pretend-hosts", "3", "--", "true"], 2, "expected 1 to 2"),
        (["-n", "2", "--env", "A", "--", "true"], 2, "NAME=VALUE"),
        (["-n", "2", "--grace", "-1", "--", "true"], 2, "grace"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments: list[str], status: int, message: str) -> None:
    result = run(*arguments)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_more_ranks_than_descriptors_are_refused_before_the_first() -> None:
    command = [*WEFT_RUN, "-n", "100", *shell("echo started")]
    limited = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert "100 ranks: they need 364 descriptors" in result.stderr
    assert "the hard limit is 200; raise it (ulimit -Hn), or pass --no-prefix" in result.stderr


def test_the_soft_limit_of_descriptors_is_raised_for_the_launcher_only() -> None:
    command = [*WEFT_RUN, "-n", "20", *shell("ulimit -n")]
    limited = ["sh", "-c", 'ulimit -Sn 100; exec "$@"', "sh", *command]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == sorted(f"[{rank:>2}] 100" for rank in range(20))


@pytest.mark.torch
def test_ranks_form_a_group_of_torch_processes() -> None:
    program = """
import os, torch, torch.distributed as distributed
distributed.init_process_group(
    "gloo",
    init_method=f"tcp://{os.environ['WEFT_ADDR']}:{os.environ['WEFT_PORT']}",
    rank=int(os.environ["WEFT_RANK"]),
    world_size=int(os.environ["WEFT_WORLD_SIZE"]),
)
ones = torch.ones(4)
distributed.all_reduce(ones)
print(ones.tolist())
distributed.destroy_process_group()
"""
    result = run("-n", "2", "--", sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{r}] [2.0, 2.0, 2.0, 2.0]" for r in range(2)]
