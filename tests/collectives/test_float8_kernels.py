"""8-bit float conversions in kernels, compiled for the CPU, beside torch's."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

HEADER = ROOT / "crates/collectives/kernels/collectives/float8.cuh"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
#: CUDA intrinsics, and a program: codes for the float32 numbers in a file, or the numbers for
#: all codes.
PROGRAM = """
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>
#define WEFT_DEVICE inline
typedef uint8_t u8;
typedef uint32_t u32;
static inline float __uint_as_float(u32 v) { float f; std::memcpy(&f, &v, 4); return f; }
static inline u32 __float_as_uint(float f) { u32 v; std::memcpy(&v, &f, 4); return v; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
#include HEADER
int main(int count, char **arguments) {
    using namespace weft::collectives;
    std::FILE *out = std::fopen(arguments[2], "wb");
    if (count == 3) {
        for (u32 code = 0; code < 256; ++code) {
            const float value = float_of_e4m3(code);
            std::fwrite(&value, 4, 1, out);
        }
    } else {
        std::FILE *in = std::fopen(arguments[3], "rb");
        for (float value; std::fread(&value, 4, 1, in) == 1;) {
            const u8 code = arguments[1][0] == '4' ? e4m3_of(value) : e5m2_of(value);
            std::fwrite(&code, 1, 1, out);
        }
    }
    return std::fclose(out);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program."""
    if COMPILER is None:
        pytest.skip("needs a compiler of C++17")
    folder = tmp_path_factory.mktemp("float8")
    source, made = folder / "float8.cpp", folder / "float8"
    source.write_text(PROGRAM, encoding="utf-8")
    options = ["-std=c++17", "-O2", "-ffp-contract=off", f'-DHEADER="{HEADER}"']
    subprocess.run([COMPILER, *options, str(source), "-o", str(made)], check=True)
    return made


def test_every_code_of_e4m3_widens_exactly(program: Path, tmp_path: Path) -> None:
    import torch

    out = tmp_path / "out"
    subprocess.run([program, "4", out], check=True)
    seen = torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.float32)
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(seen.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(seen.view(torch.int32)[numbers], expected.view(torch.int32)[numbers])


@pytest.mark.parametrize(
    ("name", "exponent_bits", "nan"), [("float8_e4m3fn", "4", 0x7F), ("float8_e5m2", "5", 0x7E)]
)
def test_floats_round_as_those_of_torch(
    program: Path, tmp_path: Path, name: str, exponent_bits: str, nan: int
) -> None:
    import torch

    dtype = getattr(torch, name)
    # All signs and exponents; in the mantissa the seven upper bits, and the lowest one and all
    # other bits: every number in the format, every midpoint, and the neighbours of both.
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = (upper[:, None] + torch.tensor([0, 1, 0xFFFF])).flatten()
    values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    given, out = tmp_path / "in", tmp_path / "out"
    given.write_bytes(values.numpy().tobytes())
    subprocess.run([program, exponent_bits, out, given], check=True)
    seen = torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.uint8)
    rounded = values.view(torch.float32).to(dtype)
    expected = torch.where(
        rounded.float().isnan(), torch.tensor(nan, dtype=torch.uint8), rounded.view(torch.uint8)
    )
    wrong = (seen != expected).nonzero().flatten()
    assert not len(wrong), values.view(torch.float32)[wrong[:4]]
