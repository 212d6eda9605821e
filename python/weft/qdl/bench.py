"""Both nodes on one machine: a test with the model in its process, then one over a connection."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.environment import path
from weft.base.errors import ConfigurationError
from weft.launch.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Workload", "accelerator", "measure", "run_test"]

#: Seconds for a process to start or end.
PATIENCE: Final = 60.0
#: Seconds for a process to end after Ctrl-C.
END_SECONDS: Final = 1.0
#: Duration of the test whose rate is the estimate for the others.
ESTIMATE_SECONDS: Final = 0.3
#: Variables with a secret.
SECRETS: Final = ("WEFT_SECRET", "WEFT_SECRET_FILE")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, sizes and load for a measurement."""

    model: str
    sample_bytes: int
    answer_bytes: int
    scenario: str
    provider: str
    samples: int
    duration: float
    target_qps: float | None
    target_latency: float
    coalesce: bool
    work: float
    slots: int
    max_batch: int
    checksum: bool
    spin: float

    def test_options(self) -> list[str]:
        """Options for `weft qdl frontend`."""
        options = {
            "--scenario": self.scenario,
            "--bytes": self.sample_bytes,
            "--samples": self.samples,
            "--target-latency": self.target_latency,
            "--min-queries": 100,
            "--spin": self.spin,
        }
        listed = [str(each) for pair in options.items() for each in pair]
        return [*listed, "--coalesce"] if self.coalesce else listed

    def local_options(self) -> list[str]:
        """Options for `weft qdl frontend` with the model in its process."""
        return [
            "--in-process",
            *("--local-model", self.model, "--work", str(self.work)),
            *("--answer-bytes", str(self.answer_bytes)),
            # Slots for one batch, as a model in this process would have.
            *("--slots", str(self.max_batch)),
        ]

    def node_options(self) -> list[str]:
        """Options for `weft qdl accelerator`."""
        options = {
            "--model": self.model,
            "--bytes": self.sample_bytes,
            "--answer-bytes": self.answer_bytes,
            "--work": self.work,
            "--slots": self.slots,
            "--max-batch": self.max_batch,
            "--provider": self.provider,
            "--spin": self.spin,
        }
        listed = [str(each) for pair in options.items() for each in pair]
        return [*listed, "--checksum"] if self.checksum else listed


def measure(workload: Workload, step: Callable[[str], None]) -> dict[str, Any]:
    """Measure; `step` is called with each step's name.

    Raises:
        ConfigurationError: a process failed; the text is its own.
    """
    with tempfile.TemporaryDirectory(prefix="weft-qdl-") as folder:
        step("in this process")
        local = measure_one(workload, workload.local_options(), Path(folder) / "local")
        with accelerator(workload.node_options()) as node:
            step(f"over {workload.provider}")
            options = [
                "--slots",
                str(workload.slots),
                "--node",
                node["address"],
                "--provider",
                workload.provider,
            ]
            remote = measure_one(workload, options, Path(folder) / "network")
    rates = (local["samples_per_second"], remote["samples_per_second"])
    return {
        "workload": {name: getattr(workload, name) for name in workload.__dataclass_fields__},
        "in_process": local,
        "network": remote,
        "ratio": rates[1] / rates[0],
    }


def measure_one(workload: Workload, options: Sequence[str], logs: Path) -> dict[str, Any]:
    """Outcome of one test that lasts the workload's duration."""
    rate = workload.target_qps
    if rate is None:
        # Streams have no rate to aim at: the estimate determines the query count.
        guess = 2000.0 if workload.scenario == "Server" else 50_000.0
        settings = ["--target-qps", str(guess), "--duration", str(ESTIMATE_SECONDS)]
        estimate = run_test([*workload.test_options(), *options, *settings], logs / "estimate")
        rate = estimate["samples_per_second"]
        if workload.scenario == "MultiStream":
            rate /= int(estimate["summary"]["samples_per_query"])
    while True:
        settings = ["--target-qps", str(rate), "--duration", str(workload.duration)]
        outcome = run_test([*workload.test_options(), *options, *settings], logs / "test")
        # A test that is faster than its estimate ends too soon; Server's rate is a demand.
        is_short = outcome["summary"].get("Min duration satisfied", "Yes").upper() == "NO"
        if not is_short or workload.scenario == "Server":
            return outcome
        rate *= 2


def run_test(options: Sequence[str], logs: Path) -> dict[str, Any]:
    """Outcome of `weft qdl frontend` in a separate process.

    Raises:
        ConfigurationError: it failed, or a query had no answer.
    """
    command = [sys.executable, "-m", "weft", "qdl", "frontend", "--json", *options]
    with subprocess.Popen(
        [*command, "--logs", str(logs), "--audit-config", str(logs / "audit.config")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    ) as process:
        try:
            stdout, stderr = process.communicate()
        except KeyboardInterrupt:
            end_soon(process)
            raise
    if not stdout.startswith("{"):
        raise ConfigurationError(f"the front end failed: {stderr.strip()}")
    outcome: dict[str, Any] = json.loads(stdout)
    if failed := outcome["counts"]["failed"]:
        raise ConfigurationError(f"{failed} queries had no answer")
    return outcome


@cache
def own_secret() -> str:
    """Secret for this process's nodes and front ends, which no other process has."""
    return secrets.token_hex(32)


def environment() -> dict[str, str]:
    """Environment for nodes and front ends: with a secret."""
    has_secret = any(path(name) for name in SECRETS)
    return os.environ | ({} if has_secret else {"WEFT_SECRET": own_secret()})


def end_soon(process: subprocess.Popen[str]) -> None:
    """End a weft command: by SIGTERM, after which it ends child processes, or else kill it."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


@contextlib.contextmanager
def accelerator(options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A node in a separate process; yields what it printed: its address and name.

    Raises:
        ConfigurationError: it failed to start.
    """
    command = [sys.executable, "-m", "weft", "qdl", "accelerator", "--json", *options]
    # A file takes any number of errors; a full pipe would block the node.
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=die_with_parent(),
        )
        assert process.stdout is not None
        try:
            # The node prints one line at once.
            readable, _, _ = select.select([process.stdout], [], [], PATIENCE)
            line = process.stdout.readline() if readable else ""
            if not line.startswith("{"):
                process.kill()
                process.wait()
                errors.seek(0)
                reason = errors.read().strip() or f"no address within {PATIENCE:g} s"
                raise ConfigurationError(f"the node failed: {reason}")
            yield json.loads(line)
        except KeyboardInterrupt:
            process.kill()
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
