"""Dispatch and combine on a device, or its twin, bit by bit beside those on the CPU."""

import importlib
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ranks
import weft

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")

CASES: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "routing": "masked", "weighting": "expert"},
    {"dtype": "bfloat16", "combine_dtype": "float32", "output_dtype": "float32"},
    {"dtype": "bfloat16", "answer_dtype": "float32", "layout": "indexed"},
    {"dtype": "float8_e4m3fn", "hidden": 320},
    {"dtype": "float8_e4m3fn", "block": 32, "layout": "indexed", "answer_dtype": "float32"},
    {"dtype": "float8_e5m2", "scale_dtype": "float8_e8m0fnu", "block": 64, "hidden": 192},
    {"layout": "indexed", "routing": "masked", "counted": True},
    {"pad_to": 8, "routing": "masked", "dtype": "bfloat16", "counted": True},
    {"ids_dtype": "int32", "routing": "unweighted"},
    {"routing": "some"},
    {"routing": "nothing", "dtype": "float8_e4m3fn"},
    {"routing": "one", "pad_to": 8},
    {"routing": "full", "layout": "indexed"},
    {"experts": 7, "top_k": 3},
    {"experts": 3, "top_k": 2, "pad_to": 8},
    {"experts": 1, "top_k": 1},
    {"experts": 33, "top_k": 8, "hidden": 16},
    {"max_tokens": 3, "hidden": 1000},
    {"max_tokens": 8, "top_k": 4, "dtype": "bfloat16", "path": "packets"},
    {"max_tokens": 100, "path": "latency", "dtype": "bfloat16", "rounds": 2},
    {"max_tokens": 100, "path": "bandwidth", "dtype": "bfloat16", "rounds": 2},
    {"buffers": 1, "rounds": 6},
    {"buffers": 3, "max_positions": 40, "top_k": 1, "routing": "random", "experts": 64},
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("count", "step"), [(1, 2), (2, 1), (4, 3)])
def test_a_twin_gives_the_bits_of_the_cpu(count: int, step: int) -> None:
    failures = ranks.run(
        "cuda_moe.cases",
        count,
        timeout=140,
        environment={"OMP_NUM_THREADS": "1"},
        cases=CASES[::step],
        seed=count,
    )
    assert failures == [[]] * count


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@needs_gpu
@pytest.mark.timeout(600)
def test_gpus_give_the_bits_of_the_cpu() -> None:
    count = torch.cuda.device_count()
    failures = ranks.run(
        "cuda_moe.cases", count, timeout=580, cases=CASES, seed=count, device="cuda"
    )
    assert failures == [[]] * count


@needs_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
def test_a_graph_is_replayed(layout: str) -> None:
    (rank,) = cuda.local_group(1, ["cuda:0"], **SHAPE, layout=layout)
    given = [each.cuda() for each in batch(8)]

    def round() -> Any:
        with rank.dispatch(*given) as received:
            used = torch.arange(received.positions, device="cuda") < received.expert_offsets[-1]
            rows = torch.where(used, received.rows, 0) if layout == "indexed" else slice(None)
            return rank.combine(received, (received.tokens[rows] * 2).contiguous())

    round()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combined = round()
    for turn in range(3):
        given[0].copy_(batch(8)[0] + turn)
        graph.replay()
        # The last of every three tokens names one expert, and the others two; weights are halves.
        assert torch.equal(combined[:2].cpu(), (batch(8)[0] + turn)[:2] * 2)
        assert torch.equal(combined[2].cpu(), batch(8)[0][2] + turn)
    torch.cuda.synchronize()
    rank.check()


@pytest.mark.parametrize("watchdog", [False, True])
def test_a_rank_that_does_not_come_is_named_at_all_ranks(watchdog: bool) -> None:
    results = ranks.run("cuda_moe.lost", 2, skew_timeout=0.3, watchdog=watchdog, quiet=not watchdog)
    (poisoned, counts, (error, message)), (elsewhere, same) = results
    assert poisoned
    assert counts == [0]
    assert error == "WaitTimeoutError"
    assert "rank 0 waited for rank 1 in dispatch_recv" in message
    assert elsewhere == "GroupPoisonedError"
    assert message in same


SHAPE: dict[str, Any] = {"experts": 4, "top_k": 2, "hidden": 32, "max_tokens": 8}


def group(world_size: int, **arguments: Any) -> list[Any]:
    return list(cuda.local_group(world_size, ["twin"] * world_size, **(SHAPE | arguments)))


@pytest.fixture
def alone() -> Iterator[Any]:
    (rank,) = group(1)
    yield rank
    rank.close()


def batch(count: int = 3, **options: Any) -> tuple[Any, Any, Any]:
    tokens = torch.arange(count * 32, dtype=torch.float32).reshape(count, 32)
    ids = torch.tensor([[0, 1], [2, 3], [-1, 3]]).repeat(3, 1)[:count]
    return tokens.to(**options), ids, torch.full((count, 2), 0.5)


def test_the_device_decides_the_class() -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        for device in ("cpu", None, torch.device("cpu")):
            assert type(weft.moe.AllToAll(communicator, **SHAPE, device=device)) is (
                weft.moe.AllToAll
            )
        twin: Any = weft.moe.AllToAll(communicator, **SHAPE, device="twin")
        assert type(twin) is cuda.AllToAll
        assert twin.device == torch.device("cpu")
        assert twin.local_experts == range(4)
        assert twin.memory_bytes > 0
        assert f"{twin.memory_bytes}" in twin.memory_table().replace(",", "")
        with pytest.raises(weft.errors.ConfigurationError, match="'cuda:1' or 'twin'"):
            weft.moe.AllToAll(communicator, **SHAPE, device="mps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(weft.errors.ProviderError, match="no GPU here"):
        cuda.local_group(1, ["cuda:0"], **SHAPE)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"combine": "per_expert"}, "one row per token and rank"),
        ({"combine_dtype": "float8_e4m3fn"}, "answers have no scales"),
        ({"answer_dtype": "float8_e5m2"}, "answers have no scales"),
        ({"private_rows": 3}, "straight into its place"),
        ({"max_receive_rows": 3}, "max_positions"),
        ({"hidden": 30}, "120 bytes; on a device rows are multiples of 16"),
        ({"hidden": 24, "wire_dtype": "float8_e4m3fn"}, "has 24 bytes"),
        ({"dtype": "bfloat16", "wire_dtype": "float16"}, "bfloat16 cannot travel as float16"),
        ({"dtype": "float16", "wire_dtype": "float8_e4m3fn", "block": 48}, "48"),
        ({"expert_capacity": 4}, "padded"),
        ({"layout": "sideways"}, "layout"),
        ({"path": "scenic"}, "path"),
        ({"memory": "of better days"}, "memory"),
        ({"ids_dtype": "int16"}, "int16"),
        ({"top_k": 0}, "top_k|experts per token"),
        ({"buffers": 0}, "buffers"),
    ],
)
def test_arguments_without_meaning_on_a_device_are_refused(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(weft.errors.ConfigurationError, match=reason):
        group(1, **arguments)


def test_what_does_not_fit_is_refused_before_anything_is_sent(alone: Any) -> None:
    tokens, ids, weights = batch()
    odd = torch.zeros(3 * 32 + 1)[1:].reshape(3, 32)
    attempts: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "tokens has shape": ((tokens[:, :16].contiguous(), ids), {}),
        r"tokens has shape \(32,\)": ((tokens[0], ids), {}),
        "tokens is of dtype": ((tokens.half(), ids), {}),
        "tokens is a ndarray": ((tokens.numpy(), ids), {}),
        "tokens is on meta": ((tokens.to("meta"), ids), {}),
        "tokens is not contiguous": ((torch.zeros(32, 3).t(), ids), {}),
        "multiple of 16": ((odd, ids), {}),
        "9 tokens": ((torch.zeros(9, 32), torch.zeros(9, 2, dtype=torch.int64)), {}),
        "ids has shape": ((tokens, ids[:2]), {}),
        "ids is of dtype": ((tokens, ids.int()), {}),
        "weights has shape": ((tokens, ids, weights[:, :1]), {}),
        "weights is of dtype": ((tokens, ids, weights.double()), {}),
        "has no scales": ((tokens, ids), {"scales": torch.ones(3, 1)}),
        "count has shape": ((tokens, ids), {"count": torch.tensor(3, dtype=torch.int32)}),
    }
    for reason, (arguments, options) in attempts.items():
        for call in (alone.dispatch, alone.dispatch_send):
            with pytest.raises(weft.errors.ShapeError, match=reason):
                call(*arguments, **options)
    received = alone.dispatch(tokens, ids, weights)
    right = torch.zeros(received.positions, 32)
    for outputs, out, reason in (
        (right[1:], None, "outputs has shape"),
        (right.half(), None, "outputs is of dtype"),
        (right, torch.zeros(2, 32), "out has shape"),
    ):
        with pytest.raises(weft.errors.ShapeError, match=reason):
            alone.combine(received, outputs, out=out)
    out = torch.ones(3, 32)
    assert alone.combine(received, right, out=out) is out
    assert torch.equal(out, torch.zeros(3, 32))


def test_gradients_are_refused(alone: Any) -> None:
    tokens, ids, weights = batch()
    tokens.requires_grad_()
    with pytest.raises(weft.errors.ConfigurationError, match="tokens requires a gradient"):
        alone.dispatch(tokens, ids, weights)
    with torch.no_grad():
        received = alone.dispatch(tokens, ids, weights)
    outputs = torch.zeros(received.positions, 32, requires_grad=True)
    with pytest.raises(weft.errors.ConfigurationError, match="outputs requires a gradient"):
        alone.combine(received, outputs)
    received.release()


def test_calls_out_of_order_are_refused(alone: Any) -> None:
    under_way = alone.dispatch_send(*batch())
    received = under_way.recv()
    with pytest.raises(weft.errors.StageError, match="received before"):
        under_way.recv()
    outputs = torch.zeros(received.positions, 32)
    combine = alone.combine_send(received, outputs)
    with pytest.raises(weft.errors.StageError, match="combined before"):
        alone.combine(received, outputs)
    combine.recv()
    with pytest.raises(weft.errors.StageError, match="combined before"):
        combine.recv()
    received.release()
    received.release()
    with pytest.raises(weft.errors.StageError, match="released"):
        alone.combine(received, outputs)
    with pytest.raises(weft.errors.StageError, match="released"):
        received.tokens.sum()
    alone.check()


def test_a_released_round_ends_at_all_ranks() -> None:
    from workers.cuda_moe import together

    def rounds(rank: Any) -> list[bool]:
        equal = []
        for turn in range(6):
            first = rank.dispatch(*batch())
            second = rank.dispatch_send(*batch(5))
            with pytest.raises(weft.errors.BufferInUseError, match="2 rounds"):
                rank.dispatch_send(*batch())
            if turn % 2:
                first.release()
            else:
                with first:
                    rank.combine_send(first, torch.zeros(first.positions, 32))
            with second.recv() as received:
                combined = rank.combine(received, received.tokens * 2)
            equal.append(torch.equal(combined[:2], batch(5)[0][:2] * 2))
        rank.check()
        return equal

    members = group(2)
    assert together(members, rounds) == [[True] * 6] * 2
    together(members, lambda rank: rank.close())


def test_outputs_belong_to_the_caller(alone: Any) -> None:
    first = alone.dispatch(*batch())
    tokens, counts = first.tokens, first.expert_counts
    kept = tokens.clone()
    first.release()
    for _ in range(3):
        alone.dispatch(*batch(8)).release()
    assert counts.tolist() == [1, 1, 1, 2]
    assert torch.equal(tokens[:5], kept[:5])


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
    from workers.cuda_moe import cast

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


def test_what_finds_no_room_is_told_and_the_group_lives_on() -> None:
    (rank,) = group(1, layout="padded", expert_capacity=2)
    for _ in range(2):
        with rank.dispatch(*batch(8)) as received:
            assert received.expert_counts.tolist() == [0] * 4
            combined = rank.combine(received, torch.zeros(received.positions, 32))
            assert bool((combined.view(torch.uint8) == 0xFF).all())
        with pytest.raises(weft.errors.CapacityError):
            weft.check()
        with rank.dispatch(*batch(2)) as received:
            combined = rank.combine(received, received.tokens * 2)
        assert torch.equal(combined, batch(2)[0] * 2)
        weft.check()


@pytest.mark.parametrize("ids", [[[0, 4]], [[1, 1]]])
def test_experts_that_cannot_be_are_told(alone: Any, ids: list[list[int]]) -> None:
    alone.dispatch(torch.zeros(1, 32), torch.tensor(ids)).release()
    with pytest.raises(weft.errors.ExpertError):
        alone.check()
    alone.check()


def test_nothing_works_once_closed() -> None:
    (rank,) = group(1, layout="indexed")
    received = rank.dispatch(*batch())
    rank.close()
    rank.close()
    for call in (
        lambda: rank.dispatch(*batch()),
        lambda: received.tokens,
        received.release,
        lambda: rank.combine(received, torch.zeros(received.positions, 32)),
        rank.check,
    ):
        with pytest.raises(weft.errors.ClosedError):
            call()
    weft.check()


def test_a_watchdog_keeps_what_check_raises(caplog: pytest.LogCaptureFixture) -> None:
    (rank,) = group(1, watchdog=True)
    rank.dispatch(torch.zeros(1, 32), torch.tensor([[0, 9]])).release()
    while not caplog.records:
        time.sleep(0.01)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("weft.cuda", "WARNING")
    with pytest.raises(weft.errors.ExpertError):
        weft.check()
    weft.check()
    threads = threading.active_count()
    rank.close()
    assert threading.active_count() == threads - 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(
                shutil.which("g++") is None, reason="Inductor needs a C++ compiler, g++"
            ),
        ),
    ],
)
@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
def test_compiled_code_gives_the_same_bits(layout: str, backend: str) -> None:
    results = ranks.run("cuda_moe.compiled", 2, timeout=580, backend=backend, layout=layout)
    assert results == [[True] * 6 + ["nothing is held"]] * 2


@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
@pytest.mark.parametrize("test", ["test_schema", "test_faketensor"])
@pytest.mark.filterwarnings("ignore")
def test_operators_are_as_they_say(test: str, layout: str) -> None:
    # torch's own check of what an operator changes cannot compare 8-bit floats.
    dtype = "float8_e4m3fn" if test == "test_faketensor" else "bfloat16"
    (rank,) = group(1, layout=layout, dtype=dtype, block=32)
    tokens, ids, weights = batch(dtype=getattr(torch, dtype))
    scales = torch.ones(3, 1) if rank.scales else None
    given = (tokens, scales, ids, weights, torch.tensor([2], dtype=torch.int32))
    outputs = torch.zeros(rank.positions, 32, dtype=torch.bfloat16)
    for operator, *arguments in (
        ("moe_dispatch_send", *given),
        ("moe_dispatch_recv",),
        ("moe_combine_send", outputs),
        ("moe_combine_recv", 3, None),
        ("moe_dispatch", *given),
        ("moe_combine", outputs, 3, None),
        ("moe_dispatch", *given),
        ("moe_release",),
    ):
        call = getattr(torch.ops.weft, operator).default
        arguments = [rank._handle, 0, None, rank._workspace, *arguments]
        torch.library.opcheck(call, tuple(arguments), test_utils=test)
    rank.check()


def test_a_round_takes_the_channel_that_it_names() -> None:
    (rank,) = group(1, buffers=3)
    tokens, ids, weights = batch()
    first = rank.dispatch(tokens, ids, weights, channel=2, num_sms=1)
    second = rank.dispatch_send(tokens, ids, weights)
    assert (first.round, second.round) == (2, 0)
    with pytest.raises(weft.errors.BufferInUseError, match="channel 2 has a round under way"):
        rank.dispatch(tokens, ids, weights, channel=2)
    for channel in (-1, 3):
        with pytest.raises(weft.errors.ConfigurationError, match="from 0 on; pass buffers="):
            rank.dispatch_send(tokens, ids, weights, channel=channel)
    received = second.recv(num_sms=2)
    for each in (received, first):
        outputs = torch.zeros(rank.positions, rank.hidden, dtype=getattr(torch, rank.combine_dtype))
        rank.combine_send(each, outputs, num_sms=1).recv(num_sms=2)
        each.release()
    with pytest.raises(weft.errors.ConfigurationError, match="num_sms"):
        rank.dispatch(tokens, ids, weights, num_sms=0)
    # Nothing was sent, and the channel is free.
    assert rank.dispatch(tokens, ids, weights).round == 0
    rank.check()
