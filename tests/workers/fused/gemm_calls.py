"""`weft.fused` GEMMs with collectives, beside torch: on GPUs, or the twin's processes."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy
import torch

import weft
import weft.fused
from tests.workers.cuda import device_native
from tests.workers.triton.kernel_checks import awaited_error, digest_of
from weft.fused import Tiling
from weft.fused.gemm import composed

#: Small tiles, so that small matrices have many.
SMALL = Tiling(rows=16, columns=32, inner=16, group=2, slice_bytes=1024, stages=2, warps=4)
STREAM = SMALL._replace(stream_k=True)
#: For large GEMMs, for short ones, for float32 partial sums, and for few rows.
LARGE = Tiling()
SHORT = Tiling(columns=128, warps=4, stages=3, programs=2)
WIDE = Tiling(columns=128, stages=3)
FEW_ROWS = Tiling(columns=128, stages=5, stream_k=True)
#: As short GEMMs' tiles are sent by default, in a call whose program has several in each step.
PACED: dict[str, Any] = {
    "tiling": LARGE._replace(slice_bytes=128 << 10, paced_stores=True),
    "num_sms": 1,
}
OPERATORS = (
    "gemm_all_to_all",
    "gemm_reduce_scatter",
    "gemm_all_reduce",
    "all_gather_gemm",
    "all_to_all_gemm",
)


#: Kernels for GPUs beside all operators' kernels with LARGE and FEW_ROWS in bfloat16.
KERNELS: tuple[dict[str, Any], ...] = (
    {"operator": "gemm_all_to_all", "transposed": True, "tiling": SHORT, "symmetric": True},
    {"operator": "gemm_reduce_scatter", "tiling": WIDE, "wide": True},
    {"operator": "gemm_all_reduce", "tiling": LARGE, "symmetric": True},
    {"operator": "gemm_all_reduce", "dtype": torch.float32},
    {"operator": "gemm_reduce_scatter", "aligned": False},
    {"operator": "all_gather_gemm", "aligned": False},
    {"operator": "all_to_all_gemm", "transposed": True, "tiling": SHORT},
    {"operator": "gemm_all_reduce", "tiling": FEW_ROWS, "wide": True, "symmetric": True},
    {"operator": "gemm_all_to_all", "tiling": FEW_ROWS, "transposed": True, "symmetric": True},
)


class Place:
    """Ranks, and operands that each rank can make for all."""

    def __init__(self, communicator: weft.Communicator, device: str) -> None:
        self.communicator, self.name = communicator, device
        self.rank, self.ranks = communicator.rank, communicator.world_size
        if device == "cuda":
            local = int(os.environ.get("WEFT_LOCAL_RANK", "0"))
            torch.cuda.set_device(local % torch.cuda.device_count())
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device("cpu")

    def operands(
        self, seed: int, rows: int, inner: int, columns: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x on all ranks [ranks, rows, inner], and their weights [ranks, columns, inner]."""
        generator = torch.Generator().manual_seed(seed)
        xs = torch.randn(self.ranks, rows, inner, generator=generator)
        weights = torch.randn(self.ranks, columns, inner, generator=generator)
        xs, weights = xs.to(self.device, dtype), (weights / max(inner, 1) ** 0.5).to(self.device)
        return xs, weights.to(dtype)


def expected(
    operator: str, rank: int, xs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's result in float64, and the same sum over magnitudes, for the error bound."""
    value = _in_float64(operator, rank, xs.double(), weights.double())
    return value, _in_float64(operator, rank, xs.double().abs(), weights.double().abs())


def _in_float64(operator: str, rank: int, xs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    ranks, rows = xs.shape[:2]
    each = rows // ranks
    own = slice(rank * each, (rank + 1) * each)
    if operator == "all_to_all_gemm":
        xs = xs[:, own]
    if operator in ("all_gather_gemm", "all_to_all_gemm"):
        return xs.reshape(-1, xs.shape[2]) @ weights[rank].t()
    partials = xs @ weights.transpose(1, 2)
    if operator == "gemm_all_reduce":
        return partials.sum(0)
    if operator == "gemm_all_to_all":
        return partials[:, own].reshape(rows, -1)
    return partials[:, own].sum(0)


def close(found: torch.Tensor, right: tuple[torch.Tensor, torch.Tensor], sums: float = 0.0) -> bool:
    """True if each element differs by less than some roundings in its parts.

    `sums`: relative error in tensor core sums, beside float32's.
    """
    value, bound = right
    # Sums are in float32, one product after the other.
    unit, step = torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps
    if found.shape != value.shape:
        return False
    limit = (2 * unit + 6 * step + sums) * bound + 4 * unit
    return bool(((found.double() - value).abs() <= limit).all())


def _call(operator: str, x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(weft.fused, operator)(x, weight, **options)
    return found


def _cases(generator: random.Random, place: Place, count: int) -> list[dict[str, Any]]:
    """Random calls, equal on all ranks; on GPUs `count` for each of few kernels."""
    if place.name != "cuda":
        return [_case(generator, place.ranks, number) for number in range(count)]
    base = [
        {"operator": operator, "tiling": tiling}
        for operator in OPERATORS
        for tiling in (LARGE, FEW_ROWS)
    ]
    return [
        _large_case(generator, place.ranks, kernel)
        for kernel in (*base, *KERNELS)
        for _ in range(count)
    ]


def _large_case(generator: random.Random, ranks: int, kernel: dict[str, Any]) -> dict[str, Any]:
    """Random sizes for a kernel."""
    rows = generator.choice([1, 16, 100, 513, generator.randint(1, 800)])
    columns, inner = (16 * generator.randint(1, 180) for _ in range(2))
    aligned = kernel.get("aligned", True)
    if not aligned:
        columns, inner = columns + 3, inner + 5
    if kernel["operator"] in ("gemm_all_to_all", "gemm_reduce_scatter", "all_to_all_gemm"):
        rows *= ranks
    return {
        "sizes": (rows, inner, columns),
        "dtype": torch.bfloat16 if aligned else torch.float16,
        "tiling": None,
        "transposed": False,
        "symmetric": False,
        "wide": False,
        "num_sms": generator.choice([None, None, 1, 7]),
        **kernel,
    }


def _case(generator: random.Random, ranks: int, number: int) -> dict[str, Any]:
    """A random small call."""
    large = 70
    operator = OPERATORS[number % len(OPERATORS)]
    rows = generator.choice([1, 2, 16, generator.randint(0, large // 4), large // 5])
    columns = generator.choice([1, 8, 64, generator.randint(1, large), large // 16 * 16])
    inner = generator.choice([1, 16, 32, generator.randint(1, large), large // 16 * 16])
    if operator in ("gemm_all_to_all", "gemm_reduce_scatter", "all_to_all_gemm"):
        rows *= ranks
    return {
        "operator": operator,
        "sizes": (rows, inner, columns),
        "dtype": generator.choice([torch.float16, torch.float32]),
        "transposed": generator.random() < 0.5,
        "tiling": generator.choice((None, *[SMALL] * 3, *[STREAM] * 3)),
        "symmetric": operator.startswith("gemm_all") and generator.random() < 0.5,
        "wide": operator.endswith(("scatter", "reduce")) and generator.random() < 0.3,
        "num_sms": generator.choice([None, 1, 2]),
    }


def run_case(place: Place, case: dict[str, Any], seed: int) -> list[Any]:
    """A call's correctness, its case if it is wrong, and a digest of the result."""
    operator, (rows, inner, columns) = case["operator"], case["sizes"]
    xs, weights = place.operands(seed, rows, inner, columns, case["dtype"])
    x, weight = xs[place.rank].contiguous(), weights[place.rank].contiguous()
    if case["transposed"]:
        weight = weight.t().contiguous().t()
    options: dict[str, Any] = {"num_sms": case["num_sms"], "tiling": case["tiling"]}
    if case["wide"]:
        options["partial_dtype"] = torch.float32
    if case["symmetric"]:
        options["out"] = weft.symmetric_empty(
            (rows, columns), case["dtype"], device="cuda" if place.name == "cuda" else "twin"
        )
    # Apart from an output that is used again.
    found = _call(operator, x, weight, **options).clone()
    right = close(found, expected(operator, place.rank, xs, weights))
    again = _call(operator, x, weight, **options) if seed % 3 == 0 else found
    right &= torch.equal(found, again)
    return [right, str(case) if not right else None, digest_of(found)]


def calls(cases: int, repeats: int, device: str = "twin") -> dict[str, Any]:
    """Random calls of all operators, then a large and a small one repeated in turn."""
    # Time for a peer's compiler, or for other processes.
    weft.fused.set_timeout(120)
    # Tiles at a block's end have rows from the next one, which are not stored: the interpreter
    # multiplies what is there, such as values in another dtype.
    numpy.seterr(all="ignore")
    with weft.init() as communicator:
        place = Place(communicator, device)
        generator = random.Random(7)
        given = _cases(generator, place, cases)
        found = [run_case(place, case, number) for number, case in enumerate(given)]
        result = {
            "wrong": [text for right, text, _ in found if not right],
            "digests": [
                digest
                for case, (*_, digest) in zip(given, found, strict=True)
                if case["operator"] == "gemm_all_reduce"
            ],
            "alternating": [_alternating(place, each, repeats) for each in OPERATORS],
            "gathered": _gathered(place),
            "unfused": _unfused(place),
            "alone": _alone(place) if place.rank == 0 else [],
        }
        if device == "twin":
            result["scaled"] = _scaled(place)
            result["refused"] = _refused()
            result["refused scales"] = _refused_scales()
        if device == "cuda":
            result["graph"] = [_graph(place, each) for each in OPERATORS]
            result["streams"] = _streams(place)
            result["exchange"] = _exchange(place)
        weft.check()
        communicator.barrier()
        return result


def scaled(device: str) -> dict[str, Any]:
    """Only float8 calls."""
    weft.fused.set_timeout(120)
    with weft.init() as communicator:
        wrong = _scaled(Place(communicator, device))
        weft.check()
        communicator.barrier()
        return {"scaled": wrong}


def _alternating(place: Place, operator: str, repeats: int) -> bool:
    """Repeats with new values in the same buffers, a large and a tiny shape in turn."""
    dtype, scale, tilings = torch.float16, 1, (SMALL, STREAM)
    if place.name == "cuda":
        dtype, scale, tilings = torch.bfloat16, 16, (LARGE, FEW_ROWS)
    right = True
    for number in range(repeats):
        rows, inner, columns = (48, 32, 64) if number % 2 == 0 else (8, 16, 8)
        xs, weights = place.operands(
            100 + number, rows * scale, inner * scale, columns * scale, dtype
        )
        tiling = tilings[number % 2]
        found = _call(operator, xs[place.rank], weights[place.rank], tiling=tiling)
        right &= close(found, expected(operator, place.rank, xs, weights))
    return right


def _gathered(place: Place) -> bool:
    xs, weights = place.operands(5, 24, 32, 16, torch.float16)
    tiling = None
    if place.name == "cuda":
        xs, weights, tiling = xs.bfloat16(), weights.bfloat16(), FEW_ROWS
    own, weight = xs[place.rank], weights[place.rank]
    found, rows = weft.fused.all_gather_gemm(own, weight, return_gathered=True, tiling=tiling)
    right = torch.equal(rows, xs.view(-1, 32))
    return right and close(found, expected("all_gather_gemm", place.rank, xs, weights))


def _unfused(place: Place) -> list[str]:
    """Wrong calls of a GEMM and a collective: short ones, and ones through symmetric memory."""
    wrong, device = [], "cuda" if place.name == "cuda" else "twin"
    # Limits for tests, in bytes.
    composed._STAGED_REDUCTION = composed._STAGED_EXCHANGE = 1024  # type: ignore[misc]
    cases = [(operator, sizes) for operator in OPERATORS for sizes in ((8, 16, 24), (16, 8, 64))]
    # A direct call, and a GEMM with inner size 0.
    cases += [("gemm_all_reduce", (64, 8, 5200)), ("gemm_all_reduce", (4, 0, 8))]
    for number, (operator, (rows, inner, columns)) in enumerate(cases):
        xs, weights = place.operands(number, rows, inner, columns, torch.float16)
        x, weight = xs[place.rank], weights[place.rank]
        right = expected(operator, place.rank, xs, weights)
        # A call may leave its memory to the next one.
        found = [_call(operator, x, weight, fused=False) for _ in range(2)]
        if operator in ("gemm_all_to_all", "gemm_all_reduce"):
            out = weft.symmetric_empty((rows, columns), torch.float16, device=device)
            found.append(_call(operator, x, weight, fused=False, out=out))
        if not all(close(each, right) and torch.equal(each, found[0]) for each in found):
            wrong.append(f"{operator} {rows}x{columns}")
        if operator == "all_gather_gemm":
            result, gathered = weft.fused.all_gather_gemm(
                x, weight, return_gathered=True, fused=False
            )
            if not torch.equal(result, found[0]) or not torch.equal(gathered, xs.view(-1, inner)):
                wrong.append("gathered rows")
        if operator == "gemm_all_reduce":
            digests = place.communicator.all_gather(str(digest_of(found[0])).encode())
            wrong += ["bits of ranks"] if len(set(digests)) > 1 else []
    return wrong


def _graph(place: Place, operator: str) -> bool:
    """A captured graph's replays with new values, also without the kernel."""
    xs, weights = place.operands(0, 512, 1280, 384, torch.bfloat16)
    x, weight = xs[place.rank].clone(), weights[place.rank].clone()
    options: list[dict[str, Any]] = [{"tiling": LARGE}, {"tiling": FEW_ROWS}, PACED]
    options.append({"fused": False})
    for each in options:
        _call(operator, x, weight, **each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [_call(operator, x, weight, **each) for each in options]
    right = True
    for number in range(1, 6):
        xs, weights = place.operands(number, 512, 1280, 384, torch.bfloat16)
        x.copy_(xs[place.rank])
        weight.copy_(weights[place.rank])
        graph.replay()
        its = expected(operator, place.rank, xs, weights)
        right &= all(close(each, its) for each in found)
    return right


def _exchange(place: Place) -> bool:
    """An all-to-all with several tiles a program, as it is sent by default and by plain stores."""
    xs, weights = place.operands(8, 4096 * place.ranks, 2048, 3072, torch.bfloat16)
    x, weight = xs[place.rank], weights[place.rank]
    found = [
        _call("gemm_all_to_all", x, weight, fused=True, tiling=tiling) for tiling in (None, LARGE)
    ]
    right = expected("gemm_all_to_all", place.rank, xs, weights)
    return torch.equal(*found) and close(found[0], right)


def _streams(place: Place) -> list[bool]:
    """Each operator's calls, alternating between two streams, without a wait on the host."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [place.operands(number, 512, 1280, 384, torch.bfloat16) for number in range(4)]
    torch.cuda.synchronize()
    right = []
    for operator in OPERATORS:
        found = []
        for number in range(40):
            xs, weights = inputs[number % 4]
            # Every third one without the kernel, and one with paced stores.
            ways: list[dict[str, Any]] = [{"fused": False}, {"tiling": LARGE}, PACED]
            options = ways[number % 3]
            with torch.cuda.stream(streams[number % 2]):
                found.append(_call(operator, xs[place.rank], weights[place.rank], **options))
        torch.cuda.synchronize()
        values = [expected(operator, place.rank, *each) for each in inputs]
        right.append(all(close(each, values[number % 4]) for number, each in enumerate(found)))
    return right


def _alone(place: Place) -> list[str]:
    """Wrong cases in the GEMM without communication."""
    generator, wrong = random.Random(3), []
    dtypes = [torch.float16, torch.float32]
    tilings: list[Tiling | None] = [None, SMALL, STREAM]
    if place.name == "cuda":
        dtypes, tilings = [torch.bfloat16], [LARGE, FEW_ROWS]
    for number in range(12):
        rows, columns, inner = (generator.choice([1, 16, 64, 100, 33]) for _ in range(3))
        if place.name == "cuda":
            columns, inner = columns * 16, inner * 16
        dtype = generator.choice(dtypes)
        torch.manual_seed(number)
        x = torch.randn(rows, inner).to(place.device, dtype)
        weight = torch.randn(columns, inner).to(place.device, dtype)
        if number % 2 and place.name != "cuda":
            weight = weight.t().contiguous().t()
        found = weft.fused.gemm(x, weight, tiling=tilings[number % len(tilings)])
        value = x.double() @ weight.double().t()
        if not close(found, (value, x.double().abs() @ weight.double().abs().t())):
            wrong.append(f"{(rows, columns, inner)} {dtype} {number}")
    return wrong


def _scaled(place: Place) -> list[str]:
    """Wrong float8 calls: row and tensor scales, both dtypes."""
    # 32-wide tiles in the inner size, the least for float8.
    tilings: list[Tiling | None] = [SMALL._replace(inner=32), STREAM._replace(inner=32)]
    scale, dtype, on_gpu = 1, torch.float16, place.name == "cuda"
    if on_gpu:
        tilings, scale, dtype = [None, None], 16, torch.bfloat16
    wrong, sizes = [], (12 * scale, 48 * scale, 48 * scale)
    for number, operator in enumerate((*OPERATORS, "gemm")):
        for is_large in (True, False):
            # Interpreter processes take seconds for large ones on many ranks.
            if place.ranks > 2 and not on_gpu and is_large != (number % 2 == 0):
                continue
            rows, inner, columns = sizes if is_large else (4, 32, 16)
            if operator != "all_gather_gemm":
                rows *= place.ranks
            its = torch.float8_e4m3fn if is_large else torch.float8_e5m2
            xs, weights = place.operands(number, rows, inner, columns, torch.float32)
            xs, weights = xs.to(its), (4 * weights).to(torch.float8_e4m3fn)
            random = torch.Generator().manual_seed(number)
            of_rows = torch.rand(place.ranks, rows, 1, generator=random).to(place.device) + 0.5
            of_columns = torch.rand(place.ranks, 1, columns, generator=random).to(place.device)
            if not is_large:
                of_rows, of_columns = of_rows[:1, :1], of_columns[:, :, :1]
            fast = number % 2 == is_large
            options = {
                "scale_x": _scale_of_rows(operator, place, of_rows),
                "scale_weight": of_columns[place.rank].contiguous(),
                "out_dtype": dtype,
                "use_fast_accum": fast,
            }
            given = xs[place.rank], weights[place.rank]
            tiling = tilings[(number // 2 % 2) ^ is_large]
            found = [_call(operator, *given, tiling=tiling, **options)]
            # Small ones have two dtypes, which torch may not multiply.
            if operator != "gemm" and is_large:
                found.append(_call(operator, *given, fused=False, **options))
            whole = xs.double() * of_rows, weights.double() * of_columns.transpose(1, 2)
            name = operator
            if operator == "gemm":
                name, whole = "gemm_all_reduce", tuple(each[place.rank, None] for each in whole)
            # Tensor cores add 32 products to sums with 13 bits behind the point.
            sums = (inner if fast else 128) / 32 * 2**-13 if on_gpu else 0.0
            rank = 0 if operator == "gemm" else place.rank
            right = expected(name, rank, *whole)
            if not all(close(each, right, sums) for each in found):
                wrong.append(f"{operator} {(rows, inner, columns)} {its}")
    return wrong


def _scale_of_rows(operator: str, place: Place, scales: torch.Tensor) -> torch.Tensor:
    """Row scales in a rank's GEMM, from all ranks' x scales."""
    if scales.numel() == 1:
        return scales.view(1)
    if operator == "all_gather_gemm":
        return scales.reshape(-1, 1)
    if operator == "all_to_all_gemm":
        return scales.unflatten(1, (place.ranks, -1))[:, place.rank].reshape(-1, 1)
    return scales[place.rank].contiguous()


def _refused_scales() -> list[str]:
    """Messages from float8 calls that do not fit."""
    x, weight = (torch.zeros(rows, 16).to(torch.float8_e4m3fn) for rows in (6, 32))
    one, half = torch.ones(1), torch.float16
    scales = {"scale_x": one, "scale_weight": one, "out_dtype": half}
    of_rows = torch.ones(3, 1)
    calls: tuple[tuple[torch.Tensor, torch.Tensor, dict[str, Any]], ...] = (
        (x, weight, {}),
        (x, weight.to(half), scales),
        (x.to(half), weight.to(half), scales),
        (x, weight, scales | {"out_dtype": torch.float32}),
        (x, weight, scales | {"out_dtype": None}),
        (x, weight, scales | {"scale_x": of_rows}),
        (x, weight, scales | {"scale_weight": one.double()}),
        (x, weight, scales | {"tiling": SMALL}),
        (x[:, :8].contiguous(), weight[:, :8].contiguous(), scales),
    )
    return [
        device_native.named(lambda: weft.fused.gemm(x, weight, **its))[2]  # noqa: B023
        for x, weight, its in calls
    ]


def _refused() -> list[tuple[str, str]]:
    """Errors from calls that do not fit, before anything is sent."""
    half, fused = torch.float16, weft.fused
    x, weight = torch.zeros(6, 16, dtype=half), torch.zeros(32, 16, dtype=half)
    errors = [
        device_native.named(call)
        for call in (
            lambda: fused.gemm_all_reduce(x, weight[:, :8]),
            lambda: fused.gemm_all_reduce(x, weight.float()),
            lambda: fused.gemm_all_reduce(x.double(), weight.double()),
            lambda: fused.gemm_all_reduce(x.bfloat16(), weight.bfloat16()),
            lambda: fused.gemm_all_reduce(x[:, ::2], weight[:, ::2]),
            lambda: fused.gemm_all_to_all(x[:5], weight),
            lambda: fused.all_to_all_gemm(x[:5], weight),
            lambda: fused.gemm_all_reduce(x, weight, out=torch.empty(6, 32)),
            lambda: fused.gemm_all_reduce(x, weight, num_sms=0),
            lambda: fused.gemm_all_reduce(x, weight, tiling=Tiling(rows=48)),
            lambda: fused.gemm_reduce_scatter(x, weight, partial_dtype=torch.bfloat16),
            lambda: fused.gemm_all_reduce(x, weight, fused=False, num_sms=1, tiling=SMALL),
            lambda: fused.gemm_all_reduce(x, weight, fused=False, partial_dtype=torch.float32),
        )
    ]
    return [(name, message) for name, _, message in errors]


def missing(operator: str, device: str = "twin", is_paced: bool = False) -> dict[str, Any]:
    """The last rank does not make the second call; with paced stores, whether it was stored to."""
    on_gpu = device == "cuda"
    # On a GPU, a rank may compile for some seconds longer than its peer.
    weft.fused.set_timeout(8 if on_gpu else 2)
    dtype, tiling = (torch.bfloat16, FEW_ROWS) if on_gpu else (torch.float16, SMALL)
    sizes = 32, 32, 32
    options: dict[str, Any] = {"tiling": tiling}
    with weft.init() as communicator:
        place = Place(communicator, device)
        if is_paced:
            # The one program's two tiles go to the other rank.
            sizes = (256, 1280, 512) if on_gpu else (32, 320, 64)
            tiling = (LARGE if on_gpu else SMALL)._replace(paced_stores=True)
            out = weft.symmetric_empty((sizes[0], sizes[2]), dtype, device=device)
            options = {"tiling": tiling, "num_sms": 1, "out": out}
        xs, weights = place.operands(1, *sizes, dtype)
        x, weight = xs[place.rank], weights[place.rank]
        first = _call(operator, x, weight, **options).clone()
        right = close(first, expected(operator, place.rank, xs, weights))
        found: dict[str, Any] = {"right": right}
        if place.rank < place.ranks - 1:
            second = _call(operator, -x, weight, **options)
            found["nan"] = bool(second.isnan().any())
        found["error"] = awaited_error()
        if is_paced and place.rank == place.ranks - 1:
            found["unchanged"] = torch.equal(first, options["out"])
        return found
