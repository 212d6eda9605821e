"""Generated blocks in docs/: prints, checks or writes them.

    benchmarks/pages.py [--check | --write] [SUBJECT ...]      default: all subjects in `REGISTRY`

A block is the text between a line `<!-- table: NAME -->` and the next `<!-- end -->`. `REGISTRY`
has, for each block, the page, the maker and the result files. A maker is a Python file with
`blocks(subject)`, which returns texts by block name, and optionally `draw(subject)`, which writes
pictures and returns their paths. docs/benchmarks.md has the steps for a new table.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class Tables(NamedTuple):
    """Blocks on one page, made from the same result files; paths start at the repository root."""

    subject: str
    page: str
    maker: str
    #: Result files below `benchmarks`; none if the blocks are computed from schedules.
    records: tuple[str, ...]
    blocks: tuple[str, ...]

    @classmethod
    def headline(cls, subject: str, records: str, *blocks: str) -> Tables:
        """Blocks on `docs/SUBJECT.md`, from one result file."""
        return cls(subject, f"docs/{subject}.md", MAKERS[subject], (records,), blocks)

    @classmethod
    def results(cls, subject: str, records: str, *blocks: str) -> Tables:
        """Blocks on `docs/results/SUBJECT.md`, from one result file."""
        return cls(subject, f"docs/results/{subject}.md", MAKERS[subject], (records,), blocks)

    def beside(self, *records: str) -> Tables:
        """The same blocks, made from more files."""
        return self._replace(records=(*self.records, *records))


MAKERS = {
    "speed": "benchmarks/speed_page.py",
    "gpu": "benchmarks/gpu_page.py",
    "gpu-collectives": "benchmarks/gpu_collectives_page.py",
    "fused": "benchmarks/fused_page.py",
    "dispatch": "benchmarks/dispatch_page.py",
    "eflops": "reproductions/pages.py",
    "moe-rdma": "reproductions/pages.py",
    "dlrm": "reproductions/pages.py",
    "lab": "lab/pages.py",
}
TRANSFER = "results/transfer.jsonl"
GPU_MOE = "results/gpu_moe.jsonl"
GPU_COLLECTIVES = "results/gpu_collectives.jsonl"
OTHERS_MOE = "reference/gpu_moe.json"
OTHERS_COLLECTIVES = "reference/gpu_collectives.json"
OFI = ("ofi-tcp", "ofi-tcp-stream", "ofi-shm", "ofi-shm-stream")
GPU_ROUNDS = ("where", "picture", "decode", "halves", "cold", "harness", "prefill")
GPU_CASES = ("modes", "late", "gemm", "start", "sweep", "not-measured", "model", "model-checks")
FUSED_CASES = ("where", "losses", "embedding", "gemv", "norm", "gemm", "ablation")
MOE_RDMA = (
    *("cx7-prefill", "verbs-decode", "verbs-prefill", "efa-decode", "efa-prefill"),
    *("constants", "sensitivity"),
)
TRANSFERS = (
    *("where", "shm", "shm-stream", "tcp", "tcp-stream"),
    *("peers-shm", "peers-tcp"),
)
ALGORITHMS = (
    *("ring", "tree", "hd", "hdrm", "circulant", "one-shot", "two-shot", "direct"),
    *("direct-read", "hierarchical", "pairwise", "binomial", "chain"),
)

#: Each generated block: subject, page, maker, result files, names.
REGISTRY = (
    Tables.headline("speed", TRANSFER, "headline"),
    Tables.results("speed", TRANSFER, *TRANSFERS),
    Tables.results("speed", "results/ofi.jsonl", *OFI),
    Tables.results("speed", "results/collectives.jsonl", "collectives-shm", "collectives-tcp"),
    Tables.results("speed", "results/torch_calls.jsonl", "torch-calls"),
    Tables.results("speed", "results/collective_peers.jsonl", "collective-peers"),
    Tables.results("speed", "results/deepspeed.jsonl", "deepspeed"),
    Tables.results("speed", "results/training.jsonl", "training"),
    Tables.results("speed", "results/moe.jsonl", "moe"),
    Tables.results("speed", "results/host.jsonl", "crowd"),
    Tables.results("speed", "results/planner.jsonl", "planner"),
    Tables.results("speed", "results/posting.jsonl", "posting"),
    Tables.results("speed", "results/rdma.jsonl", "rdma"),
    Tables.results("speed", "instructions.json", "instructions"),
    Tables.headline("gpu", GPU_MOE, "headline").beside(OTHERS_MOE),
    Tables.results("gpu", GPU_MOE, *GPU_ROUNDS, *GPU_CASES).beside(OTHERS_MOE),
    Tables.headline("gpu-collectives", GPU_COLLECTIVES, "headline"),
    Tables.results("gpu-collectives", GPU_COLLECTIVES, "where", "times", "where-4", "times-4"),
    Tables.results("gpu-collectives", GPU_COLLECTIVES, "sms", "sms-4").beside(OTHERS_COLLECTIVES),
    Tables.results("gpu-collectives", "results/gpu_training.jsonl", "steps-where", "steps"),
    Tables.headline("fused", "results/gpu_fused.jsonl", "means"),
    Tables.results("fused", "results/gpu_fused.jsonl", *FUSED_CASES),
    Tables.results("fused", "results/gpu_fused_models.jsonl", "models"),
    Tables.headline("dispatch", "results/dispatch.jsonl", "headline"),
    Tables.results("dispatch", "results/dispatch.jsonl", "dispatch", "connections"),
    Tables.headline("eflops", "results/eflops.json", "comparison"),
    Tables.results("eflops", "results/eflops.json", "constants", "sensitivity", "all"),
    Tables.headline("moe-rdma", "results/moe-rdma.json", "notes", "cx7-decode"),
    Tables.results("moe-rdma", "results/moe-rdma.json", *MOE_RDMA),
    Tables.headline("dlrm", "results/dlrm.json", "result", "notes"),
    Tables.results("dlrm", "results/dlrm.json", "assumptions", "sensitivity"),
    Tables.results("dlrm", "results/gpu_fused.jsonl", "measured"),
    Tables.headline("lab", "results/lab.jsonl", "setting", "comparison"),
    Tables.results("lab", "results/lab.jsonl", "times", "connections"),
    *(
        Tables(
            f"algorithm-{name}",
            f"docs/algorithms/{name}.md",
            "benchmarks/algorithm_pages.py",
            (),
            ("numbers", "picture"),
        )
        for name in ALGORITHMS
    ),
    Tables(
        "front", "README.md", "benchmarks/front_page.py", (GPU_MOE, GPU_COLLECTIVES), ("front",)
    ).beside(OTHERS_MOE),
)


def subjects() -> list[str]:
    """Subjects in the registry, in order."""
    return list(dict.fromkeys(tables.subject for tables in REGISTRY))


def pages(subject: str) -> list[str]:
    """Pages with blocks from a subject, in order."""
    return list(dict.fromkeys(each.page for each in REGISTRY if each.subject == subject))


def main() -> int:
    """Print, check or write the pages; 1 if a checked page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = subjects()
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"{', '.join(known)} (default: all)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check", action="store_true", help="exit status 1 if a page is out of date"
    )
    action.add_argument("--write", action="store_true", help="write pages and pictures")
    arguments = parser.parse_args()
    unknown = set(arguments.subjects) - set(known)
    if unknown:
        parser.error(f"SUBJECT {min(unknown)}: expected one of {', '.join(known)}")
    stale = []
    for subject in arguments.subjects or known:
        made = render(subject)
        if arguments.write:
            write(subject, made)
            continue
        for page, text in made.items():
            if not arguments.check:
                print(text)
            elif text != (ROOT / page).read_text(encoding="utf-8"):
                stale.append(page)
                print(f"{page}: out of date; run `benchmarks/pages.py --write {subject}`")
    return int(bool(stale))


def render(subject: str) -> dict[str, str]:
    """Texts with up-to-date blocks, by page.

    Raises:
        ValueError: if a page has other blocks than the registry, or the registry than the maker.
    """
    every = [tables for tables in REGISTRY if tables.subject == subject]
    blocks = maker(subject).blocks(subject)
    registered = [name for tables in every for name in tables.blocks]
    if sorted(registered) != sorted(blocks):
        odd = sorted(set(registered) ^ set(blocks)) or registered
        raise ValueError(
            f"{subject}, {', '.join(odd)}: expected each block of {every[0].maker} once in REGISTRY"
        )
    made = {}
    for page in pages(subject):
        text = (ROOT / page).read_text(encoding="utf-8")
        on_page = [match[2] for match in BLOCK.finditer(text)]
        names = [name for tables in every if tables.page == page for name in tables.blocks]
        if sorted(on_page) != sorted(names):
            odd = sorted(set(on_page) ^ set(names)) or on_page
            raise ValueError(f"{page}, {', '.join(odd)}: expected each block in REGISTRY once")
        made[page] = BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n\n{match[4]}", text)
    return made


def write(subject: str, made: dict[str, str]) -> None:
    """Write pages, and the maker's pictures."""
    for page, text in made.items():
        (ROOT / page).write_text(text, encoding="utf-8")
    draw = getattr(maker(subject), "draw", None)
    for picture in draw(subject) if draw else ():
        print(f"{picture.relative_to(ROOT)} is drawn")


def maker(subject: str) -> ModuleType:
    """Module that makes a subject's blocks."""
    return load(next(tables.maker for tables in REGISTRY if tables.subject == subject))


@cache
def load(path: str) -> ModuleType:
    """A file's module; its imports also find files in its folder and in this one."""
    file = ROOT / path
    for folder in (ROOT / "benchmarks", file.parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
