"""Compiled `weft.triton` device functions: PTX lint, and planted violations."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT
from tests.triton import triton_code

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("triton_cache")]

triton = pytest.importorskip("triton")

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)

from tests.workers.triton import kernels as triton_kernels  # noqa: E402
from weft.triton import lint, spans  # noqa: E402

#: Kernel parameter types and constants; pointers are to int32, numbers are int32.
KERNELS: dict[str, dict[str, Any]] = {
    "ring": {"numbers": "", "length": 1024, "window": 2},
    "all_to_all": {"numbers": "length", "block": 1024},
    "barriers": {"numbers": "count"},
    "slices": {"numbers": "epoch", "block": 1024},
    "meet": {"numbers": "epoch"},
    "wait_for": {"numbers": "epoch source slot"},
    "receive": {"numbers": "epoch count", "block": 1024},
    "claims": {"numbers": "count"},
    "tiles": {"numbers": "rows columns rank ranks", "block": 1024},
    "comparisons": {"numbers": "", "block": 256},
    "gemm": {"numbers": "depth", "block": 64, "inside": False},
    "traced": {"numbers": "", "block": 1024},
    "meetings": {"numbers": "count"},
    "untraced": {"numbers": "", "block": 1024},
    "remote_ring": {"numbers": "programs", "block": 1024},
    "remote_store": {"numbers": "peer value", "block": 1024},
    "remote_put": {"numbers": "peer word window offset length puts", "hold": True},
    "remote_scatter": {"numbers": "template word offset first count", "block": 8},
    "remote_put_held": {"numbers": "source peer word first puts"},
    "remote_receive": {"numbers": "source word rounds"},
    "remote_consume": {"numbers": "source word rounds", "block": 1024},
    "remote_give_back": {"numbers": "source word rounds"},
    "multiply": {"numbers": "rows columns depth", "tile": 64},
    "finish": {"numbers": "tiles"},
    "gemv_reduce_scatter": {"numbers": "each inner", "tile": 16, "depth": 64},
}
#: Pointers to other types, by parameter name.
TYPES = {
    "context": "*i64",
    "proxy": "*i64",
    "trace": "*i64",
    "times": "*i64",
    "left": "*fp16",
    "right": "*fp16",
    "x": "*fp32",
    "w": "*fp32",
    "out": "*fp32",
    "inbox": "*fp32",
}


def example(name: str) -> ModuleType:
    """The example kernel, which the documentation shows."""
    examples = ROOT / "examples"
    (file,) = (
        path
        for path in (examples / "triton_all_to_all.py", examples / "04_fused_kernel.py")
        if f"\ndef {name}(" in path.read_text(encoding="utf-8")
    )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(name: str, num_warps: int = 4, **constants: Any) -> str:
    """A kernel's PTX for sm_90a; ptxas accepts it too."""
    of_weft = {"meetings": spans.meetings}
    kernel = of_weft.get(name) or getattr(triton_kernels, name, None)
    kernel = kernel or getattr(example(name), name)
    options = KERNELS[name] | constants
    numbers = options.pop("numbers").split()
    types = TYPES | ({"outputs": "*fp16"} if name == "gemm" else {})
    types = dict.fromkeys(kernel.arg_names, "*i32") | types | dict.fromkeys(numbers, "i32")
    made = triton_code.compiled(
        kernel, types, options, is_aligned=lambda name, of: True, num_warps=num_warps
    )
    assert made.asm["cubin"]
    text: str = made.asm["ptx"]
    return text


@pytest.fixture(scope="module")
def ring() -> str:
    return compiled("ring")


def rules(ptx: str) -> set[str]:
    return {violation.rule for violation in lint.check(ptx)}


@pytest.mark.parametrize("num_warps", [1, 4])
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_functions_have_no_violation(name: str, num_warps: int) -> None:
    assert lint.check(compiled(name, num_warps)) == []


@pytest.mark.parametrize("name", [name for name in KERNELS if KERNELS[name]["numbers"]])
def test_functions_compile_for_constants(name: str) -> None:
    """Triton makes arguments equal to 1 constants."""
    ones = dict.fromkeys(KERNELS[name]["numbers"].split(), 1)
    assert lint.check(compiled(name, **ones)) == []


def test_stores_to_peers_are_as_wide_as_local_ones() -> None:
    puts = compiled("slices").partition("acq_rel")[0]
    # 1024 4-byte elements by 128 threads, 16 bytes each.
    assert re.findall(r"\bst\.global\S*", puts) == ["st.global.v4.b32"] * 2


def test_spans_of_a_kernel_that_is_not_traced_cost_no_instructions() -> None:
    def instructions(name: str, **constants: Any) -> list[str]:
        """Body lines, without debug information and names."""
        body = compiled(name, **constants).replace(f"{name}_param", "param")
        found = re.findall(r"^\t(?!\.loc|//)(\S.*)", body.partition("{")[2], re.MULTILINE)
        return [line for line in found if not re.match(r"\.|\$L__", line)]

    without = instructions("untraced")
    assert len(without) > 50
    assert instructions("traced", trace=None) == without
    traced = compiled("traced")
    assert traced.count("%globaltimer") == compiled("untraced").count("%globaltimer") + 8
    assert len(instructions("traced")) > len(without)


def test_words_of_peers_have_system_scope(ring: str) -> None:
    releases = re.findall(r"\batom\S+release\S+", ring)
    assert releases
    assert all(".sys." in each for each in releases)
    assert "ld.global.sys.acquire.b32" in ring


def test_a_proxys_words_are_loaded_and_commands_released() -> None:
    """The host stores to words: a GPU's atomic operation on host memory could undo that."""
    wait, push = compiled("remote_receive"), compiled("remote_put")
    assert "ld.global.sys.acquire.b32" in wait
    for text in (wait, push):
        assert not re.search(r"\batom\S+acquire", text)
    # Four use numbers at once, behind all other words of the command.
    release = re.compile(r"atom\.global\.sys\.release\.exch\.b32")
    assert len(release.findall(push)) == len(release.findall(wait)) + 1


def test_a_words_reader_publishes_with_release_and_the_others_acquire() -> None:
    for name in ("remote_receive", "remote_consume"):
        wait = compiled(name)
        # The exchange that elects a reader; its new values, and its last one.
        assert len(re.findall(r"atom\.global\.release\.sys\.cas\.b64", wait)) == 1
        assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b64", wait)) == 2
        assert len(re.findall(r"ld\.global\.sys\.acquire\.b64", wait)) == 1
        # The word itself, before the wait and in it.
        assert len(re.findall(r"ld\.global\.sys\.acquire\.b32", wait)) == 2


def planted(text: str, pattern: str, replacement: str) -> str:
    """The text with each match replaced; there is one."""
    changed, count = re.subn(pattern, replacement, text)
    assert count > 0, pattern
    return changed


def test_a_release_without_a_block_barrier_is_found(ring: str) -> None:
    without = planted(ring, r"\bbar\.sync\s+0;", "")
    assert "release-without-barrier" in rules(without)
    assert "acquire-without-barrier" in rules(without)


def test_a_wait_without_a_block_barrier_is_found() -> None:
    changed = planted(compiled("remote_consume"), r"\bbar\.sync\s+0;", "")
    assert "acquire-without-barrier" in rules(changed)


def test_a_store_between_barrier_and_release_is_found(ring: str) -> None:
    store = r"st.global.b32 [ %rd1 + 0 ], { %r1 };\n\1"
    changed = planted(ring, r"(@%p\d+ atom\.global\.sys\.release)", store)
    assert rules(changed) == {"release-without-barrier"}


def test_a_guarded_barrier_does_not_count(ring: str) -> None:
    assert "release-without-barrier" in rules(
        planted(ring, r"\bbar\.sync\s+0;", "@%p1 bar.sync 0;")
    )


def test_a_narrow_scope_toward_a_peer_is_found(ring: str) -> None:
    changed = planted(ring, r"atom\.global\.sys\.release", "atom.global.gpu.release")
    assert rules(changed) == {"peer-scope"}
    default = planted(ring, r"atom\.global\.sys\.release\.", "atom.global.")
    assert rules(default) == {"peer-scope"}


def test_a_narrow_scope_on_this_gpu_is_not_a_violation() -> None:
    assert re.search(r"atom\.global\.gpu\.acq_rel\.or", compiled("slices"))


def test_a_proxy_fence_without_its_state_space_is_found(ring: str) -> None:
    def fenced(fence: str) -> set[str]:
        return rules(planted(ring, r"(\bbar\.sync\s+0;)", rf"{fence};\n\1"))

    assert fenced("fence.proxy.async") == {"proxy-fence-space"}
    assert fenced("fence.proxy.async.shared::cta") == set()
    assert fenced("fence.proxy.async.global") == set()


def test_an_acquire_in_a_pipelined_loop_is_found() -> None:
    before_the_loop = compiled("gemm")
    assert "cp.async" in before_the_loop
    assert "ld.global.sys.acquire" in before_the_loop
    assert "acquire-in-pipelined-loop" in rules(compiled("gemm", inside=True))


#: A loop whose header is behind its body in the text, with a pipeline.
ROTATED = """
.visible .entry rotated(.param .u64 rotated_param_0) .reqntid 128
{{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [rotated_param_0];
    bra.uni $header;
$body:
    {count}
    bar.sync 0;
    cp.async.cg.shared.global [%r1], [%rd1], 16;
$header:
    setp.gt.s32 %p1, %r3, 9;
    @%p1 bra $body;
    ret;
}}
"""


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("ld.global.sys.acquire.b32 %r2, [%rd1];", {"acquire-in-pipelined-loop"}),
        ("bar.sync 0; atom.global.gpu.acq_rel.add.u32 %r2, [%rd1], 1;", set()),
    ],
)
def test_a_loop_is_found_in_any_order_of_the_text(count: str, expected: set[str]) -> None:
    assert rules(ROTATED.format(count=count)) == expected


#: A wait whose limit each thread evaluates by itself.
DIVERGENT = """
.visible .entry divergent(.param .u64 divergent_param_0) .reqntid 128
{{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [divergent_param_0];
$again:
    {read}
    setp.gt.s64 %p1, %rd3, 9;
    @%p1 bra $ended;
    bar.sync 0;
    bra.uni $again;
$ended:
    bar.sync 0;
    ret;
}}
"""


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ("mov.u64 %rd2, %globaltimer; add.s64 %rd3, %rd2, 5;", {"divergent-barrier"}),
        ("ld.volatile.global.b64 %rd3, [%rd1];", {"divergent-barrier"}),
        ("ld.relaxed.sys.global.b64 {%rd3}, [%rd1];", {"divergent-barrier"}),
        ("ld.shared.b64 %rd3, [%r1];", set()),
        ("@%p2 ld.relaxed.sys.global.b64 %rd2, [%rd1]; ld.shared.b64 %rd3, [%r1];", set()),
        ("ld.global.b64 %rd3, [%rd1];", set()),
    ],
)
def test_a_barrier_that_threads_may_reach_apart_is_found(read: str, expected: set[str]) -> None:
    assert rules(DIVERGENT.format(read=read)) == expected


#: A wait with a bulk load behind it, and a bulk store with a release behind it, by hand.
BULK = """
.visible .entry bulk(.param .u64 bulk_param_0) .reqntid 128
{{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [bulk_param_0];
$again: ld.global.sys.acquire.b32 %r1, [%rd1];
    setp.ne.s32 %p1, %r1, 1;
    @%p1 bra $again;
    bar.sync 0;
    {load_fence}
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 16, [%r3];
    {{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%r3], 0; }}
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 16;
    cp.async.bulk.commit_group;
    {store_wait}
    bar.sync 0;
    @%p2 st.release.sys.global.u32 [%rd1], %r1;
    ret;
}}
"""


@pytest.mark.parametrize(
    ("load_fence", "store_wait", "expected"),
    [
        ("fence.proxy.async.global;", "cp.async.bulk.wait_group 0;", set()),
        ("", "cp.async.bulk.wait_group 0;", {"bulk-load-after-acquire"}),
        (
            "fence.proxy.async.shared::cta;",
            "cp.async.bulk.wait_group 0;",
            {"bulk-load-after-acquire"},
        ),
        ("fence.proxy.async.global;", "", {"bulk-store-incomplete"}),
        (
            "fence.proxy.async.global;",
            "cp.async.bulk.wait_group.read 0;",
            {"bulk-store-incomplete"},
        ),
        ("fence.proxy.async.global;", "cp.async.bulk.wait_group 1;", {"bulk-store-incomplete"}),
    ],
)
def test_bulk_copies_need_fences_and_completion(
    load_fence: str, store_wait: str, expected: set[str]
) -> None:
    assert rules(BULK.format(load_fence=load_fence, store_wait=store_wait)) == expected


def test_a_text_without_a_function_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"expected \.entry or \.func"):
        lint.check(".version 8.7\n")


def test_the_command_prints_violations_as_json(tmp_path: Path) -> None:
    file = tmp_path / "kernel.ptx"
    file.write_text(BULK.format(load_fence="", store_wait=""))
    command = [sys.executable, "-m", "weft.triton.lint", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["rule"] for each in found] == ["bulk-load-after-acquire", "bulk-store-incomplete"]
    assert found[0]["function"] == "bulk"
    assert found[0]["line"] == 13
    file.write_text("")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
