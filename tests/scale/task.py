"""A small training task for many processes, and every method on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
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
        self,
        place: Place = Placed,
        make_groups: Callable[[nn.Sequential], proxmo.ParamGroups] = separate,
        hidden: int = 8,
    ) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
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


OPTIMIZERS: dict[str, Callable[[Task], proxmo.ProxOptimizer]] = {
    "prox_sgd": lambda task: proxmo.ProxSGD(task.groups(), lr=0.2, momentum=0.8),
    "joint_units": lambda task: proxmo.ProxSGD(task.groups(), lr=0.2),
    "auto": lambda task: proxmo.AutoProxSGD(task.groups()),
    "storm": lambda task: proxmo.ProxSTORM(task.groups(), lr=0.2, momentum=0.8),
    "hybrid": lambda task: proxmo.ProxHybridSGD(task.groups(), lr=0.2, momentum=0.8),
    "spiderboost": lambda task: proxmo.ProxSpiderBoost(task.groups(), lr=0.2, period=4),
    "inexact": lambda task: proxmo.InexactProxSGD(task.params(), lr=0.2, inner=proxmo.InnerSGD(5, lr=0.05)),
}


def task_for(name: str, place: Place = Placed) -> Task:
    return Task(place, joint if name == "joint_units" else separate)


def advance(task: Task, optimizer: proxmo.ProxOptimizer, steps: Iterable[int]) -> None:
    """Take these steps, each with its batch."""
    for step in steps:
        closure = task.closure(optimizer, step)
        if isinstance(optimizer, proxmo.ProxHybridSGD):
            optimizer.step(closure, task.closure(optimizer, 2 * STEPS + step))
        elif isinstance(optimizer, proxmo.InexactProxSGD):
            optimizer.step(closure, lambda: _squares(task, optimizer))
        else:
            optimizer.step(closure)


def _squares(task: Task, optimizer: proxmo.ProxOptimizer) -> float:
    optimizer.zero_grad()
    value = sum(map(proxmo.SquaredL2(0.02).value, task.params()), torch.zeros((), dtype=torch.float64))
    value.backward()
    return value.item()


def _report(optimizer: proxmo.ProxOptimizer) -> list[Tensor]:
    """The numbers that an optimizer has to tell after a run."""
    if isinstance(optimizer, proxmo.InexactProxSGD):
        assert optimizer.report is not None
        return [torch.tensor(optimizer.report[1:3], dtype=torch.float64)]
    shares = [share or 0.0 for sparsity in optimizer.sparsity() for share in sparsity]
    known = optimizer.param_groups[0]
    estimates = [known[name] for name in ("lr", "momentum", "smoothness", "noise_variance") if name in known]
    return [optimizer.penalty_value(), torch.tensor([*shares, *estimates], dtype=torch.float64)]


def ordinary(name: str, place: Place) -> list[Tensor]:
    task = task_for(name, place)
    optimizer = OPTIMIZERS[name](task)
    advance(task, optimizer, range(2 * STEPS))
    return [*task.weights(), *_report(optimizer)]


def certified(place: Place) -> list[Tensor]:
    task = Task(place)
    optimizer = OPTIMIZERS["prox_sgd"](task)
    monitor = proxmo.criteria.Monitor(optimizer, task.closure(optimizer, STEPS))
    for step in range(STEPS):
        monitor.record()
        advance(task, optimizer, [step])
    columns = {name: torch.from_numpy(values) for name, values in monitor.arrays().items()}
    del columns["loss"], columns["objective"], columns["potential"]  # these have the loss of the own part
    return [*task.weights(), *columns.values()]


def random_iterate(place: Place) -> list[Tensor]:
    task = Task(place)
    optimizer = OPTIMIZERS["prox_sgd"](task)
    iterate = proxmo.RandomIterate(task.params(), torch.Generator().manual_seed(3))
    for step in range(STEPS):
        advance(task, optimizer, [step])
        iterate.update()
    iterate.copy_to(task.params())
    return task.weights()


METHODS: dict[str, Callable[[Place], list[Tensor]]] = {
    **{name: functools.partial(ordinary, name) for name in OPTIMIZERS},
    "certified": certified,
    "random_iterate": random_iterate,
}


def train_all(place: Place) -> dict[str, list[Tensor]]:
    return {name: method(place) for name, method in METHODS.items()}


def assert_as_alone(name: str, trained: list[dict[str, list[Tensor]]]) -> None:
    """All ranks have what one process has on the joined batch, and the same to the bit."""
    alone = METHODS[name](Placed)
    assert any((a != b).any() for a, b in zip(alone, Task().weights(), strict=False))
    for rank, results in enumerate(trained):
        for found, expected in zip(results[name], alone, strict=True):
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda text, rank=rank: f"{rank}: {text}"
            )
        for found, first in zip(results[name], trained[0][name], strict=True):
            assert torch.equal(found.nan_to_num(-1), first.nan_to_num(-1))  # no rank drifts off, not even by rounding


def rank_and_size() -> tuple[int, int]:
    return distributed.get_rank(), distributed.get_world_size()
