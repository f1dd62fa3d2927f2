"""What is fitted, as all methods see it: inputs and targets, the loss, and the way back to the units of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxmo.sklearn.inputs import Array, Columns, Inputs
from proxmo.sklearn.losses import Loss


class Layers(NamedTuple):
    """Weights of shape (outputs, inputs) and biases of each layer, as NumPy arrays in the units of the data."""

    weights: list[Array]
    biases: list[Array]


class Task(NamedTuple):
    """What a model has to predict."""

    targets: Tensor
    """Of shape (samples, outputs), or class indices of shape (samples,)."""
    center: Tensor
    """The outputs that are best if the inputs are not used."""
    spread: Tensor
    """The scale of the outputs: by how much targets differ from the center."""
    loss: Loss
    origin: Tensor
    """What was subtracted from the targets, for losses of differences, and is added to the outputs; in float64."""

    def take(self, rows: Array) -> Task:
        """Return the task for some of the samples."""
        return self._replace(targets=self.targets[torch.from_numpy(rows)])

    def moved_to(self, origin: Tensor) -> Task:
        """Return the task with targets as differences from another origin; for losses of differences."""
        if torch.equal(self.origin, origin):
            return self
        moved = (self.targets.double() + (self.origin - origin)).to(self.targets.dtype)
        return self._replace(targets=moved, origin=origin)

    def with_one_spread(self) -> Task:
        """Return the task with one scale for all outputs."""
        return self._replace(spread=self.spread.square().mean().sqrt().expand_as(self.spread))


class Outcome(NamedTuple):
    """A fitted model and how it came about."""

    layers: Layers
    loss: float
    objective: float
    curve: list[float]
    """The objective after each step on all samples, or the mean loss and the penalty of each epoch."""
    converged: bool


@dataclass
class Problem:
    """A task with its inputs; the weights of the samples sum to 1."""

    inputs: Inputs
    columns: Columns
    task: Task
    weights: Tensor
    fit_intercept: bool

    @classmethod
    def of(cls, X: Any, task: Task, weights: Array, *, fit_intercept: bool, one_scale: bool) -> Problem:
        """Prepare the problem for X; with ``one_scale`` all columns are scaled alike."""
        shares = weights / weights.sum()
        columns = Columns.of(X, shares, center=fit_intercept)
        if one_scale:
            columns, task = columns.with_one_scale(), task.with_one_spread()
        return cls(Inputs.of(X, columns), columns, task, torch.from_numpy(shares.astype(X.dtype)), fit_intercept)

    @property
    def width(self) -> int:
        """The number of inputs."""
        return len(self.columns.mean)

    @property
    def outputs(self) -> int:
        return len(self.task.center)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def numpy_dtype(self) -> Any:
        return self.weights.numpy().dtype

    def units(self, layers: int, spread: Tensor) -> list[Tensor]:
        """Return what the weights of each layer are to be multiplied by, to have the units of the data."""
        scales = self.columns.scale[:1] if np.ptp(self.columns.scale) == 0 else self.columns.scale
        units = [torch.ones(1, 1, dtype=self.dtype) for _ in range(layers)]
        units[0] = units[0] / torch.from_numpy(scales).to(self.dtype)
        units[-1] = units[-1] * (spread[:1, None] if bool((spread == spread[0]).all()) else spread[:, None])
        return units

    def in_data_units(self, weights: Sequence[Tensor], biases: Sequence[Tensor], spread: Tensor) -> Layers:
        """Return layers for X itself from those for `inputs` with outputs in units of ``spread``."""
        units = self.units(len(weights), spread)
        scaled = [(weight.double() * unit.double()).numpy() for weight, unit in zip(weights, units, strict=True)]
        moved = [bias.double().numpy().copy() for bias in biases]
        moved[-1] = moved[-1] * spread.double().numpy() + self.task.origin.numpy()
        moved[0] -= scaled[0] @ self.columns.mean
        return Layers([w.astype(self.numpy_dtype) for w in scaled], [b.astype(self.numpy_dtype) for b in moved])
