"""Measurements: a function for each kind of case, which returns this rank's figures."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from weft.bench.device.gemms import beside_gemms
from weft.bench.device.rounds import Bank, Found, Rounds, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.bench.device.cases import Case
    from weft.bench.device.context import Context
    from weft.bench.device.rig import Rig

__all__ = ["MEASURES"]


def rounds(context: Context, case: Case) -> dict[str, Any]:
    """Rounds in a graph: whole, by phase, by half, with cold caches; and NCCL beside them."""
    rig = context.rig(case)
    bank = Bank(rig, case.slots)
    align = Rounds(bank, count=1)
    found = Found(rig, bank)
    found.add("", *sample(Rounds(bank), align, case.samples), only=("round",))
    found.add("", *sample(Rounds(bank, marks=True), align, case.samples), but=("round",))
    if case.halves:
        halves = Rounds(bank, marks=True, halves=True)
        found.add("", *sample(halves, align, case.samples), but=("round", "nothing"))
    if case.cold:
        cold = Rounds(bank, marks=True, cold=True)
        found.add("cold ", *sample(cold, align, case.samples), but=("round", "nothing"))
    rows = rig.rows_sent(0)
    result = found.result() | {
        "rows_sent": sum(rows),
        "dispatch_bytes": sum(rows) * case.token_bytes,
    }
    # Replies go the other way: to each rank as many as rows came from it.
    matrix = gather_rows(context, rows)
    replies = sum(row[rig.rank] for row in matrix)
    result["combine_bytes"] = replies * case.reply_bytes
    rig.close()
    if case.beside:
        result["beside"] = beside(context, case, matrix)
    return result


def gather_rows(context: Context, rows: list[int]) -> list[list[int]]:
    """By sender, rows to each rank."""
    gathered = context.communicator.all_gather(json.dumps(rows).encode(), timeout=120)
    return [json.loads(each) for each in gathered]


def beside(context: Context, case: Case, matrix: list[list[int]]) -> dict[str, Any]:
    """As many bytes to the same ranks through torch.distributed."""
    name = context.device.backend
    unable = context.beside.unable()
    if unable is not None:
        return {"backend": name, "unable": unable}
    there = [[rows * case.token_bytes for rows in row] for row in matrix]
    back = [[rows * case.reply_bytes for rows in column] for column in zip(*matrix, strict=True)]
    times, captured, right = context.beside.measure(there, back, min(case.samples, 20))
    return {"backend": name, "times": times, "graph": captured, "wrong": int(not right)}


def modes(context: Context, case: Case) -> dict[str, Any]:
    """Calls one by one, compiled, and in a graph; and the host time per call."""
    rig, device = context.rig(case), context.device
    bank = Bank(rig, case.slots)
    align = Rounds(bank, count=1)
    found = Found(rig, bank)
    found.add("graph ", *sample(Rounds(bank), align, case.samples), only=("round",))

    def step(tokens: Any, ids: Any, weights: Any, scales: Any, outputs: Any) -> Any:
        received = rig.all_to_all.dispatch(tokens, ids, weights, scales=scales)
        combined = rig.all_to_all.combine(received, outputs)
        received.release()
        return combined

    found.add("eager ", *loop(context, bank, align, step), only=("round",))
    began = time.perf_counter()
    error = None
    try:
        compiled = device.compile(step)
        compiled(*bank.slots[0].inputs, bank.slots[0].outputs)
        device.synchronise()
    except Exception as failure:  # PyTorch's compiler raises exceptions from any class
        error = f"{type(failure).__name__}: {failure}"[:500]
    seconds = time.perf_counter() - began
    failed = context.communicator.all_gather((error or "").encode(), timeout=120)
    if not any(failed):
        found.add("compiled ", *loop(context, bank, align, compiled), only=("round",))
    result = found.result() | {"compile_seconds": seconds, "compile_error": error}
    result["host_us"] = host(context, rig, bank)
    rig.close()
    return result


def loop(
    context: Context, bank: Bank, align: Rounds, call: Callable[..., Any]
) -> tuple[dict[str, list[float]], int]:
    """Rounds that the host launches one by one, timed on the device."""
    device, torch = context.device, context.device.torch
    wrong, spans = 0, []
    for _ in range(5):
        bank.fill()
        align.replay()
        begin = device.stamp()
        for number in range(device.loop):
            slot = bank.slots[number % len(bank.slots)]
            combined = call(*slot.inputs, slot.outputs)
        spans.append((begin, device.stamp()))
        expected = bank.batch_of((device.loop - 1) % len(bank.slots)).combined
        wrong += int((combined.view(torch.int16) != expected.view(torch.int16)).any())
    return {"round": [device.elapsed_us(*span) / device.loop for span in spans]}, wrong


def host(context: Context, rig: Rig, bank: Bank) -> dict[str, float]:
    """Host microseconds for each call, while the device is behind."""
    device, slot = context.device, bank.slots[0]
    spent = dict.fromkeys(
        (
            *("dispatch", "combine", "dispatch out=", "combine out="),
            *("dispatch send", "dispatch recv", "combine send", "combine recv"),
            # An idle kernel without outputs: this host's present speed.
            "empty kernel",
        ),
        0.0,
    )
    outputs = rig.all_to_all.empty_outputs()
    combined = device.torch.empty_like(bank.batch_of(0).combined)

    def timed(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = call(*arguments, **options)
        spent[name] += time.perf_counter() - began
        return result

    for how in ("fused", "out=", "halves"):
        device.synchronise()
        context.communicator.barrier()
        # Else the stream would be empty now and then, and the calls cheaper than in a program.
        device.sleep(2000)
        for _ in range(device.host_calls):
            if how == "halves":
                sent = timed("dispatch send", rig.dispatch_send, slot.inputs)
                received = timed("dispatch recv", sent.recv)
                replies = timed("combine send", rig.all_to_all.combine_send, received, slot.outputs)
                timed("combine recv", replies.recv)
            elif how == "out=":
                received = timed("dispatch out=", rig.dispatch, slot.inputs, outputs)
                into = {"out": combined}
                timed("combine out=", rig.all_to_all.combine, received, slot.outputs, **into)
            else:
                received = timed("dispatch", rig.dispatch, slot.inputs)
                timed("combine", rig.all_to_all.combine, received, slot.outputs)
                timed("empty kernel", device.sleep, 0)
            received.release()
    device.synchronise()
    return {name: seconds / device.host_calls * 1e6 for name, seconds in spent.items()}


def harness(context: Context, case: Case) -> dict[str, Any]:
    """Pairs in a loop, an event on each side of each, and the mean, as DeepEP's tests measure.

    "once": the caches are flushed before the loop; "between": before each pair. Pairs run as calls,
    and as replays of a one-pair graph.
    """
    rig, device = context.rig(case), context.device
    bank = Bank(rig, 1)
    slot = bank.slots[0]
    found = Found(rig, bank)
    graph = Rounds(bank, count=1)

    kept: list[Any] = []

    def eager() -> None:
        kept[:] = [rig.round(slot.inputs, slot.outputs)]

    for name, call in (("eager", eager), ("graph", graph.replay)):
        for flush in ("once", "between"):
            for _ in range(device.loop):
                call()
            device.flush()
            spans = []
            for _ in range(device.loop):
                if flush == "between":
                    device.flush()
                begin = device.stamp()
                call()
                spans.append((begin, device.stamp()))
            device.synchronise()
            # The first begins when ranks come, not when all have come.
            times = [device.elapsed_us(*span) for span in spans[1:]]
            if name == "eager":
                graph.combined = list(kept)
            found.add(f"{name} {flush} ", {"pair": times}, int(graph.wrong()))
    result = found.result()
    rig.close()
    return result


def late(context: Context, case: Case) -> dict[str, Any]:
    """Rounds whose last rank is late: each rank's times, from the rank's arrival on."""
    rig = context.rig(case)
    bank = Bank(rig, case.slots)
    align = Rounds(bank, count=1)
    found = Found(rig, bank)
    found.add("on time ", *sample(Rounds(bank, marks=True), align, case.samples), but=("round",))
    last = context.communicator.world_size - 1
    waits = case.late_us if rig.rank == last else 0.0
    delayed = Rounds(bank, marks=True, late_us=waits)
    found.add("late ", *sample(delayed, align, case.samples), but=("round",))
    result = found.result() | {"late_rank": last, "late_us": case.late_us}
    rig.close()
    return result


def start(context: Context, case: Case) -> dict[str, Any]:
    """Seconds until the first round ends, on ranks that need the same kernels at once."""
    device = context.device
    device.synchronise()
    context.communicator.barrier()
    began = time.perf_counter()
    rig = context.rig(case)
    made = time.perf_counter()
    inputs = rig.source.inputs(rig.rank, 0)
    device.synchronise()
    context.communicator.barrier(timeout=120)
    ready = time.perf_counter()
    with rig.dispatch(inputs) as received:
        shape = (len(received.rows), case.hidden)
        kind = getattr(device.torch, case.wide)
        outputs = device.torch.zeros(shape, dtype=kind, device=device.name)
        rig.all_to_all.combine(received, outputs)
    device.synchronise()
    first = time.perf_counter()
    bank = Bank(rig, 1)
    result = Found(rig, bank).result() | {
        "constructor_seconds": made - began,
        "first_round_seconds": first - ready,
    }
    rig.close()
    return result


MEASURES: Final[dict[str, Callable[[Context, Case], dict[str, Any]]]] = {
    "rounds": rounds,
    "modes": modes,
    "harness": harness,
    "late": late,
    "gemm": beside_gemms,
    "start": start,
}
