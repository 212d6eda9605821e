"""C++ libraries that are compiled where they are used, and kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft._cache import cache_directory
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["cached", "digest", "find_compiler", "run", "shared_runtime"]

COMPILERS: Final = ("c++", "g++", "clang++")
#: Seconds that a command may take.
LIMIT: Final = 900
#: Characters of a command's output in an error.
MAX_OUTPUT: Final = 2000


def find_compiler(what: str, module: str) -> str:
    """Path of the C++ compiler: CXX, else the first of `COMPILERS`.

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
    """Options that link the C++ runtime of the process, not a copy.

    Without the link `libstdc++.so` of its package, a compiler takes `libstdc++.a`. A library with a
    second runtime crashes in streams: each runtime has its own ids of locale facets.

    Args:
        compiler: path of the C++ compiler.
    """
    name = "libstdc++.so"
    command = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    # The name alone: there is none.
    return ["-l:libstdc++.so.6"] if found == name else []


def digest(command: list[str], parts: Iterable[str | bytes]) -> str:
    """Digest of what a library depends on: the compiler, the machine and other parts."""
    result = hashlib.sha256()
    compiler = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    for part in [platform.machine(), *command, compiler, *parts]:
        data = part.encode() if isinstance(part, str) else part
        result.update(len(data).to_bytes(8, "little") + data)
    return result.hexdigest()[:32]


def cached(name: str, make: Callable[[Path, Path], None]) -> Path:
    """Path of a file in the cache, made unless it is there.

    Processes that need it at once make it once; it appears whole.

    Args:
        name: of the file.
        make: writes the file to its first argument; the second is a directory for other files,
            which is removed afterwards.
    """
    directory = cache_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / name
    if path.exists():
        return path
    with lock(path.with_suffix(".lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                made = Path(scratch, name)
                make(made, Path(scratch))
                made.rename(path)
    return path


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock among processes while the block runs."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command: list[str], what: str, expected: str) -> None:
    """Run a command, and raise with its output if it fails.

    Args:
        command: with its arguments.
        what: what needs it, for the error.
        expected: what to do, for the error.
    """
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"{what}: {command[0]} did not end within {LIMIT} s; {expected}"
        ) from None
    if process.returncode:
        output = (process.stderr or process.stdout)[-MAX_OUTPUT:]
        raise ConfigurationError(
            f"{what}: {command[0]} failed with status {process.returncode}: {expected}\n{output}"
        )
