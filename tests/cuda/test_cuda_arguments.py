"""Device all-to-all arguments, stages and errors."""

import importlib
import threading
import time
from typing import Any

import pytest

import weft
from tests.device_group import SHAPE, batch, group

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")


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
        ({"combine_dtype": "float8_e4m3fn"}, "replies have no scales"),
        ({"reply_dtype": "float8_e5m2"}, "replies have no scales"),
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
        ({"channels": 0}, "channels"),
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
        (right[:, 1:], None, "outputs has shape"),
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


def test_a_round_takes_the_channel_that_it_names() -> None:
    (rank,) = group(1, channels=3)
    tokens, ids, weights = batch()
    first = rank.dispatch(tokens, ids, weights, channel=2, num_sms=1)
    second = rank.dispatch_send(tokens, ids, weights)
    assert (first.round, second.round) == (2, 0)
    with pytest.raises(weft.errors.ChannelInUseError, match="channel 2 has a round in flight"):
        rank.dispatch(tokens, ids, weights, channel=2)
    for channel in (-1, 3):
        with pytest.raises(weft.errors.ConfigurationError, match="from 0 on; pass channels="):
            rank.dispatch_send(tokens, ids, weights, channel=channel)
    received = second.recv(num_sms=2)
    for each in (received, first):
        outputs = torch.zeros(rank.positions, rank.hidden, dtype=getattr(torch, rank.combine_dtype))
        rank.combine_send(each, outputs, num_sms=1).recv(num_sms=2)
        each.release()
    with pytest.raises(weft.errors.ConfigurationError, match="num_sms"):
        rank.dispatch(tokens, ids, weights, num_sms=0)
    # The round was not sent, and the channel is free.
    assert rank.dispatch(tokens, ids, weights).round == 0
    rank.check()
