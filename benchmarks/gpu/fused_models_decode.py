"""Decoder of which each sum over the ranks goes through a residual and an RMS norm at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import sdpa_kernel
from training_decode import ATTENTION, Decoder, Decoding, norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from fused_models_cases import Case
    from fused_models_rank import Context

__all__ = ["Normed", "NormedDecoding"]


class Normed(Decoder):
    """Layers of this rank, input, and the output that all sides must have."""

    def __init__(self, context: Context, case: Case) -> None:
        super().__init__(context, case)
        #: Weights of norms.
        self.ones = torch.ones_like(self.input[0])

    def run_normed(self, add: Callable[[int, Any, Any, Any], tuple[Any, Any]]) -> Any:
        """Output of all layers, before the last norm.

        Args:
            add: of the number of a product, its input and weights on this rank, and a residual:
                norm of the residual with the sum of the product over all ranks, and that sum.
        """
        states = self.input
        with torch.no_grad(), sdpa_kernel(ATTENTION):
            normed = norm(states)
            for number, layer in enumerate(self.layers):
                attended = layer.attend(normed)
                normed, states = add(2 * number, attended, layer.attention_out, states)
                fed = layer.feed(normed)
                normed, states = add(2 * number + 1, fed, layer.mlp_out, states)
        return states


class NormedDecoding(Decoding):
    """The graph of a step on one side."""

    def __init__(self, context: Context, case: Case, side: Any, data: Normed) -> None:
        self.data = data
        self.output = torch.empty_like(data.input)
        add = side.add(data)

        def work() -> None:
            self.output.copy_(data.run_normed(add))

        self.step = context.device.capture(work)
