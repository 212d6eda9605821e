"""Rank loss, by kill or stop, while kernels on all ranks store to each other.

    python tests/gpu/loss.py --times 10

prints a JSON line for each shared memory, launch and loss kind: the time until the
survivors raised, their errors, and whether their GPU still computes. A line with
`"survived": false` means that this shared memory kind is unsuitable on this machine.
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
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.fork_server import CONTEXT, server_with, start_from

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

#: Silence timeout for a rank, and timeout for a kernel.
SILENCE_SECONDS, SKEW_SECONDS = 2.0, 3.0
#: Limit from the loss until all survivors have raised.
DEADLINE_SECONDS = SKEW_SECONDS + 2.0
#: Limit for starting, compiling and ending on a busy machine.
SOON_SECONDS = 120.0


@dataclass(frozen=True)
class Spec:
    """One way to lose a rank."""

    device: Literal["cuda", "twin"] = "cuda"
    ranks: int = 2
    memory: Literal["fd", "ipc"] = "fd"
    launches: Literal["eager", "graph"] = "eager"
    how: Literal["kill", "stop"] = "kill"


def survive(pipe: Connection, options: dict[str, Any], spec: Spec) -> None:
    """A rank: rounds until one raises. Reports the start, the error, and remaining resources."""
    import torch

    import weft

    on_gpu = spec.device == "cuda"
    place = f"cuda:{options['rank'] % torch.cuda.device_count()}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(place)
    stream = torch.cuda.Stream() if on_gpu else None
    with weft.init(**options, silence_timeout=SILENCE_SECONDS) as communicator:
        all_to_all = weft.moe.AllToAll(
            communicator,
            experts=8,
            top_k=4,
            hidden=2048,
            max_tokens=256,
            dtype="bfloat16",
            device=place if on_gpu else "twin",
            memory=spec.memory,
            skew_timeout=SKEW_SECONDS,
            timeout=SOON_SECONDS,
        )
        tokens = torch.ones(256, 2048, dtype=torch.bfloat16, device=place)
        ids = torch.rand(256, 8, device=place).topk(4).indices
        combined = torch.empty_like(tokens)

        def round() -> None:
            received = all_to_all.dispatch(tokens, ids)
            all_to_all.combine(received, received.tokens, out=combined)
            received.release()

        def synchronise() -> None:
            if stream is not None:
                stream.synchronize()

        play = round
        with torch.cuda.stream(stream):
            if stream is not None:
                # The tensors above are computed on the default stream.
                stream.wait_stream(torch.cuda.default_stream())
            round()
            synchronise()
            communicator.barrier(timeout=SOON_SECONDS)
            if spec.launches == "graph" and on_gpu:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    round()
                play = graph.replay
                communicator.barrier(timeout=SOON_SECONDS)
            pipe.send("running")
            rounds = 0
            try:
                while True:
                    play()
                    synchronise()
                    all_to_all.check()
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
            sum = float(torch.ones(1000, device=place).sum())
        pipe.send(outcome | {"computes": sum == 1000})


# Processes are forked from one with all imports, which has not used a GPU.
SERVER = server_with(
    [
        *("torch", "weft", "tests.gpu.loss"),
        *("tests.gpu.collective_processes", "tests.gpu.hierarchical_processes"),
    ]
)


def lose(spec: Spec, chance: random.Random) -> dict[str, Any]:
    """Lose a rank once, and report the outcome at the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    victim = chance.randrange(spec.ranks)
    survivors = [rank for rank in range(spec.ranks) if rank != victim]
    with ExitStack() as stack:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for rank in range(spec.ranks):
            ours, theirs = CONTEXT.Pipe()
            stack.enter_context(ours)
            options = {"rank": rank, "world_size": spec.ranks, "address": f"127.0.0.1:{port}"}
            options |= {"secret": b"a secret of this test, long enough", "host_id": "one"}
            process = CONTEXT.Process(target=survive, args=(theirs, options, spec))
            start_from(SERVER, process)
            theirs.close()
            stack.callback(end, process)
            processes.append(process)
            pipes.append(ours)
        for rank, pipe in enumerate(pipes):
            message = receive(pipe, SOON_SECONDS)
            if message != "running":
                return {"failed": f"rank {rank} did not start: {message}"}
        time.sleep(chance.uniform(0, 0.2))
        lost, lost_at = processes[victim].pid, time.monotonic()
        assert lost is not None
        os.kill(lost, signal.SIGKILL if spec.how == "kill" else signal.SIGSTOP)
        reports = [receive(pipes[rank], DEADLINE_SECONDS + 10) for rank in survivors]
        for rank in survivors:
            processes[rank].join(SOON_SECONDS)
        exits = [processes[rank].exitcode for rank in survivors]
    if any(not isinstance(each, dict) for each in reports):
        return {"failed": f"survivors reported {reports}, exit statuses {exits}"}
    outcome: dict[str, Any] = {"reports": reports}
    outcome["noticed_s"] = max(each["at"] for each in reports) - lost_at
    wrong = [each for each in reports if each["named"] != [victim] or not each["computes"]]
    if wrong or any(code != 0 for code in exits) or outcome["noticed_s"] > DEADLINE_SECONDS:
        outcome["failed"] = f"victim {victim}, exits {exits}: {reports}"
    return outcome


def end(process: BaseProcess) -> None:
    """Kill a process if it still runs, and free its resources."""
    if process.is_alive():
        process.kill()
    process.join(SOON_SECONDS)
    process.close()


def receive(pipe: Connection, seconds: float) -> Any:
    """A rank's message, or why there is none."""
    if not wait([pipe], seconds):
        return f"no message within {seconds:.0f} s"
    try:
        return pipe.recv()
    except EOFError:
        return "end of the process"


def summary(spec: Spec, times: int, seed: int) -> dict[str, Any]:
    """Lose a rank `times` times: one outcome line."""
    chance = random.Random(seed)
    outcomes = [lose(spec, chance) for _ in range(times)]
    noticed = sorted(each["noticed_s"] for each in outcomes if "noticed_s" in each)
    raised = Counter(
        each["error"] for one in outcomes if "noticed_s" in one for each in one["reports"]
    )
    failed = [each["failed"] for each in outcomes if "failed" in each]
    line: dict[str, Any] = asdict(spec) | {"times": times, "seed": seed, "survived": not failed}
    if noticed:
        middle, most = noticed[len(noticed) // 2], noticed[-1]
        line["noticed_s"] = {"median": round(middle, 3), "most": round(most, 3)}
    return line | {"raised": dict(raised), "failed": failed}


def main() -> int:
    """All kinds, as JSON lines; 1 if one was not survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "twin"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", choices=["fd", "ipc"], action="append")
    parser.add_argument("--times", type=int, default=3, help="of each way (default: 3)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    failed = False
    for memory in arguments.memory or ["fd", "ipc"]:
        for launches in ("eager", "graph"):
            for how in ("kill", "stop"):
                spec = Spec(arguments.device, arguments.ranks, memory, launches, how)
                line = summary(spec, arguments.times, arguments.seed)
                failed |= not line["survived"]
                print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    # Under its importable name, so that other processes can import its functions.
    from tests.gpu import loss

    sys.exit(loss.main())
