"""Tensor-parallel decoders, compiled with the `weft.fused` pass."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from torch import distributed, nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tensor_parallel
from torch.nn.functional import linear, scaled_dot_product_attention, silu

import weft.fused
from tests.workers.fused.compile_common import compiled, counted, recorded
from weft.fused import gains

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 8, 2


def prefill() -> dict[str, Any]:
    """Two layers, tensor-parallel with rows on all ranks, too many for `gemv_all_reduce`.

    The second call's row count is no multiple of the rank count; the third keeps what its
    backward pass needs.
    """
    torch.manual_seed(9)
    layers = nn.Sequential(Layer(), Layer())
    parallel = copy.deepcopy(layers)
    for layer in parallel:
        _parallel(layer, sequence=False)
    found: dict[str, Any] = {}
    for name, rows in (("even", 40), ("odd", 35), ("trained", 40)):
        x = torch.randn(1, rows, WIDTH, requires_grad=name == "trained")
        weft.fused.enable(force=True, operators=gains.RULES)
        weft.fused.reset_report()
        with torch.set_grad_enabled(name == "trained"):
            y = compiled(parallel)(x)
        weft.fused.disable()
        with torch.no_grad():
            close = torch.allclose(y, layers(x), atol=1e-3)
        found[name] = {"close": close, **counted()}
    return found


def unequal() -> dict[str, Any]:
    """Sums with a norm behind, with one more returned on rank 0; and scaled by a symbol."""
    rank, group = distributed.get_rank(), distributed.group.WORLD.group_name
    x, w, v = torch.randn(40, 16), torch.randn(16, 16), torch.randn(24, 16)

    def summed(y: torch.Tensor) -> torch.Tensor:
        collectives = torch.ops._c10d_functional
        made: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(y, "sum", group))
        return made

    def layers(x: torch.Tensor) -> list[torch.Tensor]:
        first, second = (summed(linear(each, w)) for each in (x, x.relu()))
        # All rows in both, and on rank 0 also the first one's.
        both = linear(_normed(first + second), v)
        return [both, linear(first.sin(), v)] if rank == 0 else [both]

    def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
        made: torch.Tensor = linear(_normed(summed(linear(x, w)) * factor), v)
        return made

    weft.fused.enable(force=True, operators=["sequence_parallel"])
    uuid = config.post_grad_custom_pre_pass.uuid()
    weft.fused.reset_report()
    with torch.no_grad():
        pairs = zip(compiled(layers)(x), layers(x), strict=True)
        close = [torch.allclose(own, its, atol=1e-3) for own, its in pairs]
    found = {"unequal": [close, counted()], "uuid": uuid}
    run = torch.compile(scaled, dynamic=None, options={"fallback_by_default": True})
    with torch.no_grad():
        close = [torch.allclose(run(x, each), scaled(x, each), atol=1e-3) for each in (2, 3, 5)]
    found["symbol"] = close
    weft.fused.disable()
    rows = torch.randn(4, 8).t()
    own = torch.ops.weft_fused.own_rows(rows, group)
    found["rows"] = [torch.equal(own, rows.chunk(2)[rank]), own.is_contiguous()]
    return found


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def decoder(*, sequence: bool) -> dict[str, Any]:
    """A layer, tensor-parallel, compiled with the pass; with gradients if rows are scattered.

    Results are compared with one process's layer.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(7)
    layer = Layer()
    whole = torch.randn(BATCH, LENGTH, WIDTH)
    parallel = copy.deepcopy(layer)
    _parallel(parallel, sequence=sequence)
    part = LENGTH // ranks
    mine = slice(rank * part, (rank + 1) * part) if sequence else slice(None)
    x = whole[:, mine].clone().requires_grad_(sequence)
    weft.fused.enable(force=True)
    weft.fused.reset_report()
    with recorded() as messages, torch.set_grad_enabled(sequence):
        y = compiled(parallel)(x)
        if sequence:
            y.sum().backward()
    weft.fused.disable()
    whole.requires_grad_(sequence)
    with torch.set_grad_enabled(sequence):
        expected = layer(whole)
    found = {"close": torch.allclose(y, expected[:, mine], atol=1e-3), "lines": len(messages)}
    if sequence:
        expected.sum().backward()
        assert x.grad is not None
        assert whole.grad is not None
        pairs = [(x.grad, whole.grad[:, mine])]
        for own, theirs in zip(parallel.parameters(), layer.parameters(), strict=True):
            grad: Any = own.grad
            pairs.append((grad.full_tensor(), theirs.grad))
        found["gradients"] = all(torch.allclose(*pair, atol=1e-2) for pair in pairs)
    return found | counted()


def llama() -> dict[str, Any] | None:
    """Two Llama layers by transformers; `None` without that package."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    torch.manual_seed(8)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    made: Any = LlamaModel
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, use_cache=False, **sizes, **heads)
    model = made(config).eval()
    parallel = copy.deepcopy(model)
    columns, rows = tensor_parallel.ColwiseParallel(), tensor_parallel.RowwiseParallel()
    plan = {f"layers.*.self_attn.{name}_proj": columns for name in "qkv"}
    plan |= {f"layers.*.mlp.{name}_proj": columns for name in ("gate", "up")}
    plan |= {"layers.*.self_attn.o_proj": rows, "layers.*.mlp.down_proj": rows}
    mesh = init_device_mesh(torch.get_default_device().type, (distributed.get_world_size(),))
    tensor_parallel.parallelize_module(parallel, mesh, plan)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 50
    weft.fused.enable(force=True)
    weft.fused.reset_report()
    with torch.no_grad():
        y = compiled(parallel)(tokens).last_hidden_state
        expected = model(tokens).last_hidden_state
    weft.fused.disable()
    return {"close": torch.allclose(y, expected, atol=1e-3), **counted()}


def _parallel(layer: Layer, *, sequence: bool) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (distributed.get_world_size(),))
    columns, rows = tensor_parallel.ColwiseParallel, tensor_parallel.RowwiseParallel
    output = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        **{f"attention.{name}": columns() for name in "qkv"},
        "attention.o": rows(output_layouts=output),
        "feed.gate": columns(),
        "feed.up": columns(),
        "feed.down": rows(output_layouts=output),
    }
    if sequence:
        inputs = tensor_parallel.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan |= dict.fromkeys(("attention", "feed"), inputs)
        plan |= {name: tensor_parallel.SequenceParallel() for name in ("first", "second")}
    tensor_parallel.parallelize_module(layer, mesh, plan)


class Layer(nn.Module):  # type: ignore[misc]
    """A decoder layer like Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = Attention(), FeedForward()
        self.first, self.second = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            each(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))
