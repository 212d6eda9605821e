"""Gradients through dispatch and combine, compared with float64 and with one process."""

import gc
import importlib.util
import weakref
from typing import Any

import pytest

import weft
from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(150)]

torch = pytest.importorskip("torch")

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SHAPES: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "weighting": "expert"},
    {"dtype": "bfloat16", "combine_dtype": "float32", "output_dtype": "float32"},
    {"dtype": "bfloat16", "reply_dtype": "float32", "pad_to": 4},
    {"weighting": "expert", "pad_to": 8},
    {"top_k": 5, "experts": 7, "channels": 1},
    {"top_k": 1, "experts": 1},
]
CPU: list[dict[str, Any]] = [{"combine": "per_expert"}, {"private_rows": 1, "hidden": 5}]
DEVICE: list[dict[str, Any]] = [
    {"layout": "padded", "dtype": "bfloat16"},
    {"ids_dtype": "int64", "path": "bandwidth"},
]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("device", [None, "twin"])
def test_gradients_keep_the_stated_bounds(device: str | None, count: int) -> None:
    shapes = SHAPES + (DEVICE if device else CPU)
    reports = ranks.run(
        "moe.gradients.cases",
        count,
        timeout=140,
        environment=ONE_THREAD,
        with_torch=True,
        device=device,
        shapes=shapes[:: count // 2],
    )
    assert reports == [[]] * count


@pytest.mark.parametrize("device", [None, "twin"])
def test_parts_of_a_graph_leave_no_round_open(device: str | None) -> None:
    reports = ranks.run(
        "moe.gradients.parts",
        2,
        timeout=100,
        environment=ONE_THREAD,
        with_torch=True,
        device=device,
    )
    assert reports == [[], []]


def test_tokens_that_do_not_exist_have_gradients_of_zero() -> None:
    reports = ranks.run(
        "moe.gradients.counted", 2, timeout=100, environment=ONE_THREAD, with_torch=True
    )
    assert reports == [[0.0] * 4] * 2


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", [None, "twin"])
def test_a_layer_has_the_gradients_of_one_process(
    device: str | None, dtype: str, count: int
) -> None:
    reports = ranks.run(
        "moe.gradients.layer",
        count,
        timeout=100,
        environment=ONE_THREAD,
        with_torch=True,
        device=device,
        dtype=dtype,
    )
    check_layers(reports, dtype)


@pytest.mark.parametrize(("count", "dtype"), [(2, "float32"), (4, "float32"), (2, "bfloat16")])
def test_layers_of_transformers_have_the_gradients_of_one_process(count: int, dtype: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, which is not installed: pip install 'weft[layer]'")
    reports = ranks.run(
        "moe.gradients.transformers_layers",
        count,
        timeout=140,
        environment=ONE_THREAD,
        with_torch=True,
        quiet=False,
        device="twin",
        dtype=dtype,
    )
    for name in ("Qwen3-MoE", "DeepSeek-V3"):
        check_layers([each[name] for each in reports], dtype)


def check_layers(reports: list[dict[str, list[float]]], dtype: str) -> None:
    """Each difference is within its bound, and small: the bound is for the worst case."""
    for off in reports:
        for name, numbers in off.items():
            for of_bound, relative in zip(numbers[::2], numbers[1::2], strict=True):
                assert of_bound <= 1, (name, of_bound)
                assert relative < {"float32": 2e-5, "bfloat16": 0.06}[dtype], (name, relative)


def test_what_has_no_gradients_is_refused() -> None:
    shape: dict[str, Any] = {"experts": 2, "top_k": 1, "hidden": 16, "max_tokens": 4}
    refused = weft.errors.ConfigurationError
    with weft.init(rank=0, world_size=1) as communicator:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"layout": "indexed"}, "layout='indexed'"),
            ({"dtype": "float8_e4m3fn"}, "received codes have no gradient"),
            ({"wire_dtype": "float8_e4m3fn", "device": "twin"}, "received codes have no gradient"),
            ({"layout": "indexed", "device": "twin"}, "layout='indexed'"),
            ({"layout": "dense", "device": "twin"}, "layout='dense'"),
        ]
        for more, reason in cases:
            with pytest.raises(refused, match=reason):
                weft.moe.AllToAll(communicator, gradients=True, **shape, **more)
        for device in (None, "twin"):
            all_to_all = weft.moe.AllToAll(communicator, gradients=True, device=device, **shape)
            tokens = torch.ones(4, 16, requires_grad=True)
            received = all_to_all.dispatch(tokens, torch.zeros(4, 1, dtype=torch.int64))
            with pytest.raises(refused, match="out= of a differentiable round"):
                all_to_all.combine(received, received.tokens, out=torch.zeros(4, 16))
            with pytest.raises(weft.errors.ShapeError, match=r"is a .* torch tensor"):
                all_to_all.combine(received, received.tokens.detach().numpy())
            result = all_to_all.combine(received, received.tokens * 3)
            received.release()
            result.sum().backward()
            assert torch.equal(tokens.grad, torch.full((4, 16), 3.0))


@pytest.mark.parametrize("device", [None, "twin"])
@pytest.mark.parametrize("halves", [False, True])
def test_a_round_that_is_over_keeps_nothing(device: str | None, halves: bool) -> None:
    shape: dict[str, Any] = {"experts": 2, "top_k": 1, "hidden": 16, "max_tokens": 4}
    gc.collect()
    gc.disable()
    try:
        with weft.init(rank=0, world_size=1) as communicator:
            all_to_all = weft.moe.AllToAll(communicator, gradients=True, device=device, **shape)
            tokens = torch.ones(4, 16, requires_grad=True)
            ids = torch.zeros(4, 1, dtype=torch.int64)
            with all_to_all.dispatch(tokens, ids) as received:
                outputs = received.tokens * 3
                if halves:
                    result = all_to_all.combine_send(received, outputs).recv()
                else:
                    result = all_to_all.combine(received, outputs)
            result.sum().backward()
            kept = [weakref.ref(each) for each in (tokens, received, outputs, result)]
            del tokens, received, outputs, result
            assert [each() for each in kept] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("device", [None, "twin"])
def test_memory_of_the_backward_pass_is_counted_and_limited(device: str | None) -> None:
    shape: dict[str, Any] = {"experts": 2, "top_k": 1, "hidden": 16, "max_tokens": 64}
    with weft.init(rank=0, world_size=1) as communicator:
        plain = weft.moe.AllToAll(communicator, device=device, **shape)
        whole = weft.moe.AllToAll(communicator, gradients=True, device=device, **shape)
        assert whole.memory_bytes > 2 * plain.memory_bytes
        # Weight rows may be as long as short token rows.
        assert whole.memory_table().count(plain.memory_table()) >= 2
        limit = whole.memory_bytes
        whole.close()
        with pytest.raises(weft.errors.SizeError):
            weft.moe.AllToAll(
                communicator, gradients=True, device=device, max_bytes=limit - 1, **shape
            )
        made = weft.moe.AllToAll(
            communicator, gradients=True, device=device, max_bytes=limit, **shape
        )
        assert made.memory_bytes == limit


# Dynamo warnings on autograd functions and on tensors with a history.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_code_breaks_its_graph_at_a_differentiable_round() -> None:
    cuda = importlib.import_module("weft.cuda")
    (alone,) = cuda.local_group(
        1, ["twin"], gradients=True, experts=2, top_k=1, hidden=16, max_tokens=4
    )

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def tripled(tokens: Any, ids: Any) -> Any:
        received = alone.dispatch(tokens, ids)
        combined = alone.combine(received, received.tokens * 3)
        received.release()
        return combined

    tokens = torch.randn(4, 16, requires_grad=True)
    result = tripled(tokens, torch.zeros(4, 1, dtype=torch.int64))
    result.sum().backward()
    assert torch.equal(result, tokens * 3)
    assert torch.equal(tokens.grad, torch.full((4, 16), 3.0))
    alone.close()


def test_ranks_of_a_local_group_have_gradients() -> None:
    cuda = importlib.import_module("weft.cuda")
    (alone,) = cuda.local_group(
        1, ["twin"], gradients=True, experts=2, top_k=2, hidden=16, max_tokens=4
    )
    tokens, weights = torch.randn(4, 16, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    received = alone.dispatch(tokens, torch.tensor([[0, 1]] * 4), weights)
    alone.combine(received, received.tokens).sum().backward()
    received.release()
    assert torch.allclose(tokens.grad, weights.detach().sum(1, keepdim=True).expand(4, 16))
    assert torch.allclose(weights.grad, tokens.detach().sum(1, keepdim=True).expand(4, 2))
    alone.close()


@pytest.mark.parametrize("halves", [False, True])
def test_the_backward_round_goes_by_the_plan_of_the_forward_round(
    monkeypatch: pytest.MonkeyPatch, halves: bool
) -> None:
    cuda = importlib.import_module("weft.cuda")
    (alone,) = cuda.local_group(
        1, ["twin"], gradients=True, experts=3, top_k=2, hidden=16, max_tokens=4
    )
    rows, passed = alone._backward.rows, []
    dispatch = rows.dispatch

    def record(*given: Any, **named: Any) -> Any:
        passed.append((len(given), named.get("handle"), named.get("ids")))
        return dispatch(*given, **named)

    monkeypatch.setattr(rows, "dispatch", record)
    tokens, ids = torch.randn(4, 16, requires_grad=True), torch.tensor([[0, 2], [1, -1]] * 2)
    count = torch.tensor([3], dtype=torch.int32)
    if halves:
        received = alone.dispatch_send(tokens, ids, count=count).recv()
    else:
        received = alone.dispatch(tokens, ids, count=count)
    handle = received.handle
    alone.combine(received, received.tokens * 3).sum().backward()
    received.release()
    assert passed == [(1, handle, None)]
    assert torch.equal(tokens.grad.sum(1), torch.tensor([96.0, 48.0, 96.0, 0.0]))
    alone.close()
