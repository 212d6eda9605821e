"""Received tokens in DeepGEMM's grouped GEMM layouts, and their outputs in combine."""

import importlib
from typing import Any

import pytest

import weft

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")

#: The first rank has 3 experts and the second 4.
SHAPE: dict[str, Any] = {"experts": 7, "top_k": 2, "hidden": 64, "max_tokens": 9}


def group(**arguments: Any) -> list[Any]:
    return list(cuda.local_group(2, ["twin"] * 2, **(SHAPE | arguments)))


def batch(rank: Any, count: int = 9) -> tuple[Any, Any, Any]:
    random = torch.Generator().manual_seed(rank.rank)
    tokens = torch.randn(count, 64, generator=random).to(getattr(torch, rank.dtype))
    keys = torch.rand(count, 7, generator=random)
    ids = keys.topk(2).indices
    # A rank's last expert has no tokens, and some tokens have one expert.
    ids[(ids == 6) | (torch.rand(ids.shape, generator=random) < 0.2)] = -1
    return tokens, ids, torch.rand(count, 2, generator=random)


def bits(tensor: Any) -> Any:
    # An empty tensor counts as contiguous whatever its strides are.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("path", [None, "latency", "bandwidth"])
@pytest.mark.parametrize("pad_to", [1, 16])
def test_m_indices_name_the_expert_of_each_row(path: str | None, pad_to: int) -> None:
    from tests.workers.cuda.moe import together

    def check(rank: Any) -> Any:
        with rank.dispatch(*batch(rank)) as received:
            indices = received.m_indices
            assert indices.dtype == torch.int32
            assert indices.shape == (rank.positions,)
            counts, offsets = received.expert_counts.tolist(), received.expert_offsets.tolist()
            expected = torch.full((rank.positions,), -1, dtype=torch.int32)
            for expert, (begin, count) in enumerate(zip(offsets, counts, strict=False)):
                expected[begin : begin + count] = expert
            assert torch.equal(indices, expected)
            assert offsets[-1] < rank.positions, "some positions are behind the last group"
            return counts

    counts = together(group(path=path, pad_to=pad_to), check)
    assert sum(map(sum, counts)) > 0
    assert counts[1][3] == 0


def test_m_indices_name_nothing_where_there_was_no_room() -> None:
    (rank,) = cuda.local_group(1, ["twin"], **SHAPE, max_positions=4)
    with rank.dispatch(*batch(rank)) as received:
        assert received.m_indices.tolist() == [-1] * 4
    with pytest.raises(weft.errors.CapacityError):
        rank.check()


@pytest.mark.parametrize("layout", ["indexed", "padded"])
def test_other_layouts_have_no_m_indices(layout: str) -> None:
    (rank,) = cuda.local_group(1, ["twin"], **SHAPE, layout=layout)
    with rank.dispatch(*batch(rank)) as received:
        assert received.m_indices is None


@pytest.mark.parametrize("wire", [None, "float8_e4m3fn"])
def test_the_padded_layout_is_seen_by_expert(wire: str | None) -> None:
    from tests.workers.cuda.moe import together

    def check(rank: Any) -> int:
        experts = len(rank.local_experts)
        assert rank.expert_capacity == 12
        with rank.dispatch(*batch(rank)) as received:
            tokens, scales = received.expert_tokens, received.expert_scales
            assert tokens.shape == (experts, 12, 64)
            assert tokens.data_ptr() == received.tokens.data_ptr()
            assert torch.equal(received.masked_m, received.expert_counts)
            for expert, count in enumerate(received.masked_m.tolist()):
                of_it = received.of_expert(expert)
                assert torch.equal(bits(tokens[expert, :count]), bits(of_it))
                if wire is not None:
                    assert scales.shape == (experts, 12, 2)
                    expected = received.scales_of_expert(expert)
                    assert torch.equal(scales[expert, :count], expected)
            assert (scales is None) == (wire is None)
            return int(received.masked_m.sum())

    members = group(
        layout="padded", expert_capacity=12, dtype="bfloat16", wire_dtype=wire, block=32
    )
    assert min(together(members, check)) > 0


@pytest.mark.parametrize("halves", [False, True])
def test_combine_takes_outputs_by_expert(halves: bool) -> None:
    from tests.workers.cuda.moe import together

    def check(rank: Any) -> bool:
        results = []
        for by_expert in (False, True):
            with rank.dispatch(*batch(rank)) as received:
                tokens = received.expert_tokens if by_expert else received.tokens
                outputs = tokens * 3
                if halves:
                    results.append(rank.combine_send(received, outputs).recv())
                else:
                    results.append(rank.combine(received, outputs))
        assert results[0].abs().sum() > 0
        return bool(torch.equal(*results))

    assert together(group(layout="padded"), check) == [True, True]


def test_outputs_by_expert_have_gradients() -> None:
    from tests.workers.cuda.moe import together

    def check(rank: Any) -> bool:
        gradients = []
        for by_expert in (False, True):
            tokens, ids, weights = (each.clone() for each in batch(rank))
            tokens.requires_grad_()
            weights.requires_grad_()
            received = rank.dispatch(tokens, ids, weights)
            rows = received.expert_tokens if by_expert else received.tokens
            combined = rank.combine(received, rows * 3)
            received.release()
            combined.square().sum().backward()
            assert tokens.grad.abs().sum() > 0
            gradients.append((tokens.grad, weights.grad))
        return all(torch.equal(*each) for each in zip(*gradients, strict=True))

    assert together(group(layout="padded", gradients=True), check) == [True, True]


def test_what_is_not_by_expert_is_refused() -> None:
    (rank,) = cuda.local_group(1, ["twin"], **SHAPE, layout="padded")
    with rank.dispatch(*batch(rank)) as received:
        right = torch.zeros(7, 9, 64)
        for outputs, reason in (
            (right[:6], r"outputs has shape \(6, 9, 64\); \(7, 9, 64\) is needed"),
            (right.transpose(0, 1).contiguous().transpose(0, 1), "outputs is not contiguous"),
            (right.half(), "outputs is of dtype"),
        ):
            with pytest.raises(weft.errors.ShapeError, match=reason):
                rank.combine(received, outputs)
        assert torch.equal(rank.combine(received, right), torch.zeros(9, 64))
    (rank,) = cuda.local_group(1, ["twin"], **SHAPE, pad_to=8)
    with rank.dispatch(*batch(rank)) as received:
        for name in ("expert_tokens", "expert_scales"):
            if name == "expert_scales":
                assert received.expert_scales is None
                continue
            with pytest.raises(weft.errors.ConfigurationError, match="pass layout='padded'"):
                getattr(received, name)
        with pytest.raises(weft.errors.ShapeError, match="outputs has shape"):
            rank.combine(received, torch.zeros(7, 9, 64))


def aligned(scales: Any) -> Any:
    """Scales by row in DeepGEMM's float32 layout: column by column, in multiples of 16 bytes."""
    groups = scales if scales.ndim == 3 else scales[None]
    each = 16 // scales.itemsize
    length = -(-groups.shape[1] // each) * each
    placed = torch.zeros(len(groups), groups.shape[2], length, dtype=scales.dtype)
    by_row = placed.transpose(1, 2)[:, : groups.shape[1]]
    by_row.copy_(groups)
    return by_row if scales.ndim == 3 else by_row[0]


def packed(scales: Any) -> Any:
    """float8_e8m0fnu scales by row, four in an int32, column by column."""
    codes = scales.view(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4))
    words = codes.contiguous().view(torch.int32)
    return aligned(words)


@pytest.mark.parametrize("path", ["packets", "latency", "bandwidth"])
@pytest.mark.parametrize("layout", ["contiguous", "padded"])
@pytest.mark.parametrize(
    ("scale_layout", "scale_dtype"),
    [("column", "float32"), ("column", "float8_e8m0fnu"), ("column_packed", "float8_e8m0fnu")],
)
def test_scales_lie_in_aligned_columns(
    path: str, layout: str, scale_layout: str, scale_dtype: str
) -> None:
    from tests.workers.cuda.moe import together

    # Six scales: two words, one half full; 11 rows, not a multiple of 16 bytes.
    shape: dict[str, Any] = {
        "hidden": 192,
        "layout": layout,
        "path": path,
        "dtype": "bfloat16",
        "wire_dtype": "float8_e4m3fn",
        "block": 32,
        "scale_dtype": scale_dtype,
    }
    room = {"expert_capacity": 11} if layout == "padded" else {"max_positions": 31, "pad_to": 3}

    def check(rank: Any) -> list[bool]:
        by_row, by_column = rank
        tokens, ids, weights = batch(by_row)
        tokens = tokens.repeat(1, 3) * torch.arange(192)
        tokens = tokens.bfloat16()
        row = by_row.dispatch(tokens, ids, weights)
        column = by_column.dispatch(tokens, ids, weights)
        wanted = row.expert_scales if layout == "padded" else row.scales
        wanted = packed(wanted) if scale_layout == "column_packed" else aligned(wanted)
        seen = column.expert_scales if layout == "padded" else column.scales
        assert seen.shape == wanted.shape
        assert seen.stride() == wanted.stride()
        assert seen.dtype == wanted.dtype
        assert seen.data_ptr() % 16 == 0
        equal = []
        for expert, (begin, count) in enumerate(
            zip(row.expert_offsets, row.masked_m, strict=False)
        ):
            if layout == "padded":
                mine, theirs = seen[expert, :count], wanted[expert, :count]
            else:
                mine, theirs = (each[begin : begin + count] for each in (seen, wanted))
            equal.append(torch.equal(bits(mine), bits(theirs)))
            equal.append(torch.equal(bits(column.scales_of_expert(expert)), bits(theirs)))
        assert row.masked_m.sum() > 0
        row.release()
        column.release()
        by_column.check()
        return equal

    rows, columns = group(**shape, **room), group(**shape, **room, scale_layout=scale_layout)
    results = together(list(zip(rows, columns, strict=True)), check)
    assert [all(each) for each in results] == [True, True]
    assert [len(each) for each in results] == [6, 8]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"scale_layout": "column"}, "have no scales"),
        ({"scale_layout": "sideways"}, "scale_layout"),
        (
            {"scale_layout": "column", "layout": "indexed", "dtype": "float8_e4m3fn"},
            "leaves scales in the rows",
        ),
        ({"scale_layout": "column_packed", "dtype": "float8_e4m3fn"}, "float8_e8m0fnu"),
    ],
)
def test_scales_that_cannot_lie_so_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(weft.errors.ConfigurationError, match=reason):
        group(**arguments)


@pytest.mark.parametrize("scale_layout", ["column", "column_packed"])
@pytest.mark.parametrize("layout", ["contiguous", "padded"])
def test_compiled_code_has_columns_of_scales(layout: str, scale_layout: str) -> None:
    (rank,) = cuda.local_group(
        1,
        ["twin"],
        **SHAPE,
        dtype="bfloat16",
        wire_dtype="float8_e4m3fn",
        block=32,
        scale_dtype="float8_e8m0fnu",
        layout=layout,
        scale_layout=scale_layout,
    )
    tokens, ids, weights = batch(rank)

    def layer(tokens: Any, ids: Any, weights: Any) -> Any:
        with rank.dispatch(tokens, ids, weights) as received:
            assert received.scales is not None
            scales, counts = received.scales.clone(), received.expert_counts * 1
            return scales, counts, received.expert_offsets * 1

    results = [
        call(tokens, ids, weights)
        for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True))
    ]
    (one, counts, offsets), (other, *_) = results
    assert one.stride() == other.stride()
    assert counts.sum() > 0
    for expert, (begin, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        rows = (expert, slice(count)) if layout == "padded" else slice(begin, begin + count)
        assert torch.equal(bits(one[rows]), bits(other[rows]))
