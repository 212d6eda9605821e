"""One rank in benchmarks/training.py: the same training over Weft and gloo, step by step in turn.

Models: a residual network on scikit-learn's digits, and an encoder like BERT that predicts masked
characters in Python's standard library. Methods: DistributedDataParallel and FSDP2.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
import weft.torch
from weft.bench.group import deliver, worker

if TYPE_CHECKING:
    from collections.abc import Callable

SIDES = ("weft", "gloo")
#: Samples per rank and step.
BATCH = 16
#: Characters per text, and the share that is masked.
TEXT, MASKED = 64, 0.15
#: Code for a masked character, beyond ASCII.
MASK = 128


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, images: Any) -> Any:
        """Images with the same shape."""
        inner = torch.relu(self.norms[0](self.first(images)))
        return torch.relu(images + self.norms[1](self.second(inner)))


def resnet() -> tuple[Any, list[Any]]:
    """Small residual network, and the layers for FSDP2."""
    blocks = [Residual(32) for _ in range(3)]
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return network, blocks


class Encoder(nn.Module):
    """Transformer encoder over characters, with logits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(MASK + 1, 128)
        self.places = nn.Embedding(TEXT, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, MASK)

    def forward(self, codes: Any) -> Any:
        """Logits with shape (texts, characters, codes)."""
        inputs = self.characters(codes) + self.places.weight
        return self.head(self.layers(inputs))


def encoder() -> tuple[Any, list[Any]]:
    """Small encoder, and the layers for FSDP2."""
    network = Encoder()
    return network, list(network.layers.layers)


def digits_step() -> Callable[[Any, Any], Any]:
    """A network's loss on random digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    def loss(network: Any, chance: Any) -> Any:
        chosen = torch.randint(len(labels), (BATCH,), generator=chance)
        return nn.functional.cross_entropy(network(images[chosen]), labels[chosen])

    return loss


def text_step() -> Callable[[Any, Any], Any]:
    """A network's loss on masked characters in random texts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-e]*.py"))
    data = b"".join(each.read_bytes() for each in files)
    corpus = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().clamp(max=MASK - 1)

    def loss(network: Any, chance: Any) -> Any:
        begins = torch.randint(len(corpus) - TEXT, (BATCH,), generator=chance)
        texts = torch.stack([corpus[begin : begin + TEXT] for begin in begins])
        masked = torch.rand(texts.shape, generator=chance) < MASKED
        masked[:, 0] = True
        logits = network(texts.masked_fill(masked, MASK))
        return nn.functional.cross_entropy(logits[masked], texts[masked])

    return loss


MODELS: dict[str, tuple[Any, Any]] = {"resnet": (resnet, digits_step), "bert": (encoder, text_step)}
METHODS = ("ddp", "fsdp2")


class Replica:
    """A network in training over one group."""

    def __init__(self, model: str, method: str, group: Any, rank: int) -> None:
        torch.manual_seed(1)
        network, layers = MODELS[model][0]()
        if method == "ddp":
            network = DistributedDataParallel(network, process_group=group)
        else:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(network, mesh=mesh)
        self.network = network
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        self.chance = torch.Generator().manual_seed(1000 + rank)

    def step(self, loss: Callable[[Any, Any], Any]) -> float:
        """Loss in one step."""
        value = loss(self.network, self.chance)
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()
        return float(value.item())


def work(directory: Path, task: dict[str, Any]) -> None:
    """Train each model by each method over both backends."""
    torch.set_num_threads(1)
    with weft.init() as communicator:
        distributed.init_process_group(
            "weft",
            init_method=f"file://{directory}/store",
            rank=communicator.rank,
            world_size=communicator.world_size,
        )
        groups = {"weft": distributed.group.WORLD, "gloo": distributed.new_group(backend="gloo")}
        cases = []
        for model in task["models"]:
            loss = MODELS[model][1]()
            for method in task["methods"]:
                replicas = {
                    side: Replica(model, method, groups[side], communicator.rank) for side in SIDES
                }
                case: dict[str, Any] = {"model": model, "method": method}
                case |= {"losses": {side: [] for side in SIDES}, "ms": {side: [] for side in SIDES}}
                for step in range(task["steps"]):
                    # Each side is first in every other step.
                    for side in SIDES if step % 2 else reversed(SIDES):
                        communicator.barrier()
                        start = time.perf_counter()
                        case["losses"][side].append(replicas[side].step(loss))
                        case["ms"][side].append((time.perf_counter() - start) * 1000)
                cases.append(case)
        deliver(communicator, directory, {"cases": cases})
        communicator.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(worker(work))
