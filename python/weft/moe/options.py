"""Device all-to-all options.

Generated from crates/moe/src/device/options/mod.rs, which declares them; a test compares both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Required, TypedDict

__all__ = ["ARGUMENTS", "DeviceOnly", "Native", "Options", "Plain"]


class Native(TypedDict, total=False):
    """Keywords for the native class."""

    experts: Required[int]
    top_k: Required[int]
    hidden: Required[int]
    max_tokens: Required[int]
    channels: int
    token_dtype: str
    wire_dtype: str
    scales: tuple[str, int] | None
    combine_dtype: str
    reply_dtype: str
    output_dtype: str
    ids_dtype: str
    layout: str
    pad_to: int
    expert_capacity: int | None
    max_positions: int | None
    scale_layout: Literal["row", "column", "column_packed"]
    weighting: str
    path: Literal["packets", "latency", "bandwidth"] | None
    max_bytes: int | None
    skew_timeout: float
    num_sms: int | None
    concurrent: bool
    memory: Literal["fd", "ipc"]
    timeout: float


class Plain(TypedDict, total=False):
    """Arguments that the native class takes unchanged."""

    experts: Required[int]
    top_k: Required[int]
    hidden: Required[int]
    max_tokens: Required[int]
    channels: int
    layout: str
    pad_to: int
    expert_capacity: int | None
    max_positions: int | None
    scale_layout: Literal["row", "column", "column_packed"]
    weighting: str
    path: Literal["packets", "latency", "bandwidth"] | None
    max_bytes: int | None
    skew_timeout: float
    num_sms: int | None
    concurrent: bool
    memory: Literal["fd", "ipc"]
    timeout: float


class DeviceOnly(TypedDict, total=False):
    """Arguments for only device all-to-alls."""

    wire_dtype: object
    ids_dtype: object
    expert_capacity: int | None
    max_positions: int | None
    scale_layout: Literal["row", "column", "column_packed"]
    path: Literal["packets", "latency", "bandwidth"] | None
    skew_timeout: float
    num_sms: int | None
    concurrent: bool
    memory: Literal["fd", "ipc"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The native class's keywords; derived ones have no default."""

    experts: int
    top_k: int
    hidden: int
    max_tokens: int
    channels: int = 2
    token_dtype: str
    wire_dtype: str
    scales: tuple[str, int] | None
    combine_dtype: str
    reply_dtype: str
    output_dtype: str
    ids_dtype: str
    layout: str = "contiguous"
    pad_to: int = 1
    expert_capacity: int | None = None
    max_positions: int | None = None
    scale_layout: Literal["row", "column", "column_packed"] = "row"
    weighting: str = "combine"
    path: Literal["packets", "latency", "bandwidth"] | None = None
    max_bytes: int | None = None
    skew_timeout: float = 30.0
    num_sms: int | None = None
    concurrent: bool = False
    memory: Literal["fd", "ipc"] = "fd"
    timeout: float = 60.0


#: Argument documentation, in docstring form.
ARGUMENTS: Final = """\
    experts: number of experts that tokens name; without a `placement` rank r owns experts from `r *
        experts // world_size` to `(r + 1) * experts // world_size`.
    top_k: expert ids per token.
    hidden: elements per token; token, reply and result rows are multiples of 16 bytes.
    max_tokens: maximum number of tokens that a rank sends in one round.
    channels: rounds in flight: dispatched and not yet released.
    wire_dtype: token dtype on the wire and as received (default `dtype`). With "float8_e4m3fn" the
        kernel casts tokens to codes with scales when it sends them.
    combine_dtype: expert output dtype (default `dtype`, or bfloat16 if that is an 8-bit one).
    reply_dtype: reply dtype on the wire, to which each reply is rounded once (default
        `combine_dtype`).
    output_dtype: combined result dtype (default `dtype`, or bfloat16 if that is an 8-bit one).
    ids_dtype: expert id dtype: int64 or int32.
    layout: "contiguous": received tokens are copied into a group for each expert; "indexed": they
        stay where they arrived, and each expert has a list of row numbers; "padded": each expert
        has `expert_capacity` rows; "dense": each token once, by source, with `[top_k]` local ids
        and weights, as Triton's fused_moe takes them.
    pad_to: in the contiguous layout, each expert's group begins at a multiple of this many rows.
    expert_capacity: rows per expert in the padded layout (default: the worst case).
    max_positions: maximum number of positions (pairs of token and expert, and padding; rows in the
        dense layout) on a rank in one round, in the other layouts (default: the worst case). A
        round that needs more places no token at that rank, and all its results are NaN.
    scale_layout: received scale layout: "row": row-major; "column": column-major, with columns that
        begin at multiples of 16 bytes, as DeepGEMM loads float32 scales; "column_packed":
        column-major, with four float8_e8m0fnu scales in an int32, the first in the lowest bits. In
        the padded layout each expert has separate columns.
    weighting: "combine": combine multiplies by the router's weights; "expert": the experts did, as
        they must in the dense layout, where it is the default.
    path: "packets", "latency" or "bandwidth" (default: chosen by `max_tokens`).
    max_bytes: maximum number of bytes to allocate.
    skew_timeout: maximum number of seconds that a kernel waits for a peer; in a domain, the longest
        over all operators.
    num_sms: maximum number of SMs per kernel (default: the fastest number).
    concurrent: calls may overlap with the process's other concurrent all-to-alls on the GPU, on any
        communicator, in an order that differs between ranks: the constructor then rejects launches
        that do not fit on the GPU at once. Not needed if one stream orders all calls, the same on
        every rank.
    memory: how peers' memory is shared: "fd" or "ipc".
    timeout: maximum number of seconds to wait until all ranks make the same call.
"""
