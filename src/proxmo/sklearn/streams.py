"""Streams: a model that learns from one part of the data after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from proxmo.sklearn.goals import Goal
from proxmo.sklearn.inputs import Array, Columns, Inputs
from proxmo.sklearn.problem import Layers, Problem, Task
from proxmo.sklearn.stochastic import Network, Random, Samples, Training


class Stream:
    """A model that learns from parts; the first one sets the units of inputs, targets and weights of samples.

    Args:
        problem: the first part.
        unit: the mean weight of its samples, relative to which those of all parts count.
        goal: the penalty.
        hidden: the sizes of the hidden layers.
        layers: a model to start from, or ``None``.
        random: where random numbers come from.
    """

    def __init__(
        self, problem: Problem, unit: float, goal: Goal, hidden: Sequence[int], layers: Layers | None, random: Random
    ) -> None:
        network = Network(problem, hidden, random)
        if layers is not None:
            network.load(layers, problem)
        self._problem, self._unit, self._random = problem, unit, random
        self._training = Training(network, problem, goal, horizon=None)

    def aim_at(self, goal: Goal) -> None:
        """Go on with another strength, or other numbers of the penalty."""
        self._training.aim_at(goal)

    def learn(self, X: Any, task: Task, weights: Array, batch_size: int) -> float:
        """Go through a part once, and return the objective on the way."""
        problem = self._problem
        self._training.extend(Columns.of(X, weights / weights.sum(), center=problem.fit_intercept))
        inputs = Inputs.of(X.astype(problem.numpy_dtype), problem.columns)
        counts = torch.from_numpy(weights / (self._unit * len(weights))).to(problem.dtype)
        samples = Samples(inputs, task.moved_to(problem.task.origin), counts)
        loss = self._training.epoch(samples, batch_size, self._random)
        return loss / float(counts.sum()) + self._training.penalty_value()

    def layers(self) -> Layers:
        """Return the model in the units of the data."""
        return self._training.network.layers(self._problem)
