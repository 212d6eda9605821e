"""What an all-to-all on a device is asked to be; the native module checks what devices can do."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, Final, Required, TypedDict, Unpack

from weft._array import DTYPES, FLOAT8, SCALES, dtype_name
from weft._timeout import seconds
from weft.errors import ConfigurationError
from weft.float8 import scale_count

__all__ = ["Arguments", "Config", "make"]

#: Bytes that a kernel loads and stores at a time: rows begin at a multiple of it.
VECTOR: Final = 16


class Plain(TypedDict, total=False):
    """Arguments of `weft.cuda.AllToAll` that the native module takes as they are."""

    experts: Required[int]
    top_k: Required[int]
    hidden: Required[int]
    max_tokens: Required[int]
    layout: str
    pad_to: int
    expert_capacity: int | None
    max_positions: int | None
    weighting: str
    buffers: int
    num_sms: int | None
    concurrent: bool
    path: str | None
    memory: str
    skew_timeout: float
    max_bytes: int | None
    timeout: float


class Arguments(Plain, total=False):
    """Arguments of `weft.cuda.AllToAll`, whose docstring says what they mean."""

    dtype: object
    wire_dtype: object | None
    block: int
    scale_dtype: object
    combine_dtype: object | None
    answer_dtype: object | None
    output_dtype: object | None
    combine: str
    ids_dtype: object
    private_rows: int | None
    max_receive_rows: int | None


@dataclass(frozen=True, kw_only=True)
class Config:
    """Names and numbers as the native module takes them; see `weft.cuda.AllToAll`.

    The one place of defaults, but for those of `make`.
    """

    experts: int
    top_k: int
    hidden: int
    max_tokens: int
    token_dtype: str
    wire_dtype: str
    scales: tuple[str, int] | None
    combine_dtype: str
    answer_dtype: str
    output_dtype: str
    ids_dtype: str
    layout: str = "contiguous"
    pad_to: int = 1
    expert_capacity: int | None = None
    max_positions: int | None = None
    weighting: str = "combine"
    buffers: int = 2
    num_sms: int | None = None
    concurrent: bool = False
    path: str | None = None
    memory: str = "fd"
    skew_timeout: float = 30.0
    max_bytes: int | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("skew_timeout", "timeout"):
            object.__setattr__(self, name, seconds(getattr(self, name), name))

    @property
    def scales_given(self) -> bool:
        """Whether tokens come with scales: not so if the kernel makes them."""
        return self.token_dtype in FLOAT8

    @property
    def scale_columns(self) -> int:
        """Scales of a token, where it is received; 0 if it has none."""
        return scale_count(self.hidden, self.scales[1]) if self.scales else 0

    def native(self) -> dict[str, Any]:
        """Arguments of the native class."""
        return asdict(self)

    def digest(self, *more: object) -> int:
        """A number of 31 bits that shapes alike have, and others most likely not."""
        text = repr((self, more)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") >> 1


def make(
    *,
    dtype: object = "float32",
    wire_dtype: object | None = None,
    block: int = 128,
    scale_dtype: object = "float32",
    combine_dtype: object | None = None,
    answer_dtype: object | None = None,
    output_dtype: object | None = None,
    combine: str = "reduce",
    ids_dtype: object = "int64",
    private_rows: int | None = None,
    max_receive_rows: int | None = None,
    **plain: Unpack[Plain],
) -> Config:
    """The `Config` that these arguments ask for.

    Raises:
        ConfigurationError: if one is no dtype, or has a meaning on the CPU only; says why.
    """
    _refuse_what_only_the_cpu_does(combine, private_rows, max_receive_rows)
    tokens = dtype_name(dtype, (*DTYPES, *FLOAT8))
    wire = tokens if wire_dtype is None else dtype_name(wire_dtype, (*DTYPES, *FLOAT8))
    wide = "bfloat16" if tokens in FLOAT8 else tokens
    outputs = _summable("combine_dtype", wide if combine_dtype is None else combine_dtype)
    return Config(
        token_dtype=tokens,
        wire_dtype=wire,
        scales=(dtype_name(scale_dtype, SCALES), block) if wire in FLOAT8 else None,
        combine_dtype=outputs,
        answer_dtype=_summable("answer_dtype", outputs if answer_dtype is None else answer_dtype),
        output_dtype=_summable("output_dtype", wide if output_dtype is None else output_dtype),
        ids_dtype=dtype_name(ids_dtype, ("int64", "int32")),
        **plain,
    )


def _refuse_what_only_the_cpu_does(
    combine: str, private_rows: int | None, max_receive_rows: int | None
) -> None:
    if combine != "reduce":
        raise ConfigurationError(
            f"combine={combine!r} is not for devices: each rank's sum is formed where its experts "
            "are, so that one row per token and rank comes back; pass combine='reduce'"
        )
    if private_rows is not None:
        raise ConfigurationError(
            "private_rows is not for devices: every row is stored straight into its place there"
        )
    if max_receive_rows is not None:
        raise ConfigurationError(
            "max_receive_rows is not for devices: rows have a place each, and max_positions or "
            "expert_capacity limits what is made of them"
        )


def _summable(what: str, dtype: object) -> str:
    name = dtype_name(dtype, (*DTYPES, *FLOAT8))
    if name in FLOAT8:
        raise ConfigurationError(
            f"{what} is {name}: answers have no scales, and sums of 8-bit floats would be mostly "
            f"rounding; {', '.join(DTYPES)} are possible"
        )
    return name
