"""Triton kernels compiled to sm_90a without a GPU, for tests of their code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import machine_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    is_aligned: Callable[[str, str], bool] = lambda name, of: of.startswith("*"),
    **options: Any,
) -> Any:
    """A kernel as Triton compiles it.

    Args:
        kernel: function of `triton.jit`.
        types: of parameters by name; others have their default value, or are int32 without one.
        constants: of parameters by name.
        is_aligned: true for a name and a type of which 16 is a divisor, by default for pointers.
        options: of the compiler, such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert set(constants) <= set(kernel.arg_names)
    defaults = {
        name: parameter.default
        for name, parameter in kernel.signature.parameters.items()
        if parameter.default is not parameter.empty and name not in types
    }
    its = defaults | dict(constants)
    signature = {
        name: "constexpr" if name in its else types.get(name, "i32") for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, of) in enumerate(signature.items())
        if of != "constexpr" and is_aligned(name, of)
    }
    source = ASTSource(kernel, signature, its, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def usage(made: Any, folder: Path, resource: str) -> int:
    """A resource of a thread by cuobjdump, such as "REG" or "STACK", bytes of local memory."""
    found = re.search(rf"{resource}:(\d+)", _dumped(made, folder, "-res-usage"))
    assert found is not None
    return int(found[1])


def sass(made: Any, folder: Path) -> str:
    """Machine code of a kernel."""
    return _dumped(made, folder, "-sass")


def _dumped(made: Any, folder: Path, option: str) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    return machine_code.dump(option, str(file))
