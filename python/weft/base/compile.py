"""C++ libraries, compiled where they are used and kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.base import cache
from weft.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["cached", "digest", "find_compiler", "run", "shared_runtime"]

COMPILERS: Final = ("c++", "g++", "clang++")
#: Seconds that a command may take.
LIMIT: Final = 900
#: Characters from a command's output in an error.
MAX_OUTPUT: Final = 2000


def find_compiler(what: str, module: str) -> str:
    """Path to the C++ compiler: CXX, else the first one in `COMPILERS`.

    Args:
        what: what needs it, for the error.
        module: module that builds it when run.
    """
    named = os.environ.get("CXX", "").strip()
    for name in [named] if named else COMPILERS:
        if found := shutil.which(name):
            return found
    where = f"CXX={named}" if named else ", ".join(COMPILERS)
    raise ConfigurationError(
        f"{what}: no C++ compiler ({where}); install one (Debian: apt install g++), or run "
        f"`python -m {module}` on a like machine that has one and copy its WEFT_CACHE_DIR"
    )


def shared_runtime(compiler: str) -> list[str]:
    """Options that link the process's C++ runtime, not a copy.

    If the package has no `libstdc++.so` link, a compiler takes `libstdc++.a`. A library with a
    second runtime crashes in streams, because each runtime has separate locale facet ids.

    Args:
        compiler: path to the C++ compiler.
    """
    name = "libstdc++.so"
    command = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    # Only the name was returned: there is no such file.
    return ["-l:libstdc++.so.6"] if found == name else []


def digest(command: list[str], parts: Iterable[str | bytes]) -> str:
    """Digest over everything a library depends on: compiler, machine and other parts."""
    result = hashlib.sha256()
    compiler = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    for part in [platform.machine(), *command, compiler, *parts]:
        data = part.encode() if isinstance(part, str) else part
        result.update(len(data).to_bytes(8, "little") + data)
    return result.hexdigest()[:32]


def cached(name: str, make: Callable[[Path, Path], None]) -> Path:
    """Path to a library in the cache, made unless a whole one is there.

    Processes that need it at the same time make it once; it appears whole. The last bytes are a
    digest.

    Args:
        name: file name.
        make: writes the file to the first argument; the second is a directory for other files,
            which is removed afterwards.

    Raises:
        ConfigurationError: if no folder can be written.
    """
    made = b""
    reason = "no folder can be written"
    for folder in cache.folders(make=True):
        path = folder / name
        if cache.is_whole(path):
            return path
        try:
            with lock(path.with_suffix(".lock")):
                # Another process may have made it meanwhile.
                if not cache.is_whole(path):
                    made = made or cache.copied(name) or content_of(name, make)
                    cache.keep(path, cache.sealed(name, made))
                return path
        except OSError as error:
            reason = f"{path}: {error.strerror or error}"
            cache.warn(reason)
    raise ConfigurationError(
        f"{name} cannot be kept: {reason}; set WEFT_CACHE_DIR or TMPDIR to a folder with free space"
    )


def content_of(name: str, make: Callable[[Path, Path], None]) -> bytes:
    """Content of the file that `make` writes, beside temporary files that it needs."""
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        path = Path(scratch, name)
        make(path, Path(scratch))
        return path.read_bytes()


@contextlib.contextmanager
def lock(path: Path, limit: float = LIMIT) -> Iterator[None]:
    """Hold a lock among processes while the block runs.

    Raises:
        OSError: if the file cannot be locked, or another process holds it for more than `limit` s.
    """
    until = time.monotonic() + limit
    # Neither a symbolic link is followed, nor does a FIFO block.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, flags, 0o600)
        stack.callback(os.close, descriptor)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another process has held it for {limit} s") from None
                time.sleep(0.05)
        yield


def run(command: list[str], what: str, expected: str) -> None:
    """Run a command, and raise with the output if it fails.

    Args:
        command: program and arguments.
        what: what needs it, for the error.
        expected: what to do, for the error.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=LIMIT)
        except BaseException as error:
            # A compiler is a process tree.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise ConfigurationError(
                f"{what}: {command[0]} did not end within {LIMIT} s; {expected}"
            ) from None
    if process.returncode:
        output = (stderr or stdout)[-MAX_OUTPUT:]
        raise ConfigurationError(
            f"{what}: {command[0]} failed with status {process.returncode}: {expected}\n{output}"
        )
