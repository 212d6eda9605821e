"""Kernel timelines: span memory, clock alignment between ranks, and spans from all ranks.

A timeline's trace file opens in Perfetto (see https://ui.perfetto.dev).
"""

from __future__ import annotations

from contextlib import nullcontext
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from weft.base.errors import ConfigurationError, DeviceError, ShapeError
from weft.gpu import symmetric
from weft.report.programs import ProgramSpan, Timeline
from weft.triton import layout
from weft.triton.contexts import context
from weft.triton.spans import FIELDS, meetings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from weft.group.communicator import Communicator

__all__ = ["Clocks", "align_clocks", "check_trace", "timeline", "trace_empty"]

#: Time limit in seconds for the record exchange between ranks.
_TIMEOUT = 60.0


class Clocks(NamedTuple):
    """Differences between device clocks on a communicator's ranks.

    Attributes:
        ahead_ns: by rank: by how many nanoseconds the clock is ahead of rank 0's.
        error_ns: by rank: the largest error of `ahead_ns`.
        resolution_ns: clock step: the readings' common divisor.
        communicator: group with these ranks.
    """

    ahead_ns: tuple[int, ...]
    error_ns: tuple[int, ...]
    resolution_ns: int
    communicator: Communicator


def trace_empty(programs: int, capacity: int, *, device: object = "cuda") -> torch.Tensor:
    """Memory for spans from a kernel's programs, for `span_end`.

    Args:
        programs: grid size; more programs than these are not traced.
        capacity: spans for each program.
        device: where the kernel runs: a GPU, or the CPU under the interpreter.

    Returns:
        int64 `[programs, 1 + capacity, 3]`.

    Raises:
        ConfigurationError: if a number is below 1.
    """
    if programs < 1 or capacity < 1:
        raise ConfigurationError(
            f"trace of {programs} programs with {capacity} spans each: expected 1 or more of both"
        )
    place = torch.device("cpu" if device == "twin" else str(device))
    trace = torch.zeros((programs, 1 + capacity, FIELDS), dtype=torch.int64, device=place)
    trace[0, 0, 1], trace[0, 0, 2] = capacity, programs
    return trace


def check_trace(trace: torch.Tensor) -> None:
    """Raise ShapeError if a tensor cannot be from `trace_empty`."""
    if trace.dtype != torch.int64 or trace.dim() != 3 or trace.shape[2] != FIELDS:
        raise ShapeError(
            f"trace is {trace.dtype} of shape {tuple(trace.shape)}: expected torch.int64 "
            f"[programs, 1 + capacity, {FIELDS}]; make it by trace_empty"
        )


def align_clocks(
    communicator: Communicator | None = None, *, device: object = "cuda", rounds: int = 32
) -> Clocks:
    """Measure the differences between the ranks' device clocks; all ranks call it.

    GPU clocks have neither a common zero nor exactly equal rates: call it just before the traced
    kernel. A rank leaves a barrier only after every other rank has come; so the times before and
    after `rounds` barriers bound the differences from both sides, whatever the delays are.

    Args:
        communicator: group to align; by default the only one that is open.
        device: this rank's GPU, or "twin".
        rounds: number of barriers; the best one determines the error.

    Raises:
        ConfigurationError: if `rounds` is below 1.
        DeviceError: if a barrier failed without a recorded error.
        WaitTimeoutError, PeerLostError: if a rank did not come.
    """
    group = symmetric.only_open() if communicator is None else communicator
    if rounds < 1:
        raise ConfigurationError(f"rounds is {rounds}: expected 1 or more")
    # Kernels read as many words as there may be ranks, under a mask.
    words = symmetric.empty(layout.MAX_RANKS, torch.int32, device=device, communicator=group)
    times = torch.zeros((rounds, 2), dtype=torch.int64, device=words.device)
    failed = torch.zeros(1, dtype=torch.int32, device=words.device)
    with torch.cuda.device(words.device) if words.is_cuda else nullcontext():
        meetings[(1,)](words, context(words), times, failed, rounds)
    has_failed = bool(failed.item())
    symmetric.owner(words).check()
    if has_failed:
        raise DeviceError("clocks: a barrier between ranks failed; close the communicator")
    read = np.ascontiguousarray(times.cpu().numpy())
    gathered = group._native.all_gather(read.tobytes(), _TIMEOUT)
    return aligned([np.frombuffer(each, np.int64).reshape(-1, 2) for each in gathered], group)


def aligned(times: Sequence[NDArray[np.int64]], communicator: Communicator) -> Clocks:
    """Clocks from each rank's times before and after common barriers, `[barriers, 2]`."""
    step = _resolution(np.concatenate([each.ravel() - each[0, 0] for each in times]))
    own = times[0]
    ahead, errors = [0], [0]
    for its in times[1:]:
        # It left after rank 0 had come, and the reverse. A clock shows the last step.
        most = int((its[:, 1] - own[:, 0]).min()) + step
        least = int((its[:, 0] - own[:, 1]).max()) - step
        # Reversed only if the clocks' rates differ by more than the errors.
        least, most = sorted((least, most))
        ahead.append((least + most) // 2)
        errors.append((most - least + 1) // 2)
    return Clocks(tuple(ahead), tuple(errors), step, communicator)


def timeline(trace: torch.Tensor, names: Sequence[str], clocks: Clocks | None = None) -> Timeline:
    """The spans that the last launch of a traced kernel recorded.

    It waits for the device. With `clocks` all ranks call it, and each gets the spans from all
    ranks; otherwise it returns only this rank's spans, as rank 0.

    Args:
        trace: memory from `trace_empty`, filled by a kernel.
        names: kind names: `names[kind]` in `span_end`.
        clocks: clocks from `align_clocks`.

    Returns:
        A timeline: `write_trace(path)` writes a Perfetto file, `write_picture(path)` a picture.

    Raises:
        ShapeError: if `trace` is not from `trace_empty`.
        ConfigurationError: if a kind has no name.
    """
    check_trace(trace)
    own = np.ascontiguousarray(trace.cpu().numpy())
    if clocks is None:
        return _timeline([own], names, (0,), 0)
    gathered = clocks.communicator._native.all_gather(_packed(own), _TIMEOUT)
    records = [_unpacked(each) for each in gathered]
    # Two ranks other than 0 may both be off.
    error = sum(sorted(clocks.error_ns)[-2:])
    return _timeline(records, names, clocks.ahead_ns, error)


def _timeline(
    records: Sequence[NDArray[np.int64]],
    names: Sequence[str],
    ahead_ns: Sequence[int],
    error_ns: int,
) -> Timeline:
    """Spans from all ranks on one clock that begins with the earliest."""
    spans, steps, dropped = [], [], 0
    for rank, (record, ahead) in enumerate(zip(records, ahead_ns, strict=True)):
        capacity = record.shape[1] - 1
        for program, row in enumerate(record):
            count = int(row[0, 0])
            dropped += max(0, count - capacity)
            for kind, begin, end in row[1 : 1 + min(count, capacity)].tolist():
                if not 0 <= kind < len(names):
                    raise ConfigurationError(
                        f"kind {kind} of a span of rank {rank}, program {program}: expected 0 to "
                        f"{len(names) - 1}; pass a name for each kind"
                    )
                steps.append((rank, begin, end))
                spans.append(ProgramSpan(rank, program, names[kind], begin - ahead, end - ahead))
    first = {rank: begin for rank, begin, _ in reversed(steps)}
    step = _resolution(
        np.array([time - first[rank] for rank, *both in steps for time in both], np.int64)
    )
    zero = min((span.begin_ns for span in spans), default=0)
    moved = [
        span._replace(begin_ns=span.begin_ns - zero, end_ns=span.end_ns - zero) for span in spans
    ]
    moved.sort(key=lambda span: (span.rank, span.program, span.begin_ns, -span.end_ns))
    return Timeline(tuple(moved), error_ns, step, dropped)


def _resolution(differences: NDArray[np.int64]) -> int:
    """Greatest common divisor of time differences; 1 if all are zero."""
    return gcd(*(int(each) for each in np.unique(np.abs(differences)))) or 1


def _packed(record: NDArray[np.int64]) -> bytes:
    """A record with the shape; ranks may have different grids."""
    return np.array(record.shape, np.int64).tobytes() + record.tobytes()


def _unpacked(data: bytes) -> NDArray[np.int64]:
    values = np.frombuffer(data, np.int64)
    return values[3:].reshape(values[:3])
