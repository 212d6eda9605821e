"""`gemv_all_reduce` and `all_reduce_rms_norm` between processes: on GPUs, or the interpreter."""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import numpy as np
import torch

import weft
import weft.fused
from tests.workers.cuda import device_native
from tests.workers.triton.kernel_checks import awaited_error, digest_of, program_of
from weft.fused import GemvTiling, RmsNormTiling

#: Significand bits, with the hidden one.
BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
#: Relative error limit for float32 sums in any order.
SUM_ERROR = 1e-5


class Place:
    """A rank's device, and inputs that every rank can compute."""

    def __init__(self, communicator: weft.Communicator, device: str) -> None:
        self.communicator = communicator
        self.rank, self.ranks = communicator.rank, communicator.world_size
        if device == "cuda":
            local = int(os.environ.get("WEFT_LOCAL_RANK", "0"))
            torch.cuda.set_device(local % torch.cuda.device_count())
        self.device = torch.device("cuda" if device == "cuda" else "cpu")
        self.on_gpu = device == "cuda"
        # The interpreter adds what lies in an inbox before the packets arrive, and discards it.
        np.seterr(invalid="ignore", over="ignore")
        # A peer may be in its compiler.
        weft.fused.set_timeout(60)

    def meet(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        weft.check()
        self.communicator.barrier()

    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float16, torch.float32) + ((torch.bfloat16,) if self.on_gpu else ())


class Gemv:
    """`gemv_all_reduce` inputs on all ranks, by a seed, and this rank's part."""

    def __init__(self, place: Place, seed: int, options: dict[str, Any]) -> None:
        generator = torch.Generator(place.device).manual_seed(seed)
        tokens, hidden, inner = options["tokens"], options["hidden"], options["inner"]
        dtype: torch.dtype = options["dtype"]

        def uniform(*shape: int) -> torch.Tensor:
            values = torch.rand(shape, generator=generator, device=place.device)
            return (values - 0.5).to(dtype)

        xs = [uniform(tokens, inner) for _ in range(place.ranks)]
        weights = [uniform(hidden, inner) for _ in range(place.ranks)]
        self.scales: list[torch.Tensor] | None = None
        if options.get("float8"):
            weights = [each.to(torch.float8_e4m3fn) for each in weights]
        if options.get("scales"):
            count = 1 if options["scales"] == 1 else hidden
            options_of = {"generator": generator, "device": place.device}
            self.scales = [torch.rand(count, **options_of) for _ in range(place.ranks)]
        self.residual, self.norm_weight = uniform(tokens, hidden), uniform(hidden)
        self.xs, self.weights = xs, weights
        self.x, self.weight = self.xs[place.rank], self.weights[place.rank]
        self.scale = None if self.scales is None else self.scales[place.rank]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the ranks in float64, and the parts' magnitude sum."""
        total = magnitude = torch.zeros(0)
        for rank, (x, weight) in enumerate(zip(self.xs, self.weights, strict=True)):
            factors = weight.double() if weight.itemsize > 1 else weight.float().double()
            part = torch.nn.functional.linear(x.double(), factors)
            if self.scales is not None:
                part = part * self.scales[rank].double()
            total = total + part if rank else part
            magnitude = magnitude + part.abs() if rank else part.abs()
        return total, magnitude


def _is_near(
    found: torch.Tensor,
    expected: torch.Tensor,
    inner: int,
    rounded: torch.Tensor | float = 0.0,
) -> bool:
    """True if rounded once, except for float32 errors in `inner` summed products.

    `rounded`: magnitude sum over parts that were rounded before.
    """
    # The products' magnitude sum is at most inner / 4.
    values = expected.abs() + rounded
    limit = values * 2.0 ** -BITS[found.dtype] * 1.01 + inner * SUM_ERROR / 4
    return bool(((found.double() - expected).abs() <= limit).all())


def _is_normed(normed: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    """True if the norm over `rows` is as in Llama, but for a last bit."""
    values = rows.float()
    scaled = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    expected = (scaled.to(rows.dtype).float() * weight.float()).to(rows.dtype).double()
    limit = expected.abs() * 2.0 ** (3 - BITS[rows.dtype]) + 1e-6
    return bool(((normed.double() - expected).abs() <= limit).all())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one, other))


#: On GPUs each of these with each of two shape classes is a kernel to compile, so they are
#: few: dtype, float8, scales, algorithm, kind, tokens, `GemvTiling.dot`.
GPU_GEMVS: tuple[tuple[Any, ...], ...] = (
    (torch.bfloat16, False, 0, None, "both", (1, 8), True),
    (torch.bfloat16, True, 2, "two_shot", "norm", (17, 32), True),
    (torch.float16, True, 1, "one_shot", "plain", (9, 16), True),
    (torch.float32, False, 0, "two_shot", "residual", (1, 1), False),
)
#: dtype, algorithm, tiling, rows, elements in a row.
GPU_NORMS: tuple[tuple[Any, ...], ...] = (
    (torch.bfloat16, None, None, (1, 16), (2056, 4096)),
    (torch.float16, "two_shot", ("packets", 512, 4, 132), (133, 512), (8, 1024)),
    (torch.float32, "two_shot", ("packets", 128, 4, 20), (21, 40), (136, 1000)),
    (torch.bfloat16, None, ("flags", 4096, 16, 264), (1, 512), (8, 8192)),
    (torch.float16, "two_shot", ("flags", 2048, 8, 50), (1, 200), (8, 4096)),
)


def random_gemv(place: Place, generator: random.Random, index: int) -> dict[str, Any]:
    if place.on_gpu:
        dtype, float8, scales, algorithm, kind, tokens, dot = GPU_GEMVS[index % len(GPU_GEMVS)]
        # One tile for each program and whole steps, or neither.
        large = index // len(GPU_GEMVS) % 2
        return {
            "tokens": generator.randint(*tokens),
            "hidden": 8 * generator.randint(130, 256),
            "inner": 8 * (2 * generator.randint(1, 100) + 1) if large else 192,
            "dtype": dtype,
            "float8": float8,
            "scales": scales,
            "algorithm": algorithm,
            "kind": kind,
            "tiling": [32, 64, 4, 3, 20 if large else None, dot, tokens[0] > 4],
        }
    options: dict[str, Any] = {
        "tokens": generator.choice([0, 1, 1, 2, 7, 8, 9, 16, 17, 32]),
        "hidden": 8 * generator.randint(1, 20),
        "inner": 8 * generator.randint(1, 10),
        "dtype": generator.choice(place.dtypes()),
        "scales": generator.choice([0, 0, 1, 2]),
        "algorithm": generator.choice([None, "one_shot", "two_shot"]),
        "kind": generator.choice(["plain", "residual", "norm", "both"]),
    }
    options["float8"] = generator.random() < 0.4
    if generator.random() < 0.3:
        dot = options["tokens"] > 1 or generator.random() < 0.5
        options["tiling"] = [generator.choice([16, 32]), 64, generator.choice([2, 4]), 3, 2, dot]
    return options


def _gemv_call(inputs: Gemv, options: dict[str, Any]) -> Any:
    kind = options["kind"]
    tiling = options.get("tiling")
    return weft.fused.gemv_all_reduce(
        inputs.x,
        inputs.weight,
        weight_scale=inputs.scale,
        residual=inputs.residual if kind in ("residual", "both") else None,
        norm_weight=inputs.norm_weight if kind in ("norm", "both") else None,
        eps=1e-5,
        algorithm=options["algorithm"],
        tiling=None if tiling is None else GemvTiling(*tiling),
        fused=options.get("fused", True),
    )


def check_gemv(place: Place, seed: int, options: dict[str, Any]) -> tuple[list[str], str]:
    """A call's failed checks, and a digest of its results."""
    inputs = Gemv(place, seed, options)
    found = _gemv_call(inputs, options)
    again = _gemv_call(inputs, options)
    kind = options["kind"]
    normed, rows = found if kind in ("norm", "both") else (None, found)
    wrong = []
    expected, magnitude = inputs.expected()
    tiling = options.get("tiling")
    halves = options["dtype"] != torch.float32 and options["tokens"] > 4
    if tiling is not None:
        halves = len(tiling) > 6 and tiling[6]
    near = (expected, options["inner"] * place.ranks, magnitude if halves else 0.0)
    shape = (options["tokens"], options["hidden"])
    if tuple(rows.shape) != shape or rows.dtype != options["dtype"]:
        wrong.append("shape")
    if kind in ("residual", "both"):
        plain = _gemv_call(inputs, options | {"kind": "plain"})
        if not _is_near(plain, *near):
            wrong.append("sum")
        if not _same(rows, (plain.float() + inputs.residual.float()).to(rows.dtype)):
            wrong.append("residual")
    elif not _is_near(rows, *near):
        wrong.append("sum")
    if normed is not None:
        apart = _gemv_call(inputs, options | {"fused": False})
        if not _is_normed(normed, rows, inputs.norm_weight, 1e-5):
            wrong.append("norm")
        if not _same(apart[1], rows) or not _is_normed(apart[0], rows, inputs.norm_weight, 1e-5):
            wrong.append("norm in a kernel of its own")
    both = found if normed is not None else (found,)
    others = again if normed is not None else (again,)
    if not all(_same(one, other) for one, other in zip(both, others, strict=True)):
        wrong.append("repeat")
    return [f"{each}: {options}" for each in wrong], digest_of(*both)


def check_norm(place: Place, seed: int, options: dict[str, Any]) -> tuple[list[str], str]:
    rows, hidden, dtype = options["rows"], options["hidden"], options["dtype"]
    algorithm, tiling = options["algorithm"], options["tiling"]
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, hidden)
    parts = [(torch.rand(shape, generator=generator) - 0.5).to(dtype) for _ in range(place.ranks)]
    residual = (torch.rand(shape, generator=generator) - 0.5).to(dtype).to(place.device)
    weight = (torch.rand(hidden, generator=generator) - 0.5).to(dtype).to(place.device)
    x = parts[place.rank].to(place.device)
    out = x.clone() if seed % 2 else None
    normed, summed = weft.fused.all_reduce_rms_norm(
        x if out is None else out,
        residual,
        weight,
        eps=1e-5,
        algorithm=algorithm,
        out=out,
        tiling=None if tiling is None else RmsNormTiling(*tiling),
    )
    total = parts[0].float()
    for each in parts[1:]:
        total = total + each.float()
    expected = (total.to(dtype).float().to(place.device) + residual.float()).to(dtype)
    wrong = []
    if not _same(summed, expected):
        wrong.append(f"sum: {options}")
    if not _is_normed(normed, summed, weight, 1e-5):
        wrong.append(f"norm: {options}")
    if out is not None and normed.data_ptr() != out.data_ptr():
        wrong.append(f"out: {options}")
    return wrong, digest_of(normed, summed)


def calls(cases: int, repeats: int, seed: int, device: str = "twin") -> dict[str, Any]:
    """Random calls of both operators in turn: failed checks, and all results' digests."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        generator = random.Random(seed)
        wrong: list[str] = []
        digests: list[str] = []
        for index in range(cases):
            failed, digest = check_gemv(place, index, random_gemv(place, generator, index))
            wrong += failed
            digests.append(digest)
            for number in (2 * index, 2 * index + 1):
                options = random_norm(place, generator, number)
                failed, digest = check_norm(place, number, options)
                wrong += failed
                digests.append(digest)
        found: dict[str, Any] = {"wrong": wrong, "digests": digests, "local": _local(place)}
        found["errors"] = _errors(place)
        found["alternating"] = _alternating(place, repeats)
        found["page"] = _page(device)
        if place.on_gpu and place.ranks > 1:
            found["graph"] = _graph(place)
            found["serving"] = _serving(place)
        place.meet()
        return found


def random_norm(place: Place, generator: random.Random, index: int) -> dict[str, Any]:
    if place.on_gpu:
        dtype, algorithm, tiling, rows, hidden = GPU_NORMS[index % len(GPU_NORMS)]
        return {
            "rows": generator.randint(*rows),
            "hidden": generator.randint(hidden[0] // 8, hidden[1] // 8) * 8,
            "dtype": dtype,
            "algorithm": algorithm,
            "tiling": tiling,
        }
    # Words in a row are up to 160.
    tilings = [("flags", 256, 1, 2), ("flags", 256, 4, 5), ("packets", 32, 1, 3)]
    return {
        "rows": generator.choice([0, 1, 2, 5]),
        "hidden": 8 * generator.randint(1, 20),
        "dtype": generator.choice(place.dtypes()),
        "algorithm": generator.choice([None, "one_shot", "two_shot"]),
        "tiling": [None, *tilings][index % 4],
    }


def _alternating(place: Place, repeats: int) -> list[str]:
    """Calls in few shapes in random order, without pauses; returns ones whose bits changed."""
    generator = random.Random(5)
    half = torch.float16
    most = (32, 1000) if place.on_gpu else (9, 40)
    runs: list[tuple[str, Any]] = []
    for tokens, hidden in ((1, 24), most):
        for algorithm, kind in (("one_shot", "plain"), ("two_shot", "both")):
            options = {"tokens": tokens, "hidden": hidden, "inner": 64, "dtype": half}
            options |= {"algorithm": algorithm, "kind": kind}
            inputs = Gemv(place, len(runs), options)
            runs.append((str(options), functools.partial(_gemv_call, inputs, options)))
    flags = RmsNormTiling("flags", 256, 4, 3)
    norms: tuple[tuple[Any, ...], ...] = (
        (1, 8, half, "one_shot", None),
        (9, 264, half, "two_shot", None),
        (3, 72, half, "one_shot", flags),
        (9, 264, half, "one_shot", flags),
        (7, 40, half, "two_shot", flags),
    )
    for rows, hidden, dtype, algorithm, tiling in norms:
        x = torch.ones(rows, hidden, dtype=dtype, device=place.device) * (place.rank + 1)
        options = {"algorithm": algorithm, "tiling": tiling}
        call = functools.partial(
            weft.fused.all_reduce_rms_norm, x, x * 0 + rows, x[0] * 0 + 2, **options
        )
        runs.append((f"{rows} x {hidden} {options}", call))
    expected = [_results(call()) for _, call in runs]
    found = []
    for _ in range(repeats):
        index = generator.randrange(len(runs))
        found.append((index, _results(runs[index][1]())))
    return [
        runs[index][0]
        for index, results in found
        if not all(_same(*pair) for pair in zip(expected[index], results, strict=True))
    ]


def _results(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _local(place: Place) -> list[str]:
    """Failed checks on the GEMV without communication."""
    wrong = []
    for tokens in (0, 1, 3):
        options = {"tokens": tokens, "hidden": 88, "inner": 200, "dtype": torch.float16}
        inputs = Gemv(place, tokens, options)
        out = torch.empty(tokens, 88, dtype=torch.float16, device=place.device)
        found = weft.fused.gemv(inputs.x, inputs.weight, out=out)
        expected = torch.nn.functional.linear(inputs.x.double(), inputs.weight.double())
        if found is not out or not _is_near(found, expected, 200):
            wrong.append(f"{tokens} tokens")
    return wrong


def _errors(place: Place) -> dict[str, Any]:
    """Errors from invalid arguments."""
    half = {"dtype": torch.float16, "device": place.device}
    x, weight = torch.zeros(2, 16, **half), torch.zeros(24, 16, **half)
    scale, wide = torch.ones(24, device=place.device), torch.zeros(1, 32776, **half)
    short = RmsNormTiling("flags", 128, 4, 1)
    gemv, norm = weft.fused.gemv_all_reduce, weft.fused.all_reduce_rms_norm
    given: dict[str, Any] = {
        "dimensions": lambda: gemv(x[0], weight),
        "tokens": lambda: gemv(torch.zeros(33, 16, **half), weight),
        "inner": lambda: gemv(torch.zeros(2, 12, **half), torch.zeros(24, 12, **half)),
        "hidden": lambda: gemv(x, weight[:20]),
        "weight": lambda: gemv(x, torch.zeros(24, 8, **half)),
        "dtype": lambda: gemv(x, weight.float()),
        "integers": lambda: gemv(x.int(), weight.int()),
        "strides": lambda: gemv(x, torch.zeros(16, 24, **half).t()),
        "layout": lambda: gemv(torch.zeros(16, 2, **half).t(), weight),
        "scale": lambda: gemv(x, weight, weight_scale=scale[:2]),
        "residual": lambda: gemv(x, weight, residual=torch.zeros(2, 16, **half)),
        "out": lambda: gemv(x, weight, out=torch.zeros(2, 24, device=place.device)),
        "algorithm": lambda: gemv(x, weight, algorithm="ring"),
        "block": lambda: gemv(x, weight, tiling=GemvTiling(24, 64)),
        "halves": lambda: gemv(x.float(), weight.float(), tiling=GemvTiling(32, 64, halves=True)),
        "dot": lambda: gemv(x, weight, tiling=GemvTiling(32, 64, dot=False)),
        "fused": lambda: gemv(x, weight, fused=False),
        "rows": lambda: norm(x, x[:1], x[0]),
        "norm_weight": lambda: norm(x, x, x[0, :8]),
        "wide": lambda: norm(wide, wide, wide[0]),
        "norm_algorithm": lambda: norm(x, x, x[0], algorithm="ring"),
        "protocol": lambda: norm(x, x, x[0], tiling=RmsNormTiling("bytes", 128, 4, 1)),
        "flags": lambda: norm(wide[:, :512], wide[:, :512], wide[0, :512], tiling=short),
        "power": lambda: norm(x, x, x[0], tiling=RmsNormTiling("packets", 96, 1, 1)),
        "programs": lambda: norm(x, x, x[0], tiling=RmsNormTiling("packets", 128, 4, 0)),
    }
    if not place.on_gpu:
        brain = torch.zeros(2, 16, dtype=torch.bfloat16)
        given["bfloat16"] = lambda: norm(brain, brain, brain[0])
    return {name: device_native.named(call)[::2] for name, call in given.items()}


def _graph(place: Place) -> list[str]:
    """Failed checks on replays of captured calls that differ in shape."""
    shapes = [(1, 4096, 1024), (32, 7168, 512)]
    inputs = [
        Gemv(place, 7, {"tokens": t, "hidden": n, "inner": k, "dtype": torch.bfloat16})
        for t, n, k in shapes
    ]

    def run() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for each in inputs:
            y = weft.fused.gemv_all_reduce(each.x, each.weight)
            assert isinstance(y, torch.Tensor)
            found.append(y)
            for fused in (True, False):
                found += weft.fused.gemv_all_reduce(
                    each.x,
                    each.weight,
                    residual=each.residual,
                    norm_weight=each.norm_weight,
                    fused=fused,
                )
            found += weft.fused.all_reduce_rms_norm(y, each.residual, each.norm_weight)
        return found

    run()
    place.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    wrong = []
    for number in range(30):
        for each in captured:
            each.fill_(-1)
        for its in inputs:
            its.x.mul_(-1 if number % 2 else 0.5)
        graph.replay()
        eager = run()
        for index, (one, other) in enumerate(zip(eager, captured, strict=True)):
            if not torch.equal(one, other):
                wrong.append(f"replay {number}, result {index}")
    place.meet()
    return wrong


def _serving(place: Place) -> list[str]:
    """Failed checks on serving shapes, large weights in both formats."""
    wrong: list[str] = []
    for tokens, hidden, inner, float8 in ((1, 8192, 4096, False), (20, 5120, 1032, True)):
        options: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "inner": inner}
        options |= {"dtype": torch.bfloat16, "float8": float8, "scales": 2 if float8 else 0}
        options |= {"algorithm": None, "kind": "both"}
        wrong += check_gemv(place, tokens, options)[0]
    for rows in (1, 16, 128):
        options = {"rows": rows, "hidden": 8192, "dtype": torch.bfloat16}
        wrong += check_norm(place, rows, options | {"algorithm": None, "tiling": None})[0]
    return wrong


def missing(operator: str, device: str = "twin") -> dict[str, Any]:
    """Rank 1 does not make the third call."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        weft.fused.set_timeout(2 if place.on_gpu else 5)
        half = {"dtype": torch.float16, "device": place.device}
        x, weight = torch.ones(3, 64, **half), torch.ones(64, 64, **half)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            if operator != "gemv_all_reduce":
                tiling = RmsNormTiling(operator, 128, 4, 3)
                return weft.fused.all_reduce_rms_norm(x, x, weight[0], tiling=tiling)
            found = weft.fused.gemv_all_reduce(x, weight, residual=x, norm_weight=weight[0])
            assert isinstance(found, tuple)
            return found

        for _ in range(2):
            call()
        place.meet()
        if place.rank == 1:
            # The other rank's error ends the group.
            return {"error": awaited_error()}
        results = call()
        numbers = [int(each.isnan().sum()) for each in results]
        return {"nan": numbers, "error": device_native.named(weft.check)}


def _page(device: str) -> list[bool]:
    """Checks on the program in docs/fused-gemv.md."""
    program = program_of("fused-gemv.md")
    if device == "twin":
        program = program.replace('"cuda"', '"cpu"').replace("torch.bfloat16", "torch.float16")
    names: dict[str, Any] = {}
    exec(program, names)
    return [bool(each) for each in names["checks"]]
