"""Plans that outlive their round, and arrays of exactly the length of a round.

The plan of a round holds the destination of each token and the position of each received row. It
belongs to the channel, whose next round overwrites it, unless the round is dispatched with
`keep=True`: then it lies in a tensor, and its `Handle` sends other tokens by the same plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.cuda.outputs import Arrived
from weft.errors import ConfigurationError, ShapeError, StageError

if TYPE_CHECKING:
    from weft.cuda.all_to_all import AllToAll
    from weft.cuda.launcher import Batch

__all__ = ["Handle", "HostCounts", "Planned"]

#: Options that determine a plan: equal in all-to-alls that share a handle.
_SHAPE = ("experts", "top_k", "max_tokens", "layout", "pad_to", "expert_capacity")


class HostCounts(NamedTuple):
    """Counts of a round on the host.

    Attributes:
        experts: tokens of each local expert; zeros if the round exceeds the positions of the rank.
        offsets: first position of each expert, and the end of the last.
    """

    experts: list[int]
    offsets: list[int]


class Handle:
    """The plan of a round that was dispatched with `keep=True`, for later rounds.

    `dispatch(tokens, handle=handle)` sends as many other tokens to the same experts: slots and
    positions, counts, offsets, rows and weights are those of that round, and no counts are computed
    or waited for. Combine is unchanged, with the router's weights of that round.

    It is valid for as long as it is kept, for any number of rounds, in this all-to-all and in
    others of the same ranks, experts, top_k, max_tokens, layout and positions, with any dtypes and
    `hidden`. Every rank passes the handle of the same round; if one does not, all raise
    `StageError`, and the group ends.

    Attributes:
        sent: tokens of each batch that it sends.
        positions: rows of received tokens.
        nbytes: bytes on the device.
    """

    def __init__(self, all_to_all: AllToAll, sent: int) -> None:
        self._shape = _shape(all_to_all)
        self.sent = sent
        self.positions = all_to_all.positions
        size = all_to_all._native.plan_bytes
        self._plan = torch.empty(size, dtype=torch.uint8, device=all_to_all.device)
        #: Its arrays of positions, once the round was received: see `Received`.
        self._arrived: Arrived | None = None
        self._counts: HostCounts | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        words = () if self._arrived is None else self._arrived[2:]
        return int(self._plan.nbytes) + sum(int(tensor.nbytes) for tensor in words)

    def _check(self, all_to_all: AllToAll) -> Arrived:
        """Its arrays of positions, if it fits an all-to-all."""
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


def _shape(all_to_all: AllToAll) -> tuple[object, ...]:
    config = all_to_all._config
    ranks, room = (all_to_all.rank, all_to_all.world_size), all_to_all.positions
    return ranks, all_to_all.device, *(getattr(config, name) for name in _SHAPE), room


class Planned:
    """A round with a plan or arrays of its own.

    Args:
        all_to_all: that of the round.
        sent: tokens of this rank.
        keep: true to keep its plan for later rounds.
        handle: of the earlier round whose plan it uses.
        load: counters to which the tokens of each expert are added.
    """

    def __init__(
        self,
        all_to_all: AllToAll,
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
        #: Counts of the round, if the host has them.
        self.counts = None if handle is None else handle._counts
        self.positions = all_to_all.positions if handle is None else handle.positions

    def site(self) -> dict[str, Any]:
        """Location of the plan, as arguments of the native module."""
        address = 0 if self.handle is None else int(self.handle._plan.data_ptr())
        return {"plan": address, "kept": self.kept}

    def count(self, channel: int, timeout: float) -> HostCounts:
        """Wait for the counts of the round; its arrays have exactly their length from then on."""
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
        """Launch the send half of dispatch."""
        launcher = self._all_to_all._launcher
        given, rows = launcher._inputs(batch), len(batch.tokens)
        stream = launcher._stream(channel)
        launcher.native.dispatch_send(stream, channel, *given, rows, num_sms=num_sms, **self.site())

    def receive(self, channel: int, num_sms: int | None) -> Arrived:
        """Launch its receive half."""
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
        """Outputs of dispatch: with the plan of a handle, tokens and scales alone are new."""
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
        # Kernels write counts of as many experts as any rank has.
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


def refuse_columns(all_to_all: AllToAll) -> None:
    """Raise if the received arrays of a layout cannot be shortened to the positions in use."""
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
    all_to_all: AllToAll,
    handle: Handle | None,
    tokens: torch.Tensor,
    others: tuple[object, ...],
    *,
    differentiable: bool,
) -> None:
    """Raise if a round cannot have a plan of its own.

    Args:
        all_to_all: that of the round.
        handle: of the plan that it uses.
        tokens: of the round.
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
