"""Environment variables of Weft, and a warning for names that Weft does not read."""

from __future__ import annotations

import difflib
import logging
import os
from functools import cache
from typing import Final

__all__ = ["VARIABLES", "check_variables"]

#: Variables that the library, its tests and its build read; docs/environment.md describes them.
VARIABLES: Final = (
    "WEFT_ADDR",
    "WEFT_ADVERTISE",
    "WEFT_BIND",
    "WEFT_BUILD_COMMIT",
    "WEFT_CACHE_DIR",
    "WEFT_CONNECT_TIMEOUT",
    "WEFT_DEPENDENT_LAUNCH",
    "WEFT_FIRST_SEED",
    "WEFT_HOSTILE",
    "WEFT_HOST_ID",
    "WEFT_KERNELS",
    "WEFT_LIBFABRIC",
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
#: Prefixes of variables by which tests and benchmarks pass arguments to processes they start.
RESERVED: Final = ("WEFT_TEST_", "WEFT_BENCH_")

logger = logging.getLogger("weft")


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
    return f"environment variable {name}: not read by Weft; {meant}"
