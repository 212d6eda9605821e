"""Device that a rank measures on: clock, graphs, description."""

from __future__ import annotations

import ctypes
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from weft.diagnosis.libraries import load
from weft.topology.nvml import nvml_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cuda", "Device", "Twin", "describe", "missing", "open_device", "visible"]

#: More than any device's second-level cache.
FLUSH_BYTES: Final = 256 << 20


class Device:
    """The CPU twin: calls run at once, so the wall clock times them and a graph is a function."""

    kind = "twin"
    name = "cpu"
    #: `AllToAll` argument.
    place = "twin"
    #: The library that moves the same bytes beside Weft.
    backend = "gloo"
    #: Rounds in a loop that is timed as a whole, and calls in a loop for host time.
    loop, host_calls = 6, 5

    def __init__(self) -> None:
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(1)

    def stamp(self) -> Any:
        """Time at this point in the stream."""
        return Stamp()

    def mark(self) -> Any:
        """Memory for the time that `set_mark` writes, in a graph at each replay."""
        return Stamp()

    def set_mark(self, mark: Any) -> None:
        """Write the time at this point in the stream to the mark."""
        mark.at = time.perf_counter_ns()

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Microseconds between two stamps or marks, after `synchronise`."""
        return float(end.at - begin.at) / 1000

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work as something to replay; it has been run once before."""
        work()
        return work

    def compile(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The work through `torch.compile`; no code is generated here."""
        compiled: Callable[..., Any] = self.torch.compile(work, backend="aot_eager")
        return compiled

    def sleep(self, microseconds: float) -> None:
        """Keep the stream busy with an idle kernel."""
        time.sleep(microseconds / 1e6)

    def flush(self) -> None:
        """Flush the caches; no effect on a CPU."""

    def synchronise(self) -> None:
        """Wait until all work is done."""


class Stamp:
    """A time on the wall clock."""

    def __init__(self) -> None:
        self.at = time.perf_counter_ns()


Twin = Device


class Cuda(Device):
    """A GPU, through PyTorch's current stream."""

    kind = "cuda"
    backend = "nccl"
    loop, host_calls = 50, 100

    def __init__(self, ordinal: int) -> None:
        self.torch = import_module("torch")
        self.name = self.place = f"cuda:{ordinal}"
        self.torch.cuda.set_device(ordinal)
        self._flushed: Any = None
        self._cycles_per_us = self._clock()

    def _clock(self) -> float:
        cycles = 20_000_000
        self.torch.cuda._sleep(cycles)
        begin = self.stamp()
        self.torch.cuda._sleep(cycles)
        end = self.stamp()
        self.synchronise()
        return cycles / self.elapsed_us(begin, end)

    def stamp(self) -> Any:
        """An event on the current stream."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> Any:
        """An event for a graph."""
        # An external event is a graph node, which writes the time anew at each replay.
        return self.torch.cuda.Event(enable_timing=True, external=True)

    def set_mark(self, mark: Any) -> None:
        """Record it, or capture that."""
        mark.record()

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Microseconds between two events, after `synchronise`."""
        return float(begin.elapsed_time(end)) * 1000

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work as a CUDA graph, which keeps the tensors that the work refers to."""
        cuda = self.torch.cuda
        # What is set up at first use is set up outside the capture.
        aside = cuda.Stream()
        aside.wait_stream(cuda.current_stream())
        with cuda.stream(aside):
            work()
        cuda.current_stream().wait_stream(aside)
        self.synchronise()
        graph = cuda.CUDAGraph()
        # As communication is launched where computation runs beside it; kernels keep the priority.
        urgent = cuda.Stream(priority=-1)
        # Other threads (NCCL's watchdog) may call CUDA meanwhile.
        with cuda.graph(graph, stream=urgent, capture_error_mode="thread_local"):
            work()
        return Replay(graph, work)

    def compile(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The work through `torch.compile`."""
        compiled: Callable[..., Any] = self.torch.compile(work)
        return compiled

    def sleep(self, microseconds: float) -> None:
        """Launch a kernel that only waits for this time."""
        self.torch.cuda._sleep(int(microseconds * self._cycles_per_us))

    def flush(self) -> None:
        """Write to more memory than the caches hold."""
        if self._flushed is None:
            self._flushed = self.torch.empty(FLUSH_BYTES, dtype=self.torch.uint8, device=self.name)
        self._flushed.zero_()

    def synchronise(self) -> None:
        """Wait until the GPU has finished all work."""
        self.torch.cuda.synchronize()


class Replay:
    """Graph replays, with the work whose tensors have memory that the graph uses."""

    def __init__(self, graph: Any, work: Callable[[], None]) -> None:
        self._graph, self._work = graph, work

    def __call__(self) -> None:
        self._graph.replay()


def open_device(kind: str, local_rank: int) -> Device:
    """A rank's device; ranks beyond the GPUs share them in turn."""
    return Twin() if kind == "twin" else Cuda(local_rank % visible())


def visible() -> int:
    """GPUs that PyTorch sees."""
    return int(import_module("torch").cuda.device_count())


def missing(kind: str) -> str | None:
    """Missing requirement for such devices, with a remedy; None if all are met."""
    try:
        torch = import_module("torch")
    except ImportError:
        return f"--device {kind} needs PyTorch, which is not installed: pip install 'weft[torch]'"
    if kind == "cuda" and not torch.cuda.device_count():
        built = torch.version.cuda
        why = (
            f"PyTorch {torch.__version__} was built without CUDA"
            if built is None
            else "no NVIDIA driver or no visible GPU (see nvidia-smi and CUDA_VISIBLE_DEVICES)"
        )
        return f"--device cuda needs a GPU, and there is none: {why}. --device twin runs on the CPU"
    return None


def describe(device: Device, ranks: int) -> dict[str, Any]:
    """GPUs, links between them, and software versions on them."""
    torch = device.torch
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device.kind == "twin":
        return {"device": "twin", "ranks": ranks, "gpus": [], "versions": versions}
    cuda = torch.cuda
    count = cuda.device_count()
    used = min(ranks, count)
    pairs = [(a, b) for a in range(used) for b in range(used) if a != b]
    versions |= {"nccl": ".".join(map(str, cuda.nccl.version())), "driver": driver()}
    return {
        "device": "cuda",
        "ranks": ranks,
        "gpus": [cuda.get_device_name(ordinal) for ordinal in range(used)],
        "gpus_visible": count,
        "ranks_per_gpu": -(-ranks // count),
        "peer_access": all(cuda.can_device_access_peer(a, b) for a, b in pairs),
        "links": links(nvml_gpus()),
        "versions": versions,
    }


def links(gpus: list[dict[str, Any]] | None) -> str:
    """Links between this machine's GPUs, in words."""
    if not gpus:
        return "not known (no NVML)"
    counts = sorted({len(gpu["nvlinks"]) for gpu in gpus})
    if counts == [0]:
        return "no NVLink"
    own = {gpu["bus_id"].lower() for gpu in gpus}
    to_gpus = any(far.lower() in own for gpu in gpus for far in gpu["nvlinks"])
    number = "/".join(map(str, counts))
    return f"{number} NVLinks each, to {'other GPUs' if to_gpus else 'a switch'}"


def driver() -> str | None:
    """NVIDIA driver version, if NVML reports it."""
    library = load("libnvidia-ml.so.1")
    if library is None or library.nvmlInit_v2() != 0:
        return None
    try:
        text = ctypes.create_string_buffer(96)
        failed = library.nvmlSystemGetDriverVersion(text, len(text))
        return None if failed else text.value.decode(errors="replace")
    finally:
        library.nvmlShutdown()
