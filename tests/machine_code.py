"""Kernels compiled for a shape, and their machine code. Needs no GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from weft import _native


class Kernel(NamedTuple):
    """One kernel.

    Attributes:
        registers: registers for each thread.
        local: a thread's local memory bytes, including the stack.
        code: instructions in order, operands included, without predicates.
    """

    registers: int
    local: int
    code: list[str]

    def having(self, *parts: str) -> list[str]:
        """Instructions whose name has all of `parts` between its dots."""
        return [line for line in self.code if set(parts) <= set(line.split()[0].split("."))]

    def each(self, name: str) -> list[int]:
        """Positions of instructions with exactly this name."""
        return [at for at, line in enumerate(self.code) if line.split()[0] == name]


def compiled(
    defines: list[tuple[str, str]], arch: str, source: str | None = None
) -> dict[str, Kernel]:
    """Every kernel, by name, compiled with Weft's own options.

    Args:
        defines: macros.
        arch: as the compiler names it.
        source: another program, in place of Weft's own, that includes its headers.

    Raises:
        AssertionError: with the compiler's log, if it fails.
    """
    return _kernels(tuple(defines), arch, source)


@functools.cache
def _kernels(
    defines: tuple[tuple[str, str], ...], arch: str, source: str | None
) -> dict[str, Kernel]:
    return _listed(cubin(defines, arch, source))


@functools.cache
def collectives(
    ranks: int,
    arch: str,
    reduction: str | None = None,
    element: str | None = None,
    *,
    transfers: bool = False,
) -> dict[str, Kernel]:
    """Collective kernels by name: a reduction's, or the ones without arithmetic.

    `transfers`: the send and receive kernel.

    Raises:
        AssertionError: with the compiler's log, if it fails.
    """
    name, files, options = _native.device_collectives_source(
        ranks, 32, arch, reduction, element, transfers=transfers
    )
    return _listed(_compile(name, dict(files), options))


def _listed(code: bytes) -> dict[str, Kernel]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage, listing = (dump(option, file.name) for option in ("-res-usage", "-sass"))
    resources = {
        name: (int(registers), int(stack) + int(local))
        for name, registers, stack, local in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage
        )
    }
    functions = re.split(r"^\s*Function : (\w+)$", listing, flags=re.MULTILINE)[1:]
    listings = dict(zip(functions[::2], functions[1::2], strict=True))
    assert listings.keys() == resources.keys()
    return {name: Kernel(*resources[name], _instructions(text)) for name, text in listings.items()}


def cubin(defines: tuple[tuple[str, str], ...], arch: str, source: str | None = None) -> bytes:
    """Machine code, by PyTorch's NVRTC."""
    program_name, files, options = _native.device_source(arch)
    texts = dict(files)
    if source is not None:
        texts[program_name] = source
    options = options + [f"-D{name}={value}" for name, value in defines]
    return _compile(program_name, texts, options)


def _compile(name: str, files: dict[str, str], options: list[str]) -> bytes:
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    headers = {path: text.encode() for path, text in files.items()}
    text = headers.pop(name)
    names = [path.encode() for path in headers]
    arguments = [option.encode() for option in options]
    _, program = nvrtc.nvrtcCreateProgram(
        text, name.encode(), len(names), list(headers.values()), names
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
        # Warnings are errors.
        assert "warning" not in log.decode(), log.decode()
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code: bytes = b" " * size
        nvrtc.nvrtcGetCUBIN(program, code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def tools() -> Path | None:
    """Folder with cuobjdump and nvdisasm in Triton's package, or None."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "backends" / "nvidia" / "bin"
    return folder if all((folder / name).exists() for name in ("cuobjdump", "nvdisasm")) else None


def dump(option: str, file: str) -> str:
    """Output from cuobjdump for a file."""
    folder = tools()
    assert folder is not None
    # cuobjdump searches nvdisasm on the path.
    environment = os.environ | {"PATH": f"{folder}:{os.environ.get('PATH', '')}"}
    return subprocess.run(
        [folder / "cuobjdump", option, file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def _instructions(listing: str) -> list[str]:
    """Instructions in a listing: `/*0010*/ @P0 LDG.E R2, desc[UR4][R2.64] ; /* 0x... */`."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w[^;]*?)\s*;", listing)
    return [line for line in found if not line.startswith("0x")]
