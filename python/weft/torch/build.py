"""Compiles and caches the backend's C++ library (`shim`) for the installed torch.

torch has no stable C++ interface for backends, so the library is bound to one minor release of
torch. A `make wheel` wheel has it for one torch and one Python; for others it is compiled where it
is used. Processes that need it at once compile it once. The cache key is a hash over the inputs.

See https://docs.pytorch.org/tutorials/intermediate/process_group_cpp_extension_tutorial.html.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Final

from weft.base import compile as _compile
from weft.base.errors import ConfigurationError

__all__ = ["built", "load", "prebuilt"]

logger = logging.getLogger(__name__)

#: The torch release whose C++ interface the library is written for.
TORCH: Final = "2.11"
MODULE: Final = "_weft_torch"
SOURCES: Final = Path(__file__).parent / "shim"
#: Library directory in a wheel.
PREBUILT: Final = Path(__file__).parent / "prebuilt"
#: Error subject.
WHAT: Final = "backend weft"


@cache
def load() -> Any:
    """The C++ library as a module: the wheel's, else the cached one, which is built if missing.

    Raises:
        ConfigurationError: if torch has another version, there is no C++ compiler or no Python
            headers, or the compiler fails.
    """
    import torch

    check_torch(torch.__version__)
    ready = prebuilt(torch.__version__)
    if ready.exists():
        try:
            return loaded(ready)
        except ImportError as error:
            # From a machine with a newer C library, for example.
            logger.warning("%s cannot be loaded, so it is compiled here: %s", ready, error)
    return loaded(built())


def loaded(path: Path) -> Any:
    """The library in this file as a module."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, str(path), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def prebuilt(torch_version: str) -> Path:
    """Library path in a wheel, for this torch, this Python and these sources."""
    digest = hashlib.sha256()
    for path in [Path(__file__), *sorted(SOURCES.iterdir())]:
        digest.update(path.read_bytes())
    abi = sysconfig.get_config_var("SOABI")
    return PREBUILT / f"{MODULE}-{torch_version}-{abi}-{digest.hexdigest()[:16]}.so"


def built() -> Path:
    """Library path in the cache, compiled unless it is there."""
    import torch

    check_torch(torch.__version__)
    libraries, include = (Path(torch.__file__).parent / name for name in ("lib", "include"))
    command = [_compile.find_compiler(WHAT, "weft.torch"), *flags(include)]
    sources = [each.read_bytes() for each in sorted(SOURCES.iterdir())]
    key = _compile.digest(command, [torch.__version__, sys.version, *sources])

    def make(path: Path, _: Path) -> None:
        _compile.run(
            [
                *command,
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                str(SOURCES / "module.cpp"),
                # torch is imported before, so the libraries are found by name, wherever they lie.
                *("-o", str(path), f"-L{libraries}"),
                *("-ltorch_python", "-ltorch_cpu", "-lc10"),
                *_compile.shared_runtime(command[0]),
            ],
            WHAT,
            "expected a compiler of C++17; set CXX to another one",
        )

    return _compile.cached(f"{MODULE}-{key}.so", make)


def check_torch(version: str) -> None:
    """Raise unless the library is written for this torch release."""
    if version.split("+")[0].rsplit(".", 1)[0] != TORCH:
        raise ConfigurationError(
            f"backend weft with torch {version}: expected torch {TORCH}; "
            f"pip install 'torch=={TORCH}.*', or use another backend"
        )


def flags(include: Path) -> list[str]:
    """Compiler options, apart from input and output."""
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
