"""`weft.fused.EmbeddingAllToAll` between processes, beside `embedding_bag` over all tables."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import embedding_bag

import weft
import weft.fused
from tests.workers.cuda import device_native
from tests.workers.triton.kernel_checks import program_of
from weft.fused.embedding.tables import Tiling
from weft.gpu import symmetric

if TYPE_CHECKING:
    from collections.abc import Callable


class Table(NamedTuple):
    """A table: the same on all ranks by its seed."""

    rows: int
    columns: int
    mode: str
    seed: int

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.rows, self.columns, generator=generator).to(dtype)


class Bags(NamedTuple):
    """A table's bags for the global batch."""

    indices: torch.Tensor
    offsets: torch.Tensor
    factors: torch.Tensor

    @staticmethod
    def random(
        table: Table, batch: int, longest: int, seed: int, kind: torch.dtype = torch.int64
    ) -> Bags:
        """Bags with 0 to `longest` indices; half the indices are among the first three rows."""
        generator = torch.Generator().manual_seed(1000 * seed + table.seed)
        lengths = torch.randint(0, longest + 1, (batch,), generator=generator)
        total = int(lengths.sum())
        ids = torch.randint(0, table.rows, (total,), generator=generator)
        ids = torch.where(torch.rand(total, generator=generator) < 0.5, ids % 3, ids)
        offsets = lengths.cumsum(0) - lengths
        factors = torch.randn(total, generator=generator)
        return Bags(ids.to(kind), offsets.to(kind), factors)

    def pooled(self, table: Table, weight: torch.Tensor) -> torch.Tensor:
        """Rows as torch computes them, in float32."""
        mode = "mean" if table.mode == "mean" else "sum"
        factors = self.factors if table.mode == "weighted_sum" else None
        return embedding_bag(
            self.indices.long(),
            weight.float(),
            self.offsets.long(),
            mode=mode,
            per_sample_weights=factors,
        )


#: Tables by rank, modulo the rank count given; the second list has a rank without tables.
MIXED = [
    [Table(50, 8, "sum", 1), Table(7, 64, "mean", 2), Table(300, 4, "weighted_sum", 3)],
    [Table(20, 132, "mean", 4)],
    [],
    [Table(11, 16, "sum", 5), Table(40, 24, "sum", 6)],
]
EQUAL = [[Table(30 + rank, 16, "sum", 10 + 2 * rank)] * 2 for rank in range(8)]


def tables_of(name: str, ranks: int) -> list[list[Table]]:
    every = {"mixed": MIXED, "equal": EQUAL}[name]
    return [every[rank % len(every)] for rank in range(ranks)]


class Place:
    """A rank with its tables, on its device."""

    def __init__(self, name: str, device: str, dtype: torch.dtype, **options: Any) -> None:
        self.device = device
        if device == "cuda":
            local = int(os.environ.get("WEFT_LOCAL_RANK", "0"))
            torch.cuda.set_device(local % torch.cuda.device_count())
        self.group = symmetric.only_open()
        self.rank, self.ranks = self.group.rank, self.group.world_size
        self.every = tables_of(name, self.ranks)
        self.own = self.every[self.rank]
        self.dtype = dtype
        self.weights = [each.weight(dtype).to(device).requires_grad_() for each in self.own]
        if dtype != torch.float32:
            # One variant to compile; float32 has all default tilings' variants.
            own_last = -1 if dtype == torch.float16 else 3
            options.setdefault("tiling", Tiling(bags=8, columns=128, unroll=4, own_last=own_last))
        self.operator = weft.fused.EmbeddingAllToAll(
            self.weights,
            [each.mode for each in self.own],
            device=device,
            **({"out_dtype": dtype} | options),
        )

    def bags(self, batch: int, longest: int, seed: int, kind: torch.dtype) -> list[list[Bags]]:
        return [
            [Bags.random(each, batch, longest, seed, kind) for each in its] for its in self.every
        ]

    def arguments(self, bags: list[list[Bags]], batch: int) -> dict[str, Any]:
        """A call's arguments, on the device."""
        own = bags[self.rank]
        if not own:
            return {"batch": batch}
        indices, offsets, factors = weft.fused.concatenate_bags(
            [each.indices.to(self.device) for each in own],
            [each.offsets.to(self.device) for each in own],
            [each.factors.to(self.device) for each in own],
        )
        weighted = any(each.mode == "weighted_sum" for each in self.own)
        return {
            "indices": indices,
            "offsets": offsets,
            "per_sample_weights": factors if weighted else None,
        }

    def expected(self, bags: list[list[Bags]]) -> torch.Tensor:
        """This rank's sample rows for all tables, float32 on the CPU."""
        pooled = [
            each.pooled(table, table.weight(self.dtype))
            for its, theirs in zip(self.every, bags, strict=True)
            for table, each in zip(its, theirs, strict=True)
        ]
        return torch.tensor_split(torch.cat(pooled, dim=1), self.ranks)[self.rank]

    def is_near(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
        allowed = tolerance[found.dtype]
        rows = found.detach().float().cpu()
        return bool(torch.allclose(rows, expected, rtol=allowed, atol=4 * allowed))


def calls(device: str = "cpu", scale: int = 1, cases: list[str] | None = None) -> dict[str, Any]:
    """Results from all cases, or from some; `scale` multiplies the batches."""
    dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if device == "cuda" else [])
    every: dict[str, Callable[[], Any]] = {
        **{f"forward {str(each)[6:]}": partial(_forward, device, scale, each) for each in dtypes},
        "buffers": partial(_buffers, device, scale),
        "dense": partial(_gradients, device, scale, sparse=False),
        "sparse": partial(_gradients, device, scale, sparse=True),
        "pool": partial(_pool, device, scale),
        "wrong": partial(_wrong, device),
        "function": partial(_function, device),
        "model": partial(_model, device, scale),
        "refused": partial(_refused, device),
        "page": partial(_page, device),
    }
    if device == "cuda":
        every["graph"] = _graph
    with weft.init():
        return {name: case() for name, case in every.items() if cases is None or name in cases}


def _few(place: Place, count: int) -> int | None:
    """Shape count to run: with many ranks under the interpreter `count`, otherwise all."""
    return count if place.device == "cpu" and place.ranks > 2 else None


def _forward(device: str, scale: int, dtype: torch.dtype) -> list[bool]:
    place = Place("mixed", device, dtype)
    found = []
    shapes = [(13, 5), (1, 3), (0, 2), (13, 5), (3, 0), (20, 1), (2, 40)]
    with torch.no_grad():
        for number, (batch, longest) in enumerate(shapes[: _few(place, 4)]):
            count = batch * scale
            kind = torch.int32 if number % 2 else torch.int64
            bags = place.bags(count, longest, number, kind)
            output = place.operator(**place.arguments(bags, count))
            found.append(place.is_near(output, place.expected(bags)))
    place.operator.check()
    return found


def _buffers(device: str, scale: int) -> list[bool]:
    """Outputs that are valid until the third call, then one that is given, and a separate one."""
    place = Place("equal", device, torch.float32, buffers=2)
    batch = 8 * scale
    with torch.no_grad():
        every = [place.bags(batch, 4, seed, torch.int64) for seed in range(4)]
        expected = [place.expected(bags) for bags in every]
        found = []
        before = None
        for bags, right in zip(every, expected, strict=True):
            output = place.operator(**place.arguments(bags, batch))
            if before is not None:
                found.append(place.is_near(*before))
            before = (output, right)
        own = place.operator(**place.arguments(every[0], batch), copy=True)
        given = torch.empty_like(own)
        place.operator(**place.arguments(every[1], batch), out=given)
        for bags in every[2:]:
            place.operator(**place.arguments(bags, batch))
        found += [place.is_near(own, expected[0]), place.is_near(given, expected[1])]
        view = place.operator.by_table(own)
        # The last table: a single rank has two.
        found.append(torch.equal(view[:, -1], place.operator.split(own)[-1]))
        # The same bits again.
        again = place.operator(**place.arguments(every[0], batch))
        found.append(torch.equal(again, own))
    return found


def _loss(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Its gradient differs by row and column."""
    factors = torch.arange(rows.numel(), device=rows.device).view(rows.shape) % 7 - 3 + rank
    return (rows.float() * factors).sum() + (rows.float() ** 2).sum() / 2


def _gradients(device: str, scale: int, *, sparse: bool) -> list[bool]:
    # Runs with the same row are longer than a chunk.
    tiling = Tiling(bags=8, columns=64, unroll=4, chunk=4)
    place = Place("mixed", device, torch.float32, sparse=sparse, tiling=tiling)
    found = []
    for number, (batch, longest) in enumerate([(7, 8), (3, 2), (0, 1)][: _few(place, 1)]):
        batch *= scale
        bags = place.bags(batch, longest, number, torch.int64)
        arguments = place.arguments(bags, batch)
        factors = arguments.get("per_sample_weights")
        if factors is not None:
            factors.requires_grad_()
        made = []
        for _ in range(2 if number == 0 else 1):
            for each in (*place.weights, *([] if factors is None else [factors])):
                each.grad = None
            _loss(place.operator(**arguments), place.rank).backward()
            made.append([weight.grad for weight in place.weights])
        # The whole model in this process.
        for its in bags[place.rank]:
            its.factors.requires_grad_()
        weights = [
            [table.weight(torch.float32).requires_grad_() for table in its] for its in place.every
        ]
        pooled = [
            each.pooled(*pair)
            for its, own, theirs in zip(place.every, weights, bags, strict=True)
            for *pair, each in zip(its, own, theirs, strict=True)
        ]
        parts = torch.tensor_split(torch.cat(pooled, dim=1), place.ranks)
        torch.stack([_loss(part, rank) for rank, part in enumerate(parts)]).sum().backward()
        for first, last, right in zip(made[0], made[-1], weights[place.rank], strict=True):
            assert first is not None
            assert last is not None
            # On a GPU the summation order in `to_dense` differs between calls.
            parts = [
                [each._indices(), each._values()] if sparse else [each] for each in (first, last)
            ]
            found.append(first.is_sparse == sparse and all(map(torch.equal, *parts)))
            dense = first.to_dense() if sparse else first
            found.append(torch.allclose(dense.cpu(), right.grad, rtol=1e-4, atol=1e-4))
        if factors is not None:
            grads = [
                torch.zeros_like(its.factors) if its.factors.grad is None else its.factors.grad
                for its in bags[place.rank]
            ]
            assert factors.grad is not None
            passed = factors.grad.cpu()
            found.append(torch.allclose(passed, torch.cat(grads), rtol=1e-4, atol=1e-4))
    return found


def _pool(device: str, scale: int) -> bool:
    place = Place("mixed", device, torch.float32)
    if not place.own:
        return True
    batch = 11 * scale
    bags = place.bags(batch, 7, 1, torch.int64)
    found = place.operator.pool(**place.arguments(bags, batch))
    pairs = zip(place.own, bags[place.rank], strict=True)
    right = torch.cat([each.pooled(table, table.weight(torch.float32)) for table, each in pairs], 1)
    return place.is_near(found, right)


def _wrong(device: str) -> list[Any]:
    """Bag sums with indices outside the table, and the errors."""
    operator = weft.fused.EmbeddingAllToAll([torch.ones(5, 4, device=device)])
    ids = torch.tensor([0, 5, 1, -1, 2**40, 3], device=device)
    starts = torch.tensor([0, 2, 4, 5, 6], device=device)
    output = operator(ids, starts)
    ranks = operator.ranks
    every = torch.tensor([1.0, 1.0, 0.0, 1.0]).tensor_split(ranks)[operator.rank]
    right = torch.equal(output.cpu(), every[:, None].expand(-1, 4 * ranks))
    error = device_native.named(operator.check)
    operator.check()
    uncovered = []
    for offsets in ([1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 5], [0, 3, 2, 4]):
        operator(ids[:4] * 0, torch.tensor(offsets, device=device))
        uncovered.append(device_native.named(operator.check)[0])
    operator(ids[:0], torch.zeros(1, dtype=torch.int64, device=device))
    operator.check()
    return [right, error[0], error[2], uncovered]


def _function(device: str) -> list[bool]:
    """The function keeps an operator for tables with the same shapes, and differentiates."""
    rank, found = Place("equal", device, torch.float32).rank, []
    ids, starts = torch.arange(8, device=device) % 5, torch.arange(9, device=device)
    for number in range(3):
        weight = torch.full((5, 8), float(rank + number), device=device, requires_grad=True)
        output = weft.fused.embedding_all_to_all([weight], ids, starts)
        ranks = output.shape[1] // 8
        right = torch.arange(ranks).repeat_interleave(8) + number
        found.append(torch.equal(output.detach().cpu(), right.float().expand(len(output), -1)))
        output.sum().backward()
        assert weight.grad is not None
        counts = torch.bincount(ids.cpu(), minlength=5).float()
        found.append(torch.equal(weight.grad.cpu(), counts[:, None].expand(5, 8)))
    return found


class Recommender(torch.nn.Module):  # type: ignore[misc]
    """A small DLRM without its tables: dense features, pooled rows, one score for each sample."""

    def __init__(self, tables: int, columns: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bottom = torch.nn.Linear(6, columns)
        pairs = (tables + 1) * tables // 2
        self.top = torch.nn.Sequential(
            torch.nn.Linear(columns + pairs, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        below = torch.relu(self.bottom(dense))
        rows = torch.cat([below[:, None], pooled], dim=1)
        products = rows @ rows.transpose(1, 2) / rows.shape[2]
        first, second = torch.tril_indices(*products.shape[1:], offset=-1, device=dense.device)
        return self.top(torch.cat([below, products[:, first, second]], dim=1))[:, 0]


def _model(device: str, scale: int, steps: int = 3) -> float:
    """Greatest difference in losses and tables after training from one process's."""
    place = Place("equal", device, torch.float32)
    rank, ranks = place.rank, place.ranks
    batch = 4 * ranks * scale
    columns = 16
    bags = weft.fused.EmbeddingBags([(each.rows, columns) for each in place.own], device=device)
    with torch.no_grad():
        for mine, theirs in zip(bags.weights, place.weights, strict=True):
            mine.copy_(theirs)
    sharded = Recommender(2 * ranks, columns).to(device)
    whole = Recommender(2 * ranks, columns)
    every = [[each.weight(torch.float32).requires_grad_() for each in its] for its in place.every]
    flat = [each for its in every for each in its]
    rate = 1e-3
    # Losses are global batch means: replicas' gradients are summed.
    ours = torch.optim.SGD([*bags.parameters(), *sharded.parameters()], lr=rate)
    right = torch.optim.SGD([*flat, *whole.parameters()], lr=rate)
    worst = 0.0
    for step in range(steps):
        inputs = place.bags(batch, 4, step, torch.int64)
        generator = torch.Generator().manual_seed(step)
        dense = torch.randn(batch, 6, generator=generator)
        targets = torch.randn(batch, generator=generator)
        pooled = torch.stack(
            [
                each.pooled(table, weight)
                for its, theirs, own in zip(place.every, inputs, every, strict=True)
                for table, each, weight in zip(its, theirs, own, strict=True)
            ],
            dim=1,
        )
        expected = ((whole(dense, pooled) - targets) ** 2).sum() / batch
        right.zero_grad()
        expected.backward()
        own = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
        rows = bags.operator.by_table(bags(**place.arguments(inputs, batch)))
        scores = sharded(dense[own].to(device), rows)
        loss = ((scores - targets[own].to(device)) ** 2).sum() / batch
        ours.zero_grad()
        loss.backward()
        total = _sum(place.group, [loss.detach(), *(each.grad for each in sharded.parameters())])
        worst = max(worst, abs(float(total[0]) - float(expected.detach())))
        for parameter, gradient in zip(sharded.parameters(), total[1:], strict=True):
            parameter.grad = gradient.to(device)
        ours.step()
        right.step()
    for mine, theirs in zip(bags.weights, every[rank], strict=True):
        worst = max(worst, float((mine.detach().cpu() - theirs.detach()).abs().max()))
    return worst


def _sum(group: weft.Communicator, tensors: list[Any]) -> list[torch.Tensor]:
    """Sums over all ranks, in their order."""
    found = []
    for tensor in tensors:
        own = tensor.cpu().contiguous()
        parts = group.all_gather(own.numpy().tobytes())
        found.append(
            sum(
                torch.frombuffer(bytearray(part), dtype=own.dtype).view(own.shape) for part in parts
            )
        )
    return found


def _closed(operator: weft.fused.EmbeddingAllToAll) -> weft.fused.EmbeddingAllToAll:
    operator.close()
    return operator


def _refused(device: str) -> list[Any]:
    """Errors from arguments, by name."""
    operator = weft.fused.EmbeddingAllToAll(
        [torch.ones(5, 4, device=device), torch.ones(5, 8, device=device)], ["sum", "weighted_sum"]
    )
    ids, starts = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 2, 3, 4])
    ids, starts = ids.to(device), starts.to(device)
    factors = torch.ones(4, device=device)
    wrong = [
        lambda: operator(),
        lambda: operator(ids.float(), starts, factors),
        lambda: operator(ids, starts[:4], factors),
        lambda: operator(ids, starts),
        lambda: operator(ids, starts, factors[:3]),
        lambda: operator(ids, starts, factors, batch=3),
        lambda: operator(ids, starts, factors, out=torch.ones(1, 1, device=device)),
        lambda: operator.by_table(torch.ones(2, 12 * operator.ranks)),
        lambda: weft.fused.EmbeddingAllToAll([torch.ones(5, 6)]),
        lambda: weft.fused.EmbeddingAllToAll([torch.ones(5, 4)], "max"),
        lambda: weft.fused.EmbeddingAllToAll([torch.ones(5, 4, dtype=torch.float64)]),
        lambda: weft.fused.EmbeddingAllToAll([torch.ones(5, 8)[:, :4]]),
        lambda: weft.fused.EmbeddingAllToAll([torch.ones(5, 8)], buffers=0),
        lambda: weft.fused.EmbeddingAllToAll([torch.ones(5, 8)], tiling=Tiling(128, 64, 1)),
        lambda: weft.fused.EmbeddingAllToAll([torch.ones(5, 8)], tiling=Tiling(8, 64, 3)),
        lambda: _closed(operator)(ids, starts, factors),
    ]
    return [device_native.named(each)[0] for each in wrong]


def _graph() -> list[bool]:
    """A graph's replays with two calls, beside eager ones."""
    place = Place("mixed", "cuda", torch.float16)
    batch, found = 48, []
    with torch.no_grad():
        every = [place.bags(batch, 6, seed, torch.int64) for seed in range(4)]
        length = max(sum(each.indices.numel() for each in bags[place.rank]) for bags in every)
        static = place.arguments(every[0], batch)
        for name in ("indices", "per_sample_weights"):
            if static.get(name) is not None:
                static[name] = torch.nn.functional.pad(
                    static[name], (0, length - static[name].numel())
                )
        place.operator(**static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [place.operator(**static), place.operator(**static)]
        for number in range(12):
            bags = every[number % 4]
            for name, value in place.arguments(bags, batch).items():
                if isinstance(value, torch.Tensor):
                    static[name][: value.numel()].copy_(value)
            graph.replay()
            right = place.expected(bags)
            found += [place.is_near(each, right) for each in outputs]
            if number % 3 == 2:
                eager = place.operator(**place.arguments(bags, batch))
                found.append(place.is_near(eager, right))
    return found


def _page(device: str) -> list[Any]:
    """Results from the program in docs/fused-embedding.md."""
    names: dict[str, Any] = {"device": device}
    exec(program_of("fused-embedding.md"), names)
    shape = list(names["tables"].shape)
    # One for each sample and column in a mean.
    right = [abs(float(each.grad.sum()) - 128) < 1e-2 for each in names["bags"].weights]
    ranks = names["bags"].operator.ranks
    return [shape == [len(names["rows"]), 2 * ranks, 16], *right]


def silent(device: str = "cpu") -> dict[str, Any]:
    """The last rank does not make the second call: errors and all outputs."""
    with weft.init():
        weft.fused.set_timeout(5)
        return _silent(device)


def _silent(device: str) -> dict[str, Any]:
    place = Place("equal", device, torch.float32)
    with torch.no_grad():
        bags = place.bags(16, 4, 0, torch.int64)
        arguments = place.arguments(bags, 16)
        output = place.operator(**arguments)
        found: dict[str, Any] = {"right": place.is_near(output, place.expected(bags))}
        place.group.barrier()
        if place.rank < place.ranks - 1:
            output = place.operator(**arguments)
            found["lost"] = bool(output.isnan().all())
            found["error"] = device_native.named(weft.check)
            found["again"] = device_native.named(lambda: place.operator(**arguments))[0]
    # Ends with the group, which the waiting ranks have ended.
    device_native.named(lambda: place.group.all_gather(b"", timeout=60))
    return found
