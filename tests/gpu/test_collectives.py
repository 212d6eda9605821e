"""Results from device collectives beside a reference on the CPU, bit by bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weft import cuda

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_after_each_other_give_the_bits_of_the_reference(kind: str, seed: int) -> None:
    from tests.gpu.collective_calls import Group, calls_of, ranks_of

    ranks = ranks_of(kind, seed)
    group = Group(kind, ranks)
    # An allocation between launches could wait for a rank's kernels on the same GPU.
    group.verify(calls_of(seed, ranks, 25, allocate=not group.shared), seed)
    group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_share_gpus_give_the_bits_of_the_reference(ranks: int, seed: int) -> None:
    from tests.gpu.collective_calls import Group, calls_of

    group = Group("cuda", ranks)
    group.verify(calls_of(100 + seed, ranks, 25, allocate=False), seed)
    group.close()


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "direct"])
def test_every_op_of_every_dtype_gives_the_bits_of_the_reference(kind: str, algorithm: str) -> None:
    from tests.gpu.collective_calls import Call, Group, ranks_of
    from tests.gpu.collective_reference import BITWISE, FLOATS, INTEGERS, OPS

    # Kernels are compiled for each pair: on a GPU only some.
    pairs = [(op, dtype) for dtype in (*INTEGERS, *FLOATS) for op in OPS]
    pairs += [(op, dtype) for dtype in INTEGERS for op in BITWISE]
    if kind == "cuda":
        chance = random.Random(1)
        pairs = [*chance.sample(pairs, 12), ("sum", "bfloat16"), ("avg", "float32")]
        pairs += [("sum", "float8_e4m3fn"), ("avg", "float8_e5m2")]
    group = Group(kind, 3 if kind == "twin" else ranks_of(kind, 0))
    options = {"algorithm": algorithm}
    calls = [
        Call(
            "all_reduce",
            dtype,
            op,
            rows=37,
            row=(5,),
            options=dict(options),
            symmetric=algorithm == "direct",
        )
        for op, dtype in pairs
    ]
    group.verify(calls, 5)
    group.close()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_pair_of_float8_numbers_has_the_bits_of_torch(kind: str, dtype: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from tests.gpu.collective_reference import OPS, reduce

    number = getattr(torch, dtype)
    codes = torch.arange(256, dtype=torch.uint8)
    # Rank 0 has each code 256 times, rank 1 all codes 256 times.
    sources = [codes.repeat_interleave(256), codes.repeat(256)]
    group = Group(kind, 2)
    for member in group.members:
        for op in OPS:
            member.prepare(op, number)
    given = [
        each.view(number).to(member.device)
        for each, member in zip(sources, group.members, strict=True)
    ]
    outs = {op: [torch.empty_like(each) for each in given] for op in OPS}
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        for op in OPS:
            member.all_reduce(given[rank], op, out=outs[op][rank])

    group.run(work)
    for op in OPS:
        expected = torch.from_numpy(reduce(op, dtype, [each.numpy() for each in sources]))
        for out in outs[op]:
            wrong = (out.cpu().view(torch.uint8) != expected).nonzero().flatten()
            assert not len(wrong), (op, len(wrong), divmod(int(wrong[0]), 256))
    assert group.raised() == [""] * 2
    group.close()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_long_vectors_give_the_bits_of_the_reference(kind: str, name: str, symmetric: bool) -> None:
    from tests.gpu.collective_calls import Call, Group, ranks_of

    ranks = 3 if kind == "twin" else ranks_of(kind, 0)
    group = Group(kind, ranks)
    rows = 40_000 if kind == "twin" else 1_000_000
    calls = [
        Call(
            name,
            "bfloat16",
            "sum",
            rows=rows + odd,
            row=(7,),
            mode=mode,
            offset=odd,
            symmetric=symmetric,
        )
        for odd, mode in [(0, "out"), (1, "in place"), (8, "in place")]
    ]
    tiny = [Call("all_reduce", "bfloat16", rows=1, row=(3,)), Call("broadcast", rows=0)]
    group.verify([calls[0], *tiny, calls[1], *tiny, calls[2]], 6)
    group.close()


def test_algorithms_and_runs_give_the_same_bits_on_all_ranks(kind: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group, ranks_of

    group = Group(kind, ranks_of(kind, 1))
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(len(group.members), 1111, generator=generator).half() * 300
    given = [[row.to(m.device)] * 4 for row, m in zip(values, group.members, strict=True)]
    outs = [[torch.empty_like(each) for each in row] for row in given]
    for member in group.members:
        member.prepare("sum", torch.float16)
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        ways: list[dict[str, Any]] = [
            {},
            {"algorithm": "one_shot"},
            {"algorithm": "two_shot"},
            {"algorithm": "two_shot", "num_sms": 1},
        ]
        for tensor, out, way in zip(given[rank], outs[rank], ways, strict=True):
            assert member.all_reduce(tensor, out=out, **way) is out

    group.run(work)
    first = outs[0][0].cpu()
    assert all(torch.equal(out.cpu(), first) for row in outs for out in row)
    assert group.raised() == [""] * len(group.members)
    group.close()


def test_autograd_notices_a_tensor_that_a_call_has_changed() -> None:
    import torch

    from weft.cuda import local_collectives

    (member,) = local_collectives(1, ["twin"])
    weight = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    loss = (weight * saved).sum()
    member.all_reduce(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        assert member.all_reduce(torch.ones(3)).tolist() == [1.0] * 3
    member.close()


def test_one_rank_over_a_communicator_copies() -> None:
    import torch

    import weft
    from weft import cuda

    with weft.init(rank=0, world_size=1) as communicator:
        with cuda.Collectives(communicator, device="twin", watchdog=True) as alone:
            assert (alone.rank, alone.world_size, alone.device) == (0, 1, torch.device("cpu"))
            assert alone.num_sms > 0
            assert alone.memory_bytes > 0
            rows = torch.arange(12.0).view(4, 3)
            for result in (
                alone.all_reduce(rows.clone()),
                alone.reduce_scatter(rows, "avg"),
                alone.reduce(rows.clone(), op="max"),
                alone.all_gather(rows),
                alone.all_to_all(rows),
                alone.all_to_all(rows, input_splits=[4], output_splits=[4]),
                alone.broadcast(rows.clone()),
                alone.gather(rows),
                alone.scatter(rows, out=torch.zeros(4, 3)),
            ):
                assert result is not None
                assert torch.equal(result, rows)
            assert alone.barrier() is None
            assert alone.barrier(async_finish=True).query()
            weft.check()
        left = cuda.Collectives(communicator, device="twin")
    # The communicator closed it.
    with pytest.raises(weft.errors.ClosedError):
        left.barrier()


def test_compiled_code_calls_between_its_graphs() -> None:
    import torch

    from weft.cuda import local_collectives

    (member,) = local_collectives(1, ["twin"])

    def step(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        return member.all_reduce(doubled) + 1

    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(torch.ones(5)), torch.full((5,), 3.0))
    member.close()
