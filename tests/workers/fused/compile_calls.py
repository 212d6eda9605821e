"""Torch operators and the `weft.fused` compiler pass, between processes over gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from tests.workers.fused.compile_agreement import cache_keys, disagreement, groups
from tests.workers.fused.compile_bags import bags
from tests.workers.fused.compile_graphs import dynamic, graphs
from tests.workers.fused.compile_models import decoder, llama, prefill, unequal
from tests.workers.fused.compile_operators import embedding, fallbacks, operator, replays, scaled
from tests.workers.fused.compile_options import options
from tests.workers.fused.compile_places import places
from tests.workers.fused.compile_scaled import scaled_graphs
from tests.workers.fused.compile_tuning import choices, choices_of_gpus
from weft.fused import operators
from weft.fused.scaled_operators import SCALED_OPERATORS


def calls(device: str = "cpu") -> dict[str, Any]:
    """Results from all checks in one process group."""
    rank, _, group = start(device)
    torch.manual_seed(rank)
    found = {
        "operators": {name: operator(name, group) for name in operators.OPERATORS},
        "fallbacks": fallbacks(group),
        "bags": [embedding(group, columns) for columns in (8, 6)],
        "graphs": graphs(group),
        "dynamic": dynamic(group),
        "bag_places": bags(rank, group),
        "places": places(rank, group),
        "disagreement": disagreement(rank, group),
        "uuid": cache_keys(),
        "decoder": decoder(sequence=False),
        "sequence": decoder(sequence=True),
        "prefill": prefill(),
        "unequal": unequal(),
        "options": options(group),
        "llama": llama(),
        "tuning": choices(rank, group),
    }
    if device == "cpu":
        found |= _float8(group)
    if device == "cuda":
        found["graph"] = replays(group)
        found["tuned"] = choices_of_gpus(group)
    found["groups"] = groups(group)
    return found


def float8(device: str) -> dict[str, Any]:
    """Results from only the float8 checks."""
    rank, _, group = start(device)
    torch.manual_seed(rank)
    return _float8(group)


def _float8(group: str) -> dict[str, Any]:
    return {
        "scaled": {name: scaled(name, group) for name in SCALED_OPERATORS},
        "scaled graphs": scaled_graphs(group),
    }


def start(device: str) -> tuple[int, int, str]:
    """The default process group; this rank, the rank count and the group's name."""
    rank, ranks = int(os.environ["WEFT_RANK"]), int(os.environ["WEFT_WORLD_SIZE"])
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("WEFT_LOCAL_RANK", "0")))
        backend = "cuda:nccl,cpu:gloo"
    store = distributed.FileStore(os.path.join(os.environ["TEST_RESULTS"], "store"), ranks)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    assert distributed.group.WORLD is not None
    torch.set_num_threads(1)
    torch.set_default_device(device)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["TEST_RESULTS"], "inductor")
    os.environ["WEFT_CACHE_DIR"] = os.path.join(os.environ["TEST_RESULTS"], "weft")
    return rank, ranks, distributed.group.WORLD.group_name
