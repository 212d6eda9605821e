"""Decoding with tensor-parallel layers in Llama's shape: one token per sequence, two all-reduces.

Attention over a KV cache, and a gated MLP; the weights are random and split over the ranks by heads
and by columns. RMS norms have no weights, and there is no rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.context import Context
    from training_cases import Case
    from training_sides import Group

__all__ = [
    "ATTENTION",
    "EPSILON",
    "Decoder",
    "Decoding",
    "Layer",
    "attended",
    "gated",
    "norm",
    "relative",
]

#: Attention kernels, the same on all sides.
ATTENTION: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

#: For norms.
EPSILON: Final = 1e-5


@dataclass(frozen=True)
class Layer:
    """A rank's part of a layer; `heads` counts cache heads, `group` the query heads for each."""

    #: [heads * (group + 2) * head, hidden]: queries, keys, values.
    attention: Any
    #: [hidden, heads * group * head]
    attention_out: Any
    #: [2 * inner / ranks, hidden]: gates, values.
    mlp: Any
    #: [hidden, inner / ranks]
    mlp_out: Any
    #: [tokens, heads, cache, head]; the last place is for the current token.
    keys: Any
    values: Any

    def attend(self, states: Any) -> Any:
        """Input for `attention_out`, from states [tokens, hidden]."""
        return attended(states @ self.attention.t(), self.keys, self.values)

    def feed(self, states: Any) -> Any:
        """Input for `mlp_out`, from states [tokens, hidden]."""
        return gated(states @ self.mlp.t())


def attended(made: Any, cached_keys: Any, cached_values: Any) -> Any:
    """Attention over queries, keys and values, [tokens, columns]; the cache gets the last ones."""
    tokens, heads, _, head = cached_keys.shape
    queries, keys, values = made.split(
        [made.shape[1] - 2 * heads * head, heads * head, heads * head], 1
    )
    cached_keys[:, :, -1] = keys.view(tokens, heads, head)
    cached_values[:, :, -1] = values.view(tokens, heads, head)
    # The queries that share a cache head are rows in one GEMM.
    grouped = queries.view(tokens, heads, -1, head)
    found = functional.scaled_dot_product_attention(grouped, cached_keys, cached_values)
    return found.reshape(tokens, -1)


def gated(made: Any) -> Any:
    """Values times SiLU(gates), both in a tensor [tokens, columns]."""
    gates, values = made.chunk(2, 1)
    return functional.silu(gates) * values


def make_layer(context: Context, case: Case, rank: int, number: int) -> Layer:
    """A rank's part of a layer: determined by both numbers, on any rank."""
    shape, ranks, device = case.shape, context.ranks, context.device.name
    source = torch.Generator(device).manual_seed(1000 * (number + 1) + rank)
    hidden, inner, head = shape["hidden"], shape["inner"] // ranks, shape["head"]
    heads, group = shape["kv_heads"] // ranks, hidden // head // shape["kv_heads"]

    def normal(*size: int, terms: int = 1) -> Any:
        made = torch.randn(size, dtype=context.dtype, device=device, generator=source)
        return made.mul_(terms**-0.5)

    cache = (shape["tokens"], heads, shape["cache"], head)
    return Layer(
        normal(heads * (group + 2) * head, hidden, terms=hidden),
        normal(hidden, heads * group * head, terms=hidden),
        normal(2 * inner, hidden, terms=hidden),
        normal(hidden, inner, terms=shape["inner"]),
        normal(*cache),
        normal(*cache),
    )


def norm(states: Any) -> Any:
    """RMS norm."""
    return functional.rms_norm(states, states.shape[1:], eps=EPSILON)


class Decoder:
    """This rank's layers, input, and the output that all sides must have."""

    def __init__(self, context: Context, case: Case) -> None:
        self.context, self.case = context, case
        shape, device = case.shape, context.device.name
        self.layers = [
            make_layer(context, case, context.rank, number) for number in range(shape["layers"])
        ]
        source = torch.Generator(device).manual_seed(7)
        size = (shape["tokens"], shape["hidden"])
        self.input = torch.randn(size, dtype=context.dtype, device=device, generator=source)
        with torch.no_grad():
            self.output = self.reference().float()

    def run(self, add: Callable[[int, Any, Any], Any]) -> Any:
        """Output after all layers.

        Args:
            add: sums a GEMM over all ranks, [tokens, hidden]; takes its number, and its input and
            weights on this rank.
        """
        states = self.input
        with torch.no_grad(), sdpa_kernel(ATTENTION):
            for number, layer in enumerate(self.layers):
                attended = layer.attend(norm(states))
                states = states + add(2 * number, attended, layer.attention_out)
                fed = layer.feed(norm(states))
                states = states + add(2 * number + 1, fed, layer.mlp_out)
        return states

    def attend(self, part: Layer, states: Any) -> Any:
        """Input for a part's `attention_out`."""
        return part.attend(states)

    def reference(self) -> Any:
        """Output from only this rank, with sums in float32."""
        states = self.input
        with sdpa_kernel(ATTENTION):
            for number in range(len(self.layers)):
                parts = [
                    make_layer(self.context, self.case, rank, number)
                    for rank in range(self.context.ranks)
                ]
                given = norm(states)
                partials = [self.attend(part, given) @ part.attention_out.t() for part in parts]
                states = states + torch.stack(partials).float().sum(0).to(states.dtype)
                given = norm(states)
                partials = [part.feed(given) @ part.mlp_out.t() for part in parts]
                states = states + torch.stack(partials).float().sum(0).to(states.dtype)
        return states


class Decoding:
    """A step's graph on one side."""

    def __init__(self, context: Context, case: Case, side: Group, data: Decoder) -> None:
        self.data = data
        size = (case.shape["tokens"], case.shape["hidden"])
        self.output = torch.empty_like(data.input)
        # A sum may be read while the next one is made.
        buffers = side.buffers(2, size)

        def add(number: int, given: Any, weights: Any) -> Any:
            buffer = buffers[number % 2]
            torch.mm(given, weights.t(), out=buffer)
            return side.all_reduce(buffer)

        def work() -> None:
            self.output.copy_(data.run(add))

        self.step = context.device.capture(work)

    def facts(self) -> dict[str, Any]:
        """Error in the last step's output: its norm over the reference's norm."""
        return {"error": relative(self.output.float(), self.data.output)}


def relative(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of the expected values."""
    error: float = ((found - expected).norm() / expected.norm()).item()
    return error
