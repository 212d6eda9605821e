"""Words that counters set, and that call back."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weft
from tests import gdrapi, ranks


@pytest.mark.parametrize("transport", ["shm", "tcp", "mixed"])
@pytest.mark.parametrize("length", [64, 3 << 20])
def test_a_word_follows_the_bytes_of_each_round(transport: str, length: int) -> None:
    for result in ranks.run(
        "group.words.set_at_counts", 2, transport, length=length, rounds=10, home="pinned"
    ):
        assert result == {"right": 10, "home": "pinned"}


def test_a_word_that_gdrcopy_maps_follows_the_bytes(tmp_path: Path) -> None:
    settings, log = gdrapi.stand_in(tmp_path)
    for result in ranks.run(
        "group.words.set_at_counts",
        2,
        "tcp",
        environment=settings,
        length=64,
        rounds=10,
        home="auto",
    ):
        assert result == {"right": 10, "home": "gdrcopy"}
    assert log.read_text().splitlines().count("gdr_close") == 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_counts_that_are_not_reached_set_the_value_for_failures(transport: str) -> None:
    for found in ranks.run("group.words.failures", 2, transport):
        assert found == {
            "beyond": "CreditError",
            "value": "ConfigurationError",
            "word": "TypeError",
            "after": 0,
            "credited": [True, 0],
            "errors": ["CreditError", "nothing", "CreditError"],
            "late": [True, "nothing"],
            "at once": 4,
            "closed": [10, "ClosedError"],
        }


def test_stores_by_other_threads_call_back() -> None:
    (found,) = ranks.run("group.words.watched", 1, changes=200)
    assert found == {
        "chain": True,
        "open": True,
        "called": True,
        "reached": [1, 103],
        "open after": False,
        "other thread": True,
        "caught": [True, ["ZeroDivisionError('division by zero')"]],
        "refused": ["ConfigurationError", "TypeError"],
        "closed": [200, False, False],
    }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_callback_may_write_to_a_peer(transport: str) -> None:
    for found in ranks.run("group.words.answered", 2, transport, rounds=50):
        assert found == {"right": 50}


def test_a_forked_child_leaves_words_to_its_parent() -> None:
    (found,) = ranks.run("group.words.forked", 1)
    assert found == {"child": "exit 7", "called": True, "open": True}


EXIT = """
import time, weft
word = weft.Word("twin")
def turn(former, value):
    time.sleep(0.005)
    word.value = value + 1
watch = word.on_change(turn)
word.value = 1
time.sleep(0.05)
"""


def test_callbacks_end_before_the_interpreter() -> None:
    command = [sys.executable, "-c", EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_word_is_an_array_that_keeps_it() -> None:
    word = weft.Word("twin")
    array = word.array
    assert (array.shape, array.dtype) == ((1,), np.dtype(np.uint32))
    word.value = 5
    assert array[0] == 5
    array[0] = 2**32 - 1
    assert word.value == 2**32 - 1
    assert word.address == array.ctypes.data
    del word
    array[0] = 3
    assert array[0] == 3


@pytest.mark.parametrize(
    ("device", "home", "text"),
    [
        ("cpu", "pinned", 'expected "cuda"'),
        ("twin", "gpu", "expected one of"),
        ("twin", "disk", "expected one of"),
    ],
)
def test_wrong_arguments_are_named(device: str, home: object, text: str) -> None:
    with pytest.raises(weft.WeftError, match=text):
        weft.Word(device, home=home)  # type: ignore[arg-type]
