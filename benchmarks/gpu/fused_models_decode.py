"""Decoder in which each sum over the ranks goes through a residual and an RMS norm at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import sdpa_kernel
from training_decode import ATTENTION, Decoder, Decoding, norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from fused_models_cases import Case
    from harness.context import Context

__all__ = ["Normed", "NormedDecoding"]


class Normed(Decoder):
    """This rank's layers, input, and the output that all sides must have."""

    def __init__(self, context: Context, case: Case) -> None:
        super().__init__(context, case)
        #: Norm weights.
        self.ones = torch.ones_like(self.input[0])

    def run_normed(self, add: Callable[[int, Any, Any, Any], tuple[Any, Any]]) -> Any:
        """Output after all layers, before the last norm.

        Args:
            add: takes the GEMM number, its input and weights on this rank, and a residual; returns
            the norm of the residual plus the GEMM's sum over all ranks, and that sum.
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
    """A step's graph on one side."""

    def __init__(self, context: Context, case: Case, side: Any, data: Normed) -> None:
        self.data = data
        self.output = torch.empty_like(data.input)
        add = side.add(data)

        def work() -> None:
            self.output.copy_(data.run_normed(add))

        self.step = context.device.capture(work)
