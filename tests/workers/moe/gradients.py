"""Gradients through dispatch and combine, compared with those in one process."""

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import weft
from tests import ROOT
from weft.moe import AllToAll

if TYPE_CHECKING:
    from collections.abc import Callable

SINGLE = 2.0**-24
#: Bound factor: two correct runs may both differ, and bounds omit rounding products.
SLACK = 2.1


class Case(NamedTuple):
    """A round: each rank's batch, and its result's gradient."""

    tokens: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    upstream: torch.Tensor


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff."""
    return float(torch.finfo(dtype).eps) / 2


def case(rank: int, all_to_all: AllToAll, *, seed: int = 0, count: int | None = None) -> Case:
    """A rank's batch, reproducible on any rank."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    most, top_k, hidden = all_to_all.max_tokens, all_to_all.top_k, all_to_all.hidden
    if count is None:
        # One rank sends no tokens.
        count = 0 if (rank + seed) % 4 == 3 else most - rank
    ids = torch.rand(count, all_to_all.experts, generator=random).argsort(-1)[:, :top_k]
    ids = torch.where(torch.rand(ids.shape, generator=random) < 0.2, -1, ids).contiguous()
    return Case(
        torch.randn(count, hidden, generator=random).to(getattr(torch, all_to_all.dtype)),
        ids,
        torch.rand(count, top_k, generator=random),
        torch.randn(count, hidden, generator=random).to(getattr(torch, all_to_all.output_dtype)),
    )


def gains(all_to_all: AllToAll) -> torch.Tensor:
    """Expert factors: `[experts, hidden]`."""
    random = torch.Generator().manual_seed(7)
    made = torch.randn(all_to_all.experts, all_to_all.hidden, generator=random)
    return made.to(getattr(torch, all_to_all.dtype))


def expert_of_positions(all_to_all: AllToAll, received: weft.moe.Received) -> torch.Tensor:
    """Each position's local expert; arbitrary behind the last."""
    offsets = torch.as_tensor(received.expert_offsets)[1:].contiguous()
    positions = torch.arange(received.positions, dtype=offsets.dtype)
    found = torch.searchsorted(offsets, positions, right=True)
    return found.clamp_(max=max(len(offsets) - 1, 0))


def experts(all_to_all: AllToAll, received: weft.moe.Received, gain: torch.Tensor) -> torch.Tensor:
    """Each row times its expert's gain, and times its weight unless combine applies it."""
    outputs = received.tokens * gain[expert_of_positions(all_to_all, received)]
    if all_to_all._weighting == "expert":
        outputs = outputs * torch.as_tensor(received.weights)[:, None]
    return outputs.to(getattr(torch, all_to_all.combine_dtype))


def round_of(
    all_to_all: AllToAll, sent: Case, gain: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    received = all_to_all.dispatch(sent.tokens, sent.ids, sent.weights, **arguments)
    with received:
        return torch.as_tensor(all_to_all.combine(received, experts(all_to_all, received, gain)))


def halves(all_to_all: AllToAll, sent: Case, gain: torch.Tensor, **arguments: Any) -> torch.Tensor:
    under_way = all_to_all.dispatch_send(sent.tokens, sent.ids, sent.weights, **arguments)
    with under_way.recv() as received:
        outputs = experts(all_to_all, received, gain)
        return torch.as_tensor(all_to_all.combine_send(received, outputs).recv())


def differentiable(sent: Case) -> Case:
    return sent._replace(
        tokens=sent.tokens.clone().requires_grad_(), weights=sent.weights.clone().requires_grad_()
    )


def beyond(found: torch.Tensor | None, exact: torch.Tensor, allowed: torch.Tensor) -> float:
    """Largest excess over the bound; 0 if all elements are within."""
    assert found is not None
    off = (found.double() - exact).abs() - allowed
    # Comparisons with NaN are false.
    return 0.0 if bool((off <= 0).all()) else float(off.nan_to_num(float("inf")).max())


def elementwise(
    all_to_all: AllToAll, sent: Case, got: Case, gain: torch.Tensor
) -> dict[str, float]:
    """Token and weight gradients compared with float64, with the docs/moe.md bounds."""
    kinds = [
        getattr(torch, name)
        for name in (all_to_all.dtype, all_to_all.combine_dtype, all_to_all.reply_dtype)
    ]
    tokens, outputs, answers = kinds
    here = sent.ids >= 0
    gain = gain[sent.ids.clamp(min=0)]
    y = (sent.tokens[:, None] * gain).to(outputs if all_to_all._weighting == "combine" else tokens)
    # These are computed per element, with equal roundings in both.
    upstream = sent.upstream.to(outputs)[:, None].float()
    wide = upstream * sent.weights[..., None]
    rows = wide.to(outputs).to(tokens) if all_to_all._weighting == "combine" else wide.to(tokens)
    rows = (rows * gain).double() * here[..., None]
    size = rows.abs().sum(1)
    answer = unit(torch.float32 if answers == torch.float32 else tokens)
    most = all_to_all.top_k
    allowed = size * ((1 + SINGLE) ** most * (1 + answer) * (1 + unit(tokens)) - 1)
    terms = (y.double() * upstream.double()) * here[..., None]
    dots = (all_to_all.hidden + 2) * SINGLE * terms.abs().sum(-1)
    return {
        "tokens": beyond(got.tokens.grad, rows.sum(1), allowed),
        "weights": beyond(got.weights.grad, terms.sum(-1), dots),
    }


def make(communicator: weft.Communicator, device: str | None, **arguments: Any) -> AllToAll:
    shape = {"experts": 6, "top_k": 3, "hidden": 32, "max_tokens": 12} | arguments
    return AllToAll(communicator, gradients=True, device=device, **shape)


def cases(device: str | None, shapes: list[dict[str, Any]]) -> list[str]:
    """Each shape's rounds; the errors."""
    failures = []
    with weft.init() as communicator:
        for shape in shapes:
            with make(communicator, device, **shape) as all_to_all:
                failures += rounds(communicator, all_to_all, str(shape))
            communicator.barrier()
    return failures


def rounds(communicator: weft.Communicator, all_to_all: AllToAll, name: str) -> list[str]:
    """One at a time, then three that are differentiated together."""
    failures = []
    gain = gains(all_to_all)[all_to_all.local_experts.start : all_to_all.local_experts.stop]
    if not len(gain):
        gain = gains(all_to_all)[:1]
    ways: list[Callable[..., torch.Tensor]] = [round_of, halves]
    for seed, way in enumerate(ways):
        sent = case(communicator.rank, all_to_all, seed=seed)
        got = differentiable(sent)
        way(all_to_all, got, gain).backward(sent.upstream)
        off = elementwise(all_to_all, sent, got, gains(all_to_all))
        failures += [f"{name}, {way.__name__}: {each}" for each in off.items() if each[1]]
    several = [case(communicator.rank, all_to_all, seed=seed) for seed in (2, 3, 4)]
    given = [differentiable(each) for each in several]
    results = [round_of(all_to_all, each, gain) for each in given]
    # More rounds than there are channels.
    torch.autograd.backward(results, [each.upstream for each in several])
    for sent, got in zip(several, given, strict=True):
        off = elementwise(all_to_all, sent, got, gains(all_to_all))
        failures += [f"{name}, together: {each}" for each in off.items() if each[1]]
    return failures


def counted() -> list[float]:
    """On a device, 5 of 12 tokens are valid: the others get zero gradients."""
    with weft.init() as communicator, make(communicator, "twin") as all_to_all:
        sent = case(communicator.rank, all_to_all, count=12)
        got = differentiable(sent)
        gain = gains(all_to_all)[list(all_to_all.local_experts)]
        count = torch.tensor([5], dtype=torch.int32)
        result = round_of(all_to_all, got, gain, count=count)
        result.backward(sent.upstream)
        assert got.tokens.grad is not None
        assert got.weights.grad is not None
        some = sent._replace(**{name: each[:5] for name, each in sent._asdict().items()})
        existing = got._replace(tokens=got.tokens.detach()[:5], weights=got.weights.detach()[:5])
        existing.tokens.grad, existing.weights.grad = got.tokens.grad[:5], got.weights.grad[:5]
        off = elementwise(all_to_all, some, existing, gains(all_to_all))
        rest = [got.tokens.grad[5:], got.weights.grad[5:]]
        return [*off.values(), *(float(each.abs().sum()) for each in rest)]


def parts(device: str | None) -> list[str]:
    """A graph's parts: each call ends the rounds that it began and frees their channels."""
    failures = []
    with (
        weft.init() as communicator,
        make(communicator, device, channels=1, max_tokens=6) as all_to_all,
    ):
        gain = gains(all_to_all)[list(all_to_all.local_experts)].requires_grad_()
        sent = case(communicator.rank, all_to_all, count=6)
        for _ in range(3):
            # Only parameter gradients: dispatch's backward is skipped.
            got = differentiable(sent)
            result = round_of(all_to_all, got, gain)
            (slope,) = torch.autograd.grad(result, gain, sent.upstream)
            if not slope.isfinite().all():
                failures.append("parameters alone")
        for _ in range(2):
            # Tokens without gradients: a model's first layer.
            result = round_of(all_to_all, sent, gain)
            result.backward(sent.upstream)
        # Twice through one graph.
        got = differentiable(sent)
        result = round_of(all_to_all, got, gain)
        result.backward(sent.upstream, retain_graph=True)
        assert got.tokens.grad is not None
        once = got.tokens.grad.clone()
        result.backward(sent.upstream)
        if not torch.equal(got.tokens.grad, 2 * once):
            failures.append("twice")
        # Received rows without a result.
        got = differentiable(sent)
        with all_to_all.dispatch(got.tokens, got.ids, got.weights) as received:
            rows = received.tokens
        rows.sum().backward()
        assert got.tokens.grad is not None
        named = (sent.ids >= 0).sum(1, keepdim=True).expand_as(got.tokens)
        if not torch.equal(got.tokens.grad, named.float()):
            failures.append("rows alone")
        # Without gradients, and with experts that ignore their tokens.
        with torch.no_grad():
            if round_of(all_to_all, got, gain).requires_grad:
                failures.append("no_grad")
        got = differentiable(sent)
        with all_to_all.dispatch(got.tokens, got.ids, got.weights) as received:
            outputs = torch.ones(received.positions, all_to_all.hidden)
            all_to_all.combine(received, outputs).backward(sent.upstream)
        assert got.tokens.grad is not None
        if got.tokens.grad.abs().sum() != 0:
            failures.append("constant experts")
    return failures


class Near(NamedTuple):
    """Numbers in float64, each with a rounded run's difference bound."""

    value: torch.Tensor
    error: torch.Tensor

    @property
    def size(self) -> torch.Tensor:
        return self.value.abs() + self.error

    @property
    def T(self) -> "Near":  # noqa: N802
        return Near(self.value.T, self.error.T)

    def chunk(self) -> tuple["Near", "Near"]:
        values, errors = self.value.chunk(2, dim=-1), self.error.chunk(2, dim=-1)
        return Near(values[0], errors[0]), Near(values[1], errors[1])

    def rounded(self, roundings: float) -> "Near":
        return Near(self.value, self.error + roundings * self.size)


def exactly(value: torch.Tensor) -> Near:
    return Near(value.double(), torch.zeros_like(value.double()))


def matmul(a: Near, b: Near, u: float) -> Near:
    """Matmul with sums in float32, in any order, then rounded."""
    size = a.size @ b.size
    error = size - a.value.abs() @ b.value.abs()
    return Near(a.value @ b.value, error + (a.value.shape[1] * SINGLE + u) * size)


def times(a: Near, b: Near, u: float) -> Near:
    size = a.size * b.size
    return Near(a.value * b.value, size - (a.value * b.value).abs() + u * size)


def silu(a: Near, u: float) -> Near:
    value = torch.nn.functional.silu(a.value)
    # Its slope is at most 1.1; exp, sum and division round.
    return Near(value, 1.1 * a.error + (8 * SINGLE + u) * value.abs())


def silu_slope(a: Near) -> Near:
    inner = torch.sigmoid(a.value)
    value = inner * (1 + a.value * (1 - inner))
    # The second derivative is at most 0.5; six operations on numbers up to 1 + |a| round.
    return Near(value, 0.5 * a.error + 12 * SINGLE * (1 + a.size))


def mlp_bounds(
    first: torch.Tensor, second: torch.Tensor, sent: list[Case], dtype: torch.dtype
) -> dict[str, list[torch.Tensor]]:
    """Rounding error bounds for gated experts' gradients.

    Args:
        first: `[experts, 2 * inner, hidden]`.
        second: `[experts, hidden, inner]`.
        sent: batches by rank.
        dtype: dtype for all tensors except weights.

    Returns:
        Bounds for `tokens` and `weights` by rank, for `first` and `second` by expert.
    """
    u, top_k = unit(dtype), sent[0].ids.shape[1]
    tokens = [torch.zeros_like(each.tokens, dtype=torch.float64) for each in sent]
    sizes = [each.clone() for each in tokens]
    weights = [torch.zeros_like(each.weights, dtype=torch.float64) for each in sent]
    of_first, of_second = [], []
    lengths = [len(each.ids) for each in sent]
    starts = [sum(lengths[:rank]) for rank in range(len(sent))]
    ids, x, w, d = (
        torch.cat([getattr(each, name) for each in sent])
        for name in ("ids", "tokens", "weights", "upstream")
    )
    off, size, off_w = torch.cat(tokens), torch.cat(sizes), torch.cat(weights)
    for expert in range(len(first)):
        token, choice = torch.where(ids == expert)
        rows, one, two = exactly(x[token]), exactly(first[expert]), exactly(second[expert])
        gate, up = matmul(rows, one.T, u).chunk()
        act = silu(gate, u)
        middle = times(act, up, u)
        y = matmul(middle, two.T, u)
        upstream = exactly(d[token])
        # Weights are rounded to the dtype in one process.
        dy = times(upstream, exactly(w[token, choice, None]), 3 * u)
        dots = times(y, upstream, 2 * u)
        off_w[token, choice] = (dots.error + (d.shape[1] * SINGLE + u) * dots.size).sum(-1)
        dmiddle = matmul(dy, two, u)
        dup, dact = times(dmiddle, act, u), times(dmiddle, up, u)
        # torch multiplies by the slope in float32, or rounds its factors.
        dgate = times(dact, silu_slope(gate), 4 * u)
        both = Near(torch.cat([dgate.value, dup.value], 1), torch.cat([dgate.error, dup.error], 1))
        drows = matmul(both, one, u)
        off.index_add_(0, token, drows.error)
        size.index_add_(0, token, drows.size)
        of_first.append(matmul(both.T, rows, 2 * u).error)
        of_second.append(matmul(dy.T, middle, 2 * u).error)
    # One process rounds each sum over at most top_k rows; otherwise replies and the sum are
    # rounded.
    off += size * ((1 + u) ** (top_k + 2) - 1)
    cut = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return {
        "tokens": [off[each] for each in cut],
        "weights": [off_w[each] for each in cut],
        "first": of_first,
        "second": of_second,
    }


def one_process(
    first: torch.Tensor, second: torch.Tensor, sent: list[Case]
) -> tuple[list[Case], torch.Tensor, torch.Tensor]:
    """All ranks' token gradients through a layer with all experts in this process."""
    given = [differentiable(each) for each in sent]
    first, second = first.clone().requires_grad_(), second.clone().requires_grad_()
    ids = torch.cat([each.ids for each in given])
    x, w = torch.cat([each.tokens for each in given]), torch.cat([each.weights for each in given])
    result = torch.zeros_like(x)
    for expert in range(len(first)):
        token, choice = torch.where(ids == expert)
        gate, up = (x[token] @ first[expert].T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ second[expert].T
        result = result.index_add(0, token, y * w[token, choice, None].to(y.dtype))
    result.backward(torch.cat([each.upstream for each in sent]))
    assert first.grad is not None
    assert second.grad is not None
    return given, first.grad, second.grad


def compared(
    off: dict[str, list[float]], name: str, a: Any, b: torch.Tensor, allowed: torch.Tensor
) -> None:
    """Record the largest difference between two gradients, relative to bound and largest number."""
    difference = (a.double() - b.double()).abs()
    of_bound = float((difference / (SLACK * allowed + 1e-300)).max()) if a.numel() else 0.0
    largest = float(b.double().abs().max()) if b.numel() else 0.0
    relative = float(difference.max()) / largest if largest else float(difference.sum())
    off.setdefault(name, []).extend([of_bound, relative])


def layer(device: str | None, dtype: str) -> dict[str, list[float]]:
    """A small MoE layer with gated experts, on all ranks and in one process."""
    kind, inner = getattr(torch, dtype), 24
    off: dict[str, list[float]] = {}
    with (
        weft.init() as communicator,
        make(communicator, device, dtype=dtype, experts=5, pad_to=4) as all_to_all,
    ):
        random = torch.Generator().manual_seed(11)
        first = torch.randn(5, 2 * inner, 32, generator=random).mul(0.3).to(kind)
        second = torch.randn(5, 32, inner, generator=random).mul(0.3).to(kind)
        ranks = range(communicator.world_size)
        sent = [case(rank, all_to_all, seed=5) for rank in ranks]
        alone, of_first, of_second = one_process(first, second, sent)
        bounds = mlp_bounds(first, second, sent, kind)
        rank, mine = communicator.rank, list(all_to_all.local_experts)
        own = [each[mine].clone().requires_grad_() for each in (first, second)]
        got = differentiable(sent[rank])
        with all_to_all.dispatch(got.tokens, got.ids, got.weights) as received:
            outputs = torch.zeros(received.positions, 32, dtype=kind)
            for expert in range(len(mine)):
                begin = int(received.expert_offsets[expert])
                at = slice(begin, begin + int(received.expert_counts[expert]))
                gate, up = (received.tokens[at] @ own[0][expert].T).chunk(2, dim=-1)
                y = (torch.nn.functional.silu(gate) * up) @ own[1][expert].T
                outputs[at] = y
            all_to_all.combine(received, outputs).backward(sent[rank].upstream)
        for name in ("tokens", "weights"):
            a, b = getattr(got, name).grad, getattr(alone[rank], name).grad
            compared(off, name, a, b, bounds[name][rank])
        for name, found, whole in (
            ("first", own[0].grad, of_first),
            ("second", own[1].grad, of_second),
        ):
            for number, expert in enumerate(mine):
                assert found is not None
                compared(off, name, found[number], whole[expert], bounds[name][expert])
    return off


def example() -> Any:
    """The module examples/use_as_layer.py."""
    path = ROOT / "examples" / "use_as_layer.py"
    spec = importlib.util.spec_from_file_location("use_as_layer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Watched(torch.nn.Module):  # type: ignore[misc]
    """A layer's experts, with their inputs kept."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.given: tuple[torch.Tensor, ...] = ()

    def forward(self, *given: torch.Tensor) -> Any:
        # Gradients in this call only.
        self.given = tuple(each.clone() if each.is_floating_point() else each for each in given)
        for each in self.given:
            if each.is_floating_point():
                each.retain_grad()
        return self.experts(*self.given)


def transformers_layers(device: str, dtype: str) -> dict[str, dict[str, list[float]]]:
    """Transformers layers: their experts over all ranks, and in one process."""
    module, kind = example(), getattr(torch, dtype)
    reports: dict[str, dict[str, list[float]]] = {}
    with weft.init() as communicator:
        rank, ranks = communicator.rank, communicator.world_size
        all_to_all = AllToAll(
            communicator,
            experts=module.EXPERTS,
            top_k=module.TOP_K,
            hidden=module.HIDDEN,
            max_tokens=module.TOKENS,
            dtype=dtype,
            layout="padded",
            expert_capacity=ranks * module.TOKENS,
            device=device,
            gradients=True,
        )
        for name, block in module.layers().items():
            reports[name] = one_layer(module, block.to(kind), all_to_all, rank, ranks)
        communicator.barrier()
        all_to_all.close()
    return reports


def one_layer(
    module: Any, block: Any, all_to_all: AllToAll, rank: int, ranks: int
) -> dict[str, list[float]]:
    random = torch.Generator().manual_seed(3)
    shape = (ranks, 1, module.TOKENS, module.HIDDEN)
    kind = getattr(torch, all_to_all.dtype)
    everything = torch.randn(2, *shape, generator=random).to(kind)
    everyone, whole = block.experts, Watched(block.experts)
    block.experts = whole
    sent, inputs, gates = [], [], []
    for tokens, upstream in zip(*everything, strict=True):
        given = tokens.clone().requires_grad_()
        block.gate.zero_grad()
        block(given).backward(upstream)
        hidden, ids, weights = whole.given
        sent.append(Case(hidden.detach(), ids, weights.detach(), upstream[0]))
        inputs.append((given.grad, hidden.grad, weights.grad))
        gates.append(block.gate.weight.grad.clone())
    block.experts = watched = Watched(module.SpreadExperts(everyone, all_to_all))
    given = everything[0][rank].clone().requires_grad_()
    block.gate.zero_grad()
    block(given).backward(everything[1][rank])
    hidden, _, weights = watched.given
    bounds = mlp_bounds(everyone.gate_up_proj, everyone.down_proj, sent, kind)
    off: dict[str, list[float]] = {}
    compared(off, "tokens", hidden.grad, inputs[rank][1], bounds["tokens"][rank])
    compared(off, "weights", weights.grad, inputs[rank][2], bounds["weights"][rank])
    spread: Any = watched.experts
    for name, found, of_all in (
        ("first", spread.gate_up_proj.grad, everyone.gate_up_proj.grad),
        ("second", spread.down_proj.grad, everyone.down_proj.grad),
    ):
        for at, expert in enumerate(all_to_all.local_experts):
            compared(off, name, found[at], of_all[expert], bounds[name][expert] * 2)
    # The rest of the layer has the same code in both: relative to the largest number.
    free = torch.full((), float("inf"), dtype=torch.float64)
    compared(off, "layer's input", given.grad, inputs[rank][0], free)
    compared(off, "gate", block.gate.weight.grad, gates[rank], free)
    return off
