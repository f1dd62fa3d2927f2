"""The methods of `benchmarks.targets`: ways to remove a share of the weights or units of a network while it is trained.

All train with the same batches, lr and number of steps. Weights (`param_groups`) are ranked over all layers together,
units (`unit_groups`) in each layer, as in `shrink`: behind a normalisation norms of different layers do not compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import util
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from benchmarks.targets_tasks import Task
from proxmo import (
    L1,
    GroupL2,
    KeepScheduler,
    ParamGroups,
    Penalty,
    ProxSGD,
    Trimmed,
    compact,
    freeze_zeros,
    param_groups,
    unit_groups,
)
from proxmo.optim.units import Family, joined, seen_by_penalty, write_back
from proxmo.targets import HOLD

Kind = Literal["elements", "units", "rows"]
AfterStep = Callable[[int], None]
MOMENTUM = 0.9
CUT, REFIT = 0.8, 0.7  # shares of the steps after which lr is cut, and after which zeros are fixed by some methods
RAMP = (0.05, 0.5)  # as in KeepScheduler
TRIALS, TOLERANCE = 8, 0.1  # of the search for a strength; the tolerance is relative to the share to keep
FIRST_STRENGTH = {"elements": 1e-4, "units": 1e-2}


@dataclass(frozen=True)
class Job:
    """A share to remove from a task."""

    task: Task
    kind: Kind
    removed: float
    seed: int
    widths: list[int] | None = None
    """The units left in each family, for a network of this size from scratch."""
    strength: float | None = None
    """Where the search for a strength starts; ``None`` for a guess."""

    @property
    def keep(self) -> float:
        return 1 - self.removed


class Outcome(NamedTuple):
    """What a method reached."""

    score: float
    removed: float
    widths: list[int] | None
    """The units left in each family; ``None`` for elements."""
    runs: int = 1
    """Training runs that it took, with those of a search."""
    strength: float | None = None


class Blocks:
    """The weights or units that may be removed, as an optimizer had them before a method dropped its penalty."""

    def __init__(self, kind: Kind, groups: ParamGroups) -> None:
        self._kind = kind
        self._groups = [group for group in groups if group["penalty"] is not None]

    def weights(self) -> list[Tensor]:
        """Return the parameters that are made of them."""
        return [p for group in self._groups for p in tensors_of(group)]

    @torch.no_grad()
    def left(self) -> list[tuple[int, int]]:
        """Return how many there are and how many are not zero, for each tensor or family of units."""
        found = []
        for group in self._groups:
            for x in seen_by_penalty(group["units"] if self._kind == "units" else None, tensors_of(group)):
                alive = x != 0 if self._kind == "elements" else x.any(1)
                found.append((alive.numel(), int(alive.sum())))
        return found

    def removed(self) -> float:
        totals, alive = zip(*self.left(), strict=True)
        return 1 - sum(alive) / sum(totals)

    @torch.no_grad()
    def narrow(self, widths: list[int]) -> None:
        """Zero all but the first units of each family."""
        counts = iter(widths)
        for family, params in self._families():
            matrix = joined(family, params)
            matrix[max(1, next(counts)) :] = 0
            write_back(family, matrix, params)

    @torch.no_grad()
    def keep_largest(self, keep: float, each: bool = False) -> None:
        """Zero all but a share: the weights of largest magnitude in all tensors, or in each family units by norm.

        With ``each`` weights are ranked in each tensor alone as well.
        """
        if self._kind == "elements":
            weights = self.weights()
            for ranked in [[p] for p in weights] if each else [weights]:
                least = _least_kept(torch.cat([p.flatten() for p in ranked]).abs_(), keep)
                for p in ranked:
                    p[p.abs() < least] = 0
            return
        for family, params in self._families():
            matrix = joined(family, params)
            norms = matrix.norm(dim=1)
            matrix[norms < _least_kept(norms, keep)] = 0
            write_back(family, matrix, params)

    def _families(self) -> Iterator[tuple[Family, list[Tensor]]]:
        for group in self._groups:
            for family in group["units"]:
                yield family, tensors_of(group)


def tensors_of(group: dict[str, Any]) -> list[Tensor]:
    return [p if isinstance(p, Tensor) else p[1] for p in group["params"]]


def _least_kept(sizes: Tensor, keep: float) -> Tensor:
    """Return the smallest of the sizes that are kept."""
    kept = max(1, round(keep * len(sizes)))
    return sizes.kthvalue(len(sizes) - kept + 1).values


class Schedule(Protocol):
    """What changes the options of an optimizer after each step, such as an LRScheduler."""

    def step(self) -> None: ...


def cut_at_the_end(optimizer: Optimizer, steps: int) -> Schedule:
    return MultiStepLR(optimizer, [round(CUT * steps)], gamma=0.1)


def fit(
    task: Task,
    network: nn.Module,
    optimizer: Optimizer,
    seed: int,
    after_step: AfterStep,
    schedule: Callable[[Optimizer, int], Schedule] = cut_at_the_end,
) -> None:
    """Train for all steps; ``after_step`` is called with the number of steps so far."""
    scheduler = schedule(optimizer, task.steps)
    batches = task.batches(torch.Generator().manual_seed(seed))
    network.train()
    for step in range(1, task.steps + 1):
        optimizer.zero_grad()
        task.loss(network, *next(batches)).backward()
        optimizer.step()
        scheduler.step()
        after_step(step)


def new_network(job: Job) -> nn.Module:
    torch.manual_seed(job.seed)
    return job.task.make()


def groups_of(job: Job, network: nn.Module, penalty: Penalty) -> ParamGroups:
    if job.kind == "elements":
        return param_groups(network, penalty)
    if job.kind == "rows":
        return _rows_of_hidden_layers(network, penalty)
    return unit_groups(network, job.task.example, penalty, exclude=job.task.exclude)


def _rows_of_hidden_layers(network: nn.Module, penalty: Penalty) -> ParamGroups:
    """Penalise the rows of all linear layers but the last, in proportion to the root of their length, as RAMDA does."""
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    *hidden, output = layers
    strength = penalty.strength if isinstance(penalty, GroupL2) else 0.0
    strengths = {name: strength * math.sqrt(layers[name].in_features) for name in hidden}
    return param_groups(network, penalty, exclude=[output], per_layer=strengths)


def penalty_of(kind: Kind, strength: float) -> L1 | GroupL2:
    return L1(strength) if kind == "elements" else GroupL2(strength)


def trimmed_penalty(kind: Kind, strength: float) -> Trimmed:
    return Trimmed(penalty_of(kind, strength), 1.0, scope="all" if kind == "elements" else "each")


@torch.no_grad()
def _outcome(job: Job, network: nn.Module, blocks: Blocks, runs: int = 1, strength: float | None = None) -> Outcome:
    widths = [alive for _, alive in blocks.left()] if job.kind == "units" else None
    return Outcome(job.task.score(network.eval()), blocks.removed(), widths, runs, strength)


def _run(job: Job, penalty: Penalty, plan: Callable[[ProxSGD], AfterStep]) -> Outcome:
    """Train with a penalty and what ``plan`` does after each step."""
    network = new_network(job)
    groups = groups_of(job, network, penalty)
    blocks = Blocks(job.kind, groups)
    optimizer = ProxSGD(groups, job.task.lr, MOMENTUM)
    fit(job.task, network, optimizer, job.seed, plan(optimizer))
    return _outcome(job, network, blocks)


def dense(job: Job) -> Outcome:
    return _run(job, penalty_of(job.kind, 0.0), lambda _: lambda step: None)


def trimmed(job: Job) -> Outcome:
    """`Trimmed` with `KeepScheduler` as it is: no strength."""

    def plan(optimizer: ProxSGD) -> AfterStep:
        scheduler = KeepScheduler(optimizer, job.keep, job.task.steps)
        return lambda step: scheduler.step()

    return _run(job, trimmed_penalty(job.kind, 0.0), plan)


def gradual(job: Job) -> Outcome:
    """Gradual magnitude pruning: what is not kept becomes zero at once, on the same ramp."""

    def plan(optimizer: ProxSGD) -> AfterStep:
        scheduler = KeepScheduler(optimizer, job.keep, job.task.steps, tune_strength=False)
        return lambda step: scheduler.step()

    return _run(job, trimmed_penalty(job.kind, HOLD), plan)


def one_shot(job: Job) -> Outcome:
    """Train, remove the smallest in one step, and train the others on."""
    cut = round(REFIT * job.task.steps)

    def plan(optimizer: ProxSGD) -> AfterStep:
        def after_step(step: int) -> None:
            if step == cut - 1:
                for group in optimizer.param_groups:
                    if group["penalty"] is not None:
                        group["penalty"].keep = job.keep
            elif step == cut:
                freeze_zeros(optimizer)

        return after_step

    return _run(job, trimmed_penalty(job.kind, HOLD), plan)


class _MissedError(Exception):
    """A strength removed too few or too many."""

    def __init__(self, removed: float) -> None:
        super().__init__(f"removed {removed:.2%}")
        self.removed = removed


def searched(job: Job) -> Outcome:
    """ℓ1 or ℓ2,1 with a strength that removes the share asked for, then a refit; bisection on the strength's log.

    A run that misses the share ends where the refit would start. The last one takes the strength that was closest.
    """
    below, above = 0.0, math.inf
    strength = job.strength or FIRST_STRENGTH[job.kind]
    gaps: dict[float, float] = {}
    for trial in range(1, TRIALS):
        try:
            return _refitted(job, strength, TOLERANCE)._replace(runs=trial, strength=strength)
        except _MissedError as missed:
            gaps[strength] = abs(missed.removed - job.removed)
            if missed.removed < job.removed:
                below = strength
            else:
                above = strength
        strength = 4 * below if above == math.inf else above / 4 if below == 0 else math.sqrt(below * above)
    closest = min(gaps, key=gaps.__getitem__)
    return _refitted(job, closest, math.inf)._replace(runs=TRIALS, strength=closest)


def _refitted(job: Job, strength: float, tolerance: float) -> Outcome:
    network = new_network(job)
    groups = groups_of(job, network, penalty_of(job.kind, strength))
    blocks = Blocks(job.kind, groups)
    optimizer = ProxSGD(groups, job.task.lr, MOMENTUM)

    def after_step(step: int) -> None:
        if step == round(REFIT * job.task.steps):
            kept = 1 - blocks.removed()
            if abs(kept / job.keep - 1) > tolerance:
                raise _MissedError(1 - kept)
            freeze_zeros(optimizer)

    fit(job.task, network, optimizer, job.seed, after_step)
    return _outcome(job, network, blocks)


def pat(job: Job) -> Outcome:
    """torchao's pruning-aware training to a share of all weights, on the same ramp; needs torchao."""
    from torchao.prototype.pat.optim import PruneOptimizer

    network = new_network(job)
    groups = param_groups(network, L1(0.0))
    blocks = Blocks("elements", groups)
    base = SGD(pat_groups(groups, job.removed), job.task.lr, MOMENTUM, dampening=MOMENTUM)
    fit(job.task, network, PruneOptimizer(base, *ramp(job.task)), job.seed, lambda step: None)
    return _outcome(job, network, blocks)


def pat_groups(groups: ParamGroups, removed: float) -> list[dict[str, Any]]:
    """Return the weights with torchao's target, and the other parameters, for the optimizer that it wraps."""
    weights, others = [], []
    for group in groups:
        (others if group["penalty"] is None else weights).extend(tensors_of(group))
    target = {"prox_type": "GlobalMinSparsityConstraint", "group_type": "KElementGrouper", "k": 1}
    target |= {"min_sparsity": removed, "min_sparsity_schedule": True}
    return [{"params": weights, **target}, {"params": others}]


def ramp(task: Task) -> tuple[int, int]:
    """Return the steps in which the ramp starts and ends."""
    start, end = (round(share * task.steps) for share in RAMP)
    return start, end


def scratch(job: Job) -> Outcome:
    """The network that `trimmed` left, initialised anew and trained without a penalty."""
    if job.widths is None:
        raise ValueError("widths must be given, got None")
    network = new_network(job)
    blocks = Blocks("units", groups_of(job, network, GroupL2(0.0)))
    blocks.narrow(job.widths)
    removed = blocks.removed()
    small, _ = compact(network.eval(), job.task.example)
    torch.manual_seed(job.seed)
    small.apply(_reset)
    fit(job.task, small, ProxSGD(small.parameters(), job.task.lr, MOMENTUM), job.seed, lambda step: None)
    with torch.no_grad():
        return Outcome(job.task.score(small.eval()), removed, job.widths)


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):  # attention has a name of its own
        if hasattr(module, name):
            getattr(module, name)()


METHODS: dict[str, Callable[[Job], Outcome]] = {
    "dense": dense,
    "trimmed": trimmed,
    "gradual": gradual,
    "one-shot": one_shot,
    "searched": searched,
    "pat": pat,
    "scratch": scratch,
}


def methods_for(kind: Kind) -> list[str]:
    """Return the methods that remove such blocks and can run here; dense training aside."""
    names = ["trimmed", "gradual", "one-shot", "searched"]
    if kind == "units":
        return [*names, "scratch"]
    return [*names, "pat"] if util.find_spec("torchao") else names
