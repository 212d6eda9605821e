"""Operators of torch and the compiler pass of `weft.fused`, between processes over gloo."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import sys
import types
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tensor_parallel
from torch.nn.functional import linear, scaled_dot_product_attention, silu

import weft.fused
from weft.fused import embedding_operator, operators, tables, tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 8, 2
#: Operators by name; calls take x, a weight and the group's name.
OPS = torch.ops.weft_fused


def start(device: str) -> tuple[int, int, str]:
    """The default process group; this rank, the number of ranks and the name of the group."""
    rank, ranks = int(os.environ["WEFT_RANK"]), int(os.environ["WEFT_WORLD_SIZE"])
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("WEFT_LOCAL_RANK", "0")))
        backend = "cuda:nccl,cpu:gloo"
    store = distributed.FileStore(os.path.join(os.environ["TEST_RESULTS"], "store"), ranks)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    assert distributed.group.WORLD is not None
    torch.set_num_threads(1)
    torch.set_default_device(device)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["TEST_RESULTS"], "inductor")
    os.environ["WEFT_CACHE_DIR"] = os.path.join(os.environ["TEST_RESULTS"], "weft")
    return rank, ranks, distributed.group.WORLD.group_name


def plain(name: str, x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    """Operator by functional collectives, with torch's gradients."""
    collectives, ranks = torch.ops._c10d_functional, distributed.get_world_size()
    if name == "all_gather_matmul":
        x = wait(collectives.all_gather_into_tensor(x, ranks, group))
    if name == "all_to_all_matmul":
        x = exchanged(x, group)
    y = linear(x, weight)
    if name.endswith("all_reduce"):
        return wait(collectives.all_reduce(y, "sum", group))
    if name == "matmul_reduce_scatter":
        return wait(collectives.reduce_scatter_tensor(y, "sum", ranks, group))
    return exchanged(y, group) if name == "matmul_all_to_all" else y


def exchanged(x: torch.Tensor, group: str) -> torch.Tensor:
    ranks = distributed.get_world_size()
    sizes = [x.shape[0] // ranks] * ranks
    return wait(torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, group))


def wait(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


class Tiling(NamedTuple):
    rows: int
    columns: int


def stand_in_for_missing_kernels() -> None:
    for name, kernel in operators.KERNELS.items():
        if not hasattr(weft.fused, kernel):
            setattr(weft.fused, kernel, stand_in(name))
    if not hasattr(weft.fused, "embedding_all_to_all"):
        setattr(weft.fused, "embedding_all_to_all", stand_in_for_bags)  # noqa: B010
    module, name = operators.TILINGS[0]
    if importlib.util.find_spec(module) is None:
        stands: Any = types.SimpleNamespace(**{name: Tiling})
        sys.modules[module] = stands


def stand_in_for_bags(
    weights: list[torch.Tensor], indices: Any, offsets: Any, factors: Any, **options: Any
) -> torch.Tensor:
    modes, batch, communicator = (options[name] for name in ("modes", "batch", "communicator"))
    found = embedding_operator._pooled(weights, indices, offsets, factors, modes, batch)
    every: list[Any] = [None] * communicator.world_size
    distributed.all_gather_object(every, found)
    whole = torch.cat(every, 1)
    return torch.tensor_split(whole, communicator.world_size)[communicator.rank].clone()


def stand_in(name: str) -> Callable[..., Any]:
    """Function of `weft.fused` by the default group, with the result of `plain`."""

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        communicator: weft.Communicator,
        return_gathered: bool = False,
        tiling: Any = None,
    ) -> Any:
        assert communicator.world_size == distributed.get_world_size()
        assert distributed.group.WORLD is not None
        group = distributed.group.WORLD.group_name
        y = plain(name, x, weight, group)
        if not return_gathered:
            return y
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        return y, wait(gather(x, communicator.world_size, group))

    return call


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def calls(device: str = "cpu") -> dict[str, Any]:
    """Results of all checks of one group of processes."""
    rank, _, group = start(device)
    torch.manual_seed(rank)
    stand_in_for_missing_kernels()
    found = {
        "operators": {name: _operator(name, group) for name in operators.OPERATORS},
        "fallbacks": _fallbacks(group),
        "bags": [_embedding(group, columns) for columns in (8, 6)],
        "graphs": _graphs(group),
        "dynamic": _dynamic(group),
        "disagreement": _disagreement(rank, group),
        "uuid": _uuid(),
        "decoder": _decoder(sequence=False),
        "sequence": _decoder(sequence=True),
        "llama": _llama(),
        "tuning": _tuning(rank, group),
    }
    if device == "cuda":
        found["graph"] = _replays(group)
        found["tuned"] = _tuned(group)
    found["groups"] = _groups(group)
    return found


def _operator(name: str, group: str) -> dict[str, Any]:
    """Calls, gradients and torch's own checks of an operator."""
    ranks = distributed.get_world_size()
    call, arguments = getattr(OPS, name), (group,)
    x = torch.randn(4 * ranks, 16, requires_grad=True)
    weight = torch.randn(24, 16, requires_grad=True)
    weft.fused.reset_report()
    close, gradients = True, True
    for each in (weight, torch.randn(16, 24).t().requires_grad_()):
        y, expected = first(call(x, each, *arguments)), plain(name, x, each, group)
        close &= torch.allclose(y, expected, atol=1e-4)
        scale = torch.rand_like(y)
        own = torch.autograd.grad((y * scale).sum(), (x, each))
        theirs = torch.autograd.grad((expected * scale).sum(), (x, each))
        gradients &= all(torch.allclose(*pair, atol=1e-3) for pair in zip(own, theirs, strict=True))
    fused = weft.fused.report().fused_calls[name]
    torch.library.opcheck(call.default, (x, weight, *arguments))
    return {"close": close, "gradients": gradients, "fused": fused}


def _embedding(group: str, columns: int) -> dict[str, Any]:
    """Bags of three tables on two ranks, an uneven batch, gradients, and torch's own checks."""
    rank, batch = distributed.get_rank(), 5
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    modes = [["sum", "mean"], ["weighted_sum"]]
    tables = [
        [torch.randn(9, columns, generator=generator, requires_grad=True) for _ in its]
        for its in modes
    ]
    lengths = [torch.randint(0, 4, (len(its) * batch,), generator=generator) for its in modes]
    bags = []
    for each in lengths:
        offsets = torch.cat((each.new_zeros(1), each.cumsum(0)))
        total = int(offsets[-1])
        indices = torch.randint(0, 9, (total,), generator=generator)
        bags.append((indices, offsets, torch.rand(total, generator=generator)))
    every = []
    for its, own, (indices, offsets, factors) in zip(modes, tables, bags, strict=True):
        for place, (mode, table) in enumerate(zip(its, own, strict=True)):
            part = offsets[place * batch : (place + 1) * batch + 1]
            mine = slice(int(part[0]), int(part[-1]))
            weighted = mode == "weighted_sum"
            every.append(
                nn.functional.embedding_bag(
                    indices[mine],
                    table,
                    part - part[0],
                    mode="sum" if weighted else mode,
                    per_sample_weights=factors[mine] if weighted else None,
                    include_last_offset=True,
                )
            )
    whole = torch.cat(every, 1)
    scale = torch.rand(whole.shape, generator=generator)
    expected_grad = torch.autograd.grad((whole * scale).sum(), tables[rank])
    weft.fused.reset_report()
    indices, offsets, factors = bags[rank]
    weights = factors if rank == 1 else None
    sizes = [2 * columns, columns]
    arguments = (tables[rank], indices, offsets, weights, modes[rank], sizes, batch, torch.float32)
    y = OPS.embedding_all_to_all(*arguments, group)
    mine = slice(0, 3) if rank == 0 else slice(3, 5)
    grad = torch.autograd.grad((y * scale[mine]).sum(), tables[rank])
    counts = counted()
    torch.library.opcheck(OPS.embedding_all_to_all.default, (*arguments, group))
    return {
        "close": torch.allclose(y, whole[mine], atol=1e-4),
        "gradients": all(
            torch.allclose(*pair, atol=1e-4) for pair in zip(grad, expected_grad, strict=True)
        ),
        "fused": counts["fused_calls"],
        "unfused": counts["unfused_calls"],
    }


def _fallbacks(group: str) -> list[Any]:
    """Calls that the kernels do not take; of float64 and of integers among them."""
    ranks = distributed.get_world_size()
    found = []
    for name, rows, dtype in (
        ("matmul_all_reduce", 3, torch.float64),
        ("matmul_all_reduce", 0, torch.float32),
        ("gemv_all_reduce", 40, torch.float32),
        ("matmul_reduce_scatter", 2 * ranks, torch.float64),
    ):
        weft.fused.reset_report()
        x, weight = torch.randn(rows, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
        y = getattr(OPS, name)(x, weight, group)
        close = torch.allclose(y, plain(name, x, weight, group), atol=1e-4)
        (reason,) = weft.fused.report().unfused_calls
        found.append([close, *reason])
    return found


class Recorder(logging.Handler):
    """Messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[list[str]]:
    logger, recorder = logging.getLogger("weft.fused"), Recorder()
    before = logger.level
    logger.addHandler(recorder)
    logger.setLevel(logging.INFO)
    try:
        yield recorder.messages
    finally:
        logger.removeHandler(recorder)
        logger.setLevel(before)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By Inductor, without C++ of pointwise operators on the CPU, which is slow to compile."""
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(
        function, fullgraph=True, options={"fallback_by_default": True}
    )
    return made


def _linear_all_reduce(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(torch.relu(x), w).view(2, -1, w.shape[0])
    return functional.all_reduce(y, "sum", group) + 1


def _many_rows(x: Any, w: Any, v: Any, group: str) -> Any:
    x = x.repeat(10, 1)
    return functional.all_reduce(linear(x, w), "sum", group) * 2


def _average(x: Any, w: Any, v: Any, group: str) -> Any:
    return functional.all_reduce(linear(x, w), "avg", group)


def _bias_before(x: Any, w: Any, v: Any, group: str) -> Any:
    return functional.all_reduce(linear(x, w, w[:, 0]), "sum", group)


def _used_twice(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(x, w)
    return functional.all_reduce(y, "sum", group) + y


def _linear_reduce_scatter(x: Any, w: Any, v: Any, group: str) -> Any:
    return functional.reduce_scatter_tensor(linear(x, w), "sum", 0, group).relu()


def _scatter_of_axis(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(x.view(2, -1, x.shape[1]), w)
    return functional.reduce_scatter_tensor(y, "sum", 1, group).relu()


def _scatter_of_columns(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(x.view(2, -1, x.shape[1]), w)
    return functional.reduce_scatter_tensor(y, "sum", 2, group).relu()


def _gather_linear(x: Any, w: Any, v: Any, group: str) -> Any:
    return linear(functional.all_gather_tensor(x.relu(), 0, group), w)


def _gather_linears(x: Any, w: Any, v: Any, group: str) -> Any:
    whole = functional.all_gather_tensor(x.relu(), 0, group)
    return linear(whole, w, v[:24, 0]) + linear(whole, v) + whole.sum()


def _gathered_lengths(x: Any, group: str) -> Any:
    """Two sequences, of which each rank has a part; as functional collectives gather them."""
    whole = functional.all_gather_tensor(x.view(2, -1, x.shape[1]), 0, group)
    return torch.cat(torch.chunk(whole, distributed.get_world_size()), 1)


def _gather_of_axis(x: Any, w: Any, v: Any, group: str) -> Any:
    whole = _gathered_lengths(x, group)
    return linear(whole, w) + linear(whole, v)


def _gather_of_axis_once(x: Any, w: Any, v: Any, group: str) -> Any:
    return linear(_gathered_lengths(x, group), w)


def _linear_all_to_all(x: Any, w: Any, v: Any, group: str) -> Any:
    return functional.all_to_all_single(linear(x, w), None, None, group).relu()


def _all_to_all_linear(x: Any, w: Any, v: Any, group: str) -> Any:
    return linear(functional.all_to_all_single(x.relu(), None, None, group), w, w[:, 1])


def _uneven(x: Any, w: Any, v: Any, group: str) -> Any:
    # Rank r receives r + 1 parts of each rank.
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    part = x.shape[0] // (ranks * (ranks + 1) // 2)
    sent = [part * (each + 1) for each in range(ranks)]
    return functional.all_to_all_single(
        linear(x[: sum(sent)], w), [sent[rank]] * ranks, sent, group
    )


def _bags(x: Any, w: Any, v: Any, group: str) -> Any:
    rows = torch.arange(x.shape[0], device=x.device)
    y = nn.functional.embedding_bag(rows % 16, w, rows, mode="sum")
    return functional.all_to_all_single(y, None, None, group)


def _collective_alone(x: Any, w: Any, v: Any, group: str) -> Any:
    return linear(x, w) + functional.all_reduce(x.sum(), "sum", group)


def _dynamic(group: str) -> list[Any]:
    """A graph of dynamic rows, run with 8, 40 and 12 rows."""
    w = torch.randn(24, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = functional.all_reduce(linear(x.relu(), w), "sum", group)
        scattered = functional.reduce_scatter_tensor(linear(x, 2 * w), "sum", 0, group)
        return y.sum() + scattered

    weft.fused.enable(force=True)
    weft.fused.reset_report()
    run, found = compiled(function), []
    with torch.no_grad():
        for rows in (8, 40, 12):
            x = torch.randn(rows, 16)
            torch._dynamo.mark_dynamic(x, 0)
            found.append(torch.allclose(run(x), function(x), atol=1e-3))
    weft.fused.disable()
    return [found, counted()]


GRAPHS = {
    "linear_all_reduce": _linear_all_reduce,
    "many_rows": _many_rows,
    "average": _average,
    "bias_before": _bias_before,
    "used_twice": _used_twice,
    "linear_reduce_scatter": _linear_reduce_scatter,
    "scatter_of_axis": _scatter_of_axis,
    "scatter_of_columns": _scatter_of_columns,
    "gather_linear": _gather_linear,
    "gather_linears": _gather_linears,
    "gather_of_axis": _gather_of_axis,
    "gather_of_axis_once": _gather_of_axis_once,
    "linear_all_to_all": _linear_all_to_all,
    "all_to_all_linear": _all_to_all_linear,
    "uneven": _uneven,
    "bags": _bags,
    "collective_alone": _collective_alone,
}


def _graphs(group: str) -> dict[str, Any]:
    """All functions of `GRAPHS` in one graph, compiled with the pass, beside those functions."""
    ranks = distributed.get_world_size()
    # Tensors of its own for each, as equal products become one.
    inputs = [
        (torch.randn(6 * ranks, 16), torch.randn(24, 16), torch.randn(24, 16)) for _ in GRAPHS
    ]

    def every(inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        return [
            function(*tensors, group)
            for function, tensors in zip(GRAPHS.values(), inputs, strict=True)
        ]

    weft.fused.enable(force=True, timeout=20)
    weft.fused.reset_report()
    try:
        with recorded() as messages, torch.no_grad():
            found = compiled(every)(inputs)
    finally:
        weft.fused.disable()
    with torch.no_grad():
        expected = every(inputs)
    close = {
        name: own.shape == its.shape and torch.allclose(own, its, atol=1e-3)
        for name, own, its in zip(GRAPHS, found, expected, strict=True)
    }
    return {"close": close, "lines": len(messages), **counted()}


def counted() -> dict[str, Any]:
    report = weft.fused.report()
    return {
        "matches": sum(report.matches.values()),
        "substitutions": dict(report.substitutions),
        "refusals": [[*key, count] for key, count in sorted(report.refusals.items())],
        "fused_calls": sum(report.fused_calls.values()),
        "unfused_calls": [[*key, count] for key, count in sorted(report.unfused_calls.items())],
    }


def renew(group: str) -> None:
    """Drop groups, as new processes have none; all ranks."""
    weft.fused.groups.group_of(group)
    distributed.barrier()
    weft.fused.groups._GROUPS.clear()
    weft.fused.groups.group_of(group)


def _disagreement(rank: int, group: str) -> dict[str, Any]:
    """A rank without the pass, ranks with other flags, and a rank with another graph in its cache.

    Results are right in each case, and no rank runs the fused operator.
    """
    ranks = distributed.get_world_size()
    x, w = torch.randn(2 * ranks, 16), torch.randn(24, 16)
    with torch.no_grad():
        expected = _linear_reduce_scatter(x, w, w, group)

    def run() -> list[Any]:
        weft.fused.reset_report()
        with torch.no_grad():
            y = compiled(_linear_reduce_scatter)(x, w, w, group)
        return [torch.allclose(y, expected, atol=1e-3), counted()]

    found = {}
    if rank == 0:
        weft.fused.enable(force=True, timeout=1)
    found["absent"] = run()
    weft.fused.disable()
    # Rank 0 alone has counted a comparison.
    renew(group)
    weft.fused.enable(
        force=True, operators=["matmul_reduce_scatter", "gemv_all_reduce"][: 1 + rank]
    )
    found["flags"] = run()
    # Other sizes: the graph is not in the cache.
    x, w = torch.randn(2 * ranks, 8), torch.randn(24, 8)
    with torch.no_grad():
        expected = _linear_reduce_scatter(x, w, w, group)
    weft.fused.enable(force=True)
    found["miss"], found["hit"] = run(), run()
    renew(group)
    before = operators.SITE_TIMEOUT[0]
    operators.SITE_TIMEOUT[0] = 1.0
    if rank == 1:
        weft.fused.disable()
    found["loaded"] = run()
    operators.SITE_TIMEOUT[0] = before
    weft.fused.disable()
    renew(group)
    return found


def _uuid() -> dict[str, Any]:
    """Keys of Inductor's caches with several flags, and passes before and around this one."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Other(CustomGraphPass):  # type: ignore[misc]
        calls = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.calls += 1

        def uuid(self) -> Any:
            return "other"

    def uuid() -> Any:
        return config.post_grad_custom_pre_pass.uuid()

    def enabled(**flags: Any) -> Any:
        weft.fused.enable(**flags)
        return uuid()

    plain, force, again = enabled(), enabled(force=True), enabled()
    some = enabled(operators=["matmul_all_reduce"])
    distributed.barrier()
    tables.renew_salt()
    distributed.barrier()
    salted = enabled()
    tuning_file = tuning.tuning_file()
    tuning_file.parent.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    shape = tuning.Shape(8, 8, 8)
    key = tuning.Table.key("matmul_all_reduce", shape, torch.float32, 2, "cpu")
    table = tuning.Table({key: {"choice": "unfused", "tiling": None, "microseconds": {}}})
    if distributed.get_rank() == 0:
        tuning_file.write_text(table.text())
    distributed.barrier()
    measured = enabled()
    distributed.barrier()
    tuning_file.unlink(missing_ok=True)
    weft.fused.disable()
    other = config.post_grad_custom_pre_pass = Other()
    chained = enabled()
    # Each rank compiles a graph of its own.
    compiled(torch.relu)(torch.randn(2, 3 + distributed.get_rank()))
    calls = other.calls
    weft.fused.disable()
    restored = config.post_grad_custom_pre_pass is other
    config.post_grad_custom_pre_pass = lambda graph: None
    without = enabled()
    weft.fused.disable()
    config.post_grad_custom_pre_pass = None
    return {
        "distinct": len({plain, force, some, salted, measured, chained}),
        "again": plain == again,
        "calls": calls,
        "restored": restored,
        "without": without,
    }


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            each(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):  # type: ignore[misc]
    """A layer of a decoder as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = Attention(), FeedForward()
        self.first, self.second = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


def _parallel(layer: Layer, *, sequence: bool) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (distributed.get_world_size(),))
    columns, rows = tensor_parallel.ColwiseParallel, tensor_parallel.RowwiseParallel
    output = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        **{f"attention.{name}": columns() for name in "qkv"},
        "attention.o": rows(output_layouts=output),
        "feed.gate": columns(),
        "feed.up": columns(),
        "feed.down": rows(output_layouts=output),
    }
    if sequence:
        inputs = tensor_parallel.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan |= dict.fromkeys(("attention", "feed"), inputs)
        plan |= {name: tensor_parallel.SequenceParallel() for name in ("first", "second")}
    tensor_parallel.parallelize_module(layer, mesh, plan)


def _decoder(*, sequence: bool) -> dict[str, Any]:
    """A layer, tensor-parallel, compiled with the pass; with gradients if rows are scattered.

    Results are compared with those of the layer of one process.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(7)
    layer = Layer()
    whole = torch.randn(BATCH, LENGTH, WIDTH)
    parallel = copy.deepcopy(layer)
    _parallel(parallel, sequence=sequence)
    part = LENGTH // ranks
    mine = slice(rank * part, (rank + 1) * part) if sequence else slice(None)
    x = whole[:, mine].clone().requires_grad_(sequence)
    weft.fused.enable(force=True)
    weft.fused.reset_report()
    with recorded() as messages, torch.set_grad_enabled(sequence):
        y = compiled(parallel)(x)
        if sequence:
            y.sum().backward()
    weft.fused.disable()
    whole.requires_grad_(sequence)
    with torch.set_grad_enabled(sequence):
        expected = layer(whole)
    found = {"close": torch.allclose(y, expected[:, mine], atol=1e-3), "lines": len(messages)}
    if sequence:
        expected.sum().backward()
        assert x.grad is not None
        assert whole.grad is not None
        pairs = [(x.grad, whole.grad[:, mine])]
        for own, theirs in zip(parallel.parameters(), layer.parameters(), strict=True):
            grad: Any = own.grad
            pairs.append((grad.full_tensor(), theirs.grad))
        found["gradients"] = all(torch.allclose(*pair, atol=1e-2) for pair in pairs)
    return found | counted()


def _llama() -> dict[str, Any] | None:
    """Two layers of Llama by transformers; `None` without that package."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    torch.manual_seed(8)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    made: Any = LlamaModel
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, use_cache=False, **sizes, **heads)
    model = made(config).eval()
    parallel = copy.deepcopy(model)
    columns, rows = tensor_parallel.ColwiseParallel(), tensor_parallel.RowwiseParallel()
    plan = {f"layers.*.self_attn.{name}_proj": columns for name in "qkv"}
    plan |= {f"layers.*.mlp.{name}_proj": columns for name in ("gate", "up")}
    plan |= {"layers.*.self_attn.o_proj": rows, "layers.*.mlp.down_proj": rows}
    mesh = init_device_mesh(torch.get_default_device().type, (distributed.get_world_size(),))
    tensor_parallel.parallelize_module(parallel, mesh, plan)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 50
    weft.fused.enable(force=True)
    weft.fused.reset_report()
    with torch.no_grad():
        y = compiled(parallel)(tokens).last_hidden_state
        expected = model(tokens).last_hidden_state
    weft.fused.disable()
    return {"close": torch.allclose(y, expected, atol=1e-3), **counted()}


def _tuning(rank: int, group: str) -> dict[str, Any]:
    """Choices by a timer of the test; the ranks' times differ."""
    tuning.tuning_file().unlink(missing_ok=True)
    renew(group)
    shape, device = tuning.Shape(40, 24, 16), torch.get_default_device()
    # The second tiling is the fastest on rank 0, and the slowest on rank 1.
    times = iter([40.0, 30.0, 20.0, 25.0] if rank == 0 else [40.0, 31.0, 90.0, 26.0])
    candidates = [None, {"rows": 16, "columns": 64}, {"rows": 32, "columns": 64}, {"lines": 3}]
    called: list[Any] = []

    def timer(function: Callable[[], object]) -> float:
        weft.fused.reset_report()
        function()
        called.append(next(times))
        return float(called[-1])

    w = torch.randn(24, 16)

    def tuned(operator: str, rows: int) -> Any:
        x = torch.randn(rows, 16)
        return tuning.tune(operator, x, w, group, candidates, timer=timer)

    choice = tuned("matmul_all_reduce", 40)
    timed = len(called)
    times = iter([1.0, 2.0, 3.0, 4.0])
    slow = tuned("matmul_all_to_all", 40)
    distributed.barrier()
    weft.fused.reset_report()
    OPS.matmul_all_reduce(torch.randn(37, 16), w, group)
    fused = counted()["fused_calls"]
    OPS.matmul_all_to_all(torch.randn(36, 16), w, group)
    unfused = counted()["unfused_calls"]
    table = tuning.own_table()
    ranks = distributed.get_world_size()
    found = {
        "choice": choice,
        "slow": slow,
        "timed": timed,
        "fused": fused,
        "unfused": unfused,
        "stored": table.choice("matmul_all_reduce", shape, torch.float32, ranks, device),
        "class": table.choice(
            "matmul_all_reduce", shape._replace(rows=64), torch.float32, ranks, device
        ),
        "other": table.choice("matmul_reduce_scatter", shape, torch.float32, ranks, device),
        "doubts": [
            weft.fused.gains.doubt(name, shape, torch.float32, ranks, device, table)
            for name in ("matmul_all_reduce", "matmul_all_to_all", "matmul_reduce_scatter")
        ],
    }
    renew(group)
    tuning.tuning_file().unlink(missing_ok=True)
    return found


def _replays(group: str) -> dict[str, bool]:
    """Each operator in a CUDA graph that is replayed with other inputs."""
    found = {}
    for name in operators.OPERATORS:
        x, w = torch.zeros(16, 512).bfloat16(), torch.randn(256, 512).bfloat16()
        call = getattr(OPS, name)
        call(x, w, group)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = first(call(x, w, group))
        close = True
        for _ in range(20):
            x.copy_(torch.randn(16, 512))
            graph.replay()
            expected = plain(name, x, w, group)
            close &= torch.allclose(y.float(), expected.float(), atol=1.0, rtol=2e-2)
        found[name] = close
        torch.cuda.synchronize()
        weft.check()
    return found


def _tuned(group: str) -> dict[str, Any]:
    """Choices by the times of the GPU, with the default candidates."""
    w, found = torch.randn(2048, 1024).bfloat16(), dict[str, Any]()
    for name, rows in (("gemv_all_reduce", 4), ("matmul_all_reduce", 512)):
        x = torch.randn(rows, 1024).bfloat16()
        choice, _ = tuning.tune(name, x, w, group)
        found[name] = choice
    # The ranks share the file, which rank 0 writes.
    distributed.barrier()
    entries = tuning.own_table().entries.values()
    found["timed"] = sorted(len(each["microseconds"]) for each in entries)
    distributed.barrier()
    tuning.tuning_file().unlink(missing_ok=True)
    return found


def _groups(group: str) -> dict[str, Any]:
    """Communicators of two groups; the second one ends with its group."""
    import gc

    from weft._group import OPEN

    ranks = distributed.get_world_size()
    own = weft.fused.communicator_of(group)
    other = distributed.new_group(list(range(ranks)))
    made = weft.fused.communicator_of(other.group_name)
    found = {
        "same": weft.fused.communicator_of(group) is own,
        "distinct": made is not own,
        "ranks": [made.rank, made.world_size],
        "open": made in OPEN,
    }
    distributed.destroy_process_group(other)
    del other
    gc.collect()
    found["closed"] = made not in OPEN
    return found
