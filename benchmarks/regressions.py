"""Penalised regressions on real data, as problems for `benchmarks.auto`: their error is the gap F − F*.

Rows are scaled to unit length, but for scikit-learn's diabetes data, which stay as they are: there the useful weights
are in the hundreds. The strength of ψ is a twentieth of the smallest one that makes 0 a solution.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.datasets import Dataset, embedded, from_file
from proxmo import L1, GroupL2, Penalty
from sklearn import datasets

DOUBLE = torch.float64
SHARE = 0.05  # of the strength that makes 0 a solution
BATCH = 16
ACCURACY = 1e-12  # of the reference, relative to F(0)


class Regression:
    """f = mean loss(aᵢᵀx, yᵢ) for x of shape (inputs, outputs), from x₀ = 0; ψ = ℓ1, or ℓ2,1 with a group per input."""

    def __init__(self, name: str, inputs: Tensor, targets: Tensor, kind: str, loss: str) -> None:
        self.name = f"{loss}, {'ℓ1' if kind == 'l1' else 'ℓ2,1'}, {name}"
        self.inputs, self.targets, self._logistic = inputs.to(DOUBLE), targets.to(DOUBLE), loss == "logistic"
        curvature = 0.25 if self._logistic and self.targets.shape[1] == 1 else 0.5 if self._logistic else 1.0
        self.smoothness = curvature * float(torch.linalg.matrix_norm(self.inputs, 2)) ** 2 / len(inputs)
        slope = self.full_gradient(self.start(1))[0]
        strength = SHARE * float(slope.abs().max() if kind == "l1" else slope.norm(dim=1).max())
        self.penalty: Penalty = L1(strength) if kind == "l1" else GroupL2(strength, dim=(0, 1))  # runs and inputs

    def start(self, runs: int) -> Tensor:
        return torch.zeros(runs, self.inputs.shape[1], self.targets.shape[1], dtype=DOUBLE)

    def sample(self, runs: int, generator: torch.Generator) -> Tensor:
        return torch.randint(len(self.inputs), (runs, BATCH), generator=generator)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        inputs = self.inputs[sample]
        return inputs.mT @ self._slopes(inputs @ x, self.targets[sample]) / BATCH

    def full_gradient(self, x: Tensor) -> Tensor:
        return self.inputs.mT @ self._slopes(self.inputs @ x, self.targets) / len(self.inputs)

    def error(self, x: Tensor) -> Tensor:
        """Return the gap F − F* of each run."""
        return self.objective(x) - self.least

    def objective(self, x: Tensor) -> Tensor:
        """Return F of each run."""
        smooth = torch.stack([self._losses(self.inputs @ point).mean() for point in x])
        return smooth + torch.stack([self.penalty.value(point[None]) for point in x])

    @cached_property
    def least(self) -> float:
        """F*, by the accelerated proximal gradient method with restarts."""
        x = ahead = self.start(1)
        value, weight, lr = float(self.objective(x)), 1.0, 1 / self.smoothness
        smallest_gain, rejected = ACCURACY * value, 0
        while rejected < 2:
            new = self.penalty.prox(ahead - lr * self.full_gradient(ahead), lr)
            new_value = float(self.objective(new))
            if new_value > value - smallest_gain:
                rejected, ahead, weight = rejected + 1, x, 1.0
                continue
            following = (1 + math.sqrt(1 + 4 * weight**2)) / 2
            ahead = new + (weight - 1) / following * (new - x)
            x, value, weight, rejected = new, new_value, following, 0
        return value

    def _slopes(self, scores: Tensor, targets: Tensor) -> Tensor:
        if not self._logistic:
            return scores - targets
        return (scores.softmax(-1) if targets.shape[-1] > 1 else scores.sigmoid()) - targets

    def _losses(self, scores: Tensor) -> Tensor:
        if not self._logistic:
            return (scores - self.targets).square().sum(-1) / 2
        if scores.shape[-1] > 1:
            return torch.logsumexp(scores, -1) - (scores * self.targets).sum(-1)
        return (functional.softplus(scores) - scores * self.targets).squeeze(-1)


def regressions(files: list[Path]) -> list[Regression]:
    """Return the regressions on data of scikit-learn, and those on files in LIBSVM format with two classes."""
    inputs, targets = datasets.load_diabetes(return_X_y=True)
    diabetes = torch.tensor(inputs), torch.tensor(targets - targets.mean())[:, None]
    found = [Regression("diabetes", *diabetes, "l1", "least squares")]
    for data in (embedded("breast-cancer"), *map(from_file, files)):
        found += [Regression(data.name, *_binary(data), "l1", loss) for loss in ("logistic", "least squares")]
    for data in (embedded("digits"), embedded("wine")):
        found += [Regression(data.name, *_one_hot(data), "groups", loss) for loss in ("logistic", "least squares")]
    return found


def _binary(data: Dataset) -> tuple[Tensor, Tensor]:
    return data.inputs, data.classes[:, None]


def _one_hot(data: Dataset) -> tuple[Tensor, Tensor]:
    return data.inputs, functional.one_hot(data.classes, data.class_count)
