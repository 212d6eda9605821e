"""Models for the training benchmark, with synthetic batches: ResNet-50, and an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MODELS", "Model"]

#: Channels that leave a block, over the channels in the 3 x 3 convolution.
EXPANSION: Final = 4
#: Batches that the steps take in turn.
BATCHES: Final = 2


@dataclass(frozen=True)
class Model:
    """Network and batch factories, and the loss."""

    #: Makes a shape's network on torch's default device, and the layers for FSDP2.
    make: Callable[[dict[str, Any]], tuple[Any, list[Any]]]
    #: A batch on torch's default device, from the default generators.
    batch: Callable[[dict[str, Any]], tuple[Any, Any]]
    #: A network's loss on a batch: a float32 scalar.
    loss: Callable[[Any, tuple[Any, Any]], Any]
    memory_format: torch.memory_format = torch.contiguous_format


def convolution(given: int, made: int, size: int, stride: int = 1) -> Any:
    """Convolution without bias that keeps the size, divided by the stride."""
    return nn.Conv2d(given, made, size, stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; the 3 x 3 one has the stride."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        made = width * EXPANSION
        self.convolutions = nn.Sequential(
            *(convolution(given, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(convolution(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(convolution(width, made, 1), nn.BatchNorm2d(made)),
        )
        self.shortcut = nn.Identity()
        if stride > 1 or given != made:
            self.shortcut = nn.Sequential(convolution(given, made, 1, stride), nn.BatchNorm2d(made))

    def forward(self, images: Any) -> Any:
        """Images with `EXPANSION * width` channels."""
        return functional.relu(self.convolutions(images) + self.shortcut(images), inplace=True)


def resnet(shape: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Residual network with four stages, and those stages."""
    width = shape["width"]
    start = nn.Sequential(
        convolution(3, width, 7, 2),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    )
    stages, given = [], width
    for number, blocks in enumerate(shape["blocks"]):
        inner = width << number
        stage = nn.Sequential()
        for block in range(blocks):
            stage.append(Bottleneck(given, inner, 2 if number and not block else 1))
            given = inner * EXPANSION
        stages.append(stage)
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, shape["classes"]))
    return nn.Sequential(start, *stages, *end), stages


def images(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Random images and labels."""
    size = (shape["batch"], 3, shape["pixels"], shape["pixels"])
    pixels = torch.randn(size).to(memory_format=torch.channels_last)
    return pixels, torch.randint(shape["classes"], (shape["batch"],))


def classification_loss(network: Any, batch: tuple[Any, Any]) -> Any:
    """Cross entropy for the labels."""
    return functional.cross_entropy(network(batch[0]).float(), batch[1])


class Encoder(nn.Module):
    """Transformer encoder, and logits for each sequence's first tokens."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        hidden = shape["hidden"]
        self.predicted = shape["predicted"]
        self.words = nn.Embedding(shape["vocabulary"], hidden)
        self.places = nn.Embedding(shape["sequence"], hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, shape["heads"], shape["inner"], 0.0, "gelu", batch_first=True
            )
            for _ in range(shape["layers"])
        )
        self.head = nn.Linear(hidden, shape["vocabulary"])

    def forward(self, words: Any) -> Any:
        """Logits with shape (sequences, predicted, vocabulary)."""
        states = self.words(words) + self.places.weight
        for layer in self.layers:
            states = layer(states)
        return self.head(states[:, : self.predicted])


def encoder(shape: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Encoder with layers."""
    network = Encoder(shape)
    return network, list(network.layers)


def words(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Random words, and those to predict."""
    given = torch.randint(shape["vocabulary"], (shape["batch"], shape["sequence"]))
    return given, torch.randint(shape["vocabulary"], (shape["batch"], shape["predicted"]))


def prediction_loss(network: Any, batch: tuple[Any, Any]) -> Any:
    """Cross entropy for the predicted words."""
    logits = network(batch[0]).float()
    return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


MODELS: Final = {
    "resnet50": Model(resnet, images, classification_loss, torch.channels_last),
    "bert": Model(encoder, words, prediction_loss),
}
