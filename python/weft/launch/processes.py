"""Processes that end with the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PR_SET_PDEATHSIG: Final = 1


class Guardian:
    """A process that outlives the launcher if need be, and then kills the ranks' groups."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("guardian.py")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def guard(self, group: int) -> None:
        """Kill this process group if the launcher dies."""
        self.tell(f"+{group}\n")

    def release(self, group: int) -> None:
        """Remove this process group, which has ended."""
        self.tell(f"-{group}\n")

    def tell(self, line: str) -> None:
        """Send a line, if the guardian lives: without it, ranks still die with the launcher."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.write(line.encode())


def die_with_parent(descriptors: tuple[int, int] | None = None) -> Callable[[], None]:
    """Function for a child to run before exec: the kernel kills it when its parent dies.

    `descriptors` are the child's descriptor limits, if they differ from the parent's.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before_exec() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Signal a process group, if it still has a process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


@contextlib.contextmanager
def signals_as_bytes(numbers: Sequence[signal.Signals]) -> Iterator[int]:
    """A descriptor that yields a byte for each of these signals, while the context lasts.

    Signals that the process ignores stay ignored, for example SIGHUP under nohup, except SIGINT and
    SIGTERM.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    always = (signal.SIGINT, signal.SIGTERM)
    previous = [
        (number, signal.signal(number, lambda *_: None))
        for number in numbers
        if number in always or signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous_wakeup = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous:
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
