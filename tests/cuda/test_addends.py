"""Addends of combine: biases, and an accumulated result's previous contents."""

import importlib
from typing import Any

import pytest

import weft

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")

SHAPE: dict[str, Any] = {
    "experts": 6,
    "top_k": 2,
    "hidden": 64,
    "max_tokens": 9,
    "dtype": "bfloat16",
}
OUTPUTS = ["bfloat16", "float16", "float32"]


def group(count: int = 2, **arguments: Any) -> list[Any]:
    return list(cuda.local_group(count, ["twin"] * count, **(SHAPE | arguments)))


def batch(rank: Any) -> tuple[Any, Any, Any]:
    random = torch.Generator().manual_seed(rank.rank)
    tokens = torch.randn(7, 64, generator=random).to(getattr(torch, rank.dtype))
    ids = torch.rand(7, 6, generator=random).topk(2).indices
    # The result for a token without experts is the addends' sum.
    ids[3] = -1
    return tokens, ids, torch.rand(7, 2, generator=random)


def rows(rank: Any, seed: int) -> Any:
    random = torch.Generator().manual_seed(100 * seed + rank.rank)
    return torch.randn(7, 64, generator=random).to(getattr(torch, rank.output_dtype))


def combine(rank: Any, *, halves: bool = False, **options: Any) -> Any:
    with rank.dispatch(*batch(rank)) as received:
        outputs = received.tokens * 3
        if halves:
            return rank.combine_send(received, outputs).recv(**options)
        return rank.combine(received, outputs, **options)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("path", ["packets", "latency", "bandwidth"])
def test_they_are_added_in_float32_before_the_result_is_rounded(
    path: str, output: str, halves: bool
) -> None:
    from tests.workers.cuda.moe import together

    # Unrounded sums.
    exact = together(group(path=path, output_dtype="float32"), combine)

    def check(rank: Any) -> list[bool]:
        first, second, held = (rows(rank, seed) for seed in range(3))
        whole, equal = exact[rank.rank], []
        for bias in (None, first, (first, second), [None, second]):
            for accumulate in (False, True):
                out = held.clone() if accumulate else None
                options: dict[str, Any] = {"out": out, "accumulate": accumulate}
                result = combine(rank, halves=halves, bias=bias, **options)
                assert out is None or result is out
                expected = whole.clone()
                given = bias if isinstance(bias, tuple | list) else (bias,)
                for each in (*given, held if accumulate else None):
                    if each is not None:
                        expected += each.float()
                equal.append(torch.equal(result, expected.to(result.dtype)))
        rank.check()
        return equal

    members = group(path=path, output_dtype=output)
    assert together(members, check) == [[True] * 8] * 2


def test_tokens_that_do_not_exist_are_left_as_they_are() -> None:
    (rank,) = group(1)
    tokens, ids, weights = batch(rank)
    out, bias = rows(rank, 0), rows(rank, 1)
    held, count = out.clone(), torch.tensor([4], dtype=torch.int32)
    with rank.dispatch(tokens, ids, weights, count=count) as received:
        outputs = torch.zeros(rank.positions, 64, dtype=torch.bfloat16)
        rank.combine(received, outputs, out=out, accumulate=True, bias=bias)
    assert torch.equal(out[:4], (bias.float() + held.float()).bfloat16()[:4])
    assert torch.equal(out[4:], held[4:])


def test_what_does_not_fit_is_refused() -> None:
    (rank,) = group(1)
    right = rows(rank, 0)
    with rank.dispatch(*batch(rank)) as received:
        outputs = torch.zeros(rank.positions, 64, dtype=torch.bfloat16)
        for bias, reason in (
            (right[:6], r"bias has shape \(6, 64\); \(7, 64\) is needed"),
            (right.float(), "bias is of dtype"),
            ((right, right, right), "bias has 3 tensors; at most 2"),
            (right.t().contiguous().t(), "bias is not contiguous"),
            (3.0, "bias is a float"),
        ):
            with pytest.raises(weft.errors.ShapeError, match=reason):
                rank.combine(received, outputs, bias=bias)
        with pytest.raises(weft.errors.ConfigurationError, match="without out="):
            rank.combine(received, outputs, accumulate=True)
        right.requires_grad_()
        with pytest.raises(weft.errors.ConfigurationError, match="bias requires a gradient"):
            rank.combine(received, outputs, bias=right)
        # The round was not sent.
        with torch.no_grad():
            assert torch.equal(rank.combine(received, outputs, bias=right), right)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_biases_have_gradients(counted: bool, halves: bool) -> None:
    from tests.workers.cuda.moe import together

    def check(rank: Any) -> list[bool]:
        tokens, ids, weights = batch(rank)
        count = torch.tensor([5], dtype=torch.int32) if counted else None
        existing = 5 if counted else 7
        added = [rows(rank, seed).requires_grad_() for seed in range(2)]
        factors, equal = torch.randn(7, 64), []
        gradients = []
        for bias in (None, added[0], added):
            tokens.grad = None
            with rank.dispatch(tokens.requires_grad_(), ids, weights, count=count) as received:
                outputs = received.tokens * 3
                if halves:
                    combined = rank.combine_send(received, outputs).recv(bias=bias)
                else:
                    combined = rank.combine(received, outputs, bias=bias)
            (combined * factors)[:existing].sum().backward()
            gradients.append(tokens.grad)
        expected = factors.clone()
        expected[existing:] = 0
        assert gradients[0].abs().sum() > 0
        equal += [torch.equal(each, gradients[0]) for each in gradients]
        # The first was added twice, in separate rounds.
        equal.append(torch.equal(added[0].grad, 2 * expected))
        equal.append(torch.equal(added[1].grad, expected))
        with rank.dispatch(tokens, ids, weights) as received:
            outputs, out = received.tokens * 3, torch.zeros(7, 64)
            with pytest.raises(weft.errors.ConfigurationError, match="out= of a differentiable"):
                rank.combine(received, outputs, out=out, accumulate=True)
        return equal

    members = group(dtype="float32", gradients=True)
    assert together(members, check) == [[True] * 5] * 2


@pytest.mark.parametrize("halves", [False, True])
def test_compiled_code_adds_them_too(halves: bool) -> None:
    (rank,) = group(1)
    tokens, ids, weights = batch(rank)

    def layer(tokens: Any, ids: Any, weights: Any, first: Any, second: Any, out: Any) -> Any:
        with rank.dispatch(tokens, ids, weights) as received:
            outputs = (received.tokens.float() * 0 + 2).bfloat16()
            options = {"bias": (first, second), "out": out, "accumulate": True}
            if halves:
                return rank.combine_send(received, outputs).recv(**options) * 1
            return rank.combine(received, outputs, **options) * 1

    added, held = [rows(rank, seed) for seed in range(2)], rows(rank, 2)
    results = []
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for call in (layer, compiled):
        out = held.clone()
        results.append((call(tokens, ids, weights, added[0], added[1], out), out))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, held)
