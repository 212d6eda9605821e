"""Lint that checks memory order in compiled PTX.

The PTX memory model:
https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model.

Rules:

- `release-without-barrier`: on each path to a release there is a block barrier, and no store to
  global memory between them
- `acquire-without-barrier`: on each path from an acquire to a load of global memory there is a
  block barrier
- `acquire-in-pipelined-loop`: no acquire in a loop whose loads are asynchronous copies for later
  iterations, which would pass it; an `acq_rel` atomic counts an arrival, and is no acquire here
- `divergent-barrier`: no block barrier under a branch on a clock, or on a word that each thread
  reads individually while others may write it: threads would diverge
- `peer-scope`: system scope for atomics, acquires and releases at an address that was loaded from
  memory or has a loaded distance in it: a peer's address
- `proxy-fence-space`: `fence.proxy.async` with a state space
- `bulk-load-after-acquire`: on each path from an acquire to a bulk load from global memory there is
  a `fence.proxy.async.global`
- `bulk-store-incomplete`: on each path from a bulk store to a release there is a wait for
  completion, beyond the read from the source

Limits: loads that the compiler moves ahead through registers, instead of asynchronous copies, are
not recognised as a pipeline; function calls are not followed. For example::

    python -m weft.triton.lint FILE.ptx [--json]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.files import read_text
from weft.triton.ptx import functions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weft.triton.ptx import Function, Instruction

__all__ = ["Violation", "check", "main"]

_REGISTER = re.compile(r"%\w+")


@dataclass(frozen=True)
class Violation:
    """An instruction that breaks a rule.

    Attributes:
        rule: rule name.
        function: kernel name.
        line: PTX line, from 1.
        instruction: instruction text.
        message: rule as a sentence.
    """

    rule: str
    function: str
    line: int
    instruction: str
    message: str


def check(ptx: str) -> list[Violation]:
    """Violations in a PTX text, in text order.

    Args:
        ptx: PTX text, such as `kernel.asm["ptx"]` from a Triton kernel.

    Raises:
        ValueError: if the text has no function.
    """
    found: set[Violation] = set()
    any_function = False
    for function in functions(ptx):
        any_function = True
        for rule in (_releases, _acquires, _loops, _branches, _scopes, _fences):
            found.update(rule(function))
    if not any_function:
        raise ValueError("PTX without a function: expected .entry or .func with a body")
    return sorted(found, key=lambda violation: (violation.line, violation.rule))


def _violation(rule: str, function: Function, instruction: Instruction, message: str) -> Violation:
    return Violation(rule, function.name, instruction.line, instruction.text, message)


def _is_barrier(function: Function, each: Instruction) -> bool:
    """True for a barrier over all threads in the block."""
    if each.guard:
        return False
    if each.opcode == "bar.warp.sync":
        return 0 < function.threads <= 32
    return each.modifiers[0] in ("bar", "barrier") and each.has("sync", "red")


def _is_release(each: Instruction) -> bool:
    if each.modifiers[0] in ("fence", "membar"):
        return each.has("acq_rel", "sc", "sys", "gl", "release") and not each.has("proxy", "cta")
    if each.modifiers[0] not in ("atom", "red", "st"):
        return False
    return each.has("release", "acq_rel") and not each.has("shared", "cta")


def _is_acquire(each: Instruction) -> bool:
    if each.modifiers[0] not in ("atom", "ld"):
        return False
    return each.has("acquire", "acq_rel") and not each.has("shared", "cta")


def _is_copy(each: Instruction) -> bool:
    """True for an asynchronous copy into shared memory."""
    if not each.opcode.startswith("cp.async") or each.has("prefetch", "reduce"):
        return False
    bulk = each.has("bulk")
    spaces = [part for part in each.modifiers if part.startswith(("shared", "global"))]
    return bool(spaces) and (not bulk or spaces[0].startswith("shared"))


def _is_bulk_store(each: Instruction) -> bool:
    return each.opcode.startswith(("cp.async.bulk", "cp.reduce.async.bulk")) and (
        [part for part in each.modifiers if part.startswith(("shared", "global"))][:1] == ["global"]
    )


def _is_weak(each: Instruction, name: str) -> bool:
    """True for a weak load from or store to global memory."""
    strong = ("relaxed", "acquire", "release", "volatile", "mmio")
    return each.modifiers[0] == name and each.has("global") and not each.has(*strong)


def _releases(function: Function) -> Iterator[Violation]:
    for index, each in enumerate(function.instructions):
        if not _is_release(each):
            continue
        for at in function.before(index, lambda other: _is_barrier(function, other)):
            if at == -1 or _is_weak(function.instructions[at], "st"):
                message = "a release needs a block barrier behind the stores: tl.debug_barrier()"
                yield _violation("release-without-barrier", function, each, message)
        for at in function.before(index, _waits_for_bulk_stores):
            if at != -1 and _is_bulk_store(function.instructions[at]):
                message = "a release needs completed bulk stores: cp.async.bulk.wait_group 0"
                yield _violation("bulk-store-incomplete", function, each, message)


def _waits_for_bulk_stores(each: Instruction) -> bool:
    return each.opcode == "cp.async.bulk.wait_group" and each.operands.strip() == "0"


def _acquires(function: Function) -> Iterator[Violation]:
    for index, each in enumerate(function.instructions):
        if _is_weak(each, "ld"):
            for at in function.before(index, lambda other: _is_barrier(function, other)):
                if at != -1 and _is_acquire(function.instructions[at]):
                    message = "a load behind an acquire needs a block barrier between them"
                    yield _violation("acquire-without-barrier", function, each, message)
        if _is_copy(each) and each.has("bulk"):
            for at in function.before(index, lambda other: _is_global_fence(other)):
                if at != -1 and _is_acquire(function.instructions[at]):
                    message = "a bulk load behind an acquire needs fence.proxy.async.global"
                    yield _violation("bulk-load-after-acquire", function, each, message)


def _is_global_fence(each: Instruction) -> bool:
    return each.opcode == "fence.proxy.async.global"


def _loops(function: Function) -> Iterator[Violation]:
    copies = {at for at, each in enumerate(function.instructions) if _is_copy(each)}
    pipelined = [body for body in function.loops if body & copies]
    for body in pipelined:
        if any(inner < body for inner in pipelined):
            continue
        for at in sorted(body):
            if _is_acquire(function.instructions[at]) and function.instructions[at].has("acquire"):
                message = "copies of later iterations pass an acquire: wait before the loop"
                each = function.instructions[at]
                yield _violation("acquire-in-pipelined-loop", function, each, message)


def _branches(function: Function) -> Iterator[Violation]:
    parting = _racy_registers(function)
    for index, each in enumerate(function.instructions):
        if each.guard not in parting or not each.opcode.startswith("bra"):
            continue
        for at in sorted(function.parted(index)):
            barrier = function.instructions[at]
            if _is_barrier(function, barrier):
                message = "threads diverge at a branch on a clock or a word that is being written"
                yield _violation("divergent-barrier", function, barrier, message)


def _racy_registers(function: Function) -> set[str]:
    """Registers that depend on a clock, or on a strong load that each thread makes individually.

    Shared memory words and atomic results come from one thread.
    """
    found: set[str] = set()
    before = -1
    while len(found) != before:
        before = len(found)
        for each in function.instructions:
            name = each.modifiers[0]
            results, _, sources = _parts(each)
            if name in ("st", "atom", "red", "bra", "bar", "barrier"):
                continue
            strong = each.has("volatile", "relaxed", "acquire", "mmio")
            own_load = name == "ld" and strong and not each.guard and not each.has("shared")
            clock = re.search(r"%(?:globaltimer|clock)", sources) is not None
            if own_load or clock or found.intersection(_REGISTER.findall(sources)):
                found.update(_REGISTER.findall(results))
    return found


def _parts(each: Instruction) -> tuple[str, str, str]:
    """An instruction's results, and the sources."""
    if each.operands.startswith("{"):
        return each.operands.partition("}")
    return each.operands.partition(",")


def _scopes(function: Function) -> Iterator[Violation]:
    loaded = _loaded_addresses(function)
    for each in function.instructions:
        if each.modifiers[0] not in ("atom", "red", "ld", "st") or each.has("shared", "volatile"):
            continue
        if each.modifiers[0] in ("ld", "st") and not each.has("relaxed", "acquire", "release"):
            continue
        inside = re.search(r"\[\s*(%\w+)", each.operands)
        if inside and inside[1] in loaded and not each.has("sys"):
            message = 'a peer word needs system scope: scope="sys"'
            yield _violation("peer-scope", function, each, message)


def _loaded_addresses(function: Function) -> set[str]:
    """Registers with an address, or an address distance, that was loaded from global memory.

    A multiplication gives an index: the factors do not count.
    """
    found: set[str] = set()
    moves = ("add", "sub", "mov", "cvta", "selp", "mad", "fma")
    before = -1
    while len(found) != before:
        before = len(found)
        for each in function.instructions:
            name, registers = each.modifiers[0], _REGISTER.findall(each.operands)
            if not registers or not each.has("b64", "u64", "s64", "wide", "v2", "v4"):
                continue
            if name == "ld" and each.has("global") and each.has("b64", "u64", "s64"):
                found.update(_REGISTER.findall(each.operands.partition("[")[0]))
            elif name in moves:
                used = registers[-1:] if name in ("mad", "fma") else registers[1:]
                if found.intersection(used):
                    found.add(registers[0])
    return found


def _fences(function: Function) -> Iterator[Violation]:
    for each in function.instructions:
        if each.opcode == "fence.proxy.async":
            message = "a proxy fence without a state space is a barrier of the whole GPU: name it"
            yield _violation("proxy-fence-space", function, each, message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the violations in a file; exit status 1 if there is one, 2 without a function."""
    parser = argparse.ArgumentParser(
        prog="python -m weft.triton.lint", description="Memory order lint for compiled PTX"
    )
    parser.add_argument("file", type=Path, help="PTX file")
    parser.add_argument("--json", action="store_true", help="one JSON object for each violation")
    given = parser.parse_args(arguments)
    try:
        found = check(read_text(given.file))
    except (OSError, ValueError) as error:
        print(f"{given.file}: {error}", file=sys.stderr)
        return 2
    for each in found:
        if given.json:
            print(json.dumps({"file": str(given.file)} | asdict(each)))
        else:
            print(f"{given.file}:{each.line}: {each.rule}: {each.message}: {each.instruction}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
