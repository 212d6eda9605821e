"""Torch tensors in and out."""

from typing import Any

import numpy as np
import pytest

import weft

pytestmark = pytest.mark.torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_go_in_and_out(torch: Any, dtype: str, layout: Any) -> None:
    kind = getattr(torch, dtype)
    with weft.init(rank=0, world_size=1) as communicator:
        all_to_all = weft.moe.AllToAll(
            communicator, experts=2, top_k=1, hidden=3, max_tokens=4, dtype=kind, layout=layout
        )
        tokens = torch.arange(12, dtype=torch.float32).reshape(4, 3).to(kind)
        ids = torch.tensor([[0], [1], [0], [1]])
        weights = torch.full((4, 1), 0.5)
        for _ in range(3):
            with all_to_all.dispatch(tokens, ids, weights) as received:
                assert isinstance(received.tokens, torch.Tensor)
                assert received.tokens.dtype == kind
                assert not received.tokens.requires_grad
                again = np.array(received.rows)
                rows = received.tokens if layout == "contiguous" else received.tokens[again]
                combined = all_to_all.combine(received, (rows * 2).contiguous())
            assert isinstance(combined, torch.Tensor)
            assert combined.dtype == kind
            assert torch.equal(combined, tokens)


def test_received_tensors_are_views_of_one_buffer(torch: Any) -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        all_to_all = weft.moe.AllToAll(
            communicator, experts=2, top_k=1, hidden=3, max_tokens=4, channels=1
        )
        addresses = set()
        for count in (4, 2, 3):
            with all_to_all.dispatch(
                torch.ones(count, 3), torch.zeros(count, 1, dtype=torch.int32)
            ) as received:
                addresses.add(received.tokens.data_ptr())
                part = received.of_expert(0)
                assert part.data_ptr() == received.tokens.data_ptr()
        assert len(addresses) == 1


def test_no_tokens_give_no_tokens(torch: Any) -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        all_to_all = weft.moe.AllToAll(communicator, experts=2, top_k=1, hidden=3, max_tokens=4)
        with all_to_all.dispatch(
            torch.empty(0, 3), torch.empty(0, 1, dtype=torch.int64)
        ) as received:
            assert received.tokens.shape == (0, 3)
            assert all_to_all.combine(received, torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
def test_scaled_tensors_go_in_and_out(
    torch: Any, dtype: str, scale_dtype: str, layout: Any
) -> None:
    kinds = getattr(torch, dtype), getattr(torch, scale_dtype)
    with weft.init(rank=0, world_size=1) as communicator:
        all_to_all = weft.moe.AllToAll(
            communicator,
            experts=2,
            top_k=1,
            hidden=6,
            max_tokens=4,
            layout=layout,
            dtype=kinds[0],
            scale_dtype=kinds[1],
            block=4,
        )
        tokens = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(kinds[0])
        scales = torch.tensor([[1, 2], [4, 8], [16, 1], [2, 4]]).to(torch.float32).to(kinds[1])
        ids = torch.tensor([[0], [1], [0], [1]])
        with all_to_all.dispatch(tokens, ids, scales=scales) as received:
            assert (received.tokens.dtype, received.scales.dtype) == kinds
            assert received.scales.shape[1] == 2
            for expert, sent in ((0, [0, 2]), (1, [1, 3])):
                codes, factors = received.of_expert(expert), received.scales_of_expert(expert)
                assert torch.equal(codes.view(torch.uint8), tokens[sent].view(torch.uint8))
                assert torch.equal(factors.float(), scales[sent].float())


def test_gradients_and_ids_that_are_no_integers_are_refused(torch: Any) -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        all_to_all = weft.moe.AllToAll(communicator, experts=2, top_k=1, hidden=3, max_tokens=4)
        tokens, ids = torch.ones(4, 3, requires_grad=True), torch.zeros(4, 1, dtype=torch.int64)
        weights = torch.ones(4, 1, requires_grad=True)
        refused = weft.errors.ConfigurationError
        with pytest.raises(refused, match=r"tokens requires a gradient.*tokens\.detach\(\)"):
            all_to_all.dispatch_send(tokens, ids)
        with pytest.raises(refused, match=r"weights requires a gradient"):
            all_to_all.dispatch_send(tokens.detach(), ids, weights)
        for kind in (torch.float32, torch.bool, torch.bfloat16):
            with pytest.raises(weft.errors.ShapeError, match="ids"):
                all_to_all.dispatch_send(tokens.detach(), ids.to(kind))
        with torch.no_grad(), all_to_all.dispatch(tokens, ids, weights) as received:
            outputs = received.tokens.contiguous()
            assert torch.equal(all_to_all.combine(received, outputs), tokens)
