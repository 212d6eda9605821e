"""Gradients and engines' layers on a device, compared with the CPU, and in a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import weft
from tests.adapters.engines import removed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

SHAPE: dict[str, Any] = {"experts": 4, "top_k": 3, "hidden": 64, "max_tokens": 16}
SINGLE = 2.0**-24


@pytest.fixture
def communicator() -> Iterator[weft.Communicator]:
    with weft.init(rank=0, world_size=1) as made:
        yield made


@pytest.fixture
def stand_ins() -> Iterator[None]:
    with removed():
        yield


def place_of(kind: str) -> str:
    return "cpu" if kind == "twin" else kind


def inputs(place: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids with some masked, weights."""
    import torch

    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(16, 4, generator=random).argsort(-1)[:, :3]
    ids = torch.where(torch.rand(ids.shape, generator=random) < 0.2, -1, ids)
    tokens, weights = torch.randn(16, 64, generator=random), torch.rand(16, 3, generator=random)
    return tokens.to(place), ids.to(place).contiguous(), weights.to(place)


def gradients(
    all_to_all: weft.moe.AllToAll, place: str, upstream: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The result, and token and weight gradients, with experts that multiply by three."""
    tokens, ids, weights = inputs(place)
    tokens.requires_grad_()
    weights.requires_grad_()
    with all_to_all.dispatch(tokens, ids, weights) as received:
        combined = all_to_all.combine(received, received.tokens * 3)
    combined.backward(upstream.to(place))
    assert tokens.grad is not None
    assert weights.grad is not None
    return combined.detach().cpu(), tokens.grad.cpu(), weights.grad.cpu()


@pytest.mark.parametrize("layout", ["contiguous", "padded"])
def test_gradients_are_those_of_the_cpu(
    kind: str, layout: str, communicator: weft.Communicator
) -> None:
    import torch

    upstream = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    on_cpu = weft.moe.AllToAll(communicator, gradients=True, **SHAPE)
    expected = gradients(on_cpu, "cpu", upstream)
    shape = SHAPE | {"layout": layout}
    device = weft.moe.AllToAll(communicator, gradients=True, device=kind, **shape)
    found = gradients(device, place_of(kind), upstream)
    weft.check()
    for here, there in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(here, there)
    tokens, ids, _ = inputs("cpu")
    # The sum order differs.
    size = (3 * tokens.double() * upstream.double()).abs().sum(-1, keepdim=True) * (ids >= 0)
    allowed = 2 * (64 + 2) * SINGLE * size
    assert ((found[2] - expected[2]).double().abs() <= allowed).all()
    device.close()


def replayed(
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
) -> None:
    """Capture a call, replay it with other inputs, and compare with the call itself."""
    import torch

    fixed = inputs("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*fixed)
    for seed in (2, 3, 4):
        given = inputs("cuda", seed)
        for place, value in zip(fixed, given, strict=True):
            place.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        weft.check()
        seen = [each.clone() for each in captured]
        for here, there in zip(seen, call(*given), strict=True):
            assert torch.equal(here, there)


@pytest.mark.gpu
def test_a_graph_of_forward_and_backward_pass_is_replayed(communicator: weft.Communicator) -> None:
    import torch

    all_to_all = weft.moe.AllToAll(communicator, gradients=True, device="cuda", **SHAPE)

    def call(
        tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        leaves = tokens.detach().requires_grad_(), weights.detach().requires_grad_()
        received = all_to_all.dispatch(leaves[0], ids, leaves[1])
        combined = all_to_all.combine(received, received.tokens * 3)
        received.release()
        return combined.detach(), *torch.autograd.grad(combined.sum(), leaves)

    replayed(call)
    all_to_all.close()


def layer(
    engine: str, kind: str, communicator: weft.Communicator
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
    """An engine stand-in's layer whose experts take padded batches."""
    import torch

    from tests.adapters.engines import sglang, vllm
    from tests.workers.adapters.layers import adapter

    all_to_all = weft.moe.AllToAll(communicator, device=kind, layout="padded", **SHAPE)
    module, random = adapter(engine), torch.Generator().manual_seed(9)
    first = torch.randn(4, 2 * 32, 64, generator=random).to(place_of(kind)) / 8
    second = torch.randn(4, 64, 32, generator=random).to(place_of(kind)) / 8
    if engine == "sglang":
        whole = sglang.Layer(module.Dispatcher(all_to_all), first, second, whole=True)
        return lambda tokens, ids, weights: (
            whole(tokens, sglang.StandardTopKOutput(weights, ids, None), halves=False),
        )
    parts = module.PrepareAndFinalize(all_to_all)
    runner = vllm.Experts(
        batched=True,
        left=vllm.TopKWeightAndReduceDelegate(),
        quant_config=vllm.QuantConfig(),
        whole=True,
        max_num_tokens=parts.max_num_tokens_per_rank(),
        num_dispatchers=parts.num_dispatchers(),
    )
    kernel, local = vllm.Kernel(parts, runner), torch.arange(4).to(place_of(kind))
    return lambda tokens, ids, weights: (
        kernel(tokens, first, second, weights, ids, 4, local, asynchronous=False),
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_layer_of_an_engine_is_right(
    kind: str, engine: str, communicator: weft.Communicator
) -> None:
    import torch

    tokens, ids, weights = inputs(place_of(kind))
    (found,) = layer(engine, kind, communicator)(tokens, ids, weights)
    (expected,) = layer(engine, "twin", communicator)(*inputs("cpu"))
    weft.check()
    assert expected.abs().max() > 0.1
    # Another library's GEMMs, with sums in a different order.
    assert torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_layer_of_an_engine_is_captured(engine: str, communicator: weft.Communicator) -> None:
    replayed(layer(engine, "cuda", communicator))
