"""Ranks on pretended hosts that make collective calls over all hosts; one may be killed.

    python tests/gpu/hierarchical_processes.py [--device cuda] [--hosts 2] [--local 1]

prints a JSON line for each way to end: the errors from the survivors and the time until they
raised. Ranks take the GPUs in turn, so that several may share one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.fork_server import CONTEXT, start_from
from tests.gpu.loss import SERVER, SILENCE_SECONDS, SKEW_SECONDS, SOON_SECONDS, end, receive

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

#: Limit from a loss until all survivors have raised, and from the calls that lack one.
LOST_SECONDS, ABSENT_SECONDS = 10.0, 2 * SKEW_SECONDS + 6.0
#: Chunk bytes: short, so that calls have many.
PIECE_BYTES = 1 << 14


@dataclass(frozen=True)
class Spec:
    """One run; `victim`: the rank that is killed or stopped, or that does not call."""

    device: Literal["cuda", "twin"] = "cuda"
    hosts: int = 2
    local: int = 1
    providers: list[str] = field(default_factory=lambda: ["shm", "tcp"])
    how: Literal["right", "kill", "stop", "absent"] = "right"
    victim: int = 0
    #: True if ranks on a host have consecutive numbers.
    blocks: bool = True
    calls: int = 40
    seed: int = 1
    memory: Literal["fd", "ipc"] = "fd"

    @property
    def ranks(self) -> int:
        return self.hosts * self.local

    @property
    def by_host(self) -> list[list[int]]:
        """Each host's ranks."""
        if self.blocks:
            return [list(range(h * self.local, (h + 1) * self.local)) for h in range(self.hosts)]
        return [list(range(h, self.ranks, self.hosts)) for h in range(self.hosts)]


def reduced(spec: Spec, op: str, dtype: str, contributions: list[Any]) -> Any:
    """A reduction's bytes: within hosts in rank order, then in host order."""
    from tests.gpu import collective_reference as reference

    step, kind = "sum" if op == "avg" else op, dtype
    if dtype in ("float16", "bfloat16") and step in ("sum", "product"):
        # Rounded once, at the end.
        kind = "float32"
        widened = (reference.widen(each, dtype) for each in contributions)
        contributions = [reference.narrow(each, kind) for each in widened]
    hosts = [reference.reduce(step, kind, [contributions[r] for r in h]) for h in spec.by_host]
    result = hosts[0]
    for host in hosts[1:]:
        result = reference.reduce(step, kind, [result, host])
    values = reference.widen(result, kind)
    if op == "avg" and dtype != "bool":
        values = reference.divide(dtype, values, spec.ranks)
    return reference.narrow(values, dtype)


def check_calls(spec: Spec, collectives: Any) -> int:
    """Make random calls and compare every bit; the call count."""
    import numpy as np
    import torch

    from tests.gpu import collective_reference as reference
    from weft.collectives.host import ELEMENTS

    chance = np.random.default_rng(spec.seed)
    ranks, rank, device = spec.ranks, collectives.rank, collectives.device

    def tensor(given: Any, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(len(given) // dtype.itemsize, dtype=dtype)
        if len(given):
            made.view(torch.uint8).copy_(torch.from_numpy(given.copy()))
        return made.to(device)

    for number in range(spec.calls):
        name = str(chance.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast"]))
        short = str(chance.choice(ELEMENTS))
        ops = [*reference.OPS, *(() if short in reference.FLOATS else reference.BITWISE)]
        op, root = str(chance.choice(ops)), int(chance.integers(ranks))
        if name in ("all_gather", "broadcast"):
            short = str(chance.choice([*ELEMENTS, "complex128", "uint16", "float8_e5m2"]))
        dtype = getattr(torch, short)
        rows = int(chance.choice([0, 1, 2, 7, 300, 5000, 20_011]))
        count = rows * ranks if name == "reduce_scatter" else rows
        if short in ("complex128", "uint16", "float8_e5m2"):
            given = [
                np.frombuffer(chance.bytes(count * dtype.itemsize), np.uint8) for _ in range(ranks)
            ]
        else:
            given = [reference.drawn(chance, dtype, count) for _ in range(ranks)]
        if short == "bool":
            given = [np.asarray(each & 1, np.uint8) for each in given]
        in_place = bool(chance.integers(2))
        if name in ("all_reduce", "reduce_scatter"):
            prepare(collectives, op, dtype)
        own = tensor(given[rank], dtype)
        width = rows * dtype.itemsize
        part = slice(rank * width, (rank + 1) * width)
        if name == "all_reduce":
            expected = reduced(spec, op, short, given)
            result = collectives.all_reduce(own, op, out=None if in_place else own.clone())
        elif name == "reduce_scatter":
            expected = reduced(spec, op, short, given)[part]
            out = own[rank * rows : (rank + 1) * rows] if in_place else None
            result = collectives.reduce_scatter(own, op, out=out)
        elif name == "all_gather":
            expected, out = np.concatenate(given), None
            if in_place:
                out = torch.zeros(ranks * rows, dtype=dtype, device=device)
                own = out[rank * rows : (rank + 1) * rows].copy_(own)
            result = collectives.all_gather(own, out=out)
        else:
            expected = given[root]
            result = collectives.broadcast(own, root)
        found = reference.to_bytes(result)
        assert (found == expected).all(), (
            f"call {number} {name} {op} of {count} {short}, in place {in_place}: "
            f"{(found != expected).sum()} of {len(expected)} bytes differ"
        )
        if number % 10 == 0:
            collectives.barrier()
    return spec.calls


def prepare(collectives: Any, op: str, dtype: Any) -> None:
    """Compile a reduction's kernels at all ranks: first calls would be at different times."""
    collectives.prepare(op, dtype)
    if collectives.device.type == "cuda":
        collectives.communicator.barrier(timeout=SOON_SECONDS)


def refusals(collectives: Any) -> list[str]:
    """Errors from calls that do not fit, which leave the object usable."""
    import torch

    from tests.workers.backend.forked import message

    device = collectives.device
    odd = torch.zeros(collectives.world_size + 1, device=device)
    return [
        message(lambda: collectives.all_reduce(odd, "mean")),
        message(lambda: collectives.all_reduce(odd.to(torch.uint32))),
        message(lambda: collectives.reduce_scatter(odd)),
        message(lambda: collectives.broadcast(odd, collectives.world_size)),
        message(lambda: collectives.all_gather(odd, out=odd)),
    ]


def rank_of(pipe: Connection, options: dict[str, Any], spec: Spec) -> None:
    """A rank: checked calls, then calls until one raises, if a rank is to be lost."""
    import torch

    import weft
    from weft import cuda

    on_gpu = spec.device == "cuda"
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(options["rank"] % torch.cuda.device_count())
    with weft.init(**options, silence_timeout=SILENCE_SECONDS) as communicator:
        collectives = cuda.HierarchicalCollectives(
            communicator,
            device=spec.device,
            piece_bytes=PIECE_BYTES,
            num_sms=8,
            memory=spec.memory,
            skew_timeout=SKEW_SECONDS if spec.how != "right" else SOON_SECONDS,
            timeout=SOON_SECONDS,
        )
        checked = check_calls(spec, collectives)
        errors = refusals(collectives)
        prepare(collectives, "max", torch.float32)
        collectives.check()
        communicator.barrier(timeout=SOON_SECONDS)
        pipe.send("running")
        if spec.how == "right":
            routes = communicator.routes()
            collectives.close()
            pipe.send({"checked": checked, "errors": errors, "routes": routes})
            return
        vector = torch.ones(100_000, device=collectives.device)
        if spec.how == "absent" and spec.victim == communicator.rank:
            time.sleep(ABSENT_SECONDS)
            pipe.send({"absent": True})
            return
        began = time.monotonic()
        try:
            while True:
                collectives.all_reduce(vector, "max")
                collectives.all_gather(vector[:1000])
                collectives.check()
        except weft.WeftError as error:
            outcome: dict[str, Any] = {
                "at": time.monotonic(),
                "began": began,
                "error": type(error).__name__,
                "message": str(error),
                "rank": error.rank,
            }
        outcome["again"] = 0
        for call in (lambda: collectives.all_reduce(vector), weft.check):
            try:
                call()
            except weft.WeftError as again:
                outcome["again"] += str(again) == outcome["message"]
        began = time.monotonic()
        collectives._abandon()
        outcome["closed_s"] = time.monotonic() - began
        # A store into unmapped memory would have ended the context as well.
        outcome["computes"] = float(torch.ones(1000, device=collectives.device).sum()) == 1000
    pipe.send(outcome)


def construct(pipe: Connection, options: dict[str, Any], device: str, piece_bytes: int) -> None:
    """A rank that reports the construction error."""
    import weft
    from tests.workers.backend.forked import message
    from weft import cuda

    with weft.init(**options) as communicator:
        made = message(
            lambda: cuda.HierarchicalCollectives(
                communicator, device=device, piece_bytes=piece_bytes
            )
        )
        communicator.barrier(timeout=SOON_SECONDS)
    pipe.send(made)


def constructed(device: str, piece_bytes: list[int]) -> list[Any]:
    """Construction errors on a host for each rank, with these chunk lengths."""
    with ExitStack() as stack:
        ranks = len(piece_bytes)
        pipes = []
        for rank, options in enumerate(arguments(Spec(hosts=ranks))):
            ours, theirs = CONTEXT.Pipe()
            stack.enter_context(ours)
            given = (theirs, options, device, piece_bytes[rank])
            process = CONTEXT.Process(target=construct, args=given)
            start_from(SERVER, process)
            theirs.close()
            stack.callback(end, process)
            pipes.append(ours)
        return [receive(pipe, SOON_SECONDS) for pipe in pipes]


def arguments(spec: Spec) -> list[dict[str, Any]]:
    """Arguments to `weft.init` on each rank."""
    host_of = {rank: host for host, ranks in enumerate(spec.by_host) for rank in ranks}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        {
            "rank": rank,
            "world_size": spec.ranks,
            "address": f"127.0.0.1:{port}",
            "secret": b"a secret of this test, long enough",
            "host_id": f"host-{host_of[rank]}",
            "providers": spec.providers,
        }
        for rank in range(spec.ranks)
    ]


def play(spec: Spec) -> dict[str, Any]:
    """Start all ranks, and lose one if that is the way to end: the outcome at the others."""
    with ExitStack() as stack:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for options in arguments(spec):
            ours, theirs = CONTEXT.Pipe()
            stack.enter_context(ours)
            process = CONTEXT.Process(target=rank_of, args=(theirs, options, spec))
            start_from(SERVER, process)
            theirs.close()
            stack.callback(end, process)
            processes.append(process)
            pipes.append(ours)
        for rank, pipe in enumerate(pipes):
            message = receive(pipe, SOON_SECONDS)
            if message != "running":
                return {"failed": f"rank {rank} did not start: {message}"}
        lost_at = time.monotonic()
        if spec.how in ("kill", "stop"):
            time.sleep(0.2)
            lost, lost_at = processes[spec.victim].pid, time.monotonic()
            assert lost is not None
            os.kill(lost, signal.SIGKILL if spec.how == "kill" else signal.SIGSTOP)
        left = [r for r in range(spec.ranks) if spec.how == "right" or r != spec.victim]
        reports = [receive(pipes[rank], SOON_SECONDS) for rank in left]
        for rank in left:
            processes[rank].join(SOON_SECONDS)
        exits = [processes[rank].exitcode for rank in left]
    outcome: dict[str, Any] = {"reports": reports}
    if any(not isinstance(each, dict) for each in reports) or any(exits):
        return outcome | {"failed": f"reports {reports}, exit statuses {exits}"}
    if spec.how == "right":
        return outcome
    outcome["noticed_s"] = max(each["at"] - max(lost_at, each["began"]) for each in reports)
    limit = ABSENT_SECONDS if spec.how == "absent" else LOST_SECONDS
    name = f"rank {spec.victim}"
    wrong = [each for each in reports if name not in each["message"] or not each["computes"]]
    if wrong or outcome["noticed_s"] > limit:
        outcome["failed"] = f"victim {spec.victim}: {reports}"
    return outcome


def main() -> int:
    """All ways to end, as JSON lines; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "twin"], default="cuda")
    parser.add_argument("--hosts", type=int, default=2, help="pretended hosts (default: 2)")
    parser.add_argument("--local", type=int, default=1, help="ranks of a host (default: 1)")
    parser.add_argument("--memory", choices=["fd", "ipc"], default="fd")
    parser.add_argument("--providers", default="shm,tcp", help="providers (default: shm,tcp)")
    parser.add_argument("--calls", type=int, default=40, help="random calls (default: 40)")
    given = parser.parse_args()
    failed = False
    for how in ("right", "kill", "stop", "absent"):
        last = given.hosts * given.local - 1
        spec = Spec(
            given.device,
            given.hosts,
            given.local,
            given.providers.split(","),
            how,
            victim=last,
            calls=given.calls,
            memory=given.memory,
        )
        line = asdict(spec) | play(spec)
        failed |= "failed" in line
        print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    # Under its importable name, so that other processes can import its functions.
    from tests.gpu import hierarchical_processes

    sys.exit(hierarchical_processes.main())
