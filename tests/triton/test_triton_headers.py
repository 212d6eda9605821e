"""`weft.triton` functions beside the CUDA C++ device headers, compiled for the host.

The headers are in crates/gpu/kernels/weft; `tests/triton/host_headers/weft/ptx.cuh` replaces their
instructions.
"""

import ctypes
import importlib
import itertools
import random
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests import ROOT, ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

pytest.importorskip("triton")

layout = importlib.import_module("weft.triton.layout")
remote = importlib.import_module("weft.triton.remote")

ROUNDS = 7
FIRST = (0, 2**31 - 4, -4)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The headers as a shared library."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    made = tmp_path_factory.mktemp("headers") / "functions.so"
    folder = ROOT / "tests/triton/host_headers"
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    include = ["-I", str(folder), "-I", str(ROOT / "crates" / "gpu" / "kernels")]
    subprocess.run([*command, *include, str(folder / "functions.cpp"), "-o", str(made)], check=True)
    return str(made)


def run(worker: str, count: int, **arguments: Any) -> list[Any]:
    environment = {"TRITON_INTERPRET": "1"}
    call = f"triton.headers.{worker}"
    return ranks.run(call, count, environment=environment, timeout=100, **arguments)


class Constant(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_uint64))


def test_constants_are_equal(library: str) -> None:
    constants = (Constant * 100).in_dll(ctypes.CDLL(library), "CONSTANTS")
    headers = {}
    for each in constants:
        if each.name is None:
            break
        headers[each.name.decode().upper()] = each.value
    own = {
        name: value
        for name, value in vars(layout).items()
        # Only the fused operators, which are in Triton, compare their arguments.
        if name.isupper()
        and not name.startswith("CONTEXT")
        and name not in ("CODE_DISAGREEMENT", "PHASE_WAIT", "PHASE_BARRIER")
    }
    commands = (
        "_READS",
        "_PUT",
        "_SIGNAL",
        "_SCATTER",
        "_RELEASE",
        "_DRAINED",
        "_HOLD",
        "_SLOT_BYTES",
    )
    assert headers == own | {name: getattr(remote, name).value for name in commands}


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_of_both_exchange_and_meet_at_barriers(library: str, count: int) -> None:
    for rank, result in enumerate(run("together", count, library=library, rounds=ROUNDS)):
        before = (rank - 1) % count
        for first, rounds in zip(FIRST, result["ring"], strict=True):
            for number, arrived in enumerate(rounds, 1):
                assert arrived == [before * 1000 + tail(before, first, number)]
        assert result["barriers"] == [0] * len(FIRST)


def tail(rank: int, first: int, number: int) -> int:
    """The value part that a round determines: by the headers, and by Triton."""
    if rank % 2 == 0:
        return number
    epoch = (first + number + 2**31) % 2**32 - 2**31
    return abs(epoch) % 1000 * (1 if epoch >= 0 else -1)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_pushes_that_wait_for_room_share_one_reader(library: str, elsewhere: bool) -> None:
    """A full ring whose slots are released one by one, each after the push before it.

    Elsewhere: another kernel's thread reads the count for all, and the others do not look at it.
    """
    slots, threads, tickets = 4, 6, 60
    wait_for_room = ctypes.CDLL(library).wait_for_room
    wait_for_room.restype = ctypes.c_bool
    wait_for_room.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    table = np.zeros(layout.TABLE_BYTES // 8, np.uint64)
    records, released, abort = (
        np.zeros(16, np.uint64),
        np.zeros(1, np.uint64),
        np.zeros(1, np.uint64),
    )
    table[layout.TABLE_LIMIT_NS // 8] = 20_000_000_000
    table[layout.TABLE_RECORD // 8] = records.ctypes.data
    table[layout.TABLE_ABORT // 8] = abort.ctypes.data
    table[layout.TABLE_RELEASED // 8] = released.ctypes.data
    table.view(np.uint32)[layout.TABLE_SLOTS // 4] = slots
    seen = table[layout.TABLE_SEEN_RELEASED // 8 :][:1] if elsewhere else released
    table.view(np.uint32)[layout.TABLE_POLLER // 4] = elsewhere
    # A thread that looked would see room for all.
    released[0] = tickets if elsewhere else 0
    pushed = [threading.Event() for _ in range(tickets)]
    turn = itertools.count()

    def push() -> None:
        while (ticket := next(turn)) < tickets:
            assert wait_for_room(table.ctypes.data, ticket)
            assert ticket < int(seen[0]) + slots
            pushed[ticket].set()

    with ThreadPoolExecutor(threads) as pool:
        pushes = [pool.submit(push) for _ in range(threads)]
        for ticket in range(tickets):
            if not pushed[ticket].wait(30):
                break
            seen[0] = ticket + 1
        for each in pushes:
            each.result()
    assert table.view(np.uint32)[layout.TABLE_POLLER // 4] == elsewhere
    assert not records.any()


class Table:
    """A table with words in host memory, and its readers, for `wait_rounds`."""

    def __init__(self, library: str, words: int) -> None:
        self.wait = ctypes.CDLL(library).wait_rounds
        self.wait.restype = ctypes.c_bool
        self.wait.argtypes = [ctypes.c_void_p, *[ctypes.c_uint32] * 3]
        self.table = np.zeros(layout.TABLE_BYTES // 8, np.uint64)
        self.records, self.abort = np.zeros(16, np.uint64), np.zeros(1, np.uint64)
        self.words, self.readers = np.zeros(words, np.uint32), np.zeros(words, np.uint64)
        for at, value in {
            layout.TABLE_LIMIT_NS: 20_000_000_000,
            layout.TABLE_RECORD: self.records.ctypes.data,
            layout.TABLE_ABORT: self.abort.ctypes.data,
            layout.TABLE_RING: 1,
            layout.TABLE_WORDS: self.words.ctypes.data,
            layout.TABLE_READERS: self.readers.ctypes.data,
        }.items():
            self.table[at // 8] = value
        self.table.view(np.uint32)[layout.TABLE_WORDS_EACH // 4] = words // 2

    def waits(self, source: int, word: int, rounds: int) -> bool:
        """Waits by the headers."""
        fine: bool = self.wait(self.table.ctypes.data, source, word, rounds % 2**32)
        return fine

    def waits_in_triton(self, source: int, word: int, rounds: int) -> bool:
        """Waits in a kernel under the interpreter, in another process with a copy."""
        state = [self.words.tolist(), self.readers.tolist()]
        (found,) = run("reader", 1, state=state, source=source, word=word, rounds=rounds)
        self.words[:], self.readers[:] = found["words"], found["readers"]
        fine: bool = found["fine"]
        return fine


READS = 1 << 32


@pytest.mark.parametrize("first", [0, 2**32 - 30])
def test_waits_for_one_word_share_one_reader(library: str, first: int) -> None:
    """Threads that wait for other rounds each, while the word rises one by one."""
    table, threads, rounds = Table(library, 6), 6, 60
    table.words[4] = first
    arrived = [threading.Event() for _ in range(rounds)]

    def waits(number: int) -> None:
        for round in range(number, rounds, threads):
            assert table.waits(1, 1, first + round + 1)
            # Modulo 2^32; a wait that ends early has seen too little.
            assert (int(table.words[4]) - first - round - 1) % 2**32 < 2**31
            arrived[round].set()

    with ThreadPoolExecutor(threads) as pool:
        all = [pool.submit(waits, number) for number in range(threads)]
        for round in range(rounds):
            assert not arrived[round].is_set()
            table.words[4] = (first + round + 1) % 2**32
            if not arrived[round].wait(30):
                break
        for each in all:
            each.result()
    assert not table.records.any()
    # Nobody reads now, and no other word has had a reader.
    assert table.readers[4] < READS
    assert not table.readers[[0, 1, 2, 3, 5]].any()


@pytest.mark.parametrize("triton", [False, True])
def test_a_wait_takes_what_another_reader_publishes(library: str, triton: bool) -> None:
    table = Table(library, 6)
    waits = table.waits_in_triton if triton else table.waits
    table.readers[4] = READS | 7
    # The word itself is never raised.
    assert waits(1, 1, 7)
    assert table.readers[4] == READS | 7
    assert table.words[4] == 0


@pytest.mark.parametrize("triton", [False, True])
def test_a_value_from_a_wait_long_ago_does_not_count(library: str, triton: bool) -> None:
    """The word has since moved on by more than half its range."""
    table = Table(library, 6)
    waits = table.waits_in_triton if triton else table.waits
    table.table[layout.TABLE_LIMIT_NS // 8] = 50_000_000
    table.words[4], table.readers[4] = 2**31 + 20, 5
    assert not waits(1, 1, 2**31 + 30)
    assert table.readers[4] == 2**31 + 20


def test_failed_waits_leave_equal_records(library: str) -> None:
    (found,) = run("failures", 1, library=library)
    for name in ("expired", "aborted", "barrier"):
        assert found[f"{name} headers"] == found[f"{name} triton"]
        fine, was_looked, table, record = found[f"{name} triton"]
        assert not fine
        assert was_looked
        code = layout.CODE_ABORTED if name == "aborted" else layout.CODE_TIMEOUT
        assert table[layout.TABLE_DEAD] == record[layout.RECORD_CODE] == code
        assert record[layout.RECORD_PEER] == 4
        assert record[layout.RECORD_EXPECTED : layout.RECORD_EXPECTED + 8] == [5, *[0] * 7]
        assert record[layout.RECORD_SEEN : layout.RECORD_SEEN + 8] == [247, *[255] * 3, *[0] * 4]


def test_comparisons_with_wrap_around_are_equal(library: str) -> None:
    generator = random.Random(7)
    edges = [-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 2]
    pairs = [[a, b] for a in edges for b in edges]
    while len(pairs) < 128:
        pairs.append([generator.randint(-(2**31), 2**31 - 2) for _ in range(2)])
    (found,) = run("comparisons", 1, library=library, pairs=pairs)
    assert found["headers"] == found["triton"]
