"""Non-convex composite problems from papers on variance reduction.

A point is a list of tensors whose first two axes are settings and seeds, so that all runs of a grid are batched.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.datasets import Dataset
from proxmo import L1, GroupLInf, Penalty
from proxmo.criteria import gradient_mapping

CHUNK = 4_000_000  # numbers per chunk of a full gradient


class Objective(Protocol):
    """f given by its losses, ψ by a penalty."""

    name: str
    penalty: Penalty

    def start(self, data: Dataset, seeds: range) -> list[Tensor]:
        """Return x₀ for each seed: tensors of shape (seeds, …)."""

    def losses(self, points: list[Tensor], inputs: Tensor, classes: Tensor) -> Tensor:
        """Return losses of shape (settings, seeds, samples) for inputs of shape (seeds, samples, d)."""


class NonconvexLogistic:
    """Saturating logistic loss log(1 + e^−t) − log(1 + e^−t−1) of the margin t; ψ = ℓ1."""

    name = "logistic, ℓ1"
    penalty = L1(1e-3)

    def start(self, data: Dataset, seeds: range) -> list[Tensor]:
        return [torch.zeros(len(seeds), data.inputs.shape[1], dtype=torch.float64)]

    def losses(self, points: list[Tensor], inputs: Tensor, classes: Tensor) -> Tensor:
        margins = torch.einsum("sbd,gsd->gsb", inputs, points[0]) * (2 * (classes > 0).double() - 1)
        return functional.softplus(-margins) - functional.softplus(-margins - 1)


class RobustRows:
    """Loss Σ r²/(2 + 2r²) of the residuals r of a regression on one-hot classes; ψ = ℓ∞,1, one group per input."""

    name = "robust regression, ℓ∞,1"
    penalty = GroupLInf(2e-3, dim=(0, 1))  # seeds and inputs

    def start(self, data: Dataset, seeds: range) -> list[Tensor]:
        return [torch.zeros(len(seeds), data.inputs.shape[1], data.class_count, dtype=torch.float64)]

    def losses(self, points: list[Tensor], inputs: Tensor, classes: Tensor) -> Tensor:
        targets = functional.one_hot(classes, points[0].shape[-1])
        squares = (torch.einsum("sbd,gsdc->gsbc", inputs, points[0]) - targets).square()
        return (squares / (2 + 2 * squares)).sum(-1)


class TwoLayers:
    """Cross-entropy of a network with one hidden layer of 16 tanh units; ψ = ℓ1 on all weights."""

    name = "two-layer network, ℓ1"
    penalty = L1(1e-4)
    hidden = 16

    def start(self, data: Dataset, seeds: range) -> list[Tensor]:
        inputs, classes = data.inputs.shape[1], data.class_count
        shapes = [(self.hidden, inputs), (classes, self.hidden)]
        return [torch.stack([_random(shape, 2 * seed + layer) for seed in seeds]) for layer, shape in enumerate(shapes)]

    def losses(self, points: list[Tensor], inputs: Tensor, classes: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("sbd,gshd->gsbh", inputs, points[0]))
        scores = torch.einsum("gsbh,gsch->gsbc", hidden, points[1])
        return torch.logsumexp(scores, -1) - scores.gather(-1, classes.expand(scores.shape[:-1])[..., None])[..., 0]


def gradients(objective: Objective, points: list[Tensor], inputs: Tensor, classes: Tensor) -> list[Tensor]:
    """Return the gradients of the mean loss over the samples, for each setting and seed."""
    leaves = [point.detach().requires_grad_() for point in points]
    total = objective.losses(leaves, inputs, classes).mean(-1).sum()
    return list(torch.autograd.grad(total, leaves))


def full_gradients(objective: Objective, points: list[Tensor], data: Dataset) -> list[Tensor]:
    """Return the gradients over all data, evaluated in chunks."""
    settings, seeds = points[0].shape[:2]
    widest = max(data.inputs.shape[1], 2 * TwoLayers.hidden)
    rows = max(CHUNK // (settings * seeds * widest), 1)
    totals = [torch.zeros_like(point) for point in points]
    for inputs, classes in zip(data.inputs.split(rows), data.classes.split(rows), strict=True):
        share = len(inputs) / data.size
        found = gradients(objective, points, inputs.expand(seeds, -1, -1), classes.expand(seeds, -1))
        for total, gradient in zip(totals, found, strict=True):
            total.add_(gradient, alpha=share)
    return totals


def mapping_norms(objective: Objective, points: list[Tensor], data: Dataset) -> Tensor:
    """Return ‖G‖² of the full objective with step size 1, for each setting and seed; inf for diverged runs."""
    total = torch.zeros(points[0].shape[:2], dtype=torch.float64)
    for point, gradient in zip(points, full_gradients(objective, points, data), strict=True):
        # the penalty expects a single axis of runs
        mapping = gradient_mapping(point.flatten(0, 1), gradient.flatten(0, 1), objective.penalty, lr=1.0)
        total += mapping.unflatten(0, point.shape[:2]).square().flatten(2).sum(2)
    return total.nan_to_num(nan=math.inf)


def _random(shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[1])
