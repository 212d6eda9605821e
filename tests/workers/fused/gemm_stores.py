"""GEMMs that send, with bulk or paced stores and without, on GPUs or the twin's processes."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

import weft
import weft.fused
from tests.workers.fused.gemm_calls import LARGE, OPERATORS, SHORT, SMALL, Place, run_case
from weft.fused.gemm import send


def compare(cases: int, device: str = "twin") -> dict[str, Any]:
    """Calls of GEMMs that send with bulk or paced stores and without.

    Args:
        cases: random sizes for each operator.
        device: "cuda" or "twin".

    Returns:
        `wrong` and `differ`, cases with wrong results or other bits than with ordinary stores;
        `bulk` and `paced`, the launch count with these stores.
    """
    weft.fused.set_timeout(120)
    numpy.seterr(all="ignore")
    launches = {"bulk": 0, "paced": 0}
    module: Any = send
    launch = module.launch

    def counted(kernel: Any, *arguments: Any, **options: Any) -> None:
        launches["bulk"] += "peer_tiles" in options
        staged = [getattr(each, "staging", None) is not None for each in arguments]
        launches["paced"] += any(staged)
        launch(kernel, *arguments, **options)

    module.launch = counted
    with weft.init() as communicator:
        place = Place(communicator, device)
        generator, wrong, differ = random.Random(11), [], []
        given = [
            _random_case(
                generator, place, operator, operator == "gemm_all_to_all" and number % 2 == 0
            )
            for number in range(cases)
            for operator in OPERATORS[:3]
        ]
        given += _kept_sums(place, given[0]["dtype"])
        for number, case in enumerate(given):
            tiling = case["tiling"]._replace(bulk_stores=False, paced_stores=False)
            # An operator's every third case is called again.
            found = [
                run_case(place, each, number // 3) for each in (case, case | {"tiling": tiling})
            ]
            wrong += [text for right, text, _ in found if not right]
            differ += [] if found[0][2] == found[1][2] else [str(case)]
        weft.check()
        communicator.barrier()
        return {"wrong": wrong, "differ": differ, **launches}


def _random_case(
    generator: random.Random, place: Place, operator: str, is_bulk: bool
) -> dict[str, Any]:
    """A random call with bulk or paced stores, in a GEMM that sends."""
    rows = generator.choice([1, 16, 40, generator.randint(1, 70)])
    columns, on_gpu = 8 * generator.randint(1, 12), place.name == "cuda"
    # At least the paced store steps, and not many more.
    inner = 8 * (generator.randint(1, 12) if is_bulk else generator.randint(38, 48))
    if on_gpu:
        rows, columns, inner = rows * 64, 16 * generator.randint(1, 190), inner * 8
    if operator != "gemm_all_reduce":
        rows *= place.ranks
    tiling = LARGE if on_gpu else SMALL
    if is_bulk:
        tiling = tiling._replace(bulk_stores=True, stages=3 if on_gpu else tiling.stages)
    elif on_gpu and generator.random() < 0.3:
        tiling = SHORT
    is_sum = operator != "gemm_all_to_all"
    return {
        "operator": operator,
        "sizes": (rows, inner, columns),
        "dtype": torch.bfloat16 if on_gpu else torch.float16,
        "transposed": generator.random() < 0.3,
        "tiling": tiling if is_bulk else tiling._replace(paced_stores=True),
        "symmetric": operator != "gemm_reduce_scatter" and generator.random() < 0.5,
        # With large tiles, float32 sums do not fit an SM beside the stages.
        "wide": is_sum and not on_gpu and generator.random() < 0.3,
        "num_sms": generator.choice([1, 2, 7 if on_gpu else 3]),
    }


def _kept_sums(place: Place, dtype: torch.dtype) -> list[dict[str, Any]]:
    """All-reduces whose sums are sent with the next tile: two-tile slices; float32 in place."""
    tiling, scale, deep = SMALL._replace(paced_stores=True), 1, 1
    if place.name == "cuda":
        tiling, scale, deep = LARGE._replace(paced_stores=True, columns=128), 8, 4
    common = {"operator": "gemm_all_reduce", "dtype": dtype}
    two_tiles = tiling._replace(slice_bytes=2 * tiling.rows * tiling.columns * dtype.itemsize)
    return [
        common
        | {"sizes": (40 * scale, 304 * deep, 72 * scale), "tiling": two_tiles, "num_sms": 2}
        | {"transposed": False, "symmetric": False, "wide": False},
        common
        | {"sizes": (33 * scale, 328 * deep, 40 * scale), "num_sms": 1}
        | {"tiling": tiling._replace(stages=2), "transposed": True}
        | {"symmetric": True, "wide": True},
    ]
