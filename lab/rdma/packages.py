"""Debian packages for the lab: programs that build the kernel, and programs that guests run."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BUILD", "GUEST", "SOURCE", "ensure", "missing", "version"]

#: Kernel sources.
SOURCE: Final = "linux-source-6.1"
BUILD: Final = (SOURCE, "bc", "bison", "flex", "gcc", "make", "perl", "xz-utils")
#: Programs and verbs libraries that guests use from the host's file system.
GUEST: Final = ("ibverbs-providers", "ibverbs-utils", "iproute2", "iputils-ping", "perl-base")
#: Time limit per installation, in seconds.
LIMIT: Final = 240.0


def version(package: str) -> str | None:
    """Version of an installed package."""
    if shutil.which("dpkg-query") is None:
        return None
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", package]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    status, _, number = done.stdout.partition(" ")
    return number.strip() if status == "installed" else None


def missing(packages: Sequence[str]) -> list[str]:
    """Those that are not installed."""
    return [each for each in packages if version(each) is None]


def ensure(packages: Sequence[str], report: Callable[[str], None]) -> None:
    """Install the missing ones, as root.

    Raises:
        LabError: if they cannot be installed.
    """
    absent = missing(packages)
    if not absent:
        return
    remedy = f"apt-get install {' '.join(absent)}"
    if shutil.which("apt-get") is None:
        raise LabError(f"packages {' '.join(absent)}: missing; the lab needs Debian 12's")
    if os.geteuid() != 0:
        raise LabError(f"packages {' '.join(absent)}: missing; run as root: {remedy}")
    report(remedy)
    install = ["apt-get", "-qq", "install", "-y", "--no-install-recommends", *absent]
    for command in (["apt-get", "-qq", "update"], install):
        detail = applied(command)
        if detail is not None:
            raise LabError(f"packages {' '.join(absent)}: missing; `{remedy}` fails: {detail}")


def applied(command: list[str]) -> str | None:
    """Run an apt command; returns the reason if it fails."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"not finished within {LIMIT:.0f} s"
    if done.returncode != 0:
        return " ".join(done.stderr.split()[-60:]) or f"exit status {done.returncode}"
    return None
