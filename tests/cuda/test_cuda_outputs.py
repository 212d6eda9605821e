"""Device all-to-all outputs: memory, layouts, casts."""

import importlib
import itertools
from typing import Any

import numpy as np
import pytest

import weft
from tests.device_group import batch, group

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")


def test_outputs_belong_to_the_caller(alone: Any) -> None:
    first = alone.dispatch(*batch())
    tokens, counts = first.tokens, first.expert_counts
    kept = tokens.clone()
    first.release()
    for _ in range(3):
        alone.dispatch(*batch(8)).release()
    assert counts.tolist() == [1, 1, 1, 2]
    assert torch.equal(tokens[:5], kept[:5])


OUTPUTS = ("tokens", "scales", "expert_counts", "expert_offsets", "rows", "weights")


@pytest.mark.parametrize("layout", ["contiguous", "padded", "indexed"])
def test_a_dispatch_allocates_once(layout: str) -> None:
    (rank,) = group(1, layout=layout, dtype="bfloat16", wire_dtype="float8_e4m3fn", block=32)
    received = rank.dispatch(*batch(dtype=torch.bfloat16))
    names = OUTPUTS[2:] if layout == "indexed" else OUTPUTS
    tensors = [getattr(received, name) for name in names]
    assert all(
        getattr(received, name) is tensor for name, tensor in zip(names, tensors, strict=True)
    )
    (storage,) = {each.untyped_storage().data_ptr() for each in tensors}
    parts = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
    assert parts[0][0] == storage
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(parts))
    assert all(begin % 16 == 0 for begin, _ in parts)
    received.release()
    for name in OUTPUTS:
        with pytest.raises(weft.errors.StageError, match="released"):
            getattr(received, name)


@pytest.mark.parametrize("layout", ["contiguous", "padded", "indexed"])
@pytest.mark.parametrize("halves", [False, True])
def test_dispatch_writes_where_it_is_told(layout: str, halves: bool) -> None:
    (rank,) = group(1, layout=layout)
    outputs, other = rank.empty_outputs(), group(1, layout=layout)[0].empty_outputs()
    own = rank.dispatch(*batch())
    expected = {name: getattr(own, name).clone() for name in OUTPUTS if name != "scales"}
    used = int(own.expert_offsets[-1])
    own.release()
    for out in (outputs, outputs, other):
        # Unwritten bytes are unchanged.
        out._buffer.zero_()
        if halves:
            received = rank.dispatch_send(*batch()).recv(out=out)
        else:
            received = rank.dispatch(*batch(), out=out)
        for name in ("expert_counts", "expert_offsets"):
            assert getattr(received, name) is getattr(out, name)
            assert torch.equal(getattr(out, name), expected[name])
        for name in ("rows", "weights"):
            assert torch.equal(getattr(out, name)[:used], expected[name][:used])
        if layout != "indexed":
            assert received.tokens is out.tokens
        received.release()
    (wider,) = group(1, layout=layout, experts=5)
    for wrong in (wider.empty_outputs(), outputs._buffer):
        with pytest.raises(weft.errors.ShapeError, match="out is"):
            rank.dispatch(*batch(), out=wrong)
        under_way = rank.dispatch_send(*batch())
        with pytest.raises(weft.errors.ShapeError, match="out is"):
            under_way.recv(out=wrong)
        under_way.recv().release()


def test_landed_rows_are_a_view_of_the_heap() -> None:
    (rank,) = group(1, layout="indexed", dtype="bfloat16")
    addresses = set()
    for count in (3, 8, 1):
        with rank.dispatch(*batch(count, dtype=torch.bfloat16)) as received:
            assert received.tokens.shape == (8, 32)
            assert received.scales is None
            assert torch.equal(received.tokens[:count], batch(count, dtype=torch.bfloat16)[0])
            assert set(received.rows[: int(received.expert_offsets[-1])].tolist()) == {
                *range(count)
            }
            addresses.add(received.tokens.data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
@pytest.mark.parametrize(("hidden", "block"), [(64, 32), (320, 128), (256, 256)])
def test_the_kernel_casts_as_numpy_does(hidden: int, block: int, scale_dtype: str) -> None:
    from tests.workers.cuda.moe import cast

    (rank,) = group(
        1,
        hidden=hidden,
        dtype="bfloat16",
        wire_dtype="float8_e4m3fn",
        block=block,
        scale_dtype=scale_dtype,
    )
    random = np.random.default_rng(hidden)
    values = random.standard_normal((8, hidden)) * 3.0 ** random.integers(-20, 20, (8, 1))
    tokens = torch.from_numpy(values).bfloat16()
    tokens[3, :block] = 0
    tokens[4, 0] = 0
    ids = torch.zeros(8, 2, dtype=torch.int64) - torch.tensor([0, 1])
    with rank.dispatch(tokens, ids) as received:
        assert received.tokens.dtype == torch.float8_e4m3fn
        assert received.scales.dtype == getattr(torch, scale_dtype)
        codes, scales = cast(tokens.float().numpy(), block, scale_dtype != "float32")
        for given, expected in ((received.tokens, codes), (received.scales, scales)):
            bits = given[:8].contiguous().view(torch.uint8).numpy()
            assert np.array_equal(bits, expected.view(np.uint8).reshape(bits.shape))


def test_padded_experts_have_rooms_of_their_own() -> None:
    (rank,) = group(1, layout="padded", expert_capacity=8)
    with rank.dispatch(*batch(6)) as received:
        assert received.positions == 32
        assert received.expert_counts.tolist() == [2, 2, 2, 4]
        assert received.expert_offsets.tolist() == [0, 8, 16, 24, 32]
        assert torch.equal(received.of_expert(0), batch(6)[0][[0, 3]])
        combined = rank.combine(received, received.tokens * 2)
        assert torch.equal(combined[:2], batch(6)[0][:2] * 2)


def test_dense_rows_are_what_a_fused_kernel_takes() -> None:
    members = group(2, layout="dense", dtype="float32", hidden=8, experts=4, ids_dtype="int32")
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    tokens = [torch.randn(3, 8, generator=generator) for _ in members]
    ids = [torch.tensor(each, dtype=torch.int32) for each in ([[0, 3], [2, -1], [1, 0]], [[3, 2]])]
    weights = [torch.full(each.shape, 0.5) for each in ids]
    begun = [
        member.dispatch_send(x[: len(i)], i, w)
        for member, x, i, w in zip(members, tokens, ids, weights, strict=True)
    ]
    received = [dispatch.recv() for dispatch in begun]
    assert [each.source_offsets.tolist() for each in received] == [[0, 2, 2], [0, 2, 3]]
    assert received[0].ids[:2].tolist() == [[0, -1], [1, 0]]
    assert received[1].ids[:3].tolist() == [[-1, 1], [0, -1], [1, 0]]
    for each in received:
        used = int(each.source_offsets[-1])
        assert (each.ids[used:] == -1).all()
        assert torch.equal(each.weights, torch.where(each.ids < 0, 0, 0.5))
    assert torch.equal(received[1].tokens[2], tokens[1][0])
    with pytest.raises(weft.errors.ConfigurationError, match="find them by ids"):
        received[0].of_expert(0)

    combining = []
    for member, each in zip(members, received, strict=True):
        factor = factors[member.local_experts.start + each.ids.clamp(min=0)] * each.weights
        # Values behind the last row may be NaN.
        rows = torch.where(each.ids.ge(0).any(dim=1)[:, None], each.tokens, 0)
        combining.append(member.combine_send(each, rows * factor.sum(dim=1, keepdim=True)))
    combined = [combine.recv() for combine in combining]
    assert torch.equal(combined[0], tokens[0] * torch.tensor([[4.5], [2.0], [1.5]]))
    assert torch.equal(combined[1], tokens[1][:1] * 6)
    for each in received:
        each.release()


def test_dense_outputs_have_their_weights_applied() -> None:
    with pytest.raises(weft.errors.ConfigurationError, match="use weighting expert"):
        group(1, layout="dense", weighting="combine")
