"""Stacks from late ranks: Python and native ones, on all threads.

A rank calls `arm`, and then dumps its Python stacks on a signal. `collected` has stacks of all
ranks that are armed in a directory, with thread state and place in the kernel and, if gdb is
installed, their native stacks. Several ranks may find out at the same time that one is late:
`shared` has them collected by the first, while the others wait, so that none ends the test before.
"""

import contextlib
import faulthandler
import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

#: Asks a process for its Python stacks.
SIGNAL = signal.SIGUSR2
#: Seconds for a process's dump, and for its threads by gdb.
PATIENCE = 2.0
GDB_PATIENCE = 20.0
#: Errors from waits for a rank that is late.
LATE = ("timed out", "timeout", "did not finish within", "not complete within")

Directory = str | os.PathLike[str]


def arm(directory: Directory, rank: int | str) -> None:
    """Dump this process's Python stacks to a file in the directory on `SIGNAL`."""
    path = Path(directory, f"stacks-{rank}-{os.getpid()}")
    # The handler writes to the descriptor, which stays open.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


def is_late(error: BaseException) -> bool:
    """True for the error from a wait for a rank that did not come."""
    return isinstance(error, TimeoutError) or any(each in str(error).lower() for each in LATE)


def shared(directory: Directory) -> str:
    """Same as `collected`, for the first rank that calls it here."""
    with Path(directory, "stacks").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        if not text:
            text = collected(directory)
            file.write(text)
        return text


def found(directory: Directory) -> str:
    """The text from `shared`, if a rank has called it there."""
    path = Path(directory, "stacks")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def collected(directory: Directory) -> str:
    """Stacks of all ranks that are armed in a directory and have not ended."""
    found = []
    for path in sorted(Path(directory).glob("stacks-*-*")):
        _, rank, process = path.name.split("-")
        with contextlib.suppress(ProcessLookupError):
            found.append(f"== rank {rank}, process {process}\n{of_process(path, int(process))}")
    return "\n".join(found)


def of_process(path: Path, process: int) -> str:
    """One process's stacks: Python's, the kernel's view on its threads, and native ones."""
    before = path.stat().st_size
    os.kill(process, SIGNAL)
    until = time.monotonic() + PATIENCE
    while path.stat().st_size == before and time.monotonic() < until:
        time.sleep(0.01)
    # The last stack may still be on its way.
    time.sleep(0.05)
    python = path.read_text(encoding="utf-8")[before:] or "no stacks of Python"
    return "\n".join([python, threads(process), native(process)])


def threads(process: int) -> str:
    """Name, state, place in the kernel and system call for each thread."""
    lines = []
    for task in Path(f"/proc/{process}/task").glob("*"):
        found = {}
        for name in ("comm", "wchan", "syscall", "stack"):
            # A thread may end meanwhile; the last two need permissions.
            with contextlib.suppress(OSError):
                found[name] = " < ".join((task / name).read_text(encoding="utf-8").splitlines())
        with contextlib.suppress(OSError):
            found["state"] = (task / "stat").read_text(encoding="utf-8").rpartition(")")[2][1:2]
        lines.append(f"thread {task.name}: " + ", ".join(f"{k} {v}" for k, v in found.items()))
    return "\n".join(lines)


def native(process: int) -> str:
    """Native stacks on all threads by gdb or elfutils, if one is installed and may look."""
    if process == os.getpid():
        return "no native stacks: this process collects them"
    commands = {
        "gdb": ["-p", str(process), "-batch", "-nx", "-ex", "thread apply all backtrace"],
        "eu-stack": ["-p", str(process)],
    }
    for name, arguments in commands.items():
        if (program := shutil.which(name)) is None:
            continue
        try:
            shown = subprocess.run(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=GDB_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{name} did not end within {GDB_PATIENCE:g} s"
        return shown.stdout or shown.stderr
    return "no native stacks: expected gdb or eu-stack"
