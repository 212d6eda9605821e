"""A token dispatcher for SGLang over `weft.moe.AllToAll`.

SGLang's MoE layer calls a dispatcher, then an expert runner, which takes the dispatcher's output by
its format, then the dispatcher's `combine`. For example::

    communicator = weft.Communicator.from_group(get_tp_group().device_group)
    all_to_all = weft.moe.AllToAll(
        communicator, experts=256, top_k=8, hidden=7168, max_tokens=128,
        dtype="bfloat16", wire_dtype="float8_e4m3fn", layout="padded", device="cuda",
    )
    layer.dispatcher = Dispatcher(all_to_all)

In the padded layout the formats are `DEEPEP_LL`: rows are `[local experts, capacity, hidden]`, with
`masked_m`, and combine applies the router's weights. Scales lie as in DeepEP with
`scale_layout="column"`, or "column_packed" for ue8m0. In the contiguous layout they are
`DEEPEP_NORMAL`: a row for each token and local expert, with one local id and one weight, which the
experts apply.

The formats are DeepEP's, since the runners take those. `DEEPEP_NORMAL` has counts on the host, so
on a device `dispatch` waits for the stream, as DeepEP does there.

Importing this imports SGLang (see https://github.com/sgl-project/sglang).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

try:
    from sglang.srt.layers.moe import token_dispatcher as formats
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "sglang":
        raise
    from weft.base.errors import ConfigurationError as _ConfigurationError

    raise _ConfigurationError("weft.adapters.sglang needs SGLang: pip install sglang") from error

from weft.adapters import _shape
from weft.base.errors import StageError

if TYPE_CHECKING:
    from weft.moe import AllToAll, Combine, Dispatch, Received

__all__ = ["Dispatcher"]

_Base: Any = formats.BaseDispatcher
# Names that SGLang used for these until 2025.
_Batched: Any = getattr(formats, "DeepEPLLDispatchOutput", None) or formats.DeepEPLLOutput
_Rows: Any = getattr(formats, "DeepEPNormalDispatchOutput", None) or formats.DeepEPNormalOutput


class Dispatcher(_Base):  # type: ignore[misc]
    """SGLang's interface to an all-to-all; one round at a time.

    `dispatch_a` and `dispatch_b` are halves of `dispatch`, and `combine_a` and `combine_b` are
    the halves of `combine`; other work may run between the halves.

    Args:
        all_to_all: in the padded layout with `weighting="combine"`, or contiguous with "expert".
            Layers that run one after the other may share it.

    Raises:
        ConfigurationError: if the layout or weighting does not fit.
    """

    def __init__(self, all_to_all: AllToAll) -> None:
        super().__init__()
        _shape.check(all_to_all, "SGLang")
        self.all_to_all = all_to_all
        #: State for the next call.
        self._dispatch: Dispatch | None = None
        self._received: Received | None = None
        self._combine: tuple[Combine, Received] | None = None
        self._routed: tuple[torch.Tensor, torch.Tensor] | None = None

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any, **_: Any) -> Any:
        """Bring tokens to the experts.

        Args:
            hidden_states: `[tokens, hidden]`.
            topk_output: `topk_ids` expert ids in the whole group, -1 for none, and `topk_weights`.

        Raises:
            StageError: if the previous round was not combined.
        """
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any, **_: Any) -> None:
        """Send the tokens."""
        if self._dispatch or self._received or self._combine:
            raise StageError("dispatch before the combine of the round before: call combine")
        dtype = _shape.torch_dtype(getattr(self.all_to_all, "ids_dtype", "int64"))
        ids = topk_output.topk_ids.to(dtype).contiguous()
        weights = topk_output.topk_weights.float().contiguous()
        self._dispatch = self.all_to_all.dispatch_send(hidden_states.contiguous(), ids, weights)
        self._routed = ids, weights

    def dispatch_b(self) -> Any:
        """Wait for tokens from the other ranks; returns the output that runners take."""
        if self._dispatch is None or self._routed is None:
            raise StageError("dispatch_b without dispatch_a: call dispatch_a")
        received, self._dispatch = self._dispatch.recv(), None
        self._received = received
        if _shape.batched(self.all_to_all):
            return self._batched(received, *self._routed)
        return self._rows(received)

    def combine(self, combine_input: Any, **_: Any) -> torch.Tensor:
        """Bring results back.

        Args:
            combine_input: `hidden_states` for the rows from `dispatch`, in the same format.

        Returns:
            `[tokens, hidden]`.
        """
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any, **_: Any) -> None:
        """Send the results."""
        received = self._received
        if received is None:
            raise StageError("combine without a round that was dispatched: call dispatch")
        batched = _shape.batched(self.all_to_all)
        kinds = formats.CombineInputFormat
        expected = kinds.DEEPEP_LL if batched else kinds.DEEPEP_NORMAL
        if combine_input.format != expected:
            raise StageError(
                f"combine of format {combine_input.format}: expected {expected}, as in dispatch"
            )
        rows = _shape.outputs_of(self.all_to_all, received, combine_input.hidden_states)
        self._combine = self.all_to_all.combine_send(received, rows), received
        self._received = self._routed = None

    def combine_b(self) -> torch.Tensor:
        """Wait for results from the other ranks."""
        if self._combine is None:
            raise StageError("combine_b without combine_a: call combine_a")
        (under_way, received), self._combine = self._combine, None
        combined = torch.as_tensor(under_way.recv())
        received.release()
        return combined

    def _batched(self, received: Any, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        all_to_all = self.all_to_all
        sent, top_k = ids.shape
        ranks = _shape.ranks(all_to_all)
        # Mean tokens for an expert, by which runners choose tiles.
        expected = (sent * ranks * top_k + all_to_all.experts) // all_to_all.experts
        return _Batched(
            hidden_states=received.expert_tokens,
            hidden_states_scale=received.expert_scales,
            topk_ids=ids,
            topk_weights=weights,
            masked_m=received.masked_m,
            expected_m=expected,
        )

    def _rows(self, received: Received) -> Any:
        offsets = torch.as_tensor(received.expert_offsets)
        # Includes padding, which counts as rows for the expert, as in DeepEP's aligned counts.
        lengths = offsets.diff().tolist()
        used = int(sum(lengths))
        expert = _shape.expert_of_positions(received, used)
        scales = received.scales
        weights: Any = torch.as_tensor(received.weights)[:used]
        return _Rows(
            hidden_states=received.tokens[:used],
            hidden_states_scale=None if scales is None else scales[:used],
            topk_ids=expert[:, None],
            topk_weights=weights.masked_fill(expert < 0, 0)[:, None],
            num_recv_tokens_per_expert=lengths,
        )
