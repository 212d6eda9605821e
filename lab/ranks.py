"""Rank processes from the outside: how they start, get commands, and end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.network import Plan

__all__ = ["Ranks", "Times", "started"]

ROOT: Final = Path(__file__).parent.parent
#: Seconds for all ranks to start and to join the group.
START: Final = 120.0
#: Seconds for the ranks to leave the group.
END: Final = 10.0
#: Delay until a run, so that all ranks have received the command.
LEAD: Final = 0.2


class Times(NamedTuple):
    """One rank's run."""

    #: Seconds from the common start.
    start: float
    end: float
    #: Processor time, in seconds.
    cpu: float


class Ranks:
    """Connections to the ranks, in host order."""

    def __init__(self, streams: Sequence[IO[str]], errors: Path) -> None:
        self.streams = streams
        self.errors = errors

    def command(
        self, do: str, each: Sequence[dict[str, Any]] | None = None, **all_: Any
    ) -> list[Any]:
        """Send a command to all ranks and wait for their replies.

        Args:
            do: a method in `lab.worker.Server`.
            each: arguments by rank.
            all_: arguments for every rank.

        Raises:
            LabError: if a rank fails or has ended.
        """
        for rank, stream in enumerate(self.streams):
            stream.write(json.dumps({"do": do} | all_ | (each[rank] if each else {})) + "\n")
            stream.flush()
        return self.replies(do)

    def run(self, lead: float = LEAD) -> list[Times]:
        """Run the schedule on all ranks at once, in `lead` seconds; returns each rank's times."""
        at = time.monotonic() + lead
        return [
            Times(each["start"] - at, each["end"] - at, each["cpu_s"])
            for each in self.command("run", at=at)
        ]

    def replies(self, do: str) -> list[Any]:
        """The next line from each rank.

        Raises:
            LabError: if a rank fails or has ended.
        """
        found = []
        for rank, stream in enumerate(self.streams):
            try:
                line = stream.readline()
            except TimeoutError:
                raise LabError(f"host {rank}: no reply to `{do}`{self.tail()}") from None
            reply = json.loads(line) if line else {"error": "the process has ended"}
            if "error" in reply:
                raise LabError(f"host {rank}, `{do}`: {reply['error'].strip()}{self.tail()}")
            found.append(reply)
        return found

    def tail(self) -> str:
        """Last lines in the ranks' error output."""
        lines = self.errors.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
        return "".join(f"\n  {line}" for line in lines)


@contextlib.contextmanager
def started(plan: Plan, timeout: float, hosts: Sequence[int]) -> Iterator[Ranks]:
    """A rank in each host's namespace, joined as a group over tcp; killed when the block ends.

    Args:
        plan: the network, which `built` has made.
        timeout: seconds for each reply.
        hosts: host by rank.

    Raises:
        LabError: if a rank does not come.
    """
    with tempfile.TemporaryDirectory(prefix="weft-lab-") as folder, contextlib.ExitStack() as stack:
        errors = Path(folder, "errors")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{folder}/socket")
        listener.listen(len(plan.hosts))
        listener.settimeout(START)
        process = start(plan, f"{folder}/socket", errors, hosts)
        stack.callback(kill, process)
        streams: list[IO[str]] = []
        ranks = Ranks(streams, errors)
        for _ in plan.hosts:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise LabError(f"ranks do not start within {START:.0f} s{ranks.tail()}") from None
            stack.enter_context(connection)
            connection.settimeout(max(timeout, START))
            streams.append(connection.makefile("rw", encoding="utf-8"))
            stack.callback(close, streams[-1])
        joined = ranks.replies("join")
        order = sorted(range(len(streams)), key=lambda place: joined[place]["host"])
        yield Ranks([streams[place] for place in order], errors)
        for connection_stream in streams:
            connection_stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END)


def close(stream: IO[str]) -> None:
    """Close a rank's stream, which may hold an interrupted command to a rank that has ended."""
    with contextlib.suppress(OSError):
        stream.close()


def start(plan: Plan, path: str, errors: Path, hosts: Sequence[int]) -> subprocess.Popen[str]:
    """Start the process that forks the ranks."""
    # Only the library's own variables: the caller's may belong to another group.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WEFT_")}
    search = [str(ROOT), str(ROOT / "python"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with errors.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.worker", path],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            text=True,
            env=inherited
            | {"PYTHONPATH": os.pathsep.join(filter(None, search)), "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(rank_list(plan, hosts)) + "\n")
        process.stdin.close()
    return process


def rank_list(plan: Plan, hosts: Sequence[int]) -> list[dict[str, Any]]:
    """Host, namespace and environment by rank."""
    common = {
        "WEFT_WORLD_SIZE": str(len(plan.hosts)),
        "WEFT_ADDR": plan.address(plan.hosts[hosts[0]]),
        "WEFT_PORT": "29501",
        "WEFT_SECRET": secrets.token_hex(32),
        "WEFT_PROVIDERS": "tcp",
        "WEFT_SILENCE_TIMEOUT": "60",
    }
    return [
        {
            "host": host,
            "node": plan.hosts[host],
            "environment": common | {"WEFT_RANK": str(rank), "WEFT_HOST_ID": plan.hosts[host]},
        }
        for rank, host in enumerate(hosts)
    ]


def kill(process: subprocess.Popen[str]) -> None:
    """End the process and all ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
