"""Tests in guests with rxe devices: their marks, and Rust test binaries."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import ROOT

if TYPE_CHECKING:
    from lab.rdma.guests import Outcome

needs_guests = [
    pytest.mark.skipif(
        "TEST_RDMA_LAB" not in os.environ,
        reason="TEST_RDMA_LAB is not set; `make rdma-lab` builds the guests' kernel and sets it",
    ),
    pytest.mark.timeout(480),
]


@functools.cache
def binary(test: str, package: str = "weft-fabric") -> str:
    """Path to a crate's integration test, built if it is not."""
    build = ["cargo", "test", "--locked", "--quiet", "-p", package, "--test", test]
    done = subprocess.run(
        [*build, "--no-run", "--message-format=json"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    messages = map(json.loads, done.stdout.splitlines())
    found = [each["executable"] for each in messages if each.get("executable")]
    return str(found[-1])


def count(command: list[str]) -> int:
    """Number of tests that a test binary's command selects."""
    done = subprocess.run([*command, "--list"], stdout=subprocess.PIPE, check=True, text=True)
    return sum(line.endswith(": test") for line in done.stdout.splitlines())


def passed_all(outcome: Outcome, command: list[str]) -> bool:
    """Whether every test that the binary's command selects passed, and there are some."""
    selected = count(command)
    return selected > 0 and f" {selected} passed; 0 failed; 0 ignored" in outcome.stdout


def ranks(test: str, name: str, size: int, package: str = "weft-fabric") -> list[str]:
    """Command for each of `size` guests: one rank in a Rust test whose ranks are processes."""
    return [sys.executable, "-m", "lab.rdma.ranks", str(size), binary(test, package), name]
