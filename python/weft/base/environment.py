"""Environment variables: values, and a warning for names that Weft does not read.

A blank variable counts as not set. A value that cannot be used is an error that names the variable,
never the same as none.
"""

from __future__ import annotations

import difflib
import logging
import os
from functools import cache
from pathlib import Path
from typing import Final

from weft import _native
from weft.base.errors import ConfigurationError

__all__ = ["VARIABLES", "check_variables", "flag", "path", "providers", "text"]

#: Variables that the library, the tests and the build read; docs/environment.md describes them.
VARIABLES: Final = (
    "WEFT_ADDR",
    "WEFT_ADVERTISE",
    "WEFT_BIND",
    "WEFT_BUILD_COMMIT",
    "WEFT_CACHE_DIR",
    "WEFT_CONNECT_TIMEOUT",
    "WEFT_COPY_SMS",
    "WEFT_DEPENDENT_LAUNCH",
    "WEFT_FIRST_SEED",
    "WEFT_HOSTILE",
    "WEFT_HOST_ID",
    "WEFT_KERNELS",
    "WEFT_LIBFABRIC",
    "WEFT_LIBGDRAPI",
    "WEFT_LIBIBVERBS",
    "WEFT_LOADGEN_SOURCE",
    "WEFT_LOCAL_RANK",
    "WEFT_LOCAL_WORLD_SIZE",
    "WEFT_LOG",
    "WEFT_LONG",
    "WEFT_MUTANTS",
    "WEFT_MUTANT_SEEDS",
    "WEFT_NETWORK",
    "WEFT_NVRTC_DIR",
    "WEFT_OFI_CHECK_SENDERS",
    "WEFT_OFI_DOMAINS",
    "WEFT_OFI_PROVIDER",
    "WEFT_PORT",
    "WEFT_PROVIDERS",
    "WEFT_PROXY_CORE",
    "WEFT_PROXY_IDLE",
    "WEFT_PYTHON",
    "WEFT_RANK",
    "WEFT_REDUCTION_THREADS",
    "WEFT_REPRODUCIBLE",
    "WEFT_SECRET",
    "WEFT_SECRET_FILE",
    "WEFT_SEED",
    "WEFT_SEEDS",
    "WEFT_SHM_READS",
    "WEFT_SILENCE_TIMEOUT",
    "WEFT_STAGED",
    "WEFT_TLS_CA",
    "WEFT_TLS_CERT",
    "WEFT_TLS_KEY",
    "WEFT_TLS_PAYLOADS",
    "WEFT_TUNING",
    "WEFT_VERBS_ACK_TIMEOUT",
    "WEFT_VERBS_DEVICES",
    "WEFT_VERBS_GID_INDEX",
    "WEFT_VERBS_ON_DEMAND_PAGING",
    "WEFT_VERBS_SERVICE_LEVEL",
    "WEFT_VERBS_TRAFFIC_CLASS",
    "WEFT_WORLD_SIZE",
)
PREFIX: Final = "WEFT_"
#: Prefixes for variables with which tests and benchmarks pass arguments to child processes.
RESERVED: Final = ("WEFT_TEST_", "WEFT_BENCH_")

#: Maximum characters of a value in an error.
SHOWN: Final = 200

logger = logging.getLogger("weft")


def text(name: str) -> str:
    """Value without white space around it; "" if it is not set.

    Raises:
        ConfigurationError: if it is not UTF-8.
    """
    # Bytes, since os.environ has whatever the locale makes of them.
    value = os.environb.get(os.fsencode(name), b"")
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        raise invalid(name, value.decode(errors="replace"), "UTF-8") from None


def flag(name: str, *, default: bool) -> bool:
    """Value of a 0 or 1 variable.

    Raises:
        ConfigurationError: if it is neither.
    """
    value = text(name) or str(int(default))
    if value not in ("0", "1"):
        raise invalid(name, value, "0 or 1")
    return value == "1"


def path(name: str) -> Path | None:
    """Value as a path, in any bytes; None if it is not set."""
    value = os.environb.get(os.fsencode(name), b"")
    return Path(os.fsdecode(value)) if value.strip() else None


def providers() -> list[str] | None:
    """The providers that `WEFT_PROVIDERS` names; None if it is not set.

    Raises:
        ConfigurationError: if a name has no provider.
    """
    value = text("WEFT_PROVIDERS")
    if not value:
        return None
    named = [name.strip() for name in value.split(",") if name.strip()]
    known = [name for row in _native.providers() for name in row[4]]
    if not named or not set(named) <= set(known):
        raise invalid("WEFT_PROVIDERS", value, "a list with commas of " + ", ".join(known))
    return named


def invalid(name: str, value: str, expected: str) -> ConfigurationError:
    """Error for a value that is not `expected`, such as "0 or 1"."""
    shown = value if len(value) <= SHOWN else value[:SHOWN] + "..."
    return ConfigurationError(
        f"{name} is {shown!r}: it is not {expected}; set it to {expected}, or not at all"
    )


@cache
def check_variables() -> None:
    """Log a warning for each variable `WEFT_*` that Weft does not read; once in a process."""
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(RESERVED):
            logger.warning("%s", misnamed(name))


def misnamed(name: str) -> str:
    """The warning for a variable that Weft does not read."""
    known = [each.removeprefix(PREFIX) for each in VARIABLES]
    close = difflib.get_close_matches(name.removeprefix(PREFIX), known, 1)
    meant = f"did you mean {PREFIX}{close[0]}?" if close else "see docs/environment.md"
    shown = os.fsencode(name).decode(errors="backslashreplace")
    return f"environment variable {shown}: not read by Weft; {meant}"
