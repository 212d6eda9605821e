"""Files that a command writes: checked before the work, written beside, and renamed.

A file is replaced as a whole or not at all, and only if it has the same kind. Devices, pipes and
`/dev/stdout` are written directly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "Kind",
    "OutputFile",
    "check_folder",
    "check_outputs",
    "plot_file",
    "why",
    "write_output",
]

#: Bytes at the file start that identify the kind.
HEAD_BYTES: Final = 1 << 16
#: Names for this process's open descriptors.
DESCRIPTOR: Final = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
STREAMS: Final = {"/dev/stdout": 1, "/dev/stderr": 2}
Kind = Literal[
    "Perfetto trace",
    "NCCL topology file",
    "network",
    "measurement file",
    "JSON lines of results",
    ".png",
    ".svg",
    "cabling list",
    "rank map",
    "rank file",
    "host file",
    "node ranks",
]
#: File beginnings by kind: each group has one that matches.
KINDS: Final[Mapping[Kind, tuple[tuple[bytes, ...], ...]]] = {
    "Perfetto trace": ((b"{", b"["), (b'"traceEvents"', b'"displayTimeUnit"', b'"ph"')),
    "NCCL topology file": ((b"<",), (b"<system",)),
    "network": ((b"{",), (b'"switches"', b'"endpoints"', b'"links"')),
    "measurement file": ((b"{",), (b'"weft-tuning-',)),
    "JSON lines of results": ((b"{",), (b'"origin"', b'"benchmark"', b'"case"')),
    ".png": ((b"\x89PNG",),),
    ".svg": ((b"<",), (b"<svg",)),
    "cabling list": ((b"cable,",),),
    "rank map": ((b"rank,",),),
    "rank file": ((b"rank ",),),
    "host file": ((b"",), (b" slots=",)),
    "node ranks": ((b"# torchrun",),),
}


class OutputFile(NamedTuple):
    """A file that an option names."""

    option: str
    path: Path
    #: An existing file of another kind is not replaced.
    kind: Kind
    #: True if missing folders are made.
    makes_folders: bool = False


def plot_file(path: Path) -> OutputFile:
    """The picture that `--plot` names."""
    return OutputFile("--plot", path, ".svg" if path.suffix == ".svg" else ".png")


def check_outputs(outputs: Iterable[OutputFile], inputs: Iterable[Path] = ()) -> None:
    """Check that result files can be written, before the work.

    Args:
        outputs: files that a command is to write.
        inputs: files that it reads; what does not exist is no file.

    Raises:
        ValueError: if one cannot be written, or must not be replaced; with the remedy.
    """
    taken = [(path, "an input") for path in inputs]
    for output in outputs:
        reason = obstacle(output)
        for path, what in taken:
            if reason is None and same_file(output.path, path):
                reason = f"{what} of this command; choose another name"
        if reason is not None:
            raise ValueError(f"{output.option} {output.path}: {reason}")
        taken.append((output.path, f"the file of {output.option}"))


def obstacle(output: OutputFile) -> str | None:
    """Reason why a file must not be written, with the remedy; None if it may be written."""
    descriptor = descriptor_of(output.path)
    if descriptor is not None:
        return None if is_open(descriptor) else f"descriptor {descriptor} is not open"
    target = Path(os.path.realpath(output.path))
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return folder_obstacle(target.parent, output.makes_folders)
    except OSError as error:
        return why(error)
    if stat.S_ISDIR(mode):
        return "a folder; expected a file"
    if not os.access(target, os.W_OK):
        return "no permission to write it; change its mode, or choose another name"
    if stat.S_ISREG(mode) and not is_of_kind(target, output.kind):
        return (
            f"exists, and is no {output.kind.removeprefix('.')}; delete it, or choose another name"
        )
    return None


def check_folder(option: str, path: Path) -> None:
    """Check that files can be written to a folder, which is made unless it exists.

    Raises:
        ValueError: if not, with the reason.
    """
    reason = folder_obstacle(Path(os.path.realpath(path)), makes_folders=True)
    if reason is not None:
        raise ValueError(f"{option} {path}: {reason}")


def folder_obstacle(folder: Path, makes_folders: bool) -> str | None:
    """Reason why a file cannot be made in a folder; None if it can."""
    while True:
        try:
            mode = folder.stat().st_mode
            break
        except FileNotFoundError:
            if not makes_folders:
                return f"no directory {folder}; create it first"
            folder = folder.parent
        except NotADirectoryError:
            folder = folder.parent
        except OSError as error:
            return why(error)
    if not stat.S_ISDIR(mode):
        return f"{folder} is not a directory"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write in {folder}; choose another directory"
    return None


def is_of_kind(path: Path, kind: Kind) -> bool:
    """True for an empty file, and for one that begins like files of a kind."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES).lstrip()
    except OSError:
        return False
    if not head:
        return True
    begins, *contains = KINDS[kind]
    return head.startswith(begins) and all(
        any(each in head for each in group) for group in contains
    )


def same_file(one: Path, other: Path) -> bool:
    """True for two names for one file, existing or not; false for devices."""
    try:
        return one.samefile(other) and stat.S_ISREG(one.stat().st_mode)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other) and not other.exists()


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write a file as a whole: beside it first, then renamed.

    Raises:
        OSError: if it cannot be written; a file that was there is unchanged.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    descriptor = descriptor_of(path)
    if descriptor is not None:
        if descriptor == 1 and sys.stdout is not None:
            sys.stdout.flush()
        with os.fdopen(os.dup(descriptor), "wb") as stream:
            stream.write(data)
        return
    target = Path(os.path.realpath(path))
    present = target.exists()
    if present and not target.is_file():
        with target.open("wb", buffering=0) as device:
            write_all(device.fileno(), data)
        return
    if not os.access(target.parent, os.W_OK):
        target.write_bytes(data)
        return
    beside, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.")
    try:
        with os.fdopen(beside, "wb") as file:
            os.fchmod(beside, target.stat().st_mode & 0o7777 if present else 0o666 & ~umask())
            file.write(data)
        os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        # A mount point, for example for a file in a container, can be written, but not replaced.
        if not (isinstance(error, OSError) and error.errno == errno.EBUSY):
            raise
        target.write_bytes(data)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a descriptor."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def umask() -> int:
    """Mode bits that new files in this process lack."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("Umask:")[2].split()[0], 8)
    return 0o077


def descriptor_of(path: Path) -> int | None:
    """The open descriptor that a name such as /dev/stdout stands for."""
    name = os.path.abspath(path)
    match = DESCRIPTOR.fullmatch(name)
    return int(match[1]) if match else STREAMS.get(name)


def is_open(descriptor: int) -> bool:
    """True for an open descriptor."""
    try:
        os.fstat(descriptor)
    except (OSError, OverflowError):
        return False
    return True


def why(error: OSError) -> str:
    """Reason for a failed write, without the file's number and name."""
    return error.strerror or str(error)
