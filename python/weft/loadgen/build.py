"""Builds LoadGen and the shim from the source distribution, cached by input hashes.

The package mlcommons-loadgen on PyPI contains LoadGen only as a Python module: there, each query
would pass through Python. The source distribution has everything for a C++ library.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
from pathlib import Path
from typing import Final

from weft.base import compile as _compile
from weft.base import environment
from weft.base.errors import ConfigurationError
from weft.base.files import read_bytes

__all__ = ["VERSION", "built"]

#: Version of the package `mlcommons-loadgen`.
VERSION: Final = "6.0.17"
#: Version pin, by source distribution hash.
REQUIREMENTS: Final = Path(__file__).parent / "requirements.txt"
SOURCES: Final = Path(__file__).parent / "shim"
FLAGS: Final = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
#: LoadGen's sources for a library without bindings.
FILES: Final = (
    "early_stopping.cc",
    "issue_query_controller.cc",
    "loadgen.cc",
    "logging.cc",
    "results.cc",
    "test_settings_internal.cc",
    "utils.cc",
    "version.cc",
    "generated/version_generated.cc",
)


def built() -> Path:
    """Path of the library, compiled unless it is cached; it takes a minute.

    The source distribution is downloaded by pip, or is the file that `WEFT_LOADGEN_SOURCE` names;
    either has to have the pinned hash.

    Raises:
        ConfigurationError: without a C++ compiler or the sources, or if the compiler fails.
    """
    command = [_compile.find_compiler("LoadGen", "weft.loadgen"), *FLAGS]
    own = [each.read_bytes() for each in sorted(SOURCES.iterdir())]
    key = _compile.digest(command, [REQUIREMENTS.read_bytes(), *own])

    def make(path: Path, scratch: Path) -> None:
        unpacked = unpack(distribution(scratch), scratch)
        sources = [str(SOURCES / "shim.cpp"), *(str(unpacked / name) for name in FILES)]
        _compile.run(
            [*command, f"-I{unpacked}", *sources, "-o", str(path)],
            "LoadGen",
            "expected a compiler of C++17; set CXX to another one",
        )

    return _compile.cached(f"libweft_loadgen-{key}.so", make)


def distribution(scratch: Path) -> Path:
    """Path to the source distribution, whose hash is the pinned one."""
    if named := environment.path("WEFT_LOADGEN_SOURCE"):
        return checked(named)
    _compile.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-binary=mlcommons-loadgen", "--require-hashes"),
            *("-r", str(REQUIREMENTS), "-d", str(scratch)),
        ],
        "LoadGen",
        f"expected the source distribution of mlcommons-loadgen {VERSION} from the package index; "
        "without one, set WEFT_LOADGEN_SOURCE to its file",
    )
    (found,) = scratch.glob("*.tar.gz")
    return found


def checked(archive: Path) -> Path:
    """Path to a source distribution, if it has the pinned hash."""
    if not archive.exists():
        raise ConfigurationError(f"WEFT_LOADGEN_SOURCE={archive}: no such file")
    try:
        content = read_bytes(archive)
    except OSError as error:
        raise ConfigurationError(
            f"WEFT_LOADGEN_SOURCE={archive}: expected the source distribution of mlcommons-loadgen "
            f"{VERSION}: {error}"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found not in REQUIREMENTS.read_text():
        raise ConfigurationError(
            f"WEFT_LOADGEN_SOURCE={archive}: expected the source distribution of mlcommons-loadgen "
            f"{VERSION}; the file has another hash, {found}"
        )
    return archive


def unpack(archive: Path, scratch: Path) -> Path:
    """Directory with LoadGen's sources."""
    root = scratch / "sources"
    with tarfile.open(archive) as file:
        for member in file:
            path = Path(*Path(member.name).parts[1:])
            if member.isfile() and path.suffix in {".cc", ".h"}:
                content = file.extractfile(member)
                assert content is not None
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(content.read())
    return root
