"""Gradients for dispatch and combine, each of which is the other's backward pass.

A round and the backward pass, for a token t and expert k at position p::

    dispatch   rows[p] = tokens[t]                 tokens'[t] = sum over k of rows'[p]
               placed[p] = weights[t, k]           weights'[t, k] = placed'[p]
    combine    combined[t] = sum over k of         outputs[p]' = placed[p] * combined'[t]
                 placed[p] * outputs[p]            placed'[p] = outputs[p] . combined'[t]

Combine's backward dispatches `combined'` by the same ids, and the same ids give the same positions.
Dispatch's backward combines `rows'` in that same round, so a layer costs one round forward and one
backward. Router weight gradients return in a second round, whose rows have one column per top-k
choice: each expert fills one column, and adding zeros is exact. Separate all-to-alls run these
rounds, so they take no channels from forward rounds.

This module imports torch and extends autograd as in
https://docs.pytorch.org/docs/stable/notes/extending.html.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.autograd.function import once_differentiable

from weft.base.array import FLOAT8
from weft.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Backward",
    "Source",
    "attach",
    "combined",
    "differentiate",
    "refuse",
]

#: Device row alignment in bytes.
VECTOR: Final = 16
#: float32 elements in `VECTOR`.
COLUMNS: Final = 4


class Exchange(Protocol):
    """All-to-all for the forward or the backward pass."""

    _backward: Backward | None

    @property
    def dtype(self) -> str: ...
    @property
    def combine_dtype(self) -> str: ...
    @property
    def reply_dtype(self) -> str: ...
    @property
    def output_dtype(self) -> str: ...
    @property
    def top_k(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

    def dispatch(self, *given: Any, **options: Any) -> Any:
        """Received rows in a new round."""

    def combine(self, received: Any, outputs: Any, *, timeout: float) -> Any:
        """Sums in a round."""

    def memory_table(self) -> str:
        """Memory by area."""

    def close(self, *, timeout: float) -> None:
        """Free all memory, on all ranks."""

    def _abandon(self) -> None: ...


class Received(Protocol):
    """Received rows in a round."""

    weights: Any
    _source: Source | None
    _tokens: Any

    @property
    def rows(self) -> Any: ...
    @property
    def expert_offsets(self) -> Any: ...
    @property
    def positions(self) -> int: ...

    def release(self) -> None:
        """Release the channel."""

    def _own_tokens(self) -> Any: ...


class Backward:
    """All-to-alls for the backward pass.

    Args:
        rows: sends result gradients to experts and returns token gradients.
        weights: returns router weight gradients.
        timeout: seconds that a backward call waits for the other ranks.
    """

    def __init__(self, rows: Exchange, weights: Exchange, timeout: float) -> None:
        self.rows, self.weights, self.timeout = rows, weights, timeout


def refuse(dtype: str, layout: str, *, placed: bool = False) -> None:
    """Raise if an all-to-all with these options has no gradients.

    Args:
        dtype: received token dtype.
        layout: received token layout.
        placed: true if experts have a placement.

    Raises:
        ConfigurationError: names the reason.
    """
    if dtype in FLOAT8:
        raise ConfigurationError(
            f"gradients=True with tokens of {dtype}: received codes have no gradient; pass dtype "
            "float32, bfloat16 or float16, and no wire_dtype"
        )
    if placed:
        raise ConfigurationError(
            "gradients=True with a placement: each replica would have a part of its expert's "
            "gradient, without a sum over replicas; pass no placement"
        )
    if layout in ("indexed", "dense"):
        raise ConfigurationError(
            f"gradients=True with layout={layout!r}: a row stands for several experts there; pass "
            "'contiguous', or on a device 'padded'"
        )


def differentiate(
    group: Sequence[Exchange],
    given: Mapping[str, Any],
    make: Callable[..., Sequence[Exchange]],
    timeout: float,
) -> None:
    """Make the backward all-to-alls, for one rank or for all ranks in this process.

    Args:
        group: forward all-to-alls.
        given: constructor arguments, apart from dtypes and weighting.
        make: returns one all-to-all per rank with other arguments.
        timeout: seconds for the backward pass.
    """
    made = [group]
    try:
        for arguments in backward_arguments(given, group[0]):
            if (limit := given.get("max_bytes")) is not None:
                used = sum(each[0].memory_bytes for each in made)
                arguments["max_bytes"] = max(limit - used, 0)
            made.append(make(**arguments))
    except BaseException:
        for each in itertools.chain(*made):
            each._abandon()
        raise
    for forward, rows, weights in zip(*made, strict=True):
        forward._backward = Backward(rows, weights, timeout)


def backward_arguments(
    given: Mapping[str, Any], forward: Exchange
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for `Backward.rows` and `Backward.weights`."""
    dtype = forward.dtype
    given = {name: value for name, value in given.items() if name != "wire_dtype"}
    rows = {
        **given,
        "dtype": forward.output_dtype,
        "combine_dtype": dtype,
        "reply_dtype": "float32" if forward.reply_dtype == "float32" else dtype,
        "output_dtype": dtype,
        "weighting": "expert",
    }
    weights = {
        **given,
        "hidden": -(-forward.top_k // COLUMNS) * COLUMNS,
        "dtype": "float32",
        "combine": "reduce",
        "weighting": "expert",
    }
    # Forward-pass dtypes, and a path for rows with another length.
    for name in ("combine_dtype", "reply_dtype", "output_dtype", "path"):
        weights.pop(name, None)
    return rows, weights


class Source:
    """Inputs to a dispatch, as autograd tensors.

    Args:
        backward: backward all-to-alls.
        tokens: as given to dispatch.
        weights: as given to dispatch.
        ids: as given to dispatch.
        count: as given to dispatch.
        weighting: as given to the all-to-all.
    """

    def __init__(
        self,
        backward: Backward,
        tokens: torch.Tensor,
        weights: Any,
        ids: Any,
        count: torch.Tensor | None,
        weighting: str,
    ) -> None:
        self.tokens: torch.Tensor | None = tokens
        self.weights: torch.Tensor | None = weights if torch.is_tensor(weights) else None
        # The caller may write to a numpy array, unseen by autograd.
        self.ids: torch.Tensor = ids if torch.is_tensor(ids) else torch.tensor(ids)
        needed = self.weights is not None and self.weights.requires_grad
        self.round = Round(backward, count, weighted=weighting == "combine", weights=needed)


class Round:
    """A round's backward pass: one round on `Backward.rows`, from combine's to dispatch's.

    Args:
        backward: all-to-alls that run it.
        count: number of existing tokens, if not all.
        weighted: combine multiplied by the router's weights.
        weights: the router's weights have a gradient.
    """

    def __init__(
        self, backward: Backward, count: torch.Tensor | None, *, weighted: bool, weights: bool
    ) -> None:
        self._backward, self._count = backward, count
        self.weighted, self.weights = weighted, weights
        self._received: Received | None = None
        #: Forward-round plan on a device; the backward round reuses it, without counts.
        self.handle: object = None
        #: `[positions, 1]`: positions without a token; the same in every round with the same ids.
        self.padding = torch.empty((0, 1), dtype=torch.bool)

    def receive(self, received: Received) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward round's rows and weights, as tensors that the caller owns, 0 for padding."""
        rows, offsets = torch.as_tensor(received.rows), torch.as_tensor(received.expert_offsets)
        positions = torch.arange(len(rows), device=rows.device)
        # Rows and row numbers behind the last expert's group are not written.
        self.padding = ((rows < 0) | (positions >= offsets[-1]))[:, None]
        weights = torch.as_tensor(received.weights).masked_fill(self.padding[:, 0], 0)
        return self._rows(received), weights

    def dispatch(self, gradient: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Dispatch result gradients to the experts: `[positions, hidden]`, 0 for padding."""
        received = self._open(gradient, ids)
        # A graph may skip `combine` (`torch.autograd.grad` for some inputs).
        torch.autograd.Variable._execution_engine.queue_callback(self.end)
        return self._rows(received)

    def combine(self, gradient: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Combine gradients from received rows at the source tokens."""
        all_to_all = self._backward.rows
        received = self._received
        if received is None:
            # The loss depends on received rows and on no result.
            dtype = getattr(torch, all_to_all.dtype)
            shape = (len(ids), all_to_all.hidden)
            received = self._open(torch.zeros(shape, dtype=dtype, device=ids.device), ids)
        given = prepared(gradient, all_to_all.combine_dtype)
        summed = all_to_all.combine(received, given, timeout=self._backward.timeout)
        return self.existing(summed)

    def end(self) -> None:
        """Release the round, if it is in flight."""
        received, self._received = self._received, None
        if received is not None:
            received.release()

    def return_weights(self, gradient: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return a number at each position to the token and choice: `[tokens, top_k]` float32."""
        all_to_all, timeout = self._backward.weights, self._backward.timeout
        columns = all_to_all.hidden
        nothing = torch.zeros((len(ids), columns), device=ids.device)
        # Each position's number in the top k travels where weights do.
        choices = torch.arange(ids.shape[1], dtype=torch.float32, device=ids.device)
        numbers = choices.expand(ids.shape).contiguous()
        padding = self.padding[:, 0]
        received = all_to_all.dispatch(nothing, ids, numbers, **self._counted(), timeout=timeout)
        with received:
            choice = torch.as_tensor(received.weights).masked_fill(padding, 0).long()
            rows = torch.zeros((received.positions, columns), device=ids.device)
            rows.scatter_(1, choice[:, None], gradient.masked_fill(padding, 0)[:, None])
            summed = all_to_all.combine(received, rows, timeout=timeout)
        return self.existing(summed)[:, : ids.shape[1]]

    def _open(self, gradient: torch.Tensor, ids: torch.Tensor) -> Received:
        all_to_all = self._backward.rows
        given = prepared(gradient, all_to_all.dtype)
        plan: dict[str, Any] = {"ids": ids, **self._counted()}
        if self.handle is not None:
            plan = {"handle": self.handle}
        with torch.no_grad():
            received: Received = all_to_all.dispatch(given, timeout=self._backward.timeout, **plan)
        self._received = received
        return received

    def _rows(self, received: Received) -> torch.Tensor:
        rows: torch.Tensor = received._own_tokens()
        return rows.masked_fill_(self.padding, 0)

    def _counted(self) -> dict[str, Any]:
        return {} if self._count is None else {"count": self._count}

    def existing(self, summed: torch.Tensor) -> torch.Tensor:
        """Zeros for tokens that do not exist, whose rows were not written."""
        if self._count is None:
            return summed
        missing = torch.arange(len(summed), device=summed.device) >= self._count
        return summed.masked_fill_(missing[:, None], 0)


def attach(received: Received, source: Source) -> None:
    """Make a round's tokens and weights differentiable; the caller owns them from then on."""
    # Received tensors require a gradient even if no input does: experts' parameters may.
    always = torch.empty(0, device=source.ids.device, requires_grad=True)
    received._tokens, received.weights = _Dispatch.apply(
        source.tokens, source.weights, always, source.ids, source.round, received
    )
    # The graph has them: a result that is kept must not keep the batch.
    source.tokens = source.weights = None
    received._source = source


# Compiled code breaks the graph here, rather than inside of `combine`.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def combined(
    received: Received,
    outputs: torch.Tensor,
    combine: Callable[[], torch.Tensor],
    bias: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:
    """The `combine` result as a function of `outputs`, received weights and `bias`."""
    source = received._source
    assert source is not None
    weights: Any = received.weights
    given = outputs, weights, source.ids, source.round, combine
    result: torch.Tensor = _Combine.apply(*given, *bias)
    return result


def prepared(gradient: torch.Tensor, dtype: str) -> torch.Tensor:
    """A gradient that an all-to-all can take: converted, contiguous, aligned to 16 bytes."""
    given = gradient.detach().to(getattr(torch, dtype)).contiguous()
    return given.clone() if given.data_ptr() % VECTOR else given


class _Dispatch(torch.autograd.Function):  # type: ignore[misc]
    """Received rows and weights as a function of tokens and router weights."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        weights: torch.Tensor | None,
        always: torch.Tensor,
        ids: torch.Tensor,
        round: Round,
        received: Received,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.round, ctx.dtype = round, None if weights is None else weights.dtype
        ctx.save_for_backward(ids)
        return round.receive(received)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, rows: torch.Tensor, placed: torch.Tensor) -> tuple[Any, ...]:
        round, (ids,) = ctx.round, ctx.saved_tensors
        tokens = weights = None
        if ctx.needs_input_grad[0]:
            tokens = round.combine(rows, ids)
        round.end()
        if ctx.needs_input_grad[1]:
            weights = round.return_weights(placed, ids).to(ctx.dtype)
        return tokens, weights, None, None, None, None


class _Combine(torch.autograd.Function):  # type: ignore[misc]
    """The combined result as a function of expert outputs and received weights."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: torch.Tensor,
        placed: torch.Tensor,
        ids: torch.Tensor,
        round: Round,
        combine: Callable[[], torch.Tensor],
        *bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.round, ctx.dtype = round, outputs.dtype
        saved = [outputs] if round.weighted and round.weights else []
        ctx.save_for_backward(ids, placed, *saved)
        return combine()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        round, (ids, placed, *saved) = ctx.round, ctx.saved_tensors
        rows = round.dispatch(gradient, ids)
        wanted = ctx.needs_input_grad[5:]
        # Rows for tokens that do not exist are in no result.
        of_bias = round.existing(gradient) if any(wanted) else None
        biases = [of_bias if each else None for each in wanted]
        # Dispatch's backward pass always runs: every rank takes part in it.
        of_placed = torch.zeros_like(placed)
        if not round.weighted:
            return rows.to(ctx.dtype), of_placed, None, None, None, *biases
        rows = rows.float()
        for outputs in saved:
            # Expert outputs at padding may be NaN.
            products = rows * outputs.float().masked_fill(round.padding, 0)
            of_placed = products.sum(-1)
        return (rows * placed[:, None]).to(ctx.dtype), of_placed, None, None, None, *biases
