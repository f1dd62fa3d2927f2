"""A small training task for many processes, and every method on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

import proxmo
from proxmo import shards

STEPS, BATCH = 12, 8


class Placed(NamedTuple):
    """A network made ready for many processes: what to call, and which share of a batch is this process's."""

    model: nn.Module
    share: int = 0
    shares: int = 1


Place = Callable[[nn.Sequential], Placed]


def separate(network: nn.Sequential) -> proxmo.ParamGroups:
    """Each tensor with groups of its own."""
    return proxmo.param_groups(network, proxmo.GroupL2(0.02))


def joint(network: nn.Sequential) -> proxmo.ParamGroups:
    """Groups that span tensors."""
    return proxmo.unit_groups(network, torch.zeros(2, 6, dtype=torch.float64), proxmo.GroupLInf(0.05))


class Task:
    """A small network with batches that every rank knows, of which it takes its part."""

    def __init__(
        self, place: Place = Placed, make_groups: Callable[[nn.Sequential], proxmo.ParamGroups] = separate
    ) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self._groups = make_groups(self.network)  # made before the network is divided
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(4 * STEPS, BATCH, 6, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(3, (4 * STEPS, BATCH), generator=generator)
        self.placed = place(self.network)

    def groups(self) -> proxmo.ParamGroups:
        return self._groups.on(self.network)

    def params(self) -> list[nn.Parameter]:
        return list(self.network.parameters())

    def closure(self, optimizer: proxmo.ProxOptimizer, batch: int) -> Callable[[], float]:
        model, share, shares = self.placed
        part = slice(share * BATCH // shares, (share + 1) * BATCH // shares)

        def evaluate() -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(self.inputs[batch][part]), self.labels[batch][part])
            loss.backward()
            return loss.item()

        return evaluate

    def weights(self) -> list[Tensor]:
        return [shards.full(p.detach()).clone() for p in self.params()]


def prox_sgd(task: Task) -> list[Tensor]:
    optimizer = proxmo.ProxSGD(task.groups(), lr=0.2, momentum=0.8)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
    return [*task.weights(), optimizer.penalty_value(), torch.tensor(optimizer.sparsity()[0], dtype=torch.float64)]


def joint_units(task: Task) -> list[Tensor]:
    optimizer = proxmo.ProxSGD(task.groups(), lr=0.2)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
    zeros, groups = optimizer.sparsity()[0]
    return [*task.weights(), optimizer.penalty_value(), torch.tensor([zeros, groups or 0.0], dtype=torch.float64)]


def certified(task: Task) -> list[Tensor]:
    optimizer = proxmo.ProxSGD(task.groups(), lr=0.2, momentum=0.8)
    monitor = proxmo.criteria.Monitor(optimizer, task.closure(optimizer, STEPS))
    for step in range(STEPS):
        monitor.record()
        optimizer.step(task.closure(optimizer, step))
    columns = {name: torch.from_numpy(values) for name, values in monitor.arrays().items()}
    del columns["loss"], columns["objective"], columns["potential"]  # these have the loss of the own part
    return [*task.weights(), *columns.values()]


def random_iterate(task: Task) -> list[Tensor]:
    optimizer = proxmo.ProxSGD(task.groups(), lr=0.2)
    iterate = proxmo.RandomIterate(task.params(), torch.Generator().manual_seed(3))
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
        iterate.update()
    iterate.copy_to(task.params())
    return task.weights()


def auto(task: Task) -> list[Tensor]:
    optimizer = proxmo.AutoProxSGD(task.groups())
    for step in range(2 * STEPS):
        optimizer.step(task.closure(optimizer, step))
    group = optimizer.param_groups[0]
    estimates = [group[name] for name in ("lr", "momentum", "smoothness", "noise_variance")]
    return [*task.weights(), torch.tensor(estimates, dtype=torch.float64)]


def storm(task: Task) -> list[Tensor]:
    optimizer = proxmo.ProxSTORM(task.groups(), lr=0.2, momentum=0.8)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
    return task.weights()


def hybrid(task: Task) -> list[Tensor]:
    optimizer = proxmo.ProxHybridSGD(task.groups(), lr=0.2, momentum=0.8)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step), task.closure(optimizer, STEPS + step))
    return task.weights()


def spiderboost(task: Task) -> list[Tensor]:
    optimizer = proxmo.ProxSpiderBoost(task.groups(), lr=0.2, period=4)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
    return task.weights()


def inexact(task: Task) -> list[Tensor]:
    optimizer = proxmo.InexactProxSGD(task.params(), lr=0.2, inner=proxmo.InnerSGD(5, lr=0.05))
    penalty = proxmo.SquaredL2(0.02)

    def psi() -> float:
        optimizer.zero_grad()
        value = sum(map(penalty.value, task.params()), torch.zeros((), dtype=torch.float64))
        value.backward()
        return value.item()

    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step), psi)
    assert optimizer.report is not None
    return [*task.weights(), torch.tensor(optimizer.report[1:3], dtype=torch.float64)]


METHODS = (prox_sgd, joint_units, certified, random_iterate, auto, storm, hybrid, spiderboost, inexact)


def train(method: Callable[[Task], list[Tensor]], place: Place = Placed) -> list[Tensor]:
    return method(Task(place, joint if method is joint_units else separate))


def train_all(place: Place) -> dict[str, list[Tensor]]:
    return {method.__name__: train(method, place) for method in METHODS}


def assert_as_alone(method: Callable[[Task], list[Tensor]], trained: list[dict[str, list[Tensor]]]) -> None:
    """All ranks have what one process has on the joined batch, and the same to the bit."""
    alone = train(method)
    assert any((a != b).any() for a, b in zip(alone, Task().weights(), strict=False))
    for rank, results in enumerate(trained):
        for found, expected in zip(results[method.__name__], alone, strict=True):
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda text, rank=rank: f"{rank}: {text}"
            )
        for found, first in zip(results[method.__name__], trained[0][method.__name__], strict=True):
            assert torch.equal(found.nan_to_num(-1), first.nan_to_num(-1))  # no rank drifts off, not even by rounding


def rank_and_size() -> tuple[int, int]:
    return distributed.get_rank(), distributed.get_world_size()
