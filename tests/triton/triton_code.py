"""Triton kernels compiled to sm_90a without a GPU, for code tests."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from tests import machine_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    groups: Mapping[str, type[tuple[Any, ...]]] | None = None,
    is_aligned: Callable[[str, str], bool] = lambda name, of: of.startswith("*"),
    **options: Any,
) -> Any:
    """A kernel as Triton compiles it.

    A group is a parameter whose value is a NamedTuple; its fields are named like parameters.

    Args:
        kernel: function of `triton.jit`.
        types: of parameters by name; others have their default value, or are int32 without one.
        constants: of parameters by name.
        groups: NamedTuples of constant parameters by name; others are annotated.
        is_aligned: true for a name and a type of which 16 is a divisor, by default for pointers.
        options: of the compiler, such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert set(constants) <= set(names(kernel, groups))
    signature: dict[str, Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def place(path: tuple[int, ...], name: str, default: Any) -> str:
        """A parameter's or field's type, "constexpr" with its value in `values`."""
        if name in constants or (default is not inspect.Parameter.empty and name not in types):
            values[path] = constants.get(name, default)
            return "constexpr"
        of = types.get(name, "i32")
        if is_aligned(name, of):
            aligned[path] = [["tt.divisibility", 16]]
        return of

    for index, (name, parameter) in enumerate(kernel.signature.parameters.items()):
        if groups and name in groups:
            group: Any = groups[name]
            given = {field: constants[field] for field in group._fields if field in constants}
            signature[name], values[index,] = "constexpr", group(**given)
        elif hasattr(parameter.annotation, "_fields"):
            group = parameter.annotation
            defaults = group._field_defaults
            signature[name] = group(
                *(
                    place((index, at), field, defaults.get(field, inspect.Parameter.empty))
                    for at, field in enumerate(group._fields)
                )
            )
        else:
            signature[name] = place((index,), name, parameter.default)
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def names(kernel: Any, groups: Mapping[str, type[tuple[Any, ...]]] | None = None) -> list[str]:
    """Names of a kernel's parameters, and of the fields in its groups."""
    found: list[str] = []
    for name, parameter in kernel.signature.parameters.items():
        group: Any = (groups or {}).get(name, parameter.annotation)
        found += getattr(group, "_fields", (name,))
    return found


def usage(made: Any, folder: Path, resource: str) -> int:
    """A thread resource by cuobjdump, such as "REG" or "STACK", bytes of local memory."""
    found = re.search(rf"{resource}:(\d+)", _dumped(made, folder, "-res-usage"))
    assert found is not None
    return int(found[1])


def sass(made: Any, folder: Path) -> str:
    """A kernel's machine code."""
    return _dumped(made, folder, "-sass")


def _dumped(made: Any, folder: Path, option: str) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    return machine_code.dump(option, str(file))
