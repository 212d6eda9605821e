"""MoE layers from two models in the transformers package, with experts distributed over ranks.

    torchrun --nproc-per-node 8 examples/use_as_layer.py
    weft run -n 2 -- python examples/use_as_layer.py --device twin

The layers have Qwen3-MoE's and DeepSeek-V3's code with random weights, and are narrower than the
published ones. Each rank runs different tokens through the layer twice: with all experts in one
process, and with the experts replaced.
"""

import argparse

import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import weft

TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 256, 32, 4
SIZES = {
    "hidden_size": HIDDEN,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 128,
    "experts_implementation": "eager",
}


class SpreadExperts(torch.nn.Module):
    """Replaces a layer's experts: runs this rank's experts for all ranks' tokens."""

    def __init__(self, experts: torch.nn.Module, all_to_all: weft.moe.AllToAll) -> None:
        super().__init__()
        self.all_to_all, self.act_fn = all_to_all, experts.act_fn
        mine = slice(all_to_all.local_experts.start, all_to_all.local_experts.stop)
        # Copies, so that all other experts' weights can be freed.
        self.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[mine].clone())
        self.down_proj = torch.nn.Parameter(experts.down_proj[mine].clone())

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        with self.all_to_all.dispatch(
            hidden_states, top_k_index, top_k_weights.float()
        ) as received:
            # Every expert has equally many rows; combine ignores those without a token.
            tokens = received.tokens.view(len(self.gate_up_proj), -1, HIDDEN)
            gate, up = torch.bmm(tokens, self.gate_up_proj.mT).chunk(2, dim=-1)
            outputs = torch.bmm(self.act_fn(gate) * up, self.down_proj.mT)
            return self.all_to_all.combine(received, outputs.view(-1, HIDDEN))


def layers() -> dict[str, torch.nn.Module]:
    """A layer from each model, the same on every rank."""
    torch.manual_seed(0)
    qwen = Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=True)
    deepseek = DeepseekV3Config(**SIZES, n_routed_experts=EXPERTS, n_group=4, topk_group=2)
    made = {"Qwen3-MoE": Qwen3MoeSparseMoeBlock(qwen), "DeepSeek-V3": DeepseekV3MoE(deepseek)}
    for layer in made.values():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def bound(
    experts: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Rounding difference bound between two runs, by element. `x`: [tokens, hidden].

    Both multiply the same matrices, with sums in any order in float32, and round every tensor to
    the dtype; that is each expert's error in its output `y`. docs/moe.md bounds combine's rounding;
    one process rounds every product and every sum instead.
    """
    single, unit = 2.0**-24, torch.finfo(x.dtype).eps / 2
    x, weights = x.double(), weights.double().abs()
    terms, errors = torch.zeros_like(x), torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, choice = torch.where(ids == expert)
        first, second = experts.gate_up_proj[expert].double(), experts.down_proj[expert].double()
        gate, up = (x[token] @ first.T).chunk(2, dim=-1)
        inexact = (HIDDEN * single + unit) * (x[token].abs() @ first.T.abs())
        gate_error, up_error = inexact.chunk(2, dim=-1)
        act = torch.nn.functional.silu(gate)
        # The slope in silu is at most 1.1; exp and the division round a few times themselves.
        act_error = 1.1 * gate_error + (8 * single + unit) * act.abs()
        middle = (act.abs() + act_error) * (up.abs() + up_error) * (1 + unit) - (act * up).abs()
        size = (act * up).abs() + middle
        inner = second.shape[1]
        y_error = middle @ second.T.abs() + (inner * single + unit) * (size @ second.T.abs())
        y = ((act * up) @ second.T).abs() + y_error
        weight = weights[token, choice, None]
        terms.index_add_(0, token, weight * y)
        errors.index_add_(0, token, weight * y_error)
    combine = (1 + single) ** TOP_K * (1 + unit) ** 2 - 1
    one_process = (1 + unit) ** (2 * TOP_K) - 1
    return 2 * errors + terms * (combine + one_process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "twin"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)

    with weft.init() as communicator, torch.no_grad():
        rank, ranks = communicator.rank, communicator.world_size
        device = arguments.device
        if device == "cuda":
            device = f"cuda:{rank % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        place = "cpu" if device == "twin" else device

        all_to_all = weft.moe.AllToAll(
            communicator,
            experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens=TOKENS,
            dtype=dtype,
            layout="padded",
            expert_capacity=ranks * TOKENS,
            device=device,
        )
        own = torch.Generator().manual_seed(1 + rank)
        for name, layer in layers().items():
            layer.to(device=place, dtype=dtype)
            tokens = torch.randn(1, TOKENS, HIDDEN, generator=own).to(device=place, dtype=dtype)
            in_one_process = layer(tokens)

            experts, layer.experts = layer.experts, SpreadExperts(layer.experts, all_to_all)
            spread = layer(tokens)
            all_to_all.check()

            chosen = layer.gate(tokens)
            weights, ids = sorted(chosen[1:], key=lambda each: not each.is_floating_point())
            allowed = bound(experts, tokens[0], ids, weights)
            # The layer rounds once more where it adds what is shared.
            allowed += 2 * torch.finfo(dtype).eps * in_one_process[0].double().abs()
            difference = (spread - in_one_process)[0].double().abs()
            assert (difference <= allowed).all()
            if rank == 0:
                at = difference.argmax()
                most, limit = difference.flatten()[at], allowed.flatten()[at]
                print(f"{name} on {ranks} ranks: differs by {most:.2g}; the bound is {limit:.2g}")
        communicator.barrier()
        all_to_all.close()


if __name__ == "__main__":
    main()
