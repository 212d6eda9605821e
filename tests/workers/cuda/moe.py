"""Dispatch and combine on a device or its twin, compared with the CPU."""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import weft
import weft.cuda
from weft import moe

Result = TypeVar("Result")

#: Device-only arguments.
DEVICE_ONLY = ("path", "max_positions", "ids_dtype")


class Batch(NamedTuple):
    """A rank's batch, in CPU memory."""

    tokens: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None


def batch(random: np.random.Generator, all_to_all: moe.AllToAll, routing: str) -> Batch:
    """Random tokens; `routing` selects their number and experts."""
    experts, top_k = all_to_all.experts, all_to_all.top_k
    count = int(random.integers(0, all_to_all.max_tokens + 1))
    if routing == "empty" or (routing == "some" and random.random() < 0.5):
        count = 0
    if routing in ("one", "full"):
        count = all_to_all.max_tokens
    values = random.standard_normal((count, all_to_all.hidden)).astype(np.float32)
    tokens, scales = torch.from_numpy(values).to(getattr(torch, all_to_all.dtype)), None
    if all_to_all.dtype.startswith("float8"):
        assert all_to_all.scales
        codes, factors = weft.float8.quantise(
            values,
            dtype=all_to_all.dtype,
            scale_dtype=all_to_all.scales[0],
            block=block(all_to_all),
        )
        tokens, scales = of_bytes(codes, all_to_all.dtype), of_bytes(factors, all_to_all.scales[0])
    ids = np.full((count, top_k), -1, dtype=np.int64)
    chosen = min(top_k, experts)
    for row in ids:
        row[:chosen] = random.permutation(experts)[:chosen]
    if routing == "one":
        ids[:] = -1
        ids[:, 0] = experts - 1
    if routing == "masked":
        ids[random.random(ids.shape) < 0.4] = -1
    weights = random.random((count, top_k), dtype=np.float32)
    given = None if routing == "unweighted" else torch.from_numpy(weights)
    return Batch(tokens, torch.from_numpy(ids), given, scales)


def block(all_to_all: moe.AllToAll) -> int:
    """Elements per scale."""
    assert all_to_all.scales
    return all_to_all.scales[1]


def of_bytes(array: NDArray[Any], dtype: str) -> torch.Tensor:
    """A tensor with a dtype that numpy lacks."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.from_numpy(array.view(np.uint8)).view(kind).reshape(array.shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes on the CPU, comparable even for NaN."""
    return tensor.contiguous().view(torch.uint8).cpu()


def expert(number: int, codes: torch.Tensor, scales: Any, dtype: torch.dtype) -> torch.Tensor:
    """Output from expert `number`, different for each row and column."""
    values = codes.float()
    if scales is not None:
        each = scales.float()
        values = (
            values
            * each.repeat_interleave(-(-values.shape[1] // each.shape[1]), dim=1)[
                :, : values.shape[1]
            ]
        )
    return (values * (number + 1) + number / 4).to(dtype)


def run_experts(all_to_all: moe.AllToAll, received: moe.Received, weighting: str) -> torch.Tensor:
    """Outputs for all positions; NaN at positions without a token, which must not be read."""
    dtype = getattr(torch, all_to_all.combine_dtype)
    shape, place = (received.positions, all_to_all.hidden), received.tokens.device
    outputs = torch.full(shape, torch.nan, dtype=dtype, device=place)
    for local, number in enumerate(all_to_all.local_experts):
        begin = int(received.expert_offsets[local])
        rows = slice(begin, begin + int(received.expert_counts[local]))
        scales = received.scales_of_expert(local) if all_to_all.scales else None
        answers = expert(number, received.of_expert(local), scales, dtype)
        if weighting == "expert":
            weights = torch.as_tensor(received.weights[rows], device=place)
            answers = (answers.float() * weights[:, None]).to(dtype)
        outputs[rows] = answers
    return outputs


def differ(device: moe.AllToAll, on_device: weft.cuda.Received, on_cpu: moe.Received) -> str | None:
    """Differences in received tokens between device and CPU."""
    experts = len(device.local_experts)
    if on_device.expert_counts.tolist() != on_cpu.expert_counts.tolist():
        return f"counts are {on_device.expert_counts}, not {on_cpu.expert_counts}"
    padded = device.layout == "padded"
    if not padded and on_device.expert_offsets.tolist() != on_cpu.expert_offsets.tolist():
        return f"offsets are {on_device.expert_offsets}, not {on_cpu.expert_offsets}"
    used = torch.zeros(on_device.positions, dtype=torch.bool)
    all_rows, all_weights = (
        torch.as_tensor(each).cpu() for each in (on_device.rows, on_device.weights)
    )
    for local in range(experts):
        begins = [int(each.expert_offsets[local]) for each in (on_device, on_cpu)]
        count = int(on_cpu.expert_counts[local])
        mine, theirs = (slice(begin, begin + count) for begin in begins)
        used[mine] = True
        if not torch.equal(bits(on_device.of_expert(local)), bits(on_cpu.of_expert(local))):
            return f"tokens of local expert {local} differ"
        if device.scales and not torch.equal(
            bits(on_device.scales_of_expert(local)), bits(on_cpu.scales_of_expert(local))
        ):
            return f"scales of local expert {local} differ"
        weights = torch.as_tensor(on_cpu.weights[theirs])
        if not torch.equal(all_weights[mine], weights):
            return f"weights of local expert {local} differ"
    end = int(on_device.expert_offsets[experts])
    rows, weights = all_rows[:end], all_weights[:end]
    if bool((rows[used[:end]] < 0).any()):
        return "a token has no row"
    if bool((rows[~used[:end]] != -1).any()) or bool((weights[~used[:end]] != 0).any()):
        return "padding names rows or has weights"
    if device.layout != "contiguous":
        return None if on_device.m_indices is None else "m_indices are for the contiguous layout"
    assert on_device.m_indices is not None
    groups = torch.full((on_device.positions,), -1, dtype=torch.int32)
    for local in range(experts):
        begin = int(on_cpu.expert_offsets[local])
        groups[begin : begin + int(on_cpu.expert_counts[local])] = local
    if not torch.equal(on_device.m_indices.cpu(), groups):
        return f"m_indices are {on_device.m_indices}, not {groups}"
    return None


def one_round(
    random: np.random.Generator,
    device: weft.cuda.AllToAll,
    cpu: moe.AllToAll,
    case: dict[str, Any],
    halves: bool,
) -> str | None:
    """A round on both; the differences."""
    weighting = case.get("weighting", "combine")
    sent = batch(random, cpu, case.get("routing", "random"))
    there = Batch(*(None if each is None else each.to(device.device) for each in sent))
    ids = there.ids.to(getattr(torch, device.ids_dtype))
    existing = len(sent.ids)
    count = None
    if case.get("counted"):
        existing = int(random.integers(0, existing + 1))
        count = torch.tensor([existing], dtype=torch.int32, device=device.device)
    options: dict[str, Any] = {"scales": there.scales, "count": count}
    if halves:
        received = device.dispatch_send(there.tokens, ids, there.weights, **options).recv()
    else:
        received = device.dispatch(there.tokens, ids, there.weights, **options)
    real = Batch(*(None if each is None else each[:existing] for each in sent))
    with cpu.dispatch(real.tokens, real.ids, real.weights, scales=real.scales) as expected:
        wrong = differ(device, received, expected)
        outputs = run_experts(device, received, weighting)
        if halves:
            combined = device.combine_send(received, outputs).recv()
        else:
            combined = device.combine(received, outputs)
        received.release()
        reference = cpu.combine(expected, run_experts(cpu, expected, weighting))
    if combined.shape != sent.tokens.shape:
        return f"combined has shape {combined.shape}"
    if not torch.equal(bits(combined[:existing]), bits(reference)):
        wrong = wrong or "combined tokens differ"
    device.check()
    return wrong


def cases(cases: list[dict[str, Any]], seed: int, device: str = "twin") -> list[str]:
    """Every case's rounds on a device and on the CPU; the differences."""
    failures = []
    with weft.init() as communicator:
        if device == "cuda":
            device = f"cuda:{communicator.rank % torch.cuda.device_count()}"
        for number, case in enumerate(cases):
            random = np.random.default_rng([seed, number, communicator.rank])
            given = {"experts": 8, "top_k": 2, "hidden": 32, "max_tokens": 20} | case
            rounds = given.pop("rounds", 4)
            for name in ("routing", "counted"):
                given.pop(name, None)
            both = {name: given[name] for name in given if name not in DEVICE_ONLY}
            with (
                moe.AllToAll(communicator, **given, device=device) as there,
                moe.AllToAll(communicator, **both) as here,
            ):
                assert isinstance(there, weft.cuda.AllToAll)
                wrong = [one_round(random, there, here, case, n % 2 == 0) for n in range(rounds)]
                failures += [f"{case}, round {n}: {each}" for n, each in enumerate(wrong) if each]
        communicator.barrier()
    return failures


def lost(skew_timeout: float, watchdog: bool) -> list[Any]:
    """Rank 1 never dispatches; outputs and error on rank 0."""
    with weft.init() as communicator:
        all_to_all = weft.cuda.AllToAll(
            communicator,
            device="twin",
            experts=2,
            top_k=1,
            hidden=16,
            max_tokens=4,
            skew_timeout=skew_timeout,
            watchdog=watchdog,
        )
        if communicator.rank == 1:
            return check_error(communicator.check, 20)
        received = all_to_all.dispatch(torch.ones(2, 16), torch.tensor([[0], [1]]))
        poisoned = bool((bits(received.tokens) == 0xFF).all())
        if watchdog:
            check_error(communicator.check, 20)
        return [poisoned, received.expert_counts.tolist(), check_error(weft.check, 5)]


def compiled(backend: str, layout: str) -> list[Any]:
    """Rounds in compiled code without a graph break, compared with eager rounds."""
    wire: Any = {"wire_dtype": "float8_e4m3fn", "block": 32} if layout == "indexed" else {}

    def experts(received: weft.cuda.Received) -> torch.Tensor:
        # Fusion does not change these operations' rounding.
        used = torch.arange(received.positions) < received.expert_offsets[-1]
        values = received.tokens.to(torch.float32)
        if received.scales is not None:
            values = values * received.scales.repeat_interleave(32, dim=1)
        if layout == "indexed":
            values = values[torch.where(used, received.rows, 0).long()]
        return torch.where(used[:, None], values * 2, 0).bfloat16()

    def fused(rank: Any, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        with rank.dispatch(tokens, ids, weights) as received:
            return rank.combine(received, experts(received)) + 1

    def halves(rank: Any, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        dispatch = rank.dispatch_send(tokens, ids, weights)
        dropped = rank.dispatch(tokens, ids)
        shared = tokens * 2
        received = dispatch.recv()
        combine = rank.combine_send(received, experts(received))
        dropped.release()
        combined = combine.recv() + shared
        received.release()
        return combined

    with (
        weft.init() as communicator,
        weft.cuda.AllToAll(
            communicator,
            device="twin",
            experts=6,
            top_k=2,
            hidden=64,
            max_tokens=8,
            dtype="bfloat16",
            layout=layout,
            # One rank may wait while another compiles.
            skew_timeout=120,
            **wire,
        ) as rank,
    ):
        random = np.random.default_rng(communicator.rank)
        equal: list[Any] = []
        for function in (fused, halves):
            quick = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
            for count in (5, 5, 7 + communicator.rank):
                full = batch(random, rank, "full")
                tokens, ids, weights = (each[:count] for each in full[:3] if each is not None)
                expected = function(rank, tokens, ids, weights)
                # Compilation times differ between ranks.
                communicator.barrier(timeout=120)
                result = quick(rank, tokens, ids, weights)
                equal.append(torch.equal(bits(result), bits(expected)))
        rank.check()
        return [*equal, "in use" if any(rank._busy) else "free"]


def check_error(call: Callable[[], object], seconds: float) -> list[str]:
    """Error from a check within a time limit."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            call()
        except weft.WeftError as error:
            return [type(error).__name__, str(error)]
        time.sleep(0.01)
    return ["None", ""]


def together(ranks: list[Any], call: Callable[[Any], Result]) -> list[Result]:
    """`call` with each rank in a local group, on a thread for each; the results."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = call(ranks[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(ranks))]


def cast(values: NDArray[np.float32], block: int, powers: bool) -> tuple[Any, Any]:
    """Codes and scales equal to the kernels' cast, by numpy: see "Numbers" in `docs/moe.md`."""
    rows, hidden = values.shape
    columns = -(-hidden // block)
    codes = np.empty((rows, hidden), dtype=ml_dtypes.float8_e4m3fn)
    scales = np.empty((rows, columns), dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            part = slice(column * block, (column + 1) * block)
            largest = np.abs(values[row, part]).max()
            scale = np.float32(1)
            if largest > 0 and powers:
                exponent = int(np.ceil(np.log2(np.float64(largest) / 448)))
                scale = np.float32(2.0 ** max(exponent, -127))
            elif largest > 0:
                scale = np.maximum(np.float32(largest) / np.float32(448), np.float32(2.0**-126))
            inverse = np.float32(1) / scale
            scaled = np.clip(values[row, part] * inverse, -448, 448)
            codes[row, part] = scaled.astype(ml_dtypes.float8_e4m3fn)
            scales[row, column] = scale
    return codes, scales.astype(ml_dtypes.float8_e8m0fnu) if powers else scales
