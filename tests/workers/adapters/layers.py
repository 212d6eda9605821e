"""Transformers layers, run by stand-ins for engines over several ranks."""

import importlib
from typing import Any

import torch

import weft
from tests.adapters.engines import sglang, vllm
from tests.workers.moe.gradients import example
from weft.moe import AllToAll


def adapter(engine: str) -> Any:
    """The module `weft.adapters.ENGINE` over its stand-in, freshly imported."""
    {"vllm": vllm, "sglang": sglang}[engine].install()
    return importlib.import_module(f"weft.adapters.{engine}")


def make(communicator: weft.Communicator, module: Any, device: str | None, layout: str) -> AllToAll:
    shape: dict[str, Any] = {"layout": layout, "device": device, "dtype": "float32"}
    if layout == "contiguous":
        shape |= {"weighting": "expert", "pad_to": 4}
    return AllToAll(
        communicator,
        experts=module.EXPERTS,
        top_k=module.TOP_K,
        hidden=module.HIDDEN,
        max_tokens=module.TOKENS,
        **shape,
    )


def vllm_layer(all_to_all: AllToAll, experts: Any, *, way: int) -> Any:
    """A layer of the stand-in for vLLM, as a function of tokens, ids and weights."""
    module = adapter("vllm")
    parts = module.PrepareAndFinalize(all_to_all)
    stand_in = vllm
    batched = parts.activation_format is stand_in.FusedMoEActivationFormat.BatchedExperts
    lefts = [
        stand_in.TopKWeightAndReduceContiguous(),
        stand_in.TopKWeightAndReduceNoOP(),
        stand_in.TopKWeightAndReduceDelegate(),
    ]
    runner = stand_in.Experts(
        batched=batched,
        left=lefts[2] if batched else lefts[way % 3],
        quant_config=stand_in.QuantConfig(),
        max_num_tokens=parts.max_num_tokens_per_rank(),
        num_dispatchers=parts.num_dispatchers() if batched else None,
    )
    kernel = stand_in.Kernel(parts, runner)
    mine = list(all_to_all.local_experts)
    local = torch.full((all_to_all.experts,), -1)
    local[mine] = torch.arange(len(mine))

    def run(tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return kernel(
            tokens,
            experts.gate_up_proj[mine],
            experts.down_proj[mine],
            weights,
            ids,
            all_to_all.experts,
            local,
            asynchronous=way % 2 == 1,
        )

    return run


def sglang_layer(all_to_all: AllToAll, experts: Any, *, way: int) -> Any:
    """A layer of the stand-in for SGLang, as a function of tokens, ids and weights."""
    module, mine = adapter("sglang"), list(all_to_all.local_experts)
    layer = sglang.Layer(
        module.Dispatcher(all_to_all), experts.gate_up_proj[mine], experts.down_proj[mine]
    )

    def run(tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routed = sglang.StandardTopKOutput(weights, ids, None)
        return layer(tokens, routed, halves=way % 2 == 1)

    return run


def layers(engine: str, device: str | None, layout: str) -> list[list[float]]:
    """A layer's difference from one process, and the bound.

    Each layer runs in all its engine's modes, one after the other over one all-to-all.
    """
    module, reports = example(), []
    with weft.init() as communicator, torch.no_grad():
        rank = communicator.rank
        make_layer = {"vllm": vllm_layer, "sglang": sglang_layer}[engine]
        with make(communicator, module, device, layout) as all_to_all:
            random = torch.Generator().manual_seed(rank)
            for block in module.layers().values():
                for way in range(3):
                    # The last time one rank has no tokens.
                    count = 0 if way == 2 and rank == 1 else module.TOKENS - rank
                    tokens = torch.randn(1, count, module.HIDDEN, generator=random)
                    chosen = block.gate(tokens)
                    weights, ids = sorted(chosen[1:], key=lambda each: not each.is_floating_point())
                    run = make_layer(all_to_all, block.experts, way=way)
                    result = run(tokens[0], ids, weights)
                    # Padding from an earlier round must not appear in a result.
                    again = run(tokens[0], ids, weights)
                    assert torch.equal(result, again)
                    whole = block.experts(tokens[0], ids, weights)
                    allowed = module.bound(block.experts, tokens[0], ids, weights)
                    off = (result - whole).double().abs()
                    share = float((off / allowed).max()) if count else 0.0
                    reports.append([share, float(off.max()) if count else 0.0])
            communicator.barrier()
    return reports
