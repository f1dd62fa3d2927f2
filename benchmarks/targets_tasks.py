"""The tasks of `benchmarks.targets`: data, a network, how it is trained, and how it is scored.

All methods of a task use its lr, with momentum 0.9, and cut it to a tenth for the last fifth of the steps. For digits,
fashion-mlp and cifar10-resnet it is the best of 0.1, 0.3 and 1 for dense training, of the latter two in longer runs;
the others are not tuned. The runs are short, so that all of them fit into two hours of one core.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxmo.experiments.data import FASHION_FOLDER, load
from proxmo.experiments.images import Batches, Images, Split, plain_batches
from proxmo.experiments.networks import ResNet18

Metric = Literal["accuracy", "loss"]
CONTEXT = 64  # bytes that the transformer reads


@dataclass(frozen=True)
class Task:
    """A network, its data, its budget and its score."""

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], Iterator[tuple[Tensor, Tensor]]]
    """Endless mini-batches of inputs and labels."""
    score: Callable[[nn.Module], float]
    """The metric on data held out, of a network in evaluation mode."""
    example: Tensor
    """Inputs to find the units with."""
    lr: float
    steps: int
    metric: Metric = "accuracy"
    exclude: tuple[str, ...] = ()
    """Modules whose units are not to be removed."""

    def loss(self, network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(network(inputs).flatten(0, -2), labels.flatten())


class Folders(NamedTuple):
    """Where the data are."""

    fashion_mnist: Path = FASHION_FOLDER
    cifar10: Path | None = None
    """``None`` for the folder that `proxmo data cifar10` fetches to."""


def _image_task(name: str, images: Images, make: Callable[[], nn.Module], lr: float, epochs: int, batch: int) -> Task:
    def batches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        found = Batches(images, batch, generator)
        while True:
            for inputs, labels in found:
                yield inputs.contiguous(), labels  # torch 2.13 may abort on channels-last inputs of narrow layers

    def accuracy(network: nn.Module) -> float:
        right = sum(int((network(x).argmax(1) == y).sum()) for x, y in plain_batches(images, images.test, 1000))
        return right / len(images.test)

    first = Split(images.test.images[:2], images.test.labels[:2])
    example = next(plain_batches(images, first, 2))[0]
    steps = epochs * (len(images.train) // batch)
    return Task(name, make, batches, accuracy, example, lr, steps)


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def _first(split: Split, count: int) -> Split:
    return Split(split.images[:count], split.labels[:count])


def _fashion(folders: Folders, count: int) -> Images:
    images = load("fashion-mnist", folders.fashion_mnist)
    return replace(images, train=_first(images.train, count), padding=0, flip=False)


def _small_cifar10(folders: Folders) -> Images:
    """Return 10,000 training and 5,000 test images, at half their resolution."""
    images = load("cifar10", folders.cifar10)
    train, test = _halved(_first(images.train, 10_000)), _halved(_first(images.test, 5_000))
    return replace(images, train=train, test=test, padding=2)


def _halved(split: Split) -> Split:
    pixels = split.images.permute(0, 3, 1, 2).float()
    means = functional.avg_pool2d(pixels, 2).round().to(torch.uint8)
    return Split(means.permute(0, 2, 3, 1).contiguous(), split.labels)


class ByteTransformer(nn.Module):
    """Predicts the next byte: causal attention and an MLP in each of two blocks."""

    def __init__(self, width: int = 64, heads: int = 4, neurons: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(_Block(width, heads, neurons) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, neurons: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.inner, self.outer = nn.Linear(width, neurons), nn.Linear(neurons, width)
        future = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        self.register_buffer("future", future)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first_norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=self.future, need_weights=False)[0]
        return x + self.outer(functional.gelu(self.inner(self.second_norm(x))))


def _bytes_task() -> Task:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    held_out, trained = windows[:1000], windows[1000:]

    def batches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            rows = trained[torch.randint(len(trained), (8,), generator=generator)]
            yield rows[:, :-1], rows[:, 1:]

    def loss(network: nn.Module) -> float:
        parts = [
            functional.cross_entropy(network(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            for rows in held_out.split(200)
        ]
        return float(torch.stack(parts).mean())

    example = trained[:2, :-1]
    attention = ("*attention*",)
    return Task("bytes-transformer", ByteTransformer, batches, loss, example, 1.0, 400, "loss", attention)


TASKS: dict[str, Callable[[Folders], Task]] = {
    "digits": lambda _: _image_task("digits", load("digits"), lambda: _mlp(64, 256, 256, 10), 1.0, 40, 64),
    "fashion-mlp": lambda folders: _image_task(
        "fashion-mlp", _fashion(folders, 60_000), lambda: _mlp(784, 300, 100, 10), 1.0, 1, 128
    ),
    "fashion-cnn": lambda folders: _image_task("fashion-cnn", _fashion(folders, 15_000), _cnn, 0.3, 1, 32),
    "cifar10-resnet": lambda folders: _image_task(
        "cifar10-resnet", _small_cifar10(folders), lambda: ResNet18(8, 3, 10), 0.1, 2, 64
    ),
    "bytes-transformer": lambda _: _bytes_task(),
}
