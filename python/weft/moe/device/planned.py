"""Plans that outlive the round, and arrays with exactly the length that a round needs.

A round's plan holds each token's destination and each received row's position. It belongs to the
channel, whose next round overwrites it, unless the round is dispatched with `keep=True`: then it
lies in a tensor, and its `Handle` sends other tokens by the same plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.base.errors import ConfigurationError, ShapeError, StageError
from weft.moe.device.outputs import Arrived

if TYPE_CHECKING:
    from weft.moe.device.base import Base
    from weft.moe.device.launcher import Batch

__all__ = ["Handle", "HostCounts", "Planned"]

#: Options that determine a plan: equal in all-to-alls that share a handle.
_SHAPE = ("experts", "top_k", "max_tokens", "layout", "pad_to", "expert_capacity")


class HostCounts(NamedTuple):
    """Counts for a round, on the host.

    Attributes:
        experts: token count by local expert; zeros if the round exceeds the rank's positions.
        offsets: first position by expert, then the last expert's end.
    """

    experts: list[int]
    offsets: list[int]


class Handle:
    """The plan from a round dispatched with `keep=True`, for later rounds.

    `dispatch(tokens, handle=handle)` sends the same number of other tokens to the same experts:
    slots and positions, counts, offsets, rows and weights are unchanged, and no counts are computed
    or waited for. Combine is unchanged and uses that round's router weights.

    It is valid for as long as it is kept, for any number of rounds, in this all-to-all and in
    others with the same ranks, experts, top_k, max_tokens, layout and positions, with any dtypes
    and `hidden`. Every rank passes the handle from the same round; if one does not, all raise
    `StageError`, and the group ends.

    Attributes:
        sent: tokens in each batch that it sends.
        positions: rows for received tokens.
        nbytes: bytes on the device.
    """

    def __init__(self, all_to_all: Base, sent: int) -> None:
        self._shape = _shape(all_to_all)
        self.sent = sent
        self.positions = all_to_all.positions
        size = all_to_all._native.plan_bytes
        self._plan = torch.empty(size, dtype=torch.uint8, device=all_to_all.device)
        #: Position arrays, once the round was received: see `Received`.
        self._arrived: Arrived | None = None
        self._counts: HostCounts | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        words = () if self._arrived is None else self._arrived[2:]
        return int(self._plan.nbytes) + sum(int(tensor.nbytes) for tensor in words)

    def _check(self, all_to_all: Base) -> Arrived:
        """Position arrays, if the handle fits an all-to-all."""
        for name, mine, theirs in zip(
            ("ranks", "device", *_SHAPE, "positions"), self._shape, _shape(all_to_all), strict=True
        ):
            if mine != theirs:
                raise ConfigurationError(
                    f"the handle is of an all-to-all with {name} {mine}; this one has {theirs}"
                )
        if self._arrived is None:
            raise StageError("the handle's round was not received yet: call recv first")
        return self._arrived


def _shape(all_to_all: Base) -> tuple[object, ...]:
    config = all_to_all._config
    ranks, room = (all_to_all.rank, all_to_all.world_size), all_to_all.positions
    return ranks, all_to_all.device, *(getattr(config, name) for name in _SHAPE), room


class Planned:
    """A round with a separate plan or arrays.

    Args:
        all_to_all: the round's all-to-all.
        sent: tokens on this rank.
        keep: true to keep the plan for later rounds.
        handle: from the earlier round whose plan it uses.
        load: counters to which each expert's tokens are added.
    """

    def __init__(
        self,
        all_to_all: Base,
        sent: int,
        *,
        keep: bool = False,
        handle: Handle | None = None,
        load: torch.Tensor | None = None,
    ) -> None:
        if handle is not None and load is not None:
            raise ConfigurationError(
                "expert_load with a handle: a round with a kept plan counts no tokens; leave it out"
            )
        self._all_to_all, self._load = all_to_all, load
        self.kept = handle is not None
        self.handle = Handle(all_to_all, sent) if keep and handle is None else handle
        #: Round counts, if the host has them.
        self.counts = None if handle is None else handle._counts
        self.positions = all_to_all.positions if handle is None else handle.positions

    def site(self) -> dict[str, Any]:
        """Plan location, as arguments for the native module."""
        address = 0 if self.handle is None else int(self.handle._plan.data_ptr())
        return {"plan": address, "kept": self.kept}

    def count(self, channel: int, timeout: float) -> HostCounts:
        """Wait for the round's counts; afterwards the arrays have exactly that length."""
        if self.counts is None:
            all_to_all, plan = self._all_to_all, self.site()["plan"]
            stream = all_to_all._launcher._stream(channel)
            experts, offsets, needed = all_to_all._native.counts(
                stream, channel, timeout, plan=plan
            )
            if needed:
                # The kernel that exceeds the positions reports it to all ranks.
                experts, offsets = [0] * len(experts), [0] * len(offsets)
            elif all_to_all.layout != "padded":
                self.positions = offsets[-1]
            self.counts = HostCounts(experts, offsets)
            if self.handle is not None:
                self.handle._counts, self.handle.positions = self.counts, self.positions
        return self.counts

    def send(self, channel: int, batch: Batch, num_sms: int | None) -> None:
        """Launch the dispatch send half."""
        launcher = self._all_to_all._launcher
        given, rows = launcher._inputs(batch), len(batch.tokens)
        stream = launcher._stream(channel)
        launcher.native.dispatch_send(stream, channel, *given, rows, num_sms=num_sms, **self.site())

    def receive(self, channel: int, num_sms: int | None) -> Arrived:
        """Launch the dispatch receive half."""
        launcher, arrived = self._all_to_all._launcher, self._arrays()
        stream, to = launcher._stream(channel), self._addresses(arrived)
        site = self.site() | launcher._load(self._load)
        site |= {"positions": self.positions, "experts": self._experts(arrived)}
        launcher.native.dispatch_recv(stream, channel, *to, num_sms=num_sms, **site)
        return arrived

    def both(self, channel: int, batch: Batch, num_sms: int | None) -> Arrived:
        """Launch both as one kernel."""
        launcher, arrived = self._all_to_all._launcher, self._arrays()
        given, to = launcher._inputs(batch), self._addresses(arrived)
        stream, rows = launcher._stream(channel), len(batch.tokens)
        site = self.site() | launcher._load(self._load)
        site |= {"positions": self.positions, "out_experts": self._experts(arrived)}
        launcher.native.dispatch(stream, channel, *given, rows, *to, num_sms=num_sms, **site)
        return arrived

    def _arrays(self) -> Arrived:
        """Dispatch outputs: with a handle's plan, only tokens and scales are new."""
        all_to_all, rows = self._all_to_all, self.positions
        config, device = all_to_all._config, all_to_all.device
        stay = config.layout == "indexed"
        wire = getattr(torch, config.wire_dtype)
        tokens = torch.empty((0 if stay else rows, config.hidden), dtype=wire, device=device)
        scale = getattr(torch, config.scales[0]) if config.scales else torch.float32
        size = 0 if stay else rows, config.scale_columns
        scales = torch.empty(size, dtype=scale, device=device)
        if self.handle is not None and self.kept:
            earlier = self.handle._check(all_to_all)
            return earlier._replace(tokens=tokens, scales=scales)
        # Kernels write counts for as many experts as any rank has.
        most, own = -(-config.experts // all_to_all.world_size), len(all_to_all.local_experts)
        counts = torch.empty(most, dtype=torch.int32, device=device)[:own]
        offsets = torch.empty(most + 1, dtype=torch.int32, device=device)[: own + 1]
        numbers = torch.empty(rows, dtype=torch.int32, device=device)
        weights = torch.empty(rows, dtype=torch.float32, device=device)
        indexed = rows if config.layout == "contiguous" else 0
        indices = torch.empty(indexed, dtype=torch.int32, device=device)
        arrived = Arrived(tokens, scales, counts, offsets, numbers, weights, indices)
        if self.handle is not None:
            # Without tokens, which would be kept with it.
            self.handle._arrived = arrived._replace(
                tokens=tokens[:0].clone(), scales=scales[:0].clone()
            )
        return arrived

    def _addresses(self, arrived: Arrived) -> tuple[int, ...]:
        all_to_all = self._all_to_all
        if all_to_all.layout == "indexed":
            rows = [0, 0]
        else:
            none = all_to_all.scales is None
            rows = [self._address(arrived.tokens), 0 if none else self._address(arrived.scales)]
        words = [0] * 4 if self.kept else [self._address(tensor) for tensor in arrived[2:6]]
        return (*rows, *words)

    def _experts(self, arrived: Arrived) -> int:
        placed = self._all_to_all.layout == "contiguous" and not self.kept
        return self._address(arrived.m_indices) if placed else 0

    def _address(self, tensor: torch.Tensor) -> int:
        # An empty tensor has no address, which would read as "not given".
        return int(tensor.data_ptr() or self._all_to_all._launcher.workspace.data_ptr())


def refuse_columns(all_to_all: Base) -> None:
    """Raise if a layout's received arrays cannot be shortened to the positions in use."""
    if all_to_all._layers:
        raise ConfigurationError(
            "keep=, handle= and host_counts= with placement=: a kept plan holds the placement of "
            "its round; make an all-to-all without placement"
        )
    config = all_to_all._config
    for name, given, right in (
        ("scale_layout", config.scale_layout == "row", "row"),
        ("layout", config.layout != "dense", "contiguous"),
    ):
        if not given:
            raise ConfigurationError(
                f"keep=, handle= and host_counts= with {name}={getattr(config, name)!r}: pass "
                f"{name}={right!r}"
            )


def refuse(
    all_to_all: Base,
    handle: Handle | None,
    tokens: torch.Tensor,
    others: tuple[object, ...],
    *,
    differentiable: bool,
) -> None:
    """Raise if a round cannot have a separate plan.

    Args:
        all_to_all: the round's all-to-all.
        handle: for the plan that it uses.
        tokens: the round's tokens.
        others: ids, weights and count.
        differentiable: true if autograd records it.
    """
    if torch.compiler.is_compiling():
        raise ConfigurationError(
            "keep=, handle= and host_counts= in compiled code: call dispatch outside of it"
        )
    if differentiable:
        raise ConfigurationError(
            "keep=, handle= and host_counts= in a differentiable round, whose plan its backward "
            "pass uses: call dispatch under torch.no_grad(), or pass gradients=False"
        )
    refuse_columns(all_to_all)
    if handle is None:
        if others[0] is None:
            raise ShapeError("ids are not given: pass them, or the handle of an earlier round")
        return
    if not isinstance(handle, Handle):
        raise ShapeError(
            f"handle is a {type(handle).__name__}: pass received.handle of a round that was "
            "dispatched with keep=True"
        )
    if any(other is not None for other in others):
        raise ShapeError("ids, weights and count are the handle's: pass tokens, and scales if any")
    handle._check(all_to_all)
    if tokens.shape[:1] != (handle.sent,):
        raise ShapeError(
            f"tokens has shape {tuple(tokens.shape)}; the handle's round had {handle.sent} tokens"
        )
