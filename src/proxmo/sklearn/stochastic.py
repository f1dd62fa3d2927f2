"""Networks, streams and early stopping: `AutoProxSGD` on mini-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from proxmo.optim import AutoProxSGD
from proxmo.penalties import Penalty, Trimmed
from proxmo.progress import Progress
from proxmo.sklearn.goals import Goal
from proxmo.sklearn.inputs import Columns, Inputs
from proxmo.sklearn.losses import losses_of_samples
from proxmo.sklearn.problem import Layers, Outcome, Problem, Task
from proxmo.sklearn.units import InUnits
from proxmo.targets import HOLD, KeepScheduler

Random = np.random.RandomState
LATER = 4  # a model that starts from another takes this part of the epochs


class Samples(NamedTuple):
    """Inputs with what to predict from them; the weights sum to 1, or to how much a part of a stream counts."""

    inputs: Inputs
    task: Task
    weights: Tensor


class Network(nn.Module):
    """Linear layers with ReLU between them, for inputs and outputs in units of their scale."""

    def __init__(self, problem: Problem, hidden: Sequence[int], random: Random) -> None:
        super().__init__()
        sizes = [problem.width, *hidden, problem.outputs]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for reads, gives in pairwise(sizes):
            # Without hidden layers the loss is the same for all signs, so zero is the place to start from.
            bound = math.sqrt(6 / max(reads, 1)) if hidden else 0.0
            start = random.uniform(-bound, bound, (gives, reads))
            self.weights.append(nn.Parameter(torch.from_numpy(start).to(problem.dtype)))
            self.biases.append(nn.Parameter(torch.zeros(gives, dtype=problem.dtype), problem.fit_intercept))
        # Weights of constant inputs get no gradient: they would stay, and displace others that `keep` counts.
        self.weights[0].data[:, ~torch.from_numpy(problem.columns.varies)] = 0.0
        self.center = problem.task.center * float(problem.fit_intercept)
        self.spread = problem.task.spread

    def forward(self, inputs: Inputs) -> Tensor:
        found = inputs.times(self.weights[0]) + self.biases[0]
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            found = functional.linear(functional.relu(found), weight, bias)
        outputs: Tensor = self.center + self.spread * found
        return outputs

    @torch.no_grad()
    def load(self, layers: Layers, problem: Problem) -> None:
        """Start from a model in the units of the data."""
        units = problem.units(len(layers.weights), self.spread)
        biases = [torch.from_numpy(bias.astype(np.float64)) for bias in layers.biases]
        biases[-1] -= problem.task.origin
        biases[0] += torch.from_numpy(layers.weights[0] @ problem.columns.mean)
        biases[-1] = (biases[-1] - self.center) / self.spread
        for k, (weight, unit) in enumerate(zip(layers.weights, units, strict=True)):
            self.weights[k].copy_(torch.from_numpy(weight) / unit)
            self.biases[k].copy_(biases[k])

    def layers(self, problem: Problem) -> Layers:
        """Return the model in the units of the data."""
        weights, biases = ([p.detach() for p in params] for params in (self.weights, self.biases))
        biases[-1] = biases[-1] + self.center / self.spread
        return problem.in_data_units(weights, biases, self.spread)


class Training:
    """A network, its optimizer and their schedules.

    Args:
        network: the network.
        problem: what the network was made for.
        goal: the penalty, or what to keep.
        horizon: the number of steps, if it is known: the step size then falls to zero along a cosine.
    """

    def __init__(self, network: Network, problem: Problem, goal: Goal, horizon: int | None) -> None:
        self.network, self._problem = network, problem
        chosen = list(network.weights)[: 1 if goal.first_only else None]
        free = [p for p in network.parameters() if p.requires_grad and not any(p is w for w in chosen)]
        self._penalised, self._one_scale, self._kind = chosen, goal.needs_one_scale, goal.kind
        self.penalty = self._penalty(goal)
        groups: list[dict[str, Any]] = [{"params": chosen, "penalty": self.penalty}, {"params": free}]
        self._optimizer = AutoProxSGD(groups)
        self._schedules: list[Any] = []
        if horizon is not None:
            self._schedules.append(CosineAnnealingLR(self._optimizer, horizon))
        if goal.keep is not None:
            blocks = [math.prod(self.penalty.block_shape(p)) for p in chosen]  # type: ignore[union-attr]
            self._share = goal.count_to_keep(sum(blocks), problem.width) / sum(blocks)
            assert horizon is not None
            self._schedules.append(KeepScheduler(self._optimizer, self._share, max(2, horizon)))

    def _penalty(self, goal: Goal) -> Penalty | None:
        if goal.keep is not None:
            # Blocks are compared by what they contribute, not in the units of the data.
            return Trimmed(goal.penalty, 1.0, scope="each")  # type: ignore[arg-type]
        return goal.penalty and InUnits(goal.penalty, self._units())

    def aim_at(self, goal: Goal) -> None:
        """Go on with another strength, or other numbers of the penalty."""
        if goal.kind != self._kind:
            raise ValueError(
                f"penalty must be of one kind for all parts of a stream, got {goal.penalty}; fit starts a new model"
            )
        if isinstance(self.penalty, InUnits) and goal.penalty is not None:
            self.penalty.penalty = goal.penalty

    @torch.no_grad()
    def meet_count(self) -> None:
        """Leave what `keep` allows and nothing else, also after a run of too few steps for its schedule."""
        if isinstance(self.penalty, Trimmed):
            self.penalty.keep, self.penalty.penalty.strength = self._share, HOLD
            self.penalty.prox_([weight.data for weight in self._penalised], 1.0)

    def extend(self, columns: Columns) -> None:
        """Measure inputs of a stream that vary for the first time; the function that the network is stays the same."""
        known = self._problem.columns
        extended = known.extended_by(columns)
        if self._one_scale:
            extended = extended._replace(scale=known.scale)
        self.network.weights[0].data *= torch.from_numpy(extended.scale / known.scale).to(self._problem.dtype)
        self._problem.columns = extended
        if isinstance(self.penalty, InUnits):
            self.penalty.units = self._units()

    def _units(self) -> list[Tensor]:
        return self._problem.units(len(self.network.weights), self.network.spread)[: len(self._penalised)]

    def epoch(self, samples: Samples, batch_size: int, random: Random, progress: Progress | None = None) -> float:
        """Go through the samples once in random order and return the mean loss on the way."""
        order, total, task = random.permutation(len(samples.weights)), 0.0, samples.task
        weights = samples.weights * len(order)
        for rows in np.array_split(order, math.ceil(len(order) / batch_size)):
            picked = torch.from_numpy(rows)
            self._optimizer.zero_grad()
            losses = losses_of_samples(task.loss, self.network(samples.inputs.take(rows)), task.targets[picked])
            loss = (losses * weights[picked]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            for schedule in self._schedules:
                schedule.step()
            total += float(loss.detach()) * len(rows) / len(order)
            if progress is not None:
                progress.advance()
                progress.show(loss=float(loss.detach()), zeros=self._share_of_zeros, inputs=self._inputs_in_use)
        if not math.isfinite(total):
            raise ValueError("the loss is no longer finite: rescale the inputs or the targets, or choose another loss")
        return total

    @torch.no_grad()
    def loss(self, samples: Samples) -> float:
        """Return the mean loss."""
        task = samples.task
        return float(losses_of_samples(task.loss, self.network(samples.inputs), task.targets) @ samples.weights)

    @torch.no_grad()
    def penalty_value(self) -> float:
        """Return ψ; a trimmed penalty is a means to an end and counts as 0."""
        return float(self.penalty.total(self._penalised)) if isinstance(self.penalty, InUnits) else 0.0

    def _share_of_zeros(self) -> str:
        weights = list(self.network.weights)
        zeros = sum(int((w == 0).sum()) for w in weights)
        return f"{zeros / max(sum(w.numel() for w in weights), 1):.0%}"

    def _inputs_in_use(self) -> int:
        return int((self.network.weights[0] != 0).any(0).sum())


class StochasticFit:
    """A network, or a linear model with early stopping, fitted to one goal after the other.

    Args:
        problem: the problem.
        held_back: samples to stop by, or ``None``.
        hidden: the sizes of the hidden layers.
        epochs: how often to go through the samples for the first goal; later ones take a quarter of it.
        batch_size: the number of samples in a step.
        patience: how many epochs without a better loss on the samples held back end a run.
        tol: by which share a loss must be better to count.
        random: where random numbers come from.
        verbose: show progress on a terminal.
    """

    def __init__(
        self,
        problem: Problem,
        held_back: Samples | None,
        *,
        hidden: Sequence[int],
        epochs: int,
        batch_size: int,
        patience: int,
        tol: float,
        random: Random,
        verbose: bool,
    ) -> None:
        self._problem, self._held_back = problem, held_back
        self._epochs, self._batch_size, self._patience, self._tol = epochs, batch_size, patience, tol
        self._random, self._verbose = random, verbose
        self._network, self._first = Network(problem, hidden, random), True

    def fit(self, goal: Goal) -> Outcome:
        """Fit the model to a goal, from the solution of the last one."""
        samples = Samples(self._problem.inputs, self._problem.task, self._problem.weights)
        batches = math.ceil(len(samples.weights) / self._batch_size)
        training = Training(self._network, self._problem, goal, horizon=self._epochs * batches)
        best, best_epoch, kept = math.inf, 0, None
        curve: list[float] = []
        first = 0 if goal.keep is None else self._epochs // 2 + 1  # while inputs leave, the loss says nothing
        with Progress(self._epochs * batches, "fit", shown=self._verbose) as progress:
            for epoch in range(self._epochs):
                curve.append(training.epoch(samples, self._batch_size, self._random, progress))
                curve[-1] += training.penalty_value()
                if self._held_back is None or epoch < first:
                    continue
                loss = training.loss(self._held_back)
                if loss < best - self._tol * abs(best) or kept is None:
                    best, best_epoch, kept = loss, epoch, copy.deepcopy(self._network.state_dict())
                elif epoch - best_epoch >= self._patience:
                    break
        if kept is not None:
            self._network.load_state_dict(kept)
        training.meet_count()
        self._epochs = max(1, len(curve) // LATER) if self._first else self._epochs
        self._first = False
        loss = training.loss(samples)
        objective = loss + training.penalty_value()
        return Outcome(self._network.layers(self._problem), loss, objective, curve, converged=True)
