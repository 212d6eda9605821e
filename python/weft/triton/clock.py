"""Clock for bounded waits: the GPU's global timer, or the host's clock under the interpreter.

The timer is `%globaltimer`, see https://docs.nvidia.com/cuda/parallel-thread-execution/.
"""

import os
import time

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:

    def now() -> int:
        """Nanoseconds; yields the processor, since the rank awaited may need it."""
        os.sched_yield()
        return time.monotonic_ns()

    #: Polls between checks on a wait's limit.
    POLLS = tl.constexpr(1)
else:
    from triton.language.extra.cuda import globaltimer as now  # type: ignore[no-redef]  # noqa: F401

    POLLS = tl.constexpr(64)
