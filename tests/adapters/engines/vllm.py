"""Stand-in for vLLM's modular kernels: the abstract classes, and a kernel that calls them."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None


class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor: ...


class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    def apply(self, *_: Any) -> torch.Tensor:
        raise RuntimeError("prepare and finalize weight and reduce")


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    def apply(
        self, output: torch.Tensor | None, fused_expert_output: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        return fused_expert_output if output is None else output.copy_(fused_expert_output)


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """Weighted sum over `[rows, top_k, hidden]`."""

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        outputs = fused_expert_output.view(*topk_ids.shape, -1)
        if not apply_router_weight_on_input:
            outputs.mul_(topk_weights[..., None])
        reduced = outputs.sum(1)
        return reduced if output is None else output.copy_(reduced)


class FusedMoEPrepareAndFinalize(ABC):
    @property
    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat: ...

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None: ...

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None: ...

    @abstractmethod
    def num_dispatchers(self) -> int: ...

    @abstractmethod
    def output_is_reduced(self) -> bool: ...

    def supports_async(self) -> bool:
        return False


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    @abstractmethod
    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Any: ...

    @abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None: ...


class QuantConfig(NamedTuple):
    quant_dtype: torch.dtype | None = None
    block_shape: list[int] | None = None


class Experts:
    """Gated experts in eager mode, in both formats; `[experts, 2 * inner, hidden]` and back.

    Args:
        batched: the format `BatchedExperts`.
        left: steps left to finalize.
        quant_config: row quantisation.
        whole: batches are multiplied with their padding, without counts on the host, for graph
            capture.
        max_num_tokens: rows in an expert's batch from each dispatcher.
        num_dispatchers: as `max_num_tokens`.
    """

    expects_unquantized_inputs = False

    def __init__(
        self,
        *,
        batched: bool,
        left: TopKWeightAndReduce,
        quant_config: QuantConfig,
        whole: bool = False,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        assert batched == (max_num_tokens is not None) == (num_dispatchers is not None)
        self.batched, self.left, self.quant_config = batched, left, quant_config
        self.whole = whole
        self.rows = (max_num_tokens or 0) * (num_dispatchers or 0)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return self.left

    def apply(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor,
        meta: ExpertTokensMetadata,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if scales is not None:
            block = (self.quant_config.block_shape or [0, 0])[1]
            rows = (rows.float() * scales.repeat_interleave(block, -1)[..., : rows.shape[-1]]).to(
                dtype
            )
        if self.batched:
            assert rows.dim() == 3
            assert rows.shape[:2] == (len(w1), self.rows)
            assert meta.expert_num_tokens is not None
            if self.whole:
                return gated(rows, w1, w2)
            outputs = torch.full_like(rows, float("nan"), dtype=dtype)
            for expert, count in enumerate(meta.expert_num_tokens.tolist()):
                outputs[expert, :count] = gated(rows[expert, :count], w1[expert], w2[expert])
            return outputs
        top_k = topk_ids.shape[1]
        outputs = rows.new_zeros((len(rows), top_k, rows.shape[1]), dtype=dtype)
        local = torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0)], -1)
        for expert in range(len(w1)):
            row, choice = torch.where(local == expert)
            outputs[row, choice] = gated(rows[row], w1[expert], w2[expert])
        if isinstance(self.left, TopKWeightAndReduceNoOP):
            # These apply weights and reduce themselves.
            return TopKWeightAndReduceContiguous().apply(
                None, outputs, topk_weights, topk_ids, False
            )
        return outputs


def gated(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """One expert's output, or an expert batch's."""
    gate, up = (rows @ w1.mT).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ w2.mT


class Kernel:
    """Calls both parts as vLLM's kernel does, asynchronous if prepare and finalize are."""

    def __init__(self, parts: FusedMoEPrepareAndFinalizeModular, experts: Experts) -> None:
        self.parts, self.experts = parts, experts

    def __call__(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        global_num_experts: int,
        expert_map: torch.Tensor,
        *,
        asynchronous: bool,
    ) -> torch.Tensor:
        parts: Any = self.parts
        dtype = parts.topk_indices_dtype()
        ids = topk_ids if dtype is None else topk_ids.to(dtype)
        given = (hidden_states, topk_weights, ids, global_num_experts, expert_map, False)
        quant = self.experts.quant_config
        deferred = self.experts.expects_unquantized_inputs
        if asynchronous:
            assert parts.supports_async()
            rows, scales, meta, of_rows, weights = received(
                parts.prepare_async(*given, quant, defer_input_quant=deferred)
            )
        else:
            rows, scales, meta, of_rows, weights = parts.prepare(
                *given, quant, defer_input_quant=deferred
            )
        ids = ids if of_rows is None else of_rows
        weights = topk_weights if weights is None else weights
        outputs = self.experts.apply(
            rows, scales, w1, w2, weights, ids, expert_map, meta, hidden_states.dtype
        )
        result = torch.full_like(hidden_states, float("nan"))
        left = self.experts.finalize_weight_and_reduce_impl()
        if asynchronous:
            received(parts.finalize_async(result, outputs, weights, ids, False, left))
        else:
            parts.finalize(result, outputs, weights, ids, False, left)
        return result


def received(returned: Callable[[], Any] | tuple[Callable[[], Any], Callable[[], Any]]) -> Any:
    """A receiver's result, after its hook if it has one."""
    if isinstance(returned, tuple):
        returned[0]()
        return returned[1]()
    return returned()


def install() -> None:
    """Replacement for the vLLM modules that the adapter imports."""
    here = sys.modules[__name__]
    package = "vllm.model_executor.layers.fused_moe"
    names = package.split(".")
    for length in range(1, len(names) + 1):
        sys.modules[".".join(names[:length])] = ModuleType(".".join(names[:length]))
    for name in ("modular_kernel", "topk_weight_and_reduce"):
        sys.modules[f"{package}.{name}"] = here
        setattr(sys.modules[package], name, here)
