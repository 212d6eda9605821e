"""A small mixture-of-experts classifier in numpy, and code that trains it.

A linear router picks the best `TOP_K` among `EXPERTS` experts for each image, weighted by the
softmax over those; an expert is a layer with `WIDTH` rectified units between two linear maps; a
linear head turns the weighted sum into logits. A second loss keeps the experts evenly loaded
(Fedus, Zoph and Shazeer, "Switch Transformers", 2021, https://arxiv.org/abs/2101.03961).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["CLASSES", "EXPERTS", "HIDDEN", "TOP_K", "Model", "Split", "load_split", "train"]

EXPERTS: Final = 8
TOP_K: Final = 2
HIDDEN: Final = 64
WIDTH: Final = 32
CLASSES: Final = 10
BATCH: Final = 64
BALANCE: Final = 0.02
LEARNING_RATE: Final = 3e-3
# Adam's, as published (Kingma and Ba, 2015).
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

if TYPE_CHECKING:
    Floats = NDArray[np.floating[Any]]


class Split(NamedTuple):
    """Images, `[n, HIDDEN]` float32 in 0 to 1, with digits, for training and held out."""

    train_images: Floats
    train_digits: NDArray[np.int64]
    test_images: Floats
    test_digits: NDArray[np.int64]


class Model(NamedTuple):
    """The parameters."""

    router: Floats  # [HIDDEN, EXPERTS]
    inner: Floats  # [EXPERTS, HIDDEN, WIDTH]
    inner_bias: Floats  # [EXPERTS, WIDTH]
    outer: Floats  # [EXPERTS, WIDTH, HIDDEN]
    outer_bias: Floats  # [EXPERTS, HIDDEN]
    head: Floats  # [HIDDEN, CLASSES]
    head_bias: Floats  # [CLASSES]

    def route(self, images: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Each image's experts and weights, both `[n, TOP_K]`."""
        scores = images @ self.router
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
        return ids, softmax(np.take_along_axis(scores, ids, axis=1))

    def expert(self, number: int, images: Floats) -> Floats:
        """One expert's output for images, `[n, HIDDEN]`."""
        inside = np.maximum(images @ self.inner[number] + self.inner_bias[number], 0)
        result: Floats = inside @ self.outer[number] + self.outer_bias[number]
        return result

    def logits(self, mixed: Floats) -> Floats:
        """Logits from weighted expert outputs, `[n, CLASSES]`."""
        result: Floats = mixed @ self.head + self.head_bias
        return result

    def classify(self, images: Floats) -> Floats:
        """Logits for images, all in this process."""
        ids, weights = self.route(images)
        mixed = np.zeros_like(images)
        for number in range(EXPERTS):
            rows, slots = np.nonzero(ids == number)
            mixed[rows] += weights[rows, slots, None] * self.expert(number, images[rows])
        return self.logits(mixed)


def load_split(seed: int) -> Split:
    """Handwritten digits from scikit-learn, a quarter held out."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images = (images[order] / 16).astype(np.float32)
    digits = digits[order].astype(np.int64)
    held_out = len(images) // 4
    return Split(images[held_out:], digits[held_out:], images[:held_out], digits[:held_out])


def train(split: Split, epochs: int, seed: int, after_epoch: Callable[[], None]) -> Model:
    """Train a model by Adam, calling `after_epoch` after each pass over the images."""
    random = np.random.default_rng(seed)
    parameters = list(initial(random))
    means = [np.zeros_like(parameter) for parameter in parameters]
    squares = [np.zeros_like(parameter) for parameter in parameters]
    count, step = len(split.train_images), 0
    for epoch in range(epochs):
        rate = LEARNING_RATE * (1 - epoch / epochs)
        order = random.permutation(count)
        for begin in range(0, count, BATCH):
            chosen = order[begin : begin + BATCH]
            step += 1
            slopes = gradients(
                Model(*parameters), split.train_images[chosen], split.train_digits[chosen]
            )
            for value, mean, square, slope in zip(parameters, means, squares, slopes, strict=True):
                mean += (1 - BETA1) * (slope - mean)
                square += (1 - BETA2) * (slope * slope - square)
                size = np.sqrt(square / (1 - BETA2**step)) + EPSILON
                value -= rate * mean / (1 - BETA1**step) / size
        after_epoch()
    return Model(*parameters)


def initial(random: np.random.Generator) -> Model:
    """Random parameters, scaled by how many inputs each unit has."""

    def normal(*shape: int) -> Floats:
        scale = np.float32(np.sqrt(2 / shape[-2]))
        return random.standard_normal(shape, dtype=np.float32) * scale

    def zeros(*shape: int) -> Floats:
        return np.zeros(shape, dtype=np.float32)

    return Model(
        normal(HIDDEN, EXPERTS),
        normal(EXPERTS, HIDDEN, WIDTH),
        zeros(EXPERTS, WIDTH),
        normal(EXPERTS, WIDTH, HIDDEN),
        zeros(EXPERTS, HIDDEN),
        normal(HIDDEN, CLASSES),
        zeros(CLASSES),
    )


def gradients(model: Model, images: Floats, digits: NDArray[np.int64]) -> Model:
    """Loss gradients: mean cross-entropy plus `BALANCE` times the balancing loss.

    Every expert runs on every image, with a weight of zero where it was not picked: for so small a
    model that is faster than gathering.
    """
    count = len(images)
    rows = np.arange(count)
    ids, picked = model.route(images)
    gates = np.zeros((count, EXPERTS), dtype=np.float32)
    np.put_along_axis(gates, ids, picked, axis=1)
    inside = np.maximum(images @ model.inner + model.inner_bias[:, None], 0)
    outputs = inside @ model.outer + model.outer_bias[:, None]
    mixed = np.einsum("ne,end->nd", gates, outputs)

    d_logits = softmax(model.logits(mixed))
    d_logits[rows, digits] -= 1
    d_logits /= count
    d_mixed = d_logits @ model.head.T
    d_outputs = gates.T[:, :, None] * d_mixed
    d_inside = (d_outputs @ model.outer.transpose(0, 2, 1)) * (inside > 0)

    d_gates = np.einsum("nd,end->ne", d_mixed, outputs)
    d_scores = through_softmax(gates, d_gates)
    shares = softmax(images @ model.router)
    load = np.count_nonzero(gates, axis=0) / (count * TOP_K)
    d_shares = np.broadcast_to(BALANCE * EXPERTS / count * load, shares.shape)
    d_scores += through_softmax(shares, d_shares.astype(np.float32))
    return Model(
        images.T @ d_scores,
        images.T @ d_inside,
        d_inside.sum(axis=1),
        inside.transpose(0, 2, 1) @ d_outputs,
        d_outputs.sum(axis=1),
        mixed.T @ d_logits,
        d_logits.sum(axis=0),
    )


def softmax(scores: Floats) -> Floats:
    """Softmax over each row."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: Floats = powers / powers.sum(axis=1, keepdims=True)
    return result


def through_softmax(shares: Floats, slopes: Floats) -> Floats:
    """Gradient by the scores, from the gradient by the softmax."""
    result: Floats = shares * (slopes - (shares * slopes).sum(axis=1, keepdims=True))
    return result
