"""Ranks in separate processes that make collective calls; one may be killed or stopped.

    python tests/gpu/collective_processes.py [--device cuda] [--ranks 2] [--calls broadcast,...]

prints a JSON line for each way to end: the errors from the survivors and the time until they
raised.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tests.fork_server import CONTEXT, start_from
from tests.gpu.loss import (
    DEADLINE_SECONDS,
    SERVER,
    SILENCE_SECONDS,
    SKEW_SECONDS,
    SOON_SECONDS,
    end,
    receive,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from torch import Tensor

    from weft.cuda import Collectives


@dataclass(frozen=True)
class Spec:
    """One run."""

    device: Literal["cuda", "twin"] = "cuda"
    ranks: int = 2
    memory: Literal["fd", "ipc"] = "fd"
    how: Literal["right", "kill", "stop"] = "kill"
    #: Calls in which the rank is lost, a key of `LOOPS`.
    loop: str = "all_reduce"


def calls(ranks: int) -> list[Any]:
    """Calls that every process makes, with all their results."""
    import numpy as np

    from tests.gpu.collective_calls import Call

    random = np.random.default_rng(3)
    made = [
        Call("all_reduce", "bfloat16", "sum", rows=3000, row=(7,), mode="in place"),
        Call("all_reduce", "float32", "avg", rows=2, row=()),
        Call("reduce_scatter", "float16", "sum", rows=400, row=(10,), mode="new"),
        Call("all_gather", "int64", rows=5, row=(3,), mode="in place", offset=1),
        Call("broadcast", "uint8", rows=100_000, row=(), root=ranks - 1),
        Call("all_to_all", "complex64", rows=9, mode="new"),
        Call(
            "all_to_all", "float32", rows=20, splits=random.integers(0, 20, (ranks, ranks)).tolist()
        ),
        Call("reduce", "int32", "xor", rows=70, root=1),
        Call("gather", "bool", rows=33, root=0),
        Call("scatter", "float64", rows=8, root=1),
        Call("all_reduce", "bfloat16", "sum", rows=9000, row=(7,), symmetric=True),
        Call(
            "all_gather",
            "int16",
            rows=70,
            row=(3,),
            symmetric=True,
            options={"algorithm": "direct"},
        ),
        *(
            Call(
                name,
                "bfloat16",
                rows=9001,
                row=(3,),
                mode=mode,
                symmetric=True,
                options={"copy_engine": True},
            )
            for name, mode in (
                ("all_gather", "out"),
                ("all_gather", "in place"),
                ("all_to_all", "out"),
                ("broadcast", "out"),
                ("scatter", "out"),
            )
        ),
    ]
    return [(call, call.draw(random, ranks)) for call in made]


def all_reduces(collectives: Collectives, vector: Tensor, symmetric: Tensor) -> None:
    """Both algorithms, in turn."""
    collectives.all_reduce(vector, "max", algorithm="two_shot")
    collectives.all_reduce(vector[:100], "max", algorithm="one_shot")


def from_each_root(name: str, **options: Any) -> Callable[..., None]:
    """A call for each root."""

    def run(collectives: Collectives, vector: Tensor, symmetric: Tensor) -> None:
        for root in range(collectives.world_size):
            given = None if name == "scatter" and root != collectives.rank else vector
            out = {"out": vector[: len(vector) // collectives.world_size].clone()}
            getattr(collectives, name)(given, root, **options, **(out if name == "scatter" else {}))

    return run


def messages(collectives: Collectives, vector: Tensor, symmetric: Tensor) -> None:
    """One to the next rank, and one from the rank before."""
    from weft.cuda import Receive, Send

    rank, ranks = collectives.rank, collectives.world_size
    given = Send(vector, (rank + 1) % ranks)
    collectives.batch([given, Receive(vector.clone(), (rank - 1) % ranks)])


#: A round's calls by name: on a vector that all ranks divide, and a symmetric tensor.
LOOPS: Final[dict[str, Callable[[Collectives, Tensor, Tensor], object]]] = {
    "all_reduce": all_reduces,
    "direct": lambda collectives, _, out: collectives.all_reduce(out, "max", algorithm="direct"),
    "reduce_scatter": lambda collectives, vector, _: collectives.reduce_scatter(vector, "max"),
    "all_gather": lambda collectives, vector, _: collectives.all_gather(vector),
    "all_to_all": lambda collectives, vector, _: collectives.all_to_all(vector),
    "broadcast": from_each_root("broadcast"),
    "reduce": from_each_root("reduce", op="max"),
    "gather": from_each_root("gather"),
    "scatter": from_each_root("scatter"),
    "barrier": lambda collectives, _, __: collectives.barrier(),
    "messages": messages,
    "copies": lambda collectives, vector, out: collectives.all_to_all(
        vector, out=out, copy_engine=True
    ),
}


def rank_of(pipe: Connection, options: dict[str, Any], spec: Spec) -> None:
    """A rank: checked calls, then calls until one raises, if a rank is to be lost."""
    import torch

    import weft
    from tests.gpu.collective_calls import Prepared
    from weft import cuda

    on_gpu = spec.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(options["rank"] % torch.cuda.device_count())
    with weft.init(**options, silence_timeout=SILENCE_SECONDS) as communicator:
        collectives = cuda.Collectives(
            communicator,
            device=spec.device,
            memory=spec.memory,
            num_sms=16,
            skew_timeout=SKEW_SECONDS,
            timeout=SOON_SECONDS,
        )

        def synchronise() -> None:
            if on_gpu:
                torch.cuda.synchronize()

        planned = calls(spec.ranks)
        if spec.how != "right":
            # Calls in each kind that are not in the loop are for `right`.
            planned = planned[:1]
            collectives.prepare("max", torch.float32)
        for call, _ in planned:
            if call.name in ("all_reduce", "reduce_scatter", "reduce"):
                collectives.prepare(call.op, getattr(torch, call.dtype))
        communicator.barrier(timeout=SOON_SECONDS)
        for call, given in planned:
            rank = collectives.rank
            prepared = Prepared(call, rank, given[rank], collectives)
            result = prepared.make(collectives)
            synchronise()
            collectives.check()
            prepared.check(result, call.results(given)[rank])
        pipe.send("running")
        if spec.how == "right":
            collectives.close()
            pipe.send({"computes": True})
            return
        vector = torch.ones(60_000 * spec.ranks, device=collectives.device)
        symmetric = collectives.symmetric_empty(len(vector), torch.float32)
        rounds = 0
        try:
            while True:
                LOOPS[spec.loop](collectives, vector, symmetric)
                synchronise()
                weft.check()
                communicator.check()
                rounds += 1
        except weft.WeftError as error:
            named = {error.rank} | {each[0] for each in error.missing}
            outcome = {
                "at": time.monotonic(),
                "error": type(error).__name__,
                "named": sorted(rank for rank in named if rank is not None),
                "message": str(error),
                "rounds": rounds,
            }
        # A store into unmapped memory would have ended the context as well.
        synchronise()
        total = float(torch.ones(1000, device=collectives.device).sum())
    pipe.send(outcome | {"computes": total == 1000})


def play(spec: Spec, seed: int = 7) -> dict[str, Any]:
    """Start all ranks, and lose one if that is the way to end: the outcome at the others."""
    chance = random.Random(seed)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    victim = None if spec.how == "right" else chance.randrange(spec.ranks)
    with ExitStack() as stack:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for rank in range(spec.ranks):
            ours, theirs = CONTEXT.Pipe()
            stack.enter_context(ours)
            options = {"rank": rank, "world_size": spec.ranks, "address": f"127.0.0.1:{port}"}
            options |= {"secret": b"a secret of this test, long enough", "host_id": "one"}
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
        if victim is not None:
            time.sleep(chance.uniform(0, 0.2))
            lost, lost_at = processes[victim].pid, time.monotonic()
            assert lost is not None
            os.kill(lost, signal.SIGKILL if spec.how == "kill" else signal.SIGSTOP)
        left = [rank for rank in range(spec.ranks) if rank != victim]
        reports = [receive(pipes[rank], SOON_SECONDS) for rank in left]
        for rank in left:
            processes[rank].join(SOON_SECONDS)
        exits = [processes[rank].exitcode for rank in left]
    outcome: dict[str, Any] = {"reports": reports}
    if any(not isinstance(each, dict) for each in reports) or any(exits):
        return outcome | {"failed": f"reports {reports}, exit statuses {exits}"}
    if victim is not None:
        outcome["noticed_s"] = max(each["at"] for each in reports) - lost_at
        wrong = [each for each in reports if each["named"] != [victim] or not each["computes"]]
        if wrong or outcome["noticed_s"] > DEADLINE_SECONDS:
            outcome["failed"] = f"victim {victim}: {reports}"
    return outcome


def main() -> int:
    """All ways to end, as JSON lines; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "twin"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--memory", choices=["fd", "ipc"], default="fd")
    parser.add_argument(
        "--calls", default=",".join(LOOPS), help="calls in which a rank is lost (default: all)"
    )
    arguments = parser.parse_args()
    loops = arguments.calls.split(",")
    if unknown := set(loops) - set(LOOPS):
        parser.error(f"--calls {', '.join(sorted(unknown))}: expected some of {', '.join(LOOPS)}")
    failed = False
    ways: list[tuple[Literal["right", "kill", "stop"], str]] = [("right", "all_reduce")]
    for loop in loops:
        ways += [("kill", loop), ("stop", loop)]
    for how, loop in ways:
        spec = Spec(arguments.device, arguments.ranks, arguments.memory, how, loop)
        line = asdict(spec) | play(spec)
        failed |= "failed" in line
        print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    # Under its importable name, so that other processes can import its functions.
    from tests.gpu import collective_processes

    sys.exit(collective_processes.main())
