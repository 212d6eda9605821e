"""Tensor-parallel layers in plain torch, by DTensor, compiled with several passes."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from training_decode import Decoder, Layer, attended, gated, norm, relative

if TYPE_CHECKING:
    from collections.abc import Callable

    from fused_models_cases import Case
    from fused_models_sides import Compiled
    from harness.context import Context

__all__ = ["Compiling", "Stack"]

#: GEMMs in a layer, and the axis by which each one's weights are divided among the ranks.
GEMMS = {"attention": 0, "attention_out": 1, "mlp": 0, "mlp_out": 1}


def causal(made: Any, heads: int, head: int) -> Any:
    """Attention over one sequence's queries, keys and values, [tokens, columns].

    Args:
        made: queries, keys and values on this rank.
        heads: key and value heads.
        head: columns per head.
    """
    tokens, columns = made.shape
    parts = made.split([columns - 2 * heads * head, heads * head, heads * head], 1)
    queries, keys, values = (part.view(1, tokens, -1, head).transpose(1, 2) for part in parts)
    found = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    return found.transpose(1, 2).reshape(tokens, -1)


class Stack(Decoder):
    """This rank's weights, input, and the output that all sides must have."""

    def attend(self, part: Layer, states: Any) -> Any:
        """Input for a part's `attention_out`."""
        if self.case.kind == "compile decode":
            return super().attend(part, states)
        _, heads, _, head = part.keys.shape
        return causal(states @ part.attention.t(), heads, head)


class Block(nn.Module):
    """A layer with a rank's weights, as single-process modules before `parallelize`."""

    def __init__(self, part: Layer, mesh: Any, *, has_cache: bool) -> None:
        super().__init__()
        for name, axis in GEMMS.items():
            weight = getattr(part, name)
            linear = nn.Linear(1, 1, bias=False, device="meta")
            divided = DTensor.from_local(weight, mesh, [Shard(axis)], run_check=False)
            linear.weight = nn.Parameter(divided, requires_grad=False)
            self.add_module(name, linear)
        self.has_cache = has_cache
        self.register_buffer("keys", part.keys, persistent=False)
        self.register_buffer("values", part.values, persistent=False)

    def forward(self, states: Any) -> Any:
        """States after the layer."""
        made = self.attention(norm(states))
        if self.has_cache:
            found = attended(made, self.keys, self.values)
        else:
            found = causal(made, self.keys.shape[1], self.keys.shape[3])
        states = states + self.attention_out(found)
        return states + self.mlp_out(gated(self.mlp(norm(states))))


def parallelize(block: Block, mesh: Any, *, is_sequence: bool) -> None:
    """Divide a layer's GEMMs among the ranks.

    Args:
        block: layer.
        mesh: device mesh over the ranks.
        is_sequence: True to divide rows between the GEMMs too.
    """
    between = Shard(0) if is_sequence else Replicate()
    plan: dict[str, Any] = {
        name: (
            ColwiseParallel(input_layouts=between)
            if axis == 0
            else RowwiseParallel(output_layouts=between)
        )
        for name, axis in GEMMS.items()
    }
    # Weights are divided already.
    parallelize_module(block, mesh, plan, src_data_rank=None)


def apart(name: str, function: Any) -> Callable[..., Any]:
    """A function with separate code: the compiler's caches are by code."""
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, None, function.__closure__)


class Compiling:
    """A step on one side: a graph, or a compiled function if it cannot be captured."""

    def __init__(self, context: Context, case: Case, side: Compiled, data: Stack) -> None:
        self.data, device = data, context.device
        model = nn.Sequential()
        for part in data.layers:
            block = Block(part, side.mesh, has_cache=case.kind == "compile decode")
            parallelize(block, side.mesh, is_sequence=side.is_sequence)
            model.append(block)
        given, expected = data.input, data.output
        if side.is_sequence:
            rows = len(given) // context.ranks
            mine = slice(context.rank * rows, (context.rank + 1) * rows)
            given, expected = given[mine].clone(), expected[mine]
        self.expected, self.output = expected, torch.empty_like(given)

        def run(states: Any) -> Any:
            return model(states)

        words = f"{case.name} {side.name}".replace(",", "").replace(" ", "_")
        # C++ for pointwise operators on the CPU is slow to compile.
        options = {"fallback_by_default": True} if device.kind == "twin" else None
        compiled = torch.compile(apart(words, run), fullgraph=True, dynamic=False, options=options)

        def work() -> None:
            with torch.no_grad():
                self.output.copy_(compiled(given))

        with side.settings():
            work()
        device.synchronise()
        #: Reason for which there is no graph.
        self.no_graph: str | None = None
        try:
            self.step = device.capture(work)
        except RuntimeError as error:
            self.step, self.no_graph = work, str(error)[:500]
        self.report = counts(side.fused.report())

    def facts(self) -> dict[str, Any]:
        """Error in the last step's output, the pass's counts, and why no graph ran."""
        error = relative(self.output.float(), self.expected)
        return {"error": error, "report": self.report, "no_graph": self.no_graph}


def counts(report: Any) -> dict[str, Any]:
    """Counts in a `weft.fused` report, those with reasons as lists."""
    return {
        "matches": dict(report.matches),
        "substitutions": dict(report.substitutions),
        "fused_calls": dict(report.fused_calls),
        "refusals": [[*key, count] for key, count in sorted(report.refusals.items())],
        "unfused_calls": [[*key, count] for key, count in sorted(report.unfused_calls.items())],
    }
