"""Twins for a device all-to-all in this process, and small batches for them."""

from typing import Any

SHAPE: dict[str, Any] = {"experts": 4, "top_k": 2, "hidden": 32, "max_tokens": 8}


def group(world_size: int, **arguments: Any) -> list[Any]:
    from weft import cuda

    return list(cuda.local_group(world_size, ["twin"] * world_size, **(SHAPE | arguments)))


def batch(count: int = 3, **options: Any) -> tuple[Any, Any, Any]:
    import torch

    tokens = torch.arange(count * 32, dtype=torch.float32).reshape(count, 32)
    ids = torch.tensor([[0, 1], [2, 3], [-1, 3]]).repeat(3, 1)[:count]
    return tokens.to(**options), ids, torch.full((count, 2), 0.5)
