"""Traced kernel timelines between processes: on GPUs, or the interpreter on the twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import weft
import weft.triton
from tests.workers.cuda import device_native
from tests.workers.triton import kernels
from tests.workers.triton.calls import Place

NAMES = ("all", "compute", "put", "wait")


def timelines(folder: str, device: str = "twin") -> dict[str, Any]:
    """Clocks, spans, and files for a three-program kernel, the third beyond the trace."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        programs, length = 3, 1024 if place.on_gpu else 16
        block = place.symmetric(4 + programs * length)
        context = place.context(block)
        outputs, rounds = place.zeros(programs * length), place.zeros(programs)
        trace = weft.triton.trace_empty(2, 3, device=device)
        wide = weft.triton.trace_empty(programs, 4, device=device)
        place.meet()
        untraced = (block[4:], block[:4], context, outputs, rounds)
        kernels.traced[(programs,)](*untraced, None, length)
        clocks = weft.triton.align_clocks(device=device)
        for each in (trace, wide, wide):
            kernels.traced[(programs,)](*untraced, each, length)
        place.meet()
        found = weft.triton.timeline(wide, NAMES, clocks)
        small = weft.triton.timeline(trace, NAMES, clocks)
        path = Path(folder, f"{communicator.rank}.json")
        found.write_trace(path)
        alone = weft.triton.timeline(wide, NAMES)
        return {
            "outputs": sorted(set(outputs.tolist())),
            "ahead": clocks.ahead_ns,
            "error": clocks.error_ns,
            "spans": [list(span) for span in found.spans],
            "clock_error": found.clock_error_ns,
            "small": [[*span[:3]] for span in small.spans],
            "dropped": [found.dropped, small.dropped],
            "alone": [list(span[:3]) for span in alone.spans],
            "file": json.loads(path.read_text(encoding="utf-8")),
            "unnamed": device_native.named(lambda: weft.triton.timeline(wide, NAMES[:2])),
            "shape": device_native.named(lambda: weft.triton.timeline(trace[0], NAMES)),
            "empty": device_native.named(lambda: weft.triton.trace_empty(0, 4, device=device)),
        }
