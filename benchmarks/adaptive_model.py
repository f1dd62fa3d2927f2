"""The networks of `benchmarks.adaptive`, with the blocks that a method may remove, and how they are trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.targets_methods import (
    AfterStep,
    Blocks,
    Job,
    Schedule,
    fit,
    groups_of,
    new_network,
    penalty_of,
    trimmed_penalty,
)
from proxmo import ParamGroups

WARM_UP = 0.05


class Point(NamedTuple):
    """The share that was removed, and the score with the others."""

    removed: float
    score: float


class Model:
    """A new network with the blocks that a job may remove."""

    def __init__(self, job: Job, trim: bool = False) -> None:
        self.job = job
        self.network = new_network(job)
        penalty = trimmed_penalty(job.kind, 0.0) if trim else penalty_of(job.kind, job.strength or 0.0)
        self.groups: ParamGroups = groups_of(job, self.network, penalty)
        self.blocks = Blocks(job.kind, self.groups)

    def fit(
        self,
        optimizer: Optimizer,
        after_step: AfterStep = lambda step: None,
        schedule: Callable[[Optimizer, int], Schedule] | None = None,
    ) -> Point:
        fit(self.job.task, self.network, optimizer, self.job.seed, after_step, schedule or warm_up_and_cosine)
        return self.point()

    @torch.no_grad()
    def point(self) -> Point:
        return Point(self.blocks.removed(), self.job.task.score(self.network.eval()))

    def adamw(self) -> AdamW:
        return AdamW(self.network.parameters(), self.job.task.lr)


def warm_up_and_cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    first = max(1, round(WARM_UP * steps))

    def factor(step: int) -> float:
        if step < first:
            return (step + 1) / first
        return (1 + math.cos(math.pi * min(1.0, (step - first) / (steps - first)))) / 2

    return LambdaLR(optimizer, factor)
