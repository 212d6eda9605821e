"""Device all-to-all configuration; the native module checks device limits."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import asdict
from typing import Any, Final, TypeVar, Unpack

from weft.base.array import DTYPES, FLOAT8, SCALES, dtype_name
from weft.base.errors import ConfigurationError
from weft.base.float8 import scale_count
from weft.base.timeout import seconds
from weft.moe.options import ARGUMENTS, Options, Plain

__all__ = ["Arguments", "Config", "documented", "make"]

#: Bytes per kernel load or store: rows begin at a multiple.
VECTOR: Final = 16

_Class = TypeVar("_Class", bound=type)


class Arguments(Plain, total=False):
    """Arguments to `weft.cuda.AllToAll`, described there."""

    dtype: object
    wire_dtype: object | None
    block: int
    scale_dtype: object
    combine_dtype: object | None
    reply_dtype: object | None
    output_dtype: object | None
    combine: str
    ids_dtype: object
    private_rows: int | None
    max_receive_rows: int | None


class Config(Options):
    """Names and numbers as the native module takes them; see `weft.cuda.AllToAll`."""

    def __post_init__(self) -> None:
        for name in ("skew_timeout", "timeout"):
            object.__setattr__(self, name, seconds(getattr(self, name), name))

    @property
    def scales_given(self) -> bool:
        """True if tokens come with scales: not if the kernel makes them."""
        return self.token_dtype in FLOAT8

    @property
    def scale_columns(self) -> int:
        """Scales per received token; 0 if it has none."""
        return scale_count(self.hidden, self.scales[1]) if self.scales else 0

    @property
    def placed_scales(self) -> tuple[str, int]:
        """Received scale dtype and columns: `scale_layout` may pack four into one."""
        if self.scales is None:
            return "float32", 0
        if self.scale_layout == "column_packed":
            return "int32", -(-self.scale_columns // 4)
        return self.scales[0], self.scale_columns

    def native(self) -> dict[str, Any]:
        """Arguments for the native class."""
        return asdict(self)

    def digest(self, *more: object) -> int:
        """A 31-bit number, equal for equal shapes, and most likely different for others."""
        text = repr((self, more)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") >> 1


def documented(owner: _Class) -> _Class:
    """Replace `{options}` in a class's docstring by the option documentation."""
    if owner.__doc__:
        text = inspect.cleandoc(owner.__doc__)
        owner.__doc__ = text.replace("    {options}\n", ARGUMENTS)
    return owner


def make(
    *,
    dtype: object = "float32",
    wire_dtype: object | None = None,
    block: int = 128,
    scale_dtype: object = "float32",
    combine_dtype: object | None = None,
    reply_dtype: object | None = None,
    output_dtype: object | None = None,
    combine: str = "reduce",
    ids_dtype: object = "int64",
    private_rows: int | None = None,
    max_receive_rows: int | None = None,
    **plain: Unpack[Plain],
) -> Config:
    """Make a `Config` from these arguments.

    Raises:
        ConfigurationError: if one is no dtype, or applies to the CPU only.
    """
    _refuse_what_only_the_cpu_does(combine, private_rows, max_receive_rows)
    tokens = dtype_name(dtype, (*DTYPES, *FLOAT8))
    if plain.get("layout") == "dense":
        plain.setdefault("weighting", "expert")
    wire = (
        tokens if wire_dtype is None else dtype_name(wire_dtype, (*DTYPES, *FLOAT8), "wire_dtype")
    )
    wide = "bfloat16" if tokens in FLOAT8 else tokens
    outputs = _summable("combine_dtype", wide if combine_dtype is None else combine_dtype)
    return Config(
        token_dtype=tokens,
        wire_dtype=wire,
        scales=(dtype_name(scale_dtype, SCALES, "scale_dtype"), block) if wire in FLOAT8 else None,
        combine_dtype=outputs,
        reply_dtype=_summable("reply_dtype", outputs if reply_dtype is None else reply_dtype),
        output_dtype=_summable("output_dtype", wide if output_dtype is None else output_dtype),
        ids_dtype=dtype_name(ids_dtype, ("int64", "int32"), "ids_dtype"),
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
    name = dtype_name(dtype, (*DTYPES, *FLOAT8), what)
    if name in FLOAT8:
        raise ConfigurationError(
            f"{what} {name}: expected {', '.join(DTYPES)}; replies have no scales, and sums of "
            "8-bit floats would be mostly rounding"
        )
    return name
