"""Stand-in for SGLang's token dispatchers: the formats, and a layer that calls a dispatcher."""

import sys
from abc import ABC, abstractmethod
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tests.adapters.engines.vllm import gated


class DispatchOutputFormat(Enum):
    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"


class CombineInputFormat(Enum):
    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"


class DeepEPNormalDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: list[int]

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.DEEPEP_NORMAL


class DeepEPLLDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.DEEPEP_LL


class DeepEPNormalCombineInput(NamedTuple):
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> CombineInputFormat:
        return CombineInputFormat.DEEPEP_NORMAL


class DeepEPLLCombineInput(NamedTuple):
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> CombineInputFormat:
        return CombineInputFormat.DEEPEP_LL


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None


class BaseDispatcher(ABC):
    def __init__(self) -> None:
        self.quant_config: dict[str, Any] | None = None

    @abstractmethod
    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def combine(self, combine_input: Any, **kwargs: Any) -> torch.Tensor: ...


class Layer:
    """Equivalent to SGLang's fused MoE layer: dispatcher, a runner by format, dispatcher."""

    def __init__(
        self, dispatcher: Any, w1: torch.Tensor, w2: torch.Tensor, *, whole: bool = False
    ) -> None:
        self.dispatcher, self.w1, self.w2 = dispatcher, w1, w2
        #: Batches are multiplied with their padding, without host synchronisation, for capture.
        self.whole = whole

    def __call__(
        self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput, *, halves: bool
    ) -> torch.Tensor:
        dispatcher = self.dispatcher
        if not halves:
            output = dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
            combined: torch.Tensor = dispatcher.combine(combine_input=self.run(output))
            return combined
        dispatcher.dispatch_a(hidden_states=hidden_states, topk_output=topk_output)
        dispatcher.combine_a(self.run(dispatcher.dispatch_b()))
        halved: torch.Tensor = dispatcher.combine_b()
        return halved

    def run(self, output: Any) -> Any:
        """The experts, by input format."""
        if output.format == DispatchOutputFormat.DEEPEP_LL:
            return self.masked(output)
        assert output.format == DispatchOutputFormat.DEEPEP_NORMAL
        return self.scattered(output)

    def masked(self, output: DeepEPLLDispatchOutput) -> DeepEPLLCombineInput:
        rows = output.hidden_states
        assert rows.dim() == 3
        if self.whole:
            outputs = gated(rows, self.w1, self.w2)
            return DeepEPLLCombineInput(outputs, output.topk_ids, output.topk_weights)
        counts = output.masked_m.tolist()
        assert len(rows) == len(counts) == len(self.w1)
        assert output.expected_m >= 0
        outputs = torch.full_like(rows, float("nan"))
        for expert, count in enumerate(counts):
            outputs[expert, :count] = gated(rows[expert, :count], self.w1[expert], self.w2[expert])
        return DeepEPLLCombineInput(outputs, output.topk_ids, output.topk_weights)

    def scattered(self, output: DeepEPNormalDispatchOutput) -> DeepEPNormalCombineInput:
        """Row permutation by expert, and weighted return, as in SGLang's runner."""
        rows, ids, weights = output.hidden_states, output.topk_ids, output.topk_weights
        lengths = output.num_recv_tokens_per_expert
        places = torch.full((sum(lengths), rows.shape[1]), float("nan"), dtype=rows.dtype)
        filled, begins = [0] * len(lengths), [sum(lengths[:each]) for each in range(len(lengths))]
        at = torch.full_like(ids, -1)
        for row, choice in torch.nonzero(ids >= 0).tolist():
            expert = int(ids[row, choice])
            at[row, choice] = begins[expert] + filled[expert]
            places[at[row, choice]] = rows[row]
            filled[expert] += 1
        results = torch.full_like(places, float("nan"))
        for expert, (begin, count) in enumerate(zip(begins, filled, strict=True)):
            assert count <= lengths[expert]
            part = slice(begin, begin + count)
            results[part] = gated(places[part], self.w1[expert], self.w2[expert])
        gathered = torch.zeros_like(rows)
        for row, choice in torch.nonzero(ids >= 0).tolist():
            gathered[row] += weights[row, choice] * results[at[row, choice]]
        return DeepEPNormalCombineInput(gathered, ids, weights)


def install() -> None:
    """Replacement for the SGLang module that the adapter imports."""
    package = "sglang.srt.layers.moe"
    names = package.split(".")
    for length in range(1, len(names) + 1):
        sys.modules[".".join(names[:length])] = ModuleType(".".join(names[:length]))
    here = sys.modules[__name__]
    sys.modules[f"{package}.token_dispatcher"] = here
    setattr(sys.modules[package], "token_dispatcher", here)  # noqa: B010
