"""Networks that cover the structures compaction handles, each with example inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxmo.experiments.networks import ResNet18


class Concatenated(nn.Module):
    """Two concatenated layers followed by one normalisation, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(10)
        self.third = nn.Conv2d(10, 5, 3, padding=1)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = functional.relu(self.first(x))
        second = functional.relu(self.second(first))
        both = functional.relu(self.norm(torch.cat([first, second], 1)))
        return self.head(functional.relu(self.third(both)).mean((2, 3)))


class Residual(nn.Module):
    """An MLP with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.head(hidden + self.down(functional.gelu(self.up(hidden))))


class Depthwise(nn.Module):
    """A depthwise separable convolution, as in MobileNet, flattened at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.expand_norm = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.depth, self.depth_norm = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.project, self.project_norm = nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu6(self.expand_norm(self.expand(x)))
        x = functional.relu6(self.depth_norm(self.depth(x)))
        return self.head(self.project_norm(self.project(x)).flatten(1))


class AddedToInput(nn.Module):
    """The input of the model is added to a layer, so its channels cannot be removed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.conv(x) + x).mean((2, 3)))


class Tied(nn.Module):
    """Embedding and output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


class CalledTwice(nn.Module):
    """One layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.relu(self.layer(functional.relu(self.layer(x)))))


class Centred(nn.Module):
    """Subtracts the mean over channels, which mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self.head(hidden - hidden.mean(-1, keepdim=True))


class HandwrittenAttention(nn.Module):
    """Attention with a hard-coded number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        q, k, v = (
            layer(hidden).reshape(*hidden.shape[:-1], 2, 4).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class KeywordInputs(nn.Module):
    """Takes keyword arguments and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 6), nn.Linear(2, 6), nn.Linear(6, 2)

    def forward(self, *, left: Tensor, right: Tensor) -> dict[str, Any]:
        scores = self.head(functional.relu(self.left(left) + self.right(right)))
        return {"scores": scores, "classes": scores.argmax(-1)}


def transformer(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def image(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


Case = tuple[Callable[[], nn.Module], Callable[[], Any], int]
CASES: dict[str, Case] = {  # model, example inputs, number of families with removable units
    "two layers": (lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)), lambda: image(4, 3), 1),
    "concatenated": (Concatenated, lambda: image(2, 3, 4, 4), 3),
    "residual": (Residual, lambda: image(3, 5), 2),
    "depthwise": (Depthwise, lambda: image(2, 3, 4, 4), 2),
    "ResNet": (lambda: ResNet18(8, 3, 10), lambda: image(2, 3, 16, 16), 12),
    "Transformer": (lambda: transformer(True), lambda: image(2, 5, 16), 4),
    "Transformer, sequence first": (lambda: transformer(False), lambda: image(5, 2, 16), 4),
    "transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 5, 2), nn.ReLU(), nn.Conv2d(5, 2, 1)
        ),
        lambda: image(2, 3, 4, 4),
        2,
    ),
    "1-D": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 6, 3),
            nn.BatchNorm1d(6),
            nn.PReLU(6),
            nn.Conv1d(6, 5, 2),
            nn.InstanceNorm1d(5, affine=True),
            nn.Flatten(),
            nn.Linear(10, 3),
        ),
        lambda: image(2, 3, 5),
        2,
    ),
    "3-D": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.SiLU(), nn.Conv3d(4, 2, 2)),
        lambda: image(2, 1, 4, 4, 4),
        1,
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda: torch.arange(8).reshape(2, 4),
        2,
    ),
    "keyword inputs": (KeywordInputs, lambda: {"left": image(4, 3), "right": image(4, 2)}, 1),
    "handwritten attention": (HandwrittenAttention, lambda: image(2, 3, 4), 1),
    "added to input": (AddedToInput, lambda: image(2, 3, 4, 4), 0),
    "tied": (Tied, lambda: torch.arange(10).reshape(2, 5), 1),
    "called twice": (CalledTwice, lambda: image(3, 4), 0),
    "centred": (Centred, lambda: image(3, 4), 0),
}


def make(name: str) -> tuple[nn.Module, Any]:
    """Return a model with running statistics as after training, and its example inputs."""
    torch.manual_seed(0)
    model, example = CASES[name][0](), CASES[name][1]()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model, example


def call(model: nn.Module, example: Any) -> list[Tensor]:
    """Return the outputs on a tensor or a dictionary of keyword arguments."""
    with torch.no_grad():
        outputs = model(**example) if isinstance(example, dict) else model(example)
    return list(outputs.values()) if isinstance(outputs, dict) else [outputs]
