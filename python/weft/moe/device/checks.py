"""Tensor checks for device all-to-all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from weft.base.array import refuse_gradient
from weft.base.errors import ConfigurationError, ShapeError
from weft.gpu.tensors import is_tensor
from weft.moe.device.launcher import NOTHING, Added, Batch
from weft.moe.device.outputs import Outputs
from weft.moe.differentiable import detached, refuse_out

if TYPE_CHECKING:
    from weft.moe.device.config import Config
    from weft.moe.device.launcher import Launcher

__all__ = ["ArgumentChecks", "Bias"]

#: Tensors that combine adds to the sums: one, or two.
Bias: TypeAlias = torch.Tensor | Sequence[torch.Tensor | None] | None


class ArgumentChecks:
    """Shapes, dtypes and device that tensors passed to an all-to-all must have.

    Args:
        config: the all-to-all's configuration.
        launcher: the all-to-all's launcher.
        experts: physical experts on all ranks, each replica counted.
        local_experts: physical experts on this rank.
    """

    def __init__(
        self, config: Config, launcher: Launcher, experts: int, local_experts: int
    ) -> None:
        self._config, self._device, self._layout = config, launcher.device, launcher.layout
        self._positions, self._experts = launcher.positions, experts
        #: Rows per expert in the padded layout.
        self.expert_capacity: int | None = None
        #: Shape for outputs by expert, in the padded layout.
        self._by_expert: tuple[int, int, int] | None = None
        if config.layout == "padded":
            capacity = self.expert_capacity = self._positions // launcher.layout.counted
            self._by_expert = (local_experts, capacity, config.hidden)

    def batch(self, batch: Batch, *, differentiable: bool) -> Batch:
        """A dispatch's batch, without autograd history, if all tensors fit."""
        config = self._config
        tokens, scales, ids, weights, count, layer = batch
        if differentiable:
            tokens, weights = detached(tokens), detached(weights)
        is_tensor(tokens, "tokens")
        given = tokens.shape[0] if tokens.ndim else 0
        self._tensor(tokens, (given, config.hidden), config.token_dtype, "tokens")
        if given > config.max_tokens:
            raise ShapeError(f"{given} tokens are given; max_tokens is {config.max_tokens}")
        if ids is not None:  # else a handle has them
            self._tensor(ids, (given, config.top_k), config.ids_dtype, "ids")
        if weights is not None:
            self._tensor(weights, (given, config.top_k), "float32", "weights")
        scales = self._scales(scales, given)
        if count is not None:
            self._tensor(count, (1,), "int32", "count")
        return Batch(tokens, scales, ids, weights, count, layer)

    def _scales(self, scales: torch.Tensor | None, given: int) -> torch.Tensor | None:
        config = self._config
        if (scales is None) == config.scales_given:
            needed = "needs scales" if scales is None else "has no scales"
            raise ShapeError(f"dtype {config.token_dtype} {needed}")
        if scales is not None and config.scales is not None:
            is_tensor(scales, "scales")
            dtype = config.scales[0]
            if dtype == "float8_e8m0fnu" and scales.dtype == torch.uint8:
                scales = scales.view(torch.float8_e8m0fnu)
            self._tensor(scales, (given, config.scale_columns), dtype, "scales")
        return scales

    def expert_load(self, load: torch.Tensor | None) -> None:
        """Raise if kernels cannot add expert load there."""
        if load is not None:
            is_tensor(load, "expert_load")
            dtype = "int64" if load.dtype == torch.int64 else "int32"
            self._tensor(load, (self._experts,), dtype, "expert_load")
            if not load.is_contiguous():
                raise ShapeError("expert_load is not contiguous: kernels add to it in place")

    def dispatch_out(self, out: Outputs | None, *, differentiable: bool) -> None:
        """Raise if dispatch cannot write there."""
        if out is not None:
            self.fitting(out)
            if differentiable:
                refuse_out(out)
            if torch.compiler.is_compiling():
                raise ConfigurationError(
                    "out= of dispatch in compiled code: leave it away; the compiler plans memory"
                )

    def fitting(self, out: Outputs) -> Outputs:
        """Dispatch outputs, if they have this layout."""
        if not isinstance(out, Outputs):
            raise ShapeError(f"out is a {type(out).__name__}: pass what empty_outputs() returns")
        if out._layout is not self._layout and out._layout != self._layout:
            raise ShapeError("out is of an all-to-all of another shape, or on another device")
        return out

    def by_position(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs by expert as position rows, if the shape matches."""
        shape = self._by_expert
        if shape is None or not isinstance(outputs, torch.Tensor) or outputs.shape != shape:
            return outputs
        whole = shape[0] * shape[1] == self._positions and outputs.is_contiguous()
        return outputs.view(self._positions, shape[2]) if whole else outputs

    def expert_outputs(
        self, outputs: torch.Tensor, positions: int, *, counted: bool, differentiable: bool
    ) -> torch.Tensor:
        """Expert outputs by position, if they fit.

        Args:
            outputs: tensor given to combine.
            positions: position count in the round.
            counted: whether the host has the round's counts.
            differentiable: whether autograd records the round.
        """
        hidden = self._config.hidden
        shape: tuple[int, ...] = (self._positions, hidden)
        by_expert = self._by_expert is not None and getattr(outputs, "ndim", 0) == 3
        if by_expert and self._by_expert is not None:
            shape = self._by_expert
        given = detached(outputs) if differentiable else outputs
        if not differentiable and getattr(given, "ndim", 0) == 2:
            # Fewer rows do where they are enough, and more where all are known: kernels look.
            rows = given.shape[0]
            shape = max(rows, positions) if counted else min(rows, positions), hidden
        self._tensor(given, shape, self._config.combine_dtype, "outputs")
        return self._flat(outputs, padded=differentiable) if by_expert else outputs

    def _flat(self, outputs: torch.Tensor, *, padded: bool) -> torch.Tensor:
        """Outputs by expert as rows by position; `padded`: for all positions.

        The backward pass needs all; kernels read no row behind the last expert's.
        """
        if not outputs.is_contiguous():
            raise ShapeError("outputs is not contiguous: pass outputs.contiguous()")
        flat = outputs.view(-1, self._config.hidden)
        missing = self._positions - len(flat)
        return torch.nn.functional.pad(flat, (0, 0, 0, missing)) if padded and missing else flat

    def added(
        self,
        sent: int,
        out: torch.Tensor | None,
        bias: Bias,
        *,
        accumulate: bool,
        differentiable: bool,
    ) -> Added:
        """Rows that combine adds to the sums, if they and `out` fit."""
        if differentiable:
            refuse_out(out)
        shape, dtype = (sent, self._config.hidden), self._config.output_dtype
        if out is not None:
            self._tensor(out, shape, dtype, "out")
        if accumulate and out is None:
            raise ConfigurationError("accumulate=True without out=: pass the tensor to add to")
        if bias is None and not accumulate:
            return NOTHING
        given = bias if isinstance(bias, tuple | list) else (bias,)
        if len(given) > 2:
            raise ShapeError(f"bias has {len(given)} tensors; at most 2 are possible")
        for each in given:
            if each is not None:
                self._tensor(detached(each) if differentiable else each, shape, dtype, "bias")
        first, second = (*given, None, None)[:2]
        return first, second, out if accumulate else None

    def _tensor(self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str, what: str) -> None:
        is_tensor(tensor, what)
        if tensor.shape != shape:
            raise ShapeError(f"{what} has shape {tuple(tensor.shape)}; {shape} is needed")
        if tensor.dtype != getattr(torch, dtype):
            raise ShapeError(f"{what} is of dtype {tensor.dtype}; torch.{dtype} is needed")
        if tensor.device != self._device:
            raise ShapeError(f"{what} is on {tensor.device}; this all-to-all is on {self._device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            refuse_gradient(tensor, what)
