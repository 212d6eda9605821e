"""Adapters for inference engines, with stand-ins for the engines."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from tests import ranks
from tests.adapters.engines import removed

pytestmark = [pytest.mark.torch, pytest.mark.timeout(150)]

torch = pytest.importorskip("torch")

SHAPE: dict[str, Any] = {"experts": 2, "top_k": 2, "hidden": 128, "max_tokens": 4}


@pytest.mark.parametrize(
    ("device", "layout", "count"),
    [
        (None, "contiguous", 2),
        (None, "contiguous", 4),
        ("twin", "contiguous", 2),
        ("twin", "padded", 2),
        ("twin", "padded", 4),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_layers_of_transformers_run_in_an_engine(
    engine: str, device: str | None, layout: str, count: int
) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, which is not installed: pip install 'weft[layer]'")
    reports = ranks.run(
        "adapters.layers.layers",
        count,
        timeout=140,
        environment={"OMP_NUM_THREADS": "1"},
        with_torch=True,
        quiet=False,
        engine=engine,
        device=device,
        layout=layout,
    )
    for each in reports:
        assert len(each) == 6
        for share, most in each:
            assert share <= 1
            # A token at a wrong expert differs by far more.
            assert most < 1e-3


@pytest.fixture
def engines() -> Iterator[Any]:
    """Adapters over stand-ins."""
    with removed():
        yield importlib.import_module("tests.workers.adapters.layers")


@pytest.fixture
def communicator() -> Iterator[weft.Communicator]:
    with weft.init(rank=0, world_size=1) as made:
        yield made


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_its_engine_an_adaptor_names_it(engine: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    with pytest.raises(weft.errors.ConfigurationError, match=f"pip install {engine}"):
        importlib.import_module(f"weft.adapters.{engine}")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_layouts_and_weights_that_do_not_fit_are_refused(
    engines: Any, communicator: weft.Communicator, engine: str
) -> None:
    module = engines.adapter(engine)
    kind = module.PrepareAndFinalize if engine == "vllm" else module.Dispatcher
    cases: list[tuple[dict[str, Any], str]] = [
        ({"layout": "indexed"}, "takes 'padded'"),
        ({"layout": "contiguous"}, "pass weighting='expert'"),
        ({"layout": "padded", "weighting": "expert"}, "pass weighting='combine'"),
    ]
    for more, reason in cases:
        all_to_all = weft.moe.AllToAll(communicator, device="twin", **SHAPE, **more)
        with pytest.raises(weft.errors.ConfigurationError, match=reason):
            kind(all_to_all)


def batch() -> tuple[Any, Any, Any]:
    return torch.randn(3, 128), torch.rand(3, 2), torch.tensor([[0, 1], [1, -1], [1, 0]])


def test_vllm_is_refused_what_would_go_wrong_silently(
    engines: Any, communicator: weft.Communicator
) -> None:
    module, stand_in = engines.adapter("vllm"), engines.vllm
    all_to_all = weft.moe.AllToAll(communicator, device="twin", layout="padded", **SHAPE)
    parts = module.PrepareAndFinalize(all_to_all)
    tokens, weights, ids = batch()
    plain, refused = stand_in.QuantConfig(), weft.errors.ConfigurationError
    fp8 = stand_in.QuantConfig(torch.float8_e4m3fn, [128, 128])
    with pytest.raises(refused, match="wire_dtype='float8_e4m3fn'"):
        parts.prepare(tokens, weights, ids, 2, None, False, fp8, False)
    with pytest.raises(refused, match="num_experts=3"):
        parts.prepare(tokens, weights, ids, 3, None, False, plain, False)
    with pytest.raises(refused, match="apply_router_weight_on_input with top-k 2"):
        parts.prepare(tokens, weights, ids, 2, None, True, plain, False)
    left, output = stand_in.TopKWeightAndReduceDelegate(), torch.empty(3, 128)
    with pytest.raises(weft.errors.StageError, match="call prepare"):
        parts.finalize(output, tokens, weights, ids, False, left)
    rows, *_ = parts.prepare(tokens, weights, ids, 2, None, False, fp8, True)
    with pytest.raises(weft.errors.StageError, match="call finalize"):
        parts.prepare(tokens, weights, ids, 2, None, False, plain, False)
    no_op = stand_in.TopKWeightAndReduceNoOP()
    with pytest.raises(refused, match="TopKWeightAndReduceNoOP"):
        parts.finalize(output, rows, weights, ids, False, no_op)
    # Into an output with another dtype.
    wide = torch.empty(3, 128, dtype=torch.float64)
    parts.finalize(wide, rows, weights, ids, False, left)
    expected = tokens * (weights * (ids >= 0)).sum(1, keepdim=True)
    assert torch.allclose(wide.float(), expected)


def test_vllm_applies_weights_on_the_input_for_a_top_k_of_one(
    engines: Any, communicator: weft.Communicator
) -> None:
    module, stand_in = engines.adapter("vllm"), engines.vllm
    for layout, weighting in (("padded", "combine"), ("contiguous", "expert")):
        shape = SHAPE | {"top_k": 1, "layout": layout, "weighting": weighting}
        all_to_all = weft.moe.AllToAll(communicator, device="twin", **shape)
        parts = module.PrepareAndFinalize(all_to_all)
        tokens, weights, ids = batch()
        weights, ids = weights[:, :1].contiguous(), ids[:, :1].contiguous()
        given = (tokens, weights, ids, 2, None, True, stand_in.QuantConfig(), False)
        rows, _, _, of_rows, at_rows = parts.prepare(*given)
        output, left = torch.empty(3, 128), stand_in.TopKWeightAndReduceDelegate()
        at_rows = weights if at_rows is None else at_rows
        parts.finalize(output, rows, at_rows, ids if of_rows is None else of_rows, True, left)
        assert torch.allclose(output, tokens * weights)


def test_codes_and_scales_reach_both_engines_by_expert(
    engines: Any, communicator: weft.Communicator
) -> None:
    arguments = SHAPE | {"hidden": 256, "dtype": "bfloat16", "wire_dtype": "float8_e4m3fn"}
    tokens = torch.randn(3, 256).bfloat16()
    _, weights, ids = batch()
    codes, factors = weft.float8.quantise(tokens.float().numpy(), block=128)
    whole = torch.from_numpy(weft.float8.dequantise(codes, factors, block=128))
    stand_in = engines.vllm
    fp8 = stand_in.QuantConfig(torch.float8_e4m3fn, [128, 128])
    all_to_all = weft.moe.AllToAll(communicator, device="twin", layout="padded", **arguments)

    parts = engines.adapter("vllm").PrepareAndFinalize(all_to_all)
    with pytest.raises(weft.errors.ConfigurationError, match="experts take None"):
        parts.prepare(tokens, weights, ids, 2, None, False, stand_in.QuantConfig(), False)
    rows, scales, meta, *_ = parts.prepare(tokens, weights, ids, 2, None, False, fp8, False)
    assert meta.expert_num_tokens.tolist() == [2, 3]
    check_codes(rows, scales, whole)
    output, left = torch.empty_like(tokens), stand_in.TopKWeightAndReduceDelegate()
    parts.finalize(output, rows.bfloat16(), weights, ids, False, left)

    dispatcher = engines.adapter("sglang").Dispatcher(all_to_all)
    formats = engines.sglang
    given = dispatcher.dispatch(tokens, formats.StandardTopKOutput(weights, ids, None))
    assert given.masked_m.tolist() == [2, 3]
    assert given.expected_m == (3 * 1 * 2 + 2) // 2
    check_codes(given.hidden_states, given.hidden_states_scale, whole)
    with pytest.raises(weft.errors.StageError, match=r"expected CombineInputFormat\.DEEPEP_LL"):
        dispatcher.combine(formats.DeepEPNormalCombineInput(given[0], given[2], given[3]))
    with pytest.raises(weft.errors.StageError, match="call combine"):
        dispatcher.dispatch(tokens, formats.StandardTopKOutput(weights, ids, None))
    back = formats.DeepEPLLCombineInput(given[0].bfloat16(), given[2], given[3])
    assert torch.equal(dispatcher.combine(back), output)
    for call in (lambda: dispatcher.combine(back), dispatcher.dispatch_b, dispatcher.combine_b):
        with pytest.raises(weft.errors.StageError, match="call"):
            call()


def check_codes(rows: Any, scales: Any, whole: Any) -> None:
    """Tokens 0 and 2 go to expert 0, all go to expert 1, in order."""
    assert rows.shape == (2, 4, 256)
    assert scales.shape == (2, 4, 2)
    wide = rows.float() * scales.repeat_interleave(128, -1)
    # Kernels multiply by the inverse scale, `quantise` divides: some codes differ by one.
    assert torch.allclose(wide[0, :2], whole[[0, 2]], rtol=2**-3, atol=1e-5)
    assert torch.allclose(wide[1, :3], whole, rtol=2**-3, atol=1e-5)
    assert torch.equal(wide[0, :2], wide[1, [0, 2]])
