"""The methods of `benchmarks.adaptive`: sparse training with AdamW, Lion and SGD, with a target or with a strength.

All train with the same batches and number of steps, and with an lr that rises for a twentieth of the steps and falls to
zero like a cosine. Blocks are those of `targets_methods`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import util
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import softshrink
from torch.optim import AdamW

from benchmarks import adaptive_rows
from benchmarks.adaptive_model import Model, Point
from benchmarks.targets_methods import MOMENTUM, Job, Kind, pat_groups, ramp
from proxmo import KeepScheduler, ProxAdamW, ProxLion, ProxSGD

TARGETS: dict[Kind, tuple[float, ...]] = {"elements": (0.5, 0.8, 0.9, 0.95), "units": (0.5, 0.75), "rows": (0.5, 0.75)}
Metric = Literal["element", "block"]


def dense(job: Job) -> list[Point]:
    model = Model(job)
    return [model.fit(model.adamw())]


def trimmed(job: Job, metric: Metric = "element") -> list[Point]:
    """`ProxAdamW` with `Trimmed` and `KeepScheduler` as they are: no strength."""
    model = Model(job, trim=True)
    optimizer = ProxAdamW(model.groups, job.task.lr, metric=metric)
    scheduler = KeepScheduler(optimizer, job.keep, job.task.steps)
    return [model.fit(optimizer, lambda step: scheduler.step())]


def trimmed_block(job: Job) -> list[Point]:
    return trimmed(job, "block")


def gradual(job: Job, each: bool = False) -> list[Point]:
    """AdamW with gradual magnitude pruning on the ramp of `KeepScheduler`: the smallest become zero after each step."""
    model = Model(job)
    start, end = ramp(job.task)

    def prune(step: int) -> None:
        progress = min(max((step - start) / (end - start), 0.0), 1.0)
        keep = job.keep + (1 - job.keep) * (1 - progress) ** 3
        if keep < 1:
            model.blocks.keep_largest(keep, each)

    return [model.fit(model.adamw(), prune)]


def gradual_each(job: Job) -> list[Point]:
    return gradual(job, each=True)


def pat(job: Job) -> list[Point]:
    """torchao's pruning-aware training of weights with AdamW, on the same ramp; needs torchao."""
    from torchao.prototype.pat.optim import PruneOptimizer

    model = Model(job)
    base = AdamW(pat_groups(model.groups, job.removed), job.task.lr)
    return [model.fit(PruneOptimizer(base, *ramp(job.task)))]


def prox_adamw(job: Job) -> list[Point]:
    model = Model(job)
    return [model.fit(ProxAdamW(model.groups, job.task.lr))]


def prox_lion(job: Job) -> list[Point]:
    model = Model(job)
    return [model.fit(ProxLion(model.groups, job.task.lr))]


def prox_sgd(job: Job) -> list[Point]:
    model = Model(job)
    return [model.fit(ProxSGD(model.groups, job.task.lr, MOMENTUM))]


def naive(job: Job) -> list[Point]:
    """AdamW with a soft threshold of lr·strength after each step, the same for all weights."""
    model = Model(job)
    optimizer = model.adamw()

    @torch.no_grad()
    def shrink(*_: Any) -> None:
        threshold = optimizer.param_groups[0]["lr"] * (job.strength or 0.0)
        for p in model.blocks.weights():
            p.copy_(softshrink(p, threshold))

    optimizer.register_step_post_hook(shrink)
    return [model.fit(optimizer)]


def l1_in_loss(job: Job) -> list[Point]:
    """AdamW on the loss plus ℓ1, whose subgradient is a sign; then the smallest are set to zero, for every target."""
    model = Model(job)
    optimizer = model.adamw()

    @torch.no_grad()
    def add_subgradient(*_: Any) -> None:
        for p in model.blocks.weights():
            if p.grad is not None:
                p.grad.add_(p.sign(), alpha=job.strength or 0.0)

    optimizer.register_step_pre_hook(add_subgradient)
    model.fit(optimizer)
    points = []
    for target in TARGETS[job.kind]:
        model.blocks.keep_largest(1 - target)
        points.append(model.point())
    return points


class Method(NamedTuple):
    """How to train, and the grids that it needs."""

    train: Callable[[Job], list[Point]]
    family: Literal["adam", "lion", "sgd", "ramda"] = "adam"
    strengths: bool = False
    """Whether it takes strengths, not targets."""
    kinds: tuple[Kind, ...] = ("elements", "units")


METHODS = {
    "dense": Method(dense, kinds=("elements",)),
    "trimmed": Method(trimmed),
    "trimmed-block": Method(trimmed_block, kinds=("units",)),
    "gradual": Method(gradual),
    "gradual-each": Method(gradual_each, kinds=("elements",)),
    "pat": Method(pat, kinds=("elements",)),
    "prox-adamw": Method(prox_adamw, strengths=True, kinds=("elements", "units", "rows")),
    "prox-lion": Method(prox_lion, "lion", strengths=True, kinds=("elements",)),
    "prox-sgd": Method(prox_sgd, "sgd", strengths=True, kinds=("elements",)),
    "naive": Method(naive, strengths=True, kinds=("elements",)),
    "l1-in-loss": Method(l1_in_loss, strengths=True, kinds=("elements",)),
    "ramda": Method(adaptive_rows.ramda, "ramda", strengths=True, kinds=("rows",)),
    "its-prox-adamw": Method(adaptive_rows.its_prox_adamw, strengths=True, kinds=("rows",)),
}


def methods_for(kind: Kind) -> list[str]:
    """Return the methods that remove such blocks and can run here; dense training aside."""
    missing = {"pat": not util.find_spec("torchao")}
    missing |= dict.fromkeys(("ramda", "its-prox-adamw"), not adaptive_rows.INSTALLED)
    names = [name for name, method in METHODS.items() if kind in method.kinds and name != "dense"]
    return [name for name in names if not missing.get(name)]
