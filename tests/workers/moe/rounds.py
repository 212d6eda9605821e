"""Dispatch and combine against a dense reference."""

import resource
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import weft
from tests.workers.cuda.device_native import OPTIONS
from tests.workers.group.closing import held
from tests.workers.group.transfer import raised_by
from weft import _native
from weft.moe import AllToAll, Received

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
#: Half the distance from 1 to the next number: the relative error from one rounding.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class Batch(NamedTuple):
    """A rank's batch."""

    tokens: NDArray[Any]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    scales: NDArray[Any] | None = None


def dispatch(all_to_all: AllToAll, sent: Batch) -> Received:
    """Send a batch and receive one."""
    return all_to_all.dispatch(sent.tokens, sent.ids, sent.weights, scales=sent.scales)


def batch(random: np.random.Generator, all_to_all: AllToAll, routing: str, rank: int = 0) -> Batch:
    """Random tokens; `routing` selects their number and experts."""
    experts, top_k = all_to_all.experts, all_to_all.top_k
    count = int(random.integers(0, all_to_all.max_tokens + 1))
    if routing == "empty" or (routing == "some" and rank % 2 == 0):
        count = 0
    if routing in ("one", "full"):
        count = all_to_all.max_tokens
    values = random.standard_normal((count, all_to_all.hidden))
    tokens, scales = values.astype(DTYPES[all_to_all.dtype]), None
    if all_to_all.scales:
        dtype, block = all_to_all.scales
        tokens, scales = weft.float8.quantise(
            values * 3.0 ** random.integers(-9, 9, values.shape),
            dtype=all_to_all.dtype,
            scale_dtype=dtype,
            block=block,
        )
    ids = np.full((count, top_k), -1, dtype=np.int64)
    chosen = min(top_k, experts)
    for row in ids:
        row[:chosen] = random.permutation(experts)[:chosen]
    if routing == "one":
        ids[:] = -1
        ids[:, 0] = experts - 1
    if routing == "masked":
        ids[random.random(ids.shape) < 0.4] = -1
    return Batch(tokens, ids, random.random((count, top_k), dtype=np.float32), scales)


def widened(
    all_to_all: AllToAll, tokens: NDArray[Any], scales: NDArray[Any] | None
) -> NDArray[np.float32]:
    """Numeric token values."""
    values = tokens.astype(np.float32)
    if all_to_all.scales and scales is not None:
        _, block = all_to_all.scales
        factors = scales.astype(np.float32).repeat(block, axis=1)
        values *= factors[:, : all_to_all.hidden]
    return values


def expert(number: int, tokens: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Output from expert `number`."""
    values = tokens * np.float32(number + 1) + np.float32(number / 4)
    return values.astype(DTYPES[dtype])


def run_experts(
    all_to_all: AllToAll, received: Received, weighting: str = "combine"
) -> NDArray[Any]:
    """Outputs for all positions; padding is NaN, which must not be read."""
    shape = (received.positions, all_to_all.hidden)
    outputs = np.full(shape, np.nan, dtype=DTYPES[all_to_all.combine_dtype])
    for local, number in enumerate(all_to_all.local_experts):
        begin = int(received.expert_offsets[local])
        rows = slice(begin, begin + int(received.expert_counts[local]))
        scales = received.scales_of_expert(local) if all_to_all.scales else None
        tokens = widened(all_to_all, received.of_expert(local), scales)
        answers = expert(number, tokens, all_to_all.combine_dtype)
        if weighting == "expert":
            scaled = answers.astype(np.float32) * received.weights[rows, np.newaxis]
            answers = scaled.astype(answers.dtype)
        outputs[rows] = answers
    return outputs


def terms(all_to_all: AllToAll, sent: Batch, combine: str, weighting: str) -> NDArray[np.float32]:
    """`[top_k, tokens, hidden]`: the summands in top-k order, as in a single process."""
    tokens = widened(all_to_all, sent.tokens, sent.scales)
    reply_dtype = all_to_all.reply_dtype if combine == "per_expert" else "float32"
    summands = np.zeros((all_to_all.top_k, *sent.tokens.shape), dtype=np.float32)
    for k in range(all_to_all.top_k):
        for number in range(all_to_all.experts):
            mine = sent.ids[:, k] == number
            answers = expert(number, tokens[mine], all_to_all.combine_dtype)
            weights = sent.weights[mine, k, np.newaxis]
            if weighting == "expert":
                answers = (answers.astype(np.float32) * weights).astype(answers.dtype)
            answers = answers.astype(DTYPES[reply_dtype]).astype(np.float32)
            summands[k, mine] = answers if weighting == "expert" else answers * weights
    return summands


def compare(
    all_to_all: AllToAll, sent: Batch, combined: NDArray[Any], combine: str, weighting: str
) -> str | None:
    """Differences between the combined result and the reference."""
    summands = terms(all_to_all, sent, combine, weighting)
    if combine == "per_expert":
        total = np.zeros(sent.tokens.shape, dtype=np.float32)
        for k in range(all_to_all.top_k):
            total += summands[k]
        expected = total.astype(combined.dtype)
        return None if np.array_equal(combined, expected) else "not the bits of a single process"
    dense = summands.astype(np.float64).sum(axis=0)
    # Rounding in each term, each partial sum, the result, and the float32 sums.
    dtypes = (all_to_all.combine_dtype, all_to_all.reply_dtype, all_to_all.output_dtype)
    roundings = sum(ROUNDING[dtype] for dtype in dtypes)
    roundings += (all_to_all.top_k + 2) * ROUNDING["float32"]
    allowed = np.abs(summands.astype(np.float64)).sum(axis=0) * roundings * 1.01 + 1e-6
    excess = np.abs(combined.astype(np.float64) - dense) - allowed
    return None if np.all(excess <= 0) else f"off by {excess.max()} more than allowed"


def check_received(
    communicator: weft.Communicator, all_to_all: AllToAll, received: Received, sent: Batch
) -> str | None:
    """Errors from the received tokens."""
    ids = [
        np.frombuffer(each, dtype=np.int64) for each in communicator.all_gather(sent.ids.tobytes())
    ]
    load = np.bincount(
        np.concatenate([each[each >= 0] for each in ids]), minlength=all_to_all.experts
    )
    local = slice(all_to_all.local_experts.start, all_to_all.local_experts.stop)
    if not np.array_equal(received.expert_load, load):
        return f"expert_load is {received.expert_load}, not {load}"
    if not np.array_equal(received.expert_counts, load[local]):
        return f"expert_counts is {received.expert_counts}, not {load[local]}"
    padding = np.ones(received.positions, dtype=bool)
    for begin, count in zip(received.expert_offsets, received.expert_counts, strict=False):
        padding[begin : begin + count] = False
    if np.any(received.rows[padding] != -1) or np.any(received.weights[padding] != 0):
        return "padding names tokens or has weights"
    if all_to_all.layout == "contiguous":
        areas = [received.tokens] if received.scales is None else [received.tokens, received.scales]
        if any(np.any(area[padding].view(np.uint8) != 0) for area in areas):
            return "padding is not zero"
    return None


def cases(cases: list[dict[str, Any]], seed: int) -> list[str]:
    """Every case's rounds; the errors."""
    failures = []
    with weft.init() as communicator:
        for number, case in enumerate(cases):
            random = np.random.default_rng([seed, number, communicator.rank])
            given = dict(case)
            rounds, routing = given.pop("rounds", 4), given.pop("routing", "random")
            given = {"experts": 8, "top_k": 2, "hidden": 24, "max_tokens": 40} | given
            all_to_all = AllToAll(communicator, **given)
            for round in range(rounds):
                sent = batch(random, all_to_all, routing, communicator.rank + round)
                weighting = given.get("weighting", "combine")
                with dispatch(all_to_all, sent) as received:
                    wrong = check_received(communicator, all_to_all, received, sent)
                    outputs = run_experts(all_to_all, received, weighting)
                    combined = all_to_all.combine(received, outputs)
                combine = given.get("combine", "reduce")
                wrong = wrong or compare(all_to_all, sent, combined, combine, weighting)
                if wrong:
                    failures.append(f"{case}, round {round}: {wrong}")
        communicator.barrier()
    return failures


def many_rounds(rounds: int, seed: int) -> list[str]:
    """Repeated rounds on one all-to-all, with and without barriers in between."""
    failures = []
    with weft.init() as communicator:
        random = np.random.default_rng([seed, communicator.rank])
        all_to_all = AllToAll(communicator, experts=6, top_k=2, hidden=8, max_tokens=9)
        out = np.empty((9, 8), dtype=np.float32)
        for round in range(rounds):
            sent = batch(random, all_to_all, "masked")
            with dispatch(all_to_all, sent) as received:
                outputs = run_experts(all_to_all, received)
                combined = all_to_all.combine(received, outputs, out=out[: len(sent.tokens)])
            if wrong := compare(all_to_all, sent, combined, "reduce", "combine"):
                failures.append(f"round {round}: {wrong}")
        communicator.barrier()
    return failures


def overlap(rounds: int) -> list[str]:
    """Two rounds in flight; a third is rejected."""
    failures = []
    with weft.init() as communicator:
        random = np.random.default_rng(communicator.rank)
        all_to_all = AllToAll(communicator, experts=8, top_k=2, hidden=8, max_tokens=30, channels=2)
        for round in range(rounds):
            sent = [batch(random, all_to_all, "random") for _ in range(2)]
            dispatched = [all_to_all.dispatch_send(*each[:3]) for each in sent]
            try:
                all_to_all.dispatch_send(*sent[0][:3])
                failures.append("a third round began")
            except weft.errors.ChannelInUseError:
                pass
            received = [each.recv() for each in dispatched]
            under_way = [
                all_to_all.combine_send(each, run_experts(all_to_all, each)) for each in received
            ]
            for each, combine in zip(sent, under_way, strict=True):
                if wrong := compare(all_to_all, each, combine.recv(), "reduce", "combine"):
                    failures.append(f"rounds {round}: {wrong}")
            for held in received:
                held.release()
        communicator.barrier()
    return failures


def views(layout: Literal["contiguous", "indexed"]) -> dict[str, Any]:
    """Received arrays: memory and lifetime."""
    with weft.init() as communicator:
        random = np.random.default_rng(communicator.rank)
        all_to_all = AllToAll(
            communicator, experts=4, top_k=1, hidden=8, max_tokens=16, channels=1, layout=layout
        )
        addresses, raised = [], []
        for _ in range(3):
            received = dispatch(all_to_all, batch(random, all_to_all, "full"))
            addresses.append(received.tokens.ctypes.data)
            owned = received.tokens.flags.owndata
            part = received.of_expert(0)
            shared = len(part) == 0 or np.shares_memory(part, received.tokens)
            outputs = run_experts(all_to_all, received)
            for call in (
                lambda: all_to_all.dispatch_send(*batch(random, all_to_all, "full")[:3]),
                received.release,
                lambda held=received, made=outputs: all_to_all.combine(held, made),
            ):
                try:
                    call()
                except weft.WeftError as error:
                    raised.append(type(error).__name__)
            received.release()
        communicator.barrier()
        return {
            "addresses": len(set(addresses)),
            "owned": owned,
            "shared": bool(shared),
            "raised": raised,
            "table": all_to_all.memory_table(),
            "bytes": all_to_all.memory_bytes,
        }


def refused() -> list[list[str]]:
    """Calls with arguments that do not fit, and a round after them all."""
    with weft.init() as communicator:
        random = np.random.default_rng(communicator.rank)
        all_to_all = AllToAll(communicator, experts=4, top_k=2, hidden=8, max_tokens=16)
        tokens = np.ones((3, 8), dtype=np.float32)
        ids = np.array([[0, 1], [2, 3], [-1, 0]])
        attempts: dict[str, tuple[Any, ...]] = {
            "tokens' shape": (tokens[:, :4].copy(), ids),
            "tokens' rank": (tokens[0], ids),
            "tokens' dtype": (tokens.astype(np.float16), ids),
            "unsupported dtype": (tokens.astype(np.float64), ids),
            "not contiguous": (np.ones((8, 3), dtype=np.float32).T, ids),
            "no array": (tokens.tolist(), ids),
            "ids' shape": (tokens, ids[:, :1]),
            "weights' shape": (tokens, ids, np.ones((3, 1))),
            "too many tokens": (
                np.ones((17, 8), dtype=np.float32),
                np.zeros((17, 2), int) - [0, 1],
            ),
            "expert out of range": (tokens, ids + 1),
            "expert twice": (tokens, ids * 0),
        }
        raised = []
        for name, arguments in attempts.items():
            try:
                all_to_all.dispatch_send(*arguments)
                raised.append([name, "None", ""])
            except weft.WeftError as error:
                raised.append([name, type(error).__name__, str(error)])
        sent = batch(random, all_to_all, "full")
        with dispatch(all_to_all, sent) as received:
            outputs = run_experts(all_to_all, received)
            for name, given, out in (
                ("outputs' shape", outputs[1:], None),
                ("outputs' dtype", outputs.astype(np.float16), None),
            ):
                try:
                    all_to_all.combine(received, given, out=out)
                    raised.append([name, "None", ""])
                except weft.WeftError as error:
                    raised.append([name, type(error).__name__, str(error)])
            under_way = all_to_all.combine_send(received, outputs)
            try:
                under_way.recv(out=np.empty((1, 8), dtype=np.float32))
                raised.append(["out's shape", "None", ""])
            except weft.WeftError as error:
                raised.append(["out's shape", type(error).__name__, str(error)])
            combined = under_way.recv()
        wrong = compare(all_to_all, sent, combined, "reduce", "combine")
        communicator.barrier()
        return [*raised, ["a round after all that", wrong or "right", ""]]


def refused_scales() -> dict[str, str]:
    """Mismatched scales, and valid ones given as bytes; error from each."""
    with weft.init() as communicator:
        given: dict[str, Any] = {"experts": 4, "top_k": 1, "hidden": 24, "max_tokens": 8}
        scaled = AllToAll(communicator, **given, dtype="float8_e4m3fn", block=10)
        powers = AllToAll(
            communicator, **given, dtype="float8_e4m3fn", block=10, scale_dtype="float8_e8m0fnu"
        )
        plain = AllToAll(communicator, **given)
        tokens, ids = np.zeros((3, 24), dtype=ml_dtypes.float8_e4m3fn), np.zeros((3, 1), int)
        attempts: dict[str, tuple[AllToAll, Any, Any]] = {
            "none": (scaled, tokens, None),
            "shape": (scaled, tokens, np.ones((3, 4), np.float32)),
            "dtype": (scaled, tokens, np.full((3, 3), 127, np.uint8)),
            "not wanted": (plain, tokens.astype(np.float32), np.ones((3, 3), np.float32)),
            "bytes": (powers, tokens, np.full((3, 3), 127, np.uint8)),
        }
        raised = {}
        for name, (all_to_all, sent, scales) in attempts.items():
            try:
                all_to_all.dispatch(sent, ids, scales=scales).release()
                raised[name] = "None"
            except weft.WeftError as error:
                raised[name] = f"{type(error).__name__}: {error}"
        communicator.barrier()
        return raised


def capacity() -> dict[str, Any]:
    """A round over capacity, and one after it."""
    with weft.init() as communicator:
        random = np.random.default_rng(communicator.rank)
        all_to_all = AllToAll(
            communicator, experts=4, top_k=1, hidden=8, max_tokens=32, max_receive_rows=40
        )
        named: list[int | None] = []
        wrong = []
        for _ in range(3):
            try:
                dispatch(all_to_all, batch(random, all_to_all, "one")).release()
                named.append(None)
            except weft.errors.CapacityError as error:
                named.append(error.rank)
            tokens = np.ones((8, 8), dtype=np.float32)
            sent = Batch(tokens, np.arange(8)[:, np.newaxis] % 4, np.ones((8, 1), np.float32))
            with dispatch(all_to_all, sent) as received:
                combined = all_to_all.combine(received, run_experts(all_to_all, received))
            wrong.append(compare(all_to_all, sent, combined, "reduce", "combine"))
        communicator.barrier()
        return {"named": named, "wrong": wrong}


def constructed(differing: dict[str, Any], **options: Any) -> list[str]:
    """Make an all-to-all, on rank 1 with other arguments; the error."""
    with weft.init() as communicator:
        given = {"experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 16} | options
        if communicator.rank == 1:
            given |= differing
        try:
            AllToAll(communicator, **given, timeout=10)
        except weft.WeftError as error:
            return [type(error).__name__, str(error)]
        return ["None", ""]


def no_memory(device: bool) -> dict[str, Any]:
    """Rank 1 has memory for one and a half channels: two fail, and one succeeds."""

    def make(**given: int) -> Any:
        shape = {"experts": 4, "top_k": 2, "hidden": 4096} | given
        if device:
            options: dict[str, Any] = OPTIONS | shape
            return _native.DeviceAllToAll(communicator._native, device="twin", **options)
        return AllToAll(communicator, **shape, timeout=20)  # type: ignore[arg-type]

    with weft.init() as communicator:
        largest = make(max_tokens=4096, channels=1)
        set_bytes = largest.sizes()[1] if device else largest.memory_bytes
        largest.close(20.0) if device else largest.close()
        before = resource.getrlimit(resource.RLIMIT_AS)
        if communicator.rank == 1:
            pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
            limit = pages * resource.getpagesize() + set_bytes * 3 // 2
            resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        mapped = len(held()[1])
        error = raised_by(lambda: make(max_tokens=4096, channels=2))
        kept = len(held()[1]) - mapped
        # 5/8 of that set here, and over shm as much of the peer's.
        smaller = make(max_tokens=1280, channels=2)
        resource.setrlimit(resource.RLIMIT_AS, before)
        after = "right"
        if not device:
            sent = batch(np.random.default_rng(communicator.rank), smaller, "random")
            with dispatch(smaller, sent) as received:
                combined = smaller.combine(received, run_experts(smaller, received))
            after = compare(smaller, sent, combined, "reduce", "combine") or "right"
        communicator.barrier()
        return {
            "error": type(error).__name__,
            "message": str(error),
            "rank": None if error is None else error.rank,
            "kept": kept,
            "after": after,
        }
