"""Stacks that tests show for late ranks."""

import multiprocessing
import shutil
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests import stacks


def wait_for_nothing(directory: Path, pipe: Connection) -> None:
    """A rank that is late: one thread waits for a lock that stays taken."""
    stacks.arm(directory, 7)
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lock.acquire, name="second", daemon=True).start()
    pipe.send("armed")
    lock.acquire()


def test_stacks_of_a_late_rank_name_its_functions_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # gdb takes seconds.
    monkeypatch.setattr(shutil, "which", lambda name: None)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=wait_for_nothing, args=(tmp_path, theirs)
    )
    process.start()
    try:
        assert ours.recv() == "armed"
        text = stacks.shared(tmp_path)
        assert f"== rank 7, process {process.pid}" in text
        assert text.count("in wait_for_nothing") == 1
        assert text.count(" (most recent call first)") == 2
        assert text.count("\nthread ") == 2
        assert "state S" in text
        assert "expected gdb or eu-stack" in text
    finally:
        process.kill()
        process.join()
    # Other ranks get the text that the first has collected.
    assert stacks.shared(tmp_path) == stacks.found(tmp_path) == text
    assert stacks.collected(tmp_path) == ""


def test_errors_of_late_ranks_are_told_apart() -> None:
    for text in ("weft: all_reduce: timed out after 1500 ms: rank 1", "barrier timeout"):
        assert stacks.is_late(RuntimeError(text))
    assert not stacks.is_late(ValueError("reduction_threads 65: expected 0 to 64"))
