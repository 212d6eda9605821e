"""Prepare and finalize for vLLM's modular kernels over `weft.moe.AllToAll`.

vLLM builds a fused MoE kernel from a pair: one object that brings tokens to the experts and results
back (`FusedMoEPrepareAndFinalizeModular`), and one that runs the experts
(`FusedMoEExpertsModular`). `PrepareAndFinalize` is the first of the two. For example::

    communicator = weft.Communicator.from_group(get_ep_group().device_group)
    all_to_all = weft.moe.AllToAll(
        communicator, experts=256, top_k=8, hidden=7168, max_tokens=128,
        dtype="bfloat16", wire_dtype="float8_e4m3fn", layout="padded", device="cuda",
    )
    kernel = FusedMoEKernel(PrepareAndFinalize(all_to_all), experts)

In the padded layout the activation format is `BatchedExperts`: rows are `[local experts, capacity,
hidden]`, with counts, and combine applies the router's weights. In the contiguous layout it is
`Standard`: a row for each token and local expert, with one id and one weight, which the experts
apply, or leave to finalize (`TopKWeightAndReduce`).

Importing this imports vLLM, https://github.com/vllm-project/vllm. It uses the interface in
which `prepare` takes `(a1, topk_weights, topk_ids, num_experts, expert_map,
apply_router_weight_on_input, quant_config, defer_input_quant)`, for example vLLM 0.18.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

try:
    from vllm.model_executor.layers.fused_moe import modular_kernel as kernels
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate as Delegate,
    )
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "vllm":
        raise
    from weft.base.errors import ConfigurationError as _ConfigurationError

    raise _ConfigurationError("weft.adapters.vllm needs vLLM: pip install vllm") from error

try:
    from vllm.v1.worker.ubatching import dbo_current_ubatch_id as micro_batch
except ModuleNotFoundError:

    def micro_batch() -> int:
        """Micro-batch number: 0, since this vLLM does not overlap micro-batches."""
        return 0


from weft.adapters import _shape
from weft.base.errors import ConfigurationError, ShapeError, StageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.moe import AllToAll, Received

__all__ = ["PrepareAndFinalize"]

#: Before vLLM had monolithic kernels, the modular one had no separate name.
_Base: Any = getattr(
    kernels, "FusedMoEPrepareAndFinalizeModular", kernels.FusedMoEPrepareAndFinalize
)


class PrepareAndFinalize(_Base):  # type: ignore[misc]
    """vLLM's interface to an all-to-all. A round is open from `prepare` to `finalize`.

    Args:
        all_to_all: in the padded layout with `weighting="combine"`, or contiguous with "expert".
            Layers that run one after the other may share it.

    Raises:
        ConfigurationError: if the layout or weighting does not fit.
    """

    def __init__(self, all_to_all: AllToAll) -> None:
        # Base constructors differ between vLLM versions, and set no attribute used here.
        _shape.check(all_to_all, "vLLM")
        self.all_to_all = all_to_all
        #: By micro-batch; vLLM may run two in turns: `None` until it was received.
        self._rounds: dict[int, Received | None] = {}

    @property
    def activation_format(self) -> Any:
        """Row layout that `prepare` returns."""
        formats = kernels.FusedMoEActivationFormat
        return formats.BatchedExperts if _shape.batched(self.all_to_all) else formats.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Dtype of expert ids."""
        return _shape.torch_dtype(getattr(self.all_to_all, "ids_dtype", "int64"))

    def max_num_tokens_per_rank(self) -> int | None:
        """Maximum tokens in a batch, if it sets the length of experts' batches."""
        return self.all_to_all.max_tokens if _shape.batched(self.all_to_all) else None

    def num_dispatchers(self) -> int:
        """Ranks that send tokens."""
        return _shape.ranks(self.all_to_all)

    def output_is_reduced(self) -> bool:
        """Results are complete: no reduction over ranks follows."""
        return True

    def supports_async(self) -> bool:
        """True: `prepare_async` and `finalize_async` exist."""
        return True

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Callable[[], Any]:
        """Send tokens to the experts; returns the call that waits for the other ranks' tokens.

        Args:
            a1: `[tokens, hidden]`.
            topk_weights: `[tokens, top_k]`.
            topk_ids: `[tokens, top_k]`, expert ids in the whole group; -1 for none.
            num_experts: experts in the whole group.
            expert_map: not needed: experts stand in blocks, by rank.
            apply_router_weight_on_input: multiply tokens by the weight here, only for top-k 1.
            quant_config: the dtype and block of `wire_dtype`, or none.
            defer_input_quant: the experts quantise.

        Raises:
            ConfigurationError: if the all-to-all has another number of experts, or sends tokens in
                another dtype than requested.
            StageError: if the previous round was not finalized.
        """
        all_to_all, batch = self.all_to_all, micro_batch()
        if batch in self._rounds:
            raise StageError("prepare before the finalize of the round before: call finalize")
        check_quantisation(all_to_all, quant_config, deferred=defer_input_quant)
        if num_experts != all_to_all.experts:
            raise ConfigurationError(
                f"num_experts={num_experts}: the all-to-all has {all_to_all.experts} experts"
            )
        weights = topk_weights.float().contiguous()
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ConfigurationError(
                    f"apply_router_weight_on_input with top-k {topk_ids.shape[1]}: a token has one "
                    "row for all experts of a rank; pass False, or a top-k of 1"
                )
            a1, weights = a1 * topk_weights.to(a1.dtype), torch.ones_like(weights)
        ids = topk_ids.to(self.topk_indices_dtype()).contiguous()
        under_way = all_to_all.dispatch_send(a1.contiguous(), ids, weights)
        self._rounds[batch] = None

        def receive() -> Any:
            try:
                received = under_way.recv()
            except BaseException:
                # Releases the channel for the next round, if the group lives on.
                self._rounds.pop(batch, None)
                raise
            self._rounds[batch] = received
            return self._prepared(received)

        return receive

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        """`prepare_async` and the wait.

        Returns:
            Rows, scales or `None`, token count for each local expert, and for the format
            `Standard` each row's expert id and weight.
        """
        return self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )()

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Send experts' outputs back; returns the call that waits and writes `output`.

        Args:
            output: `[tokens, hidden]`, written in place.
            fused_expert_output: what the experts returned for the rows from `prepare`.
            topk_weights: as the experts got them.
            topk_ids: as the experts got them.
            apply_router_weight_on_input: as in `prepare`.
            weight_and_reduce_impl: what the experts left to be done: everything, in the format
                `BatchedExperts`; it is called in the format `Standard`.

        Raises:
            StageError: if there was no `prepare`.
            ConfigurationError: if the experts have applied weights that combine applies.
        """
        all_to_all, batch = self.all_to_all, micro_batch()
        received = self._rounds.get(batch)
        if received is None:
            raise StageError("finalize without a round that was received: call prepare")
        rows = fused_expert_output
        if _shape.batched(all_to_all):
            if not isinstance(weight_and_reduce_impl, Delegate):
                raise ConfigurationError(
                    f"{type(weight_and_reduce_impl).__name__} in the format BatchedExperts: "
                    "combine applies the weights; use experts that leave that to it "
                    "(TopKWeightAndReduceDelegate)"
                )
        elif received.positions:
            rows = self._weighted(
                rows, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
            )
        under_way = all_to_all.combine_send(received, _shape.outputs_of(all_to_all, received, rows))
        del self._rounds[batch]

        def receive() -> None:
            dtype = _shape.torch_dtype(all_to_all.output_dtype)
            if output.dtype == dtype and output.is_contiguous():
                under_way.recv(out=output)
            else:
                output.copy_(under_way.recv())
            received.release()

        return receive

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """`finalize_async` and the wait."""
        self.finalize_async(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )()

    def _prepared(self, received: Received) -> Any:
        all_to_all = self.all_to_all
        counts: Any = torch.as_tensor(received.expert_counts)
        host = counts.to(torch.int32) if counts.device.type == "cpu" else None
        known = kernels.ExpertTokensMetadata(
            expert_num_tokens=counts.to(torch.int32), expert_num_tokens_cpu=host
        )
        if _shape.batched(all_to_all):
            by_expert: Any = received
            return by_expert.expert_tokens, by_expert.expert_scales, known, None, None
        rows, scales = received.tokens, received.scales
        expert = _shape.expert_of_positions(received, received.positions)
        here = all_to_all.local_experts
        # An expert on another rank, which experts skip; without one, weight 0.
        elsewhere = all_to_all.experts - 1 if here.start == 0 else 0
        if not len(here):
            elsewhere = 0
        ids = torch.where(expert < 0, elsewhere, expert + here.start)
        weights: Any = torch.as_tensor(received.weights).masked_fill(expert < 0, 0)
        return rows, scales, known, ids.to(self.topk_indices_dtype())[:, None], weights[:, None]

    @staticmethod
    def _weighted(
        rows: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        on_input: bool,
        left: Any,
    ) -> torch.Tensor:
        """Rows in the format `Standard` with weights applied: top-k 1 for each."""
        if isinstance(left, Delegate):
            flat = rows.reshape(len(ids), -1)
            return flat if on_input else flat * weights.to(flat.dtype)
        weighted = left.apply(None, rows, weights, ids, on_input)
        if weighted.shape[0] != len(ids):
            raise ShapeError(
                f"experts returned {weighted.shape[0]} rows; {len(ids)} are needed, one for each "
                "row that prepare returned"
            )
        return torch.as_tensor(weighted)


def check_quantisation(all_to_all: AllToAll, quant_config: Any, *, deferred: bool) -> None:
    """Raise unless tokens travel as the experts want them.

    Raises:
        ConfigurationError: names the value to pass.
    """
    wanted = None if deferred else getattr(quant_config, "quant_dtype", None)
    wire = getattr(all_to_all, "wire_dtype", all_to_all.dtype)
    if all_to_all.scales is None:
        if wanted is not None:
            raise ConfigurationError(
                f"experts take {wanted}: make the all-to-all with wire_dtype='float8_e4m3fn', or "
                "use experts that quantise (defer_input_quant)"
            )
        return
    block = getattr(quant_config, "block_shape", None)
    if wanted != _shape.torch_dtype(wire) or block is None or block[1] != all_to_all.scales[1]:
        raise ConfigurationError(
            f"experts take {wanted} in blocks {block}: this all-to-all sends {wire} with a scale "
            f"for {all_to_all.scales[1]} elements"
        )
