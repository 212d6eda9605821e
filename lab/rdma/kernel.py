"""Guest kernel: user-mode Linux with rxe and siw, from Debian's sources, in a cache.

A build takes eight processor minutes and happens once for each version of the sources,
`kernel.config` and this recipe.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lab.errors import LabError
from lab.rdma.packages import BUILD, SOURCE, ensure, version
from weft.base import cache
from weft.base import compile as _compile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["build", "cached"]

CONFIG: Final = Path(__file__).with_name("kernel.config")
ARCHIVE: Final = Path("/usr/src", f"{SOURCE}.tar.xz")
#: Folder name for all lab kernels, in the cache.
FOLDER: Final = "rdma-lab"
#: Part of the cache key: raise it when the steps below change.
RECIPE: Final = 1
#: Sources that no guest kernel compiles; their Kconfig files are read.
UNUSED: Final = ("drivers/gpu/*.[ch]", "drivers/media/*.[ch]", "sound/*.[ch]", "*.rst", "*.dts*")
#: Build time limit, in seconds.
LIMIT: Final = 1800.0


def recipe() -> str:
    """Hash over the configuration and the steps."""
    return hashlib.sha256(CONFIG.read_bytes() + str(RECIPE).encode()).hexdigest()[:12]


def cached() -> Path | None:
    """The kernel in the cache: from the installed sources, or the newest if none are installed.

    A file counts only if it is this user's and whole, since it is run.
    """
    installed = version(SOURCE)
    pattern = f"{FOLDER}/{installed or '*'}-{recipe()}/linux"
    for folder in cache.folders(make=False):
        found = [path for path in folder.glob(pattern) if is_own(path) and cache.is_whole(path)]
        if found:
            return max(found, key=lambda path: path.stat().st_mtime)
    return None


def is_own(path: Path) -> bool:
    """True if no other user can have replaced a file."""
    with contextlib.suppress(OSError):
        return path.parent == cache.usable(path.parent, make=False)
    return False


def build(report: Callable[[str], None]) -> Path:
    """The kernel, built unless it is in the cache.

    Args:
        report: takes progress lines.

    Raises:
        LabError: if a package is missing and cannot be installed, or the build fails.
    """
    if found := cached():
        return found
    ensure(BUILD, report)
    try:
        root = cache.usable(cache.place(FOLDER), make=True)
        # A second build waits for the first one.
        with _compile.lock(root / "lock", LIMIT):
            return cached() or built(root, report)
    except OSError as error:
        raise LabError(f"cache of the guests' kernel: {error}; set WEFT_CACHE_DIR") from error


def built(root: Path, report: Callable[[str], None]) -> Path:
    """The kernel, built in a folder that is locked."""
    target = root / f"{version(SOURCE)}-{recipe()}"
    folder = root / f"building-{target.name}"
    for other in root.glob("building-*"):
        if other != folder:
            shutil.rmtree(other)
    # A build that was interrupted continues.
    source = unpacked(folder, report)
    compile_in(source, report)
    result = folder / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir(mode=0o700)
    kernel = cache.sealed("linux", (source / "linux").read_bytes())
    cache.keep(result / "linux", kernel).chmod(0o700)
    shutil.copy(source / ".config", result / "config")
    shutil.rmtree(target, ignore_errors=True)
    result.rename(target)
    shutil.rmtree(folder)
    return target / "linux"


def unpacked(folder: Path, report: Callable[[str], None]) -> Path:
    """The sources in a folder, unpacked and adapted unless they are; returns the folder."""
    source, complete = folder / SOURCE, folder / "complete"
    if complete.exists():
        return source
    report(f"unpacking {ARCHIVE.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    excluded = [f"--exclude=*/{each}" for each in UNUSED]
    run(["tar", "xf", str(ARCHIVE), *excluded, "-C", str(folder)], folder)
    kconfig = source / "arch/um/Kconfig"
    text = kconfig.read_text(encoding="utf-8")
    hertz = "config HZ\n\tint\n\tdefault 100\n"
    if hertz not in text:
        raise LabError(f"{ARCHIVE}: expected HZ of 100 in arch/um/Kconfig; adapt {__name__}")
    # 1 ms timers: with 10 ms, pollers that sleep have 10 ms latencies.
    kconfig.write_text(text.replace(hertz, hertz.replace("100", "1000")), encoding="utf-8")
    complete.touch()
    return source


def compile_in(source: Path, report: Callable[[str], None]) -> None:
    """Configure and compile the sources."""
    begin = time.monotonic()
    make = ["make", "ARCH=um", f"-j{os.cpu_count()}"]
    run([*make, "allnoconfig", f"KCONFIG_ALLCONFIG={CONFIG}"], source)
    missing = set(options(CONFIG)) - set(options(source / ".config"))
    if missing:
        raise LabError(f"{CONFIG}: options not accepted: {', '.join(sorted(missing))}")
    files = 0
    shown = begin
    for line in lines([*make, "linux"], source):
        files += line.lstrip().startswith("CC ")
        if time.monotonic() > shown + 15:
            shown = time.monotonic()
            report(f"{files} files compiled in {shown - begin:.0f} s")
    report(f"kernel built in {time.monotonic() - begin:.0f} s")


def options(file: Path) -> Iterator[str]:
    """Options that a configuration sets."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("CONFIG_"):
            yield line


def run(command: list[str], folder: Path) -> None:
    """Run a command until it ends."""
    for _ in lines(command, folder):
        pass


def lines(command: list[str], folder: Path) -> Iterator[str]:
    """Command output, line by line, standard error included.

    Raises:
        LabError: if it fails, with its last lines, or takes longer than the limit.
    """
    last: list[str] = []
    command = ["timeout", "--kill-after=5", str(LIMIT), *command]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                command,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
            )
        )
        stack.callback(process.terminate)
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-19:], line.rstrip()]
            yield line
        if status := process.wait():
            detail = "".join(f"\n  {line}" for line in last)
            raise LabError(f"{' '.join(command[3:])}: exit status {status}{detail}")
