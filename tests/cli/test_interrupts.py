"""Commands that are ended by a signal, at any time."""

import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft import _start

WEFT = [sys.executable, "-m", "weft"]
# Limit for prompt events, on a busy machine; the documented one is two seconds.
SOON_SECONDS = 20
#: Fuzzer cases; WEFT_TEST_COMMANDS=1000 for more, WEFT_SEED=n for others.
CASES = int(os.environ.get("WEFT_TEST_COMMANDS", "2"))
SEED = int(os.environ.get("WEFT_SEED", "0"))
#: Files that run before Ctrl-C is silent.
STARTS = ("/weft/__init__.py", "/weft/_start.py")
#: Thread name for a native computation, as the kernel cuts it.
COMPUTATION = "weft-computatio"


def wait_until(condition: Callable[[], bool], seconds: float = SOON_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def computes(pid: int) -> bool:
    names = []
    for task in Path(f"/proc/{pid}/task").glob("*/comm"):
        try:
            names.append(task.read_text(encoding="utf-8").strip())
        except OSError:
            continue
    return COMPUTATION in names


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["topo", "bigraph", "--switches", "512", "--endpoints", "1024"], signal.SIGHUP),
        (["topo", "bigraph", "--switches", "512", "--endpoints", "1024"], signal.SIGINT),
        (["sim", "train", "--topology", "fat-tree3:k=100"], signal.SIGTERM),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else " ".join(value[:2]),
)
def test_a_signal_ends_a_native_computation(command: list[str], number: signal.Signals) -> None:
    with subprocess.Popen([*WEFT, *command], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: computes(process.pid))
        process.send_signal(number)
        _, errors = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 128 + number
    assert errors == f"weft: ended by {number.name}\n"


def test_a_command_that_holds_on_is_cut_off() -> None:
    program = """
import time
from weft.cli.interrupts import ended_by_signals
with ended_by_signals():
    words = iter(["ready"])
    while True:
        try:
            for word in words:
                print(word, flush=True)
            time.sleep(100)
        except BaseException:
            pass
"""
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SOON_SECONDS)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "weft: ended by SIGTERM\n")


def test_a_compiler_ends_with_the_command(tmp_path: Path) -> None:
    program = """
import sys
from weft.base.compile import run
from weft.cli.interrupts import ended_by_signals
with ended_by_signals():
    run(["sh", "-c", "echo $$ > new; sleep 1000 & echo $! >> new; mv new pids; wait"], "", "")
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        wait_until((tmp_path / "pids").exists)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SOON_SECONDS)
    left = [int(pid) for pid in (tmp_path / "pids").read_text(encoding="utf-8").split()]
    assert len(left) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in left))


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["-m"], ["python", "-m", "weft", "doctor"], True),
        (["-m"], ["python", "-X", "dev", "-mweft"], True),
        (["-m"], ["python", "-m", "weft.triton", "lint"], False),
        (["/usr/bin/weft", "doctor"], ["python", "/usr/bin/weft", "doctor"], True),
        (["train.py", "weft"], ["python", "train.py", "weft"], False),
        ([], ["python"], False),
    ],
)
def test_the_command_is_known_by_its_arguments(
    argv: list[str], original: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert _start.is_command() is expected


#: Commands with number options; some are left out, and some are odd.
FORMS = (
    "run -n {n} --pretend-hosts {n} --grace {n} -- sleep 0.1",
    "run -n {n} -- sh -c true",
    "demo --ranks {n} --passes {n} --output {dir}/demo",
    "bench moe --ranks {n} --tokens {n} --hidden {n} --experts {n} --top-k {n} --rounds {n}"
    " --trace {dir}/trace.json --record {dir}/moe.jsonl",
    "bench moe --device twin --ranks {n} --tokens {n} --hidden {n} --rounds {n} --num-sms {n}",
    "bench transfer --sizes {n} --rounds {n} --record {dir}/transfer.jsonl",
    "tune --ranks {n} --seconds {n} --max-size {n} --output {dir}/tuning.json",
    "sim allreduce --topology {network} --algorithm {algorithm} --bytes {n} --ranks {n}"
    " --rounds {n} --chunks {n} --local {n} --trace {dir}/trace.json",
    "sim moe --topology {network} --ranks {n} --tokens {n} --experts {n} --top-k {n} --rounds {n}",
    "sim train --topology {network} --algorithm {algorithm} --ranks {n} --iterations {n}",
    "sim dlrm --topology {network} --ranks {n} --batch {n} --tables {n} --slices-per-peer {n}",
    "sim query --topology {network} --front-ends {n} --accelerators {n} --queries {n} --rate {n}",
    "sim moe --topology {network} --sweep ranks={n}..{n} --sweep tokens={n},{n} --json",
    "topo --write-xml {dir}/topology.xml",
    "topo bigraph --switches {n} --endpoints {n} --physical {n} --nics {n} --out {dir}/plan",
    "topo network {network} --path {n} {n} --routing ecmp --seed {n} --out {dir}/network.json",
    "doctor",
    "qdl accelerator --bytes {n} --front-ends {n} --max-batch {n} --slots {n} --work {n}",
    "qdl frontend --in-process --scenario Offline --bytes {n} --samples {n} --queries {n}"
    " --logs {dir}/logs",
    "qdl bench --bytes {n} --samples {n} --slots {n} --duration {n}",
    "qdl audit TEST01 --node 127.0.0.1:1 --scenario Server --bytes {n} --logs {dir}/audit",
)
NETWORKS = (
    "bigraph:switches={n},endpoints={n}",
    "fat-tree:leaves={n},spines={n},hosts={n}",
    "fat-tree3:k={n}",
    "rail:hosts={n},gpus={n}",
)
ALGORITHMS = ("ring", "tree", "hd", "hdrm", "direct", "hierarchical", "ring,tree")
#: The documented sizes, and a hundred times as large ones, and odd ones.
NUMBERS = ("1", "2", "4", "16", "64", "128", "1024", "7168")
LARGE = ("400", "1600", "12800", "102400", "716800", "65536", "6553600")
ODD = ("0", "-1", "1.5", "nan", "1e99", "2147483648", "99999999999999999999", "''", "x")


def random_command(chance: random.Random, directory: str) -> list[str]:
    def number() -> str:
        (kind,) = chance.choices((NUMBERS, LARGE, ODD), (8, 6, 1))
        return chance.choice(kind)

    network = chance.choice(NETWORKS)
    while "{n}" in network:
        network = network.replace("{n}", number(), 1)
    form = chance.choice(FORMS)
    form = form.replace("{network}", network.replace("''", "0")).replace("{dir}", directory)
    form = form.replace("{algorithm}", chance.choice(ALGORITHMS))
    while "{n}" in form:
        form = form.replace("{n}", number(), 1)
    words = shlex.split(form)
    # Options that may be left out are, at times.
    for place in range(len(words) - 2, 1, -1):
        optional = words[place].startswith("--") and words[place] not in ("--", "--topology")
        if "--" not in words[:place] and optional and chance.random() < 0.3:
            del words[place : place + 2]
    return words


def handles_signals(pid: int) -> bool:
    """True for a command with handlers; Python has none for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def session_of(pid: int) -> list[int]:
    """Processes in a session other than its leader, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            continue
        state, _, _, session, *_ = rest.split()
        if int(session) == pid and state != "Z":
            found.append(int(number.split()[0]))
    return found


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("case", range(CASES))
def test_random_commands_end_by_a_signal(case: int, tmp_path: Path) -> None:
    chance = random.Random(f"{SEED} {case}")
    words = random_command(chance, str(tmp_path))
    number = chance.choice((signal.SIGINT, signal.SIGTERM))
    seconds = chance.random() * (3 if CASES > 2 else 0.5)
    with (tmp_path / "output").open("w+b") as output:
        process = subprocess.Popen(
            [*WEFT, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=tmp_path,
            start_new_session=True,
            preexec_fn=limited,
        )
        try:
            if chance.random() < 0.8:
                # Importing modules takes seconds on a busy machine.
                wait_until(lambda: process.poll() is not None or handles_signals(process.pid), 100)
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        try:
            status = process.wait(SOON_SECONDS)
        finally:
            process.kill()
            output.seek(0)
            said = output.read().decode(errors="replace")
            print(json.dumps(words), number.name, seconds, said[-2000:])
    wait_until(lambda: not session_of(process.pid))
    assert status in (0, 1, 2, 126, 127, -number, 128 + number), status
    # Until weft's first module is imported, the interpreter handles Ctrl-C.
    frames = re.findall(r'^  File "(.*)", line', said, re.MULTILINE)
    ours = [name for name in frames if "/weft/" in name and not name.endswith(STARTS)]
    assert not ours, said
