"""Build of the backend's C++ library (`shim`) for the installed torch, cached by its inputs.

torch has no stable C++ interface for backends, so the library is bound to one minor release of
torch and is compiled where it is used. Processes that need it at once compile it once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft._cache import cache_directory
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["built", "load"]

#: The release of torch whose C++ interface the library is written for.
TORCH: Final = "2.11"
MODULE: Final = "_weft_torch"
SOURCES: Final = Path(__file__).parent / "shim"
COMPILERS: Final = ("c++", "g++", "clang++")
#: Seconds that a compilation may take.
LIMIT: Final = 900
#: Characters of the compiler's output in an error.
MAX_OUTPUT: Final = 2000


@cache
def load() -> Any:
    """The C++ library as a module, built if the cache lacks it.

    Raises:
        ConfigurationError: for another torch, without a C++ compiler or Python's headers, or if the
            compiler fails.
    """
    path = str(built())
    loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def built() -> Path:
    """Path of the library, compiled unless it is cached."""
    import torch

    check_torch(torch.__version__)
    command = [find_compiler(), *flags(Path(torch.__file__).parent / "include")]
    directory = cache_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{MODULE}-{key(torch.__version__, command)}.so"
    if path.exists():
        return path
    with lock(path.with_suffix(".lock")):
        if not path.exists():
            compile_to(path, command, torch)
    return path


def check_torch(version: str) -> None:
    """Raise unless the library is written for this release of torch."""
    if version.split("+")[0].rsplit(".", 1)[0] != TORCH:
        raise ConfigurationError(
            f"backend weft with torch {version}: expected torch {TORCH}; "
            f"pip install 'torch=={TORCH}.*', or use another backend"
        )


def find_compiler() -> str:
    """Path of the C++ compiler: CXX, else the first of `COMPILERS`."""
    named = os.environ.get("CXX", "").strip()
    for name in [named] if named else COMPILERS:
        if found := shutil.which(name):
            return found
    where = f"CXX={named}" if named else ", ".join(COMPILERS)
    raise ConfigurationError(
        f"backend weft: no C++ compiler ({where}); install one (Debian: apt install g++), or run "
        "`python -m weft.torch` on a like machine that has one and copy its WEFT_CACHE_DIR"
    )


def flags(include: Path) -> list[str]:
    """Options of the compiler, apart from input and output."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise ConfigurationError(
            f"backend weft: no Python.h in {python}; install Python's headers "
            "(Debian: apt install python3-dev)"
        )
    if not (include / "torch").exists():
        raise ConfigurationError(f"backend weft: no headers of torch in {include}; reinstall torch")
    system = [include, include / "torch" / "csrc" / "api" / "include", python]
    return [
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        *(each for path in system for each in ("-isystem", str(path))),
    ]


def key(version: str, command: list[str]) -> str:
    """Digest of all that the library depends on."""
    digest = hashlib.sha256()
    compiler = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    parts = [version, sys.version, platform.machine(), *command]
    for part in [*map(str.encode, parts), compiler, *(each.read_bytes() for each in sources())]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def sources() -> list[Path]:
    """Files of the library, in the order of their names."""
    return sorted(SOURCES.iterdir())


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock among processes while the block runs."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_to(path: Path, command: list[str], torch: Any) -> None:
    """Compile the library; the file appears whole."""
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory, path.name)
        process = subprocess.run(
            [
                *command,
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                str(SOURCES / "module.cpp"),
                *("-o", str(made), f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
                *("-ltorch_python", "-ltorch_cpu", "-lc10"),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
        if process.returncode:
            output = (process.stderr or process.stdout)[:MAX_OUTPUT]
            raise ConfigurationError(
                f"backend weft: {command[0]} failed with status {process.returncode}: expected a "
                f"compiler of C++17; set CXX to another one\n{output}"
            )
        made.rename(path)
