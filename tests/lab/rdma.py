"""Tests in guests with rxe devices: their marks, and fabric Rust test binaries."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

from tests import ROOT

needs_guests = [
    pytest.mark.skipif(
        "TEST_RDMA_LAB" not in os.environ,
        reason="TEST_RDMA_LAB is not set; `make rdma-lab` builds the guests' kernel and sets it",
    ),
    pytest.mark.timeout(480),
]


@functools.cache
def binary(test: str) -> str:
    """Path to a fabric integration test, built if it is not."""
    build = ["cargo", "test", "--locked", "--quiet", "-p", "weft-fabric", "--test", test]
    done = subprocess.run(
        [*build, "--no-run", "--message-format=json"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    messages = map(json.loads, done.stdout.splitlines())
    found = [each["executable"] for each in messages if each.get("executable")]
    return str(found[-1])


def ranks(test: str, name: str, size: int) -> list[str]:
    """Command for each of `size` guests: one rank in a Rust test whose ranks are processes."""
    return [sys.executable, "-m", "lab.rdma.ranks", str(size), binary(test), name]
