"""The machine itself: processors, memory, limits, and what the kernel offers."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import resource
import secrets
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

import weft
from weft import _native
from weft.base import addresses
from weft.base.errors import ProviderError
from weft.diagnosis.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Callable

GIB: Final = 1 << 30
CGROUP_MOUNT: Final = Path("/sys/fs/cgroup")
# futex(2)'s number differs between architectures.
FUTEX_CALL: Final = {"x86_64": 202, "aarch64": 98}
FUTEX_WAKE: Final = 1
#: Pages with remedies, by provider.
REMEDIES: Final = {"ofi": "docs/efa.md", "verbs": "docs/verbs.md"}


def versions() -> Finding:
    """Weft's and Python's."""
    build = weft.build_info()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    detail = f"Weft {build.version} ({build.commit[:12]}, {build.profile}), {python}"
    if build.profile == "release":
        return Finding("versions", True, detail, "the native module is optimised")
    return Finding("versions", True, detail, "a debug build: do not measure with it")


def cores() -> Finding:
    """Processors that this process may use, after affinity and the control group's share."""
    allowed = len(os.sched_getaffinity(0))
    share = cgroup_cores()
    detail = f"{allowed} of {os.cpu_count()}"
    if share is not None:
        detail += f", control group: {share:g}"
    usable = max(1, int(min(allowed, share if share is not None else allowed)))
    follows = f"more than {usable} ranks share cores: their waits yield the core, then park"
    return Finding("cores", True, detail, follows)


def memory() -> Finding:
    """Memory that this process may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_memory()
    detail = f"{total / GIB:.1f} GiB"
    if limit is not None and limit < total:
        detail += f", control group: {limit / GIB:.1f} GiB"
        total = limit
    return Finding("memory", True, detail, f"regions of all ranks here share {total / GIB:.1f} GiB")


def memfd() -> Finding:
    """Memory files without names."""
    try:
        os.close(os.memfd_create("weft-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        follows = "no region can be allocated: allow memfd_create"
        return Finding("memfd", False, str(error.strerror), follows, required=True)
    return Finding("memfd", True, "memfd_create", "regions have no names to leave behind", True)


def futex() -> Finding:
    """Waiting in the kernel for a memory word."""
    call = FUTEX_CALL.get(platform.machine())
    if call is None:
        detail = f"unknown on {platform.machine()}"
        return Finding("futex", False, detail, "Weft has not been ported to this processor", True)
    word = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    # A shared one, as between processes: no FUTEX_PRIVATE_FLAG.
    if libc.syscall(call, ctypes.byref(word), FUTEX_WAKE, 1, None, None, 0) < 0:
        reason = os.strerror(ctypes.get_errno())
        return Finding("futex", False, reason, "waiters cannot park: allow futex", required=True)
    return Finding("futex", True, "shared", "an idle waiter costs no processor time", True)


def unix_sockets() -> Finding:
    """Unix sockets with abstract names, which pass region descriptors between ranks."""
    name = f"\0weft-doctor-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            follows = "no shared memory between ranks of a host: tcp carries it"
            return Finding("abstract sockets", False, str(error.strerror), follows)
    return Finding("abstract sockets", True, "AF_UNIX", "ranks of a host share memory (shm)")


def loopback() -> Finding:
    """TCP within the host, which the rendezvous uses."""
    address = addresses.loopback()
    family = addresses.family(address)
    with socket.socket(family) as listener, socket.socket(family) as caller:
        try:
            listener.bind((address, 0))
            listener.listen()
            caller.settimeout(2)
            caller.connect(listener.getsockname())
        except OSError as error:
            follows = "ranks cannot find each other: bring the interface lo up"
            return Finding("loopback", False, str(error), follows, required=True)
    return Finding("loopback", True, f"TCP over {address}", "ranks of a host find each other", True)


def dev_shm() -> Finding:
    """The file system for named shared memory, which Weft itself does not use."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        follows = "no consequence for Weft; PyTorch's data loaders need it"
        return Finding("/dev/shm", False, os.strerror(error.errno or errno.ENOENT), follows)
    follows = "Weft uses none of it; its limit does not bind regions"
    return Finding("/dev/shm", True, f"{size / GIB:.1f} GiB", follows)


def locked_memory() -> Finding:
    """Finding on the pinned memory limit; registration with a NIC pins memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("RLIMIT_MEMLOCK", True, "unlimited", "NICs can register any memory")
    follows = "bounds what a NIC may register: `ulimit -l unlimited` for verbs and libfabric"
    return Finding("RLIMIT_MEMLOCK", True, f"{limit / (1 << 20):.1f} MiB", follows)


def open_files() -> Finding:
    """Finding on the open descriptor limit; each socket and region has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft:,} (at most {hard:,})"
    follows = "bounds the sockets and regions of a rank"
    if soft < 4096:
        follows += f": `ulimit -n {min(hard, 65536)}` for hundreds of peers"
    return Finding("RLIMIT_NOFILE", True, detail, follows)


def provider(name: str, reaches: str, how: str, is_default: bool) -> Finding:
    """A way to reach peers."""
    try:
        _native.check_providers([name])
    except ProviderError as error:
        detail, _, remedy = str(error).partition("; ")
        page = REMEDIES.get(name, "docs/errors.md")
        return Finding(f"provider {name}", False, detail, remedy or f"see {page}")
    follows = "used by default" if is_default else f"used if it is named: WEFT_PROVIDERS={name},tcp"
    return Finding(f"provider {name}", True, f"{reaches}: {how}", follows)


#: A check for each provider that a process group can use.
PROVIDERS: Final[tuple[Callable[[], Finding], ...]] = tuple(
    functools.partial(provider, name, reaches, how, is_default)
    for name, reaches, how, is_default, names in _native.providers()
    if names
)

LOOKS: Final[tuple[Callable[[], Finding], ...]] = (
    versions,
    cores,
    memory,
    memfd,
    futex,
    unix_sockets,
    loopback,
    dev_shm,
    locked_memory,
    open_files,
    *PROVIDERS,
)


def cgroup_cores() -> float | None:
    """The control group's processor share, in processors; None if it has no limit."""
    match (cgroup_value("cpu.max") or "max").split():
        case [quota, period] if quota != "max":
            return int(quota) / int(period)
        case _:
            return None


def cgroup_memory() -> int | None:
    """The control group's memory limit in bytes; None if it has no limit."""
    value = cgroup_value("memory.max")
    return None if value in (None, "max") else int(value)


def cgroup_value(name: str) -> str | None:
    """A file from this process's control group (version 2), or None."""
    try:
        entries = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        unified = next(entry for entry in entries if entry.startswith("0::"))
        path = CGROUP_MOUNT / unified.removeprefix("0::").lstrip("/") / name
        return path.read_text(encoding="ascii").strip()
    except (OSError, StopIteration):
        return None
