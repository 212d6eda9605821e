"""Cache folder for files that Weft makes and reads again, which no other user can have written.

A library in the folder runs in this process, so a file counts only if it belongs to this user (or
root) and no other user could write it, its folder or a folder above it. A folder that does not
qualify, or cannot be written, is replaced by a temporary folder, with a warning.
"""

from __future__ import annotations

import atexit
import contextlib
import grp
import hashlib
import logging
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from weft.base.environment import path as environment_path

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CacheError",
    "cache_directory",
    "copied",
    "folders",
    "is_whole",
    "keep",
    "open_own",
    "place",
    "read",
    "sealed",
    "warn",
    "write",
]

logger = logging.getLogger(__name__)

#: Permission bits for writers that are not the owner.
OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
#: Maximum bytes in a file that is read as text, far above any.
MAX_TEXT: Final = 64 << 20
#: Maximum library size in bytes, far above any.
MAX_LIBRARY: Final = 1 << 30
#: Last bytes in a cached library, behind the digest.
MAGIC: Final = b"weftlib1"
TRAILER: Final = hashlib.sha256().digest_size + len(MAGIC)
ANEW: Final = "it is made anew"

#: Warnings that this process has given, each once.
_warned: set[str] = set()
#: This process's folder, and the process that made it.
_own: dict[int, Path] = {}


class CacheError(OSError):
    """Cache folder or file that cannot be used; the text is the reason."""


def cache_directory() -> Path | None:
    """Folder that docs/environment.md describes; None if no variable names one.

    It need not exist, and is not checked: see `folders`.
    """
    if named := environment_path("WEFT_CACHE_DIR"):
        return named
    shared = environment_path("XDG_CACHE_HOME")
    if shared and shared.is_absolute():
        return shared / "weft"
    home = environment_path("HOME")
    if "HOME" not in os.environ:
        # A user without an entry in the password file has no home.
        with contextlib.suppress(RuntimeError):
            home = Path.home()
    return home / ".cache" / "weft" if home and home.is_absolute() else None


def folders(*, make: bool) -> Iterator[Path]:
    """Cache folders, best first, with resolved paths; a refused one is warned about.

    Args:
        make: create them; otherwise only those that exist are listed.
    """
    named = cache_directory()
    if named is None:
        if make:
            warn("none of WEFT_CACHE_DIR, XDG_CACHE_HOME and HOME names a folder")
    else:
        try:
            yield usable(named, make=make)
        except FileNotFoundError:
            if make:
                warn(f"{named}: no such folder")
        except OSError as error:
            warn(f"{named}: {error.strerror or error}")
    with contextlib.suppress(OSError):
        yield usable(Path(tempfile.gettempdir(), f"weft-{os.geteuid()}"), make=make)
    if make or os.getpid() in _own:
        with contextlib.suppress(OSError):
            yield own_folder()


def usable(path: Path, *, make: bool) -> Path:
    """Resolved path for a folder to which only this user or root can have written.

    Raises:
        OSError: with the reason.
    """
    try:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve(strict=True)
    except FileExistsError:
        raise CacheError("it is not a folder") from None
    except RuntimeError as error:
        # Python 3.11 and 3.12 report a loop of symbolic links by it.
        raise CacheError(str(error)) from None
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise CacheError("it is not a folder")
    if reason := foreign(found):
        raise CacheError(reason)
    for above in path.parents:
        found = above.stat()
        # In a sticky folder only an entry's owner renames it.
        is_open = found.st_mode & OTHERS and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in {0, os.geteuid()} or (is_open and not is_private_group(found)):
            raise CacheError(f"another user can replace it: see the owner and mode of {above}")
    return path


def foreign(found: os.stat_result) -> str | None:
    """Reason why a file or folder may be another user's work; None without one."""
    if found.st_uid not in {0, os.geteuid()}:
        return f"it belongs to user {found.st_uid}, this process to user {os.geteuid()}"
    if found.st_mode & OTHERS and not (found.st_uid and is_private_group(found)):
        return f"other users can write it (mode {stat.S_IMODE(found.st_mode):04o}): chmod go-w"
    return None


def is_private_group(found: os.stat_result) -> bool:
    """True if only the owner can write: the group has the owner's name and no other members."""
    if found.st_mode & stat.S_IWOTH:
        return False
    with contextlib.suppress(KeyError):
        name, group = pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid)
        return group.gr_name == name and set(group.gr_mem) <= {name}
    return False


def own_folder() -> Path:
    """This process's temporary folder, removed at exit."""
    if os.getpid() not in _own:
        path = Path(tempfile.mkdtemp(prefix="weft-"))
        _own[os.getpid()] = path
        atexit.register(remove, path, os.getpid())
    return _own[os.getpid()]


def remove(path: Path, process: int) -> None:
    """Remove a folder, in the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def warn(reason: str, remedy: str = "") -> None:
    """Warn, once for each reason; without a remedy, that a temporary folder is used."""
    if reason not in _warned:
        _warned.add(reason)
        remedy = remedy or (
            "a temporary folder is used instead, set WEFT_CACHE_DIR to a folder that only this "
            "user can write"
        )
        logger.warning("cache %s; %s", reason, remedy)


class Opened(NamedTuple):
    """A file that this user owns, with properties."""

    descriptor: int
    size: int


@contextlib.contextmanager
def open_own(path: Path) -> Iterator[Opened]:
    """Open a regular file for reading that no other user can have written.

    A symbolic link is not followed, and a FIFO does not block.

    Raises:
        OSError: if it is missing, or not such a file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CacheError("it is not a regular file")
        if reason := foreign(found):
            raise CacheError(reason)
        yield Opened(descriptor, found.st_size)
    finally:
        os.close(descriptor)


def read(name: str) -> tuple[Path, str] | None:
    """Path and text for a cached file; None without a file that this user owns."""
    for folder in folders(make=False):
        path = folder / name
        try:
            with open_own(path) as (descriptor, size):
                if size > MAX_TEXT:
                    raise CacheError(f"it has {size} bytes, more than {MAX_TEXT}")
                with open(descriptor, "rb", closefd=False) as file:
                    return path, file.read(MAX_TEXT).decode(errors="replace")
        except FileNotFoundError:
            pass
        except OSError as error:
            warn(f"{path}: {error.strerror or error}")
    return None


def place(name: str) -> Path:
    """Path at which `write` keeps a file first; makes the folder."""
    return next(folders(make=True), Path(tempfile.gettempdir())) / name


def write(name: str, data: bytes) -> Path:
    """Keep a file in the first folder that takes it, and return the path.

    Raises:
        CacheError: if no folder does.
    """
    for folder in folders(make=True):
        try:
            return keep(folder / name, data)
        except OSError as error:
            warn(f"{folder / name}: {error.strerror or error}")
    raise CacheError(f"{name}: no folder can be written, not even {tempfile.gettempdir()}")


def keep(path: Path, data: bytes) -> Path:
    """Write a file; a reader finds the old one or the new one."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(fresh, flags, 0o600), "wb") as file:
            file.write(data)
        with contextlib.suppress(OSError):
            # An empty folder in the way.
            path.rmdir()
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    return path


def sealed(name: str, content: bytes) -> bytes:
    """A library with a trailer, by which `is_whole` detects damage; loaders ignore it."""
    return content + hashlib.sha256(name.encode() + content).digest() + MAGIC


def copied(name: str) -> bytes:
    """Library content from any folder; empty if none has it whole."""
    return next((found for folder in folders(make=False) if (found := content(folder / name))), b"")


def is_whole(path: Path) -> bool:
    """True for this user's library if it has a trailer that matches content and name."""
    return content(path) is not None


def content(path: Path) -> bytes | None:
    """Library content without the trailer; None if it is missing, damaged or not trusted."""
    try:
        with open_own(path) as (descriptor, _), open(descriptor, "rb", closefd=False) as file:
            whole = file.read(MAX_LIBRARY)
    except FileNotFoundError:
        return None
    except OSError as error:
        warn(f"{path}: {error.strerror or error}", ANEW)
        return None
    if sealed(path.name, whole[:-TRAILER]) == whole:
        return whole[:-TRAILER]
    warn(f"{path}: damaged, its digest does not match", ANEW)
    return None
