"""The methods of `benchmarks.auto_network`: AutoProxSGD, cells of ProxSGD, and optimizers that need no lr either.

The other optimizers have the settings that their authors suggest, and all parameters in one group. Where a method has a
step size for every weight, ψ comes in as a prox with these steps. Schedule-free methods return an average of their
iterates, which has no zeros whatever the prox does, so that ψ is a part of their loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from proxmo import AutoProxSGD, CosineRates, Penalty, ProxSGD, RateScheduler, param_groups

LRS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
MOMENTA = {"constant": (0.0, 0.9, 0.98), "cosine": (0.9,)}
DOG_FIRST = {False: 1e-6, True: 1e-4}  # DoG's first distance for networks without and with BatchNorm, by its authors


class Weights:
    """The parameters of a network, and those of them that have a penalty."""

    def __init__(self, network: nn.Module, penalty: Penalty) -> None:
        self.groups = param_groups(network, penalty)
        self.batch_norm = any(isinstance(module, _BatchNorm) for module in network.modules())
        found = [(p, group["penalty"]) for group in self.groups for _, p in group["params"]]
        self.all: list[Tensor] = [p for p, _ in found]
        self.penalised: list[tuple[Tensor, Penalty]] = [(p, penalty) for p, penalty in found if penalty is not None]

    def penalty_value(self) -> Tensor:
        return torch.stack([penalty.value(p) for p, penalty in self.penalised]).sum()

    @torch.no_grad()
    def prox(self, step_of: Callable[[Tensor], float | Tensor]) -> None:
        """Take the prox of each parameter that has a penalty, with its step."""
        for p, penalty in self.penalised:
            p.copy_(penalty.prox(p.detach(), step_of(p)))

    @torch.no_grad()
    def zeros(self) -> float:
        """Return the share of zeros among the weights that have a penalty."""
        return sum(int((p == 0).sum()) for p, _ in self.penalised) / sum(p.numel() for p, _ in self.penalised)


class Method:
    """A way to train: takes one step from a loss, and can show the point that it would return."""

    def __init__(self, weights: Weights, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        self.weights, self.optimizer, self.scheduler = weights, optimizer, scheduler

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.move(loss)
        if self.scheduler is not None:
            self.scheduler.step()

    def move(self, loss: Tensor) -> None:
        """Take a step with the gradients of the loss."""
        self.optimizer.step()

    @contextmanager
    def result(self) -> Iterator[None]:
        """Have the parameters at the point that the method would return."""
        yield


class DoG(Method):
    """Distance over gradients; its step size is that of the prox."""

    def move(self, loss: Tensor) -> None:
        self.optimizer.step()
        self.weights.prox(lambda p: float(self.optimizer.param_groups[0]["eta"][0]))


class Prodigy(Method):
    """The prox in Prodigy's own metric: each weight has the step that its gradient gets, up to momentum."""

    def move(self, loss: Tensor) -> None:
        before = self.optimizer.param_groups[0]["d"]  # the step is taken with d from before, the rest with the new one
        self.optimizer.step()
        group = self.optimizer.param_groups[0]

        def step_of(p: Tensor) -> Tensor:
            return (
                group["lr"]
                * before
                * before
                / (self.optimizer.state[p]["exp_avg_sq"].sqrt() + group["d"] * group["eps"])
            )

        self.weights.prox(step_of)


class MoMo(Method):
    """Polyak's step size for momentum, also for the prox; it is not stored, but follows from a move."""

    def move(self, loss: Tensor) -> None:
        witness = self.weights.all[-1]
        before = witness.detach().double()
        self.optimizer.step(loss=loss.detach())
        average = self.optimizer.state[witness]["grad_avg"].double()
        step = float((before - witness.detach().double()).norm() / average.norm()) if average.any() else 0.0
        self.weights.prox(lambda p: step)


class ScheduleFree(Method):
    def step(self, loss: Tensor) -> None:
        super().step(loss + self.weights.penalty_value())

    @contextmanager
    def result(self) -> Iterator[None]:
        self.optimizer.eval()  # type: ignore[attr-defined]
        yield
        self.optimizer.train()  # type: ignore[attr-defined]


def _auto(weights: Weights, steps: int) -> Method:
    return Method(weights, AutoProxSGD(weights.groups))


def _auto_cosine(weights: Weights, steps: int) -> Method:
    optimizer = AutoProxSGD(weights.groups)
    return Method(weights, optimizer, CosineAnnealingLR(optimizer, steps))


def _prox_sgd(schedule: str, lr: float, momentum: float) -> Callable[[Weights, int], Method]:
    def make(weights: Weights, steps: int) -> Method:
        optimizer = ProxSGD(weights.groups, lr, momentum)
        cosine = schedule == "cosine"
        return Method(
            weights, optimizer, RateScheduler(optimizer, CosineRates(lr, momentum, steps)) if cosine else None
        )

    return make


def _dog(weights: Weights, steps: int) -> Method:
    from dog import DoG as Optimizer

    return DoG(weights, Optimizer(weights.all, reps_rel=DOG_FIRST[weights.batch_norm]))


def _prodigy(weights: Weights, steps: int) -> Method:
    from prodigyopt import Prodigy as Optimizer

    return Prodigy(weights, Optimizer(weights.all))


def _momo(weights: Weights, steps: int) -> Method:
    from momo import Momo

    return MoMo(weights, Momo(weights.all))


def _schedule_free(name: str) -> Callable[[Weights, int], Method]:
    def make(weights: Weights, steps: int) -> Method:
        import schedulefree

        optimizer: Any = getattr(schedulefree, name)(weights.all)
        optimizer.train()
        return ScheduleFree(weights, optimizer)

    return make


def cell(schedule: str, lr: float, momentum: float) -> str:
    """Return the name of a cell of the grid."""
    return f"{schedule}, lr {lr:g}, momentum {momentum:g}"


class Peer(NamedTuple):
    """A method of another package."""

    make: Callable[[Weights, int], Method]
    module: str
    package: str


PEERS = {
    "DoG": Peer(_dog, "dog", "dog-optimizer"),
    "Prodigy": Peer(_prodigy, "prodigyopt", "prodigyopt"),
    "MoMo": Peer(_momo, "momo", "momo-opt"),
    "schedule-free SGD": Peer(_schedule_free("SGDScheduleFree"), "schedulefree", "schedulefree"),
    "schedule-free AdamW": Peer(_schedule_free("AdamWScheduleFree"), "schedulefree", "schedulefree"),
}
OWN: dict[str, Callable[[Weights, int], Method]] = {"AutoProxSGD": _auto, "AutoProxSGD, cosine": _auto_cosine}
CELLS = {
    cell(schedule, lr, momentum): _prox_sgd(schedule, lr, momentum)
    for schedule, momenta in MOMENTA.items()
    for lr, momentum in product(LRS, momenta)
}


def missing_packages() -> list[str]:
    """Return the packages that are not installed, whose methods are left out."""
    return list(dict.fromkeys(peer.package for peer in PEERS.values() if util.find_spec(peer.module) is None))


def make(name: str, weights: Weights, steps: int) -> Method:
    """Return the method of this name for training with so many steps."""
    makers = OWN | CELLS | {peer: found.make for peer, found in PEERS.items()}
    return makers[name](weights, steps)
