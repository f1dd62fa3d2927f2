"""RAMDA, and the ProxAdamW of its authors, for `benchmarks.adaptive`: a group lasso on rows of weight matrices.

Both come from the authors' repository, ismoptgroup/RAMDA on GitHub, which is no package: put a checkout on PYTHONPATH.
Its groups are rows or columns of one matrix, so that `ProxAdamW` of proxmo stands beside them with the same groups and
weights, instead of units with their biases. Filters of convolutions are not tried: the repository fails on them.
"""

from __future__ import annotations

from importlib import util
from typing import Any

from torch.optim import Optimizer

from benchmarks.adaptive_model import Model, Point
from benchmarks.targets_methods import Job, tensors_of

INSTALLED = util.find_spec("Core") is not None and util.find_spec("Core.solvers") is not None
STAGES = (0.5, 0.75)  # shares of the steps after which RAMDA starts again with a tenth of lr
MOMENTUM = 0.1  # the weight of the new point; grows to 1 in the hundred steps after the last stage


class Stages:
    """The schedule of RAMDA's authors, by steps in place of epochs."""

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        from Core.scheduler import multistep_param_scheduler

        self._optimizer, self._steps = optimizer, 0
        milestones = [round(share * steps) for share in STAGES]
        self._stages = multistep_param_scheduler("RAMDA", optimizer, milestones)

    def step(self) -> None:
        self._stages.momentum_step(self._optimizer, self._steps)
        self._stages.step(self._optimizer, self._steps)
        self._steps += 1


def ramda(job: Job) -> list[Point]:
    """RAMDA in three stages; its zeros are exact once its momentum has grown to 1."""
    from Core.optimizer import RAMDA

    model = Model(job)
    return [model.fit(RAMDA(_rows(model), job.task.lr, MOMENTUM), schedule=Stages)]


def its_prox_adamw(job: Job) -> list[Point]:
    """The authors' ProxAdamW, which solves the prox by an inner loop, with weight decay as in torch."""
    from Core.optimizer import ProxAdamW

    model = Model(job)
    return [model.fit(ProxAdamW(_rows(model), job.task.lr, weight_decay=1e-2))]


def _rows(model: Model) -> list[dict[str, Any]]:
    """Return the parameter groups as the repository takes them: ``dim`` is summed over, ``dim_`` indexes groups."""
    rows, others = {"dim": 1, "dim_": 0, "lambda_": model.job.strength}, {"lambda_": 0.0}
    return [{"params": tensors_of(group), **(others if group["penalty"] is None else rows)} for group in model.groups]
