"""A small training task for several ranks, and every method on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

import proxmo
from proxmo import shards

STEPS, BATCH = 5, 8


class Placed(NamedTuple):
    """A network prepared for distributed training: the module to call, and which part of a batch this rank takes."""

    model: nn.Module
    data_rank: int = 0
    data_ranks: int = 1


Place = Callable[[nn.Sequential], Placed]


def separate(network: nn.Sequential) -> proxmo.ParamGroups:
    """Return parameter groups with a penalty on each tensor."""
    return proxmo.param_groups(network, proxmo.GroupL2(0.02))


def joint(network: nn.Sequential) -> proxmo.ParamGroups:
    """Return parameter groups with a penalty on units that span tensors."""
    return proxmo.unit_groups(network, torch.zeros(2, 6, dtype=torch.float64), proxmo.GroupLInf(0.05))


class Task:
    """A small network, and batches that are equal on all ranks; each rank trains on its part of a batch."""

    def __init__(
        self,
        place: Place = Placed,
        make_groups: Callable[[nn.Sequential], proxmo.ParamGroups] = separate,
        hidden: int = 8,
    ) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
        self._groups = make_groups(self.network)  # before the network is sharded
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(4 * STEPS, BATCH, 6, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(3, (4 * STEPS, BATCH), generator=generator)
        self.placed = place(self.network)

    def groups(self) -> proxmo.ParamGroups:
        return self._groups.on(self.network)

    def params(self) -> list[nn.Parameter]:
        return list(self.network.parameters())

    def closure(self, optimizer: proxmo.ProxOptimizer, batch: int) -> Callable[[], float]:
        model, rank, ranks = self.placed
        samples = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)

        def evaluate() -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(self.inputs[batch][samples]), self.labels[batch][samples])
            loss.backward()
            return loss.item()

        return evaluate

    def weights(self) -> list[Tensor]:
        return [shards.full(p.detach()).clone() for p in self.params()]


OPTIMIZERS: dict[str, Callable[[Task], proxmo.ProxOptimizer]] = {
    "prox_sgd": lambda task: proxmo.ProxSGD(task.groups(), lr=0.2, momentum=0.8),
    "joint_units": lambda task: proxmo.ProxSGD(task.groups(), lr=0.2),
    "auto": lambda task: proxmo.AutoProxSGD(task.groups()),
    "adamw": lambda task: proxmo.ProxAdamW(task.groups(), lr=0.05),
    "adamw_blocks": lambda task: proxmo.ProxAdamW(task.groups(), lr=0.05, metric="block"),
    "adamw_units": lambda task: proxmo.ProxAdamW(task.groups(), lr=0.05),
    "adamw_blocks_of_units": lambda task: proxmo.ProxAdamW(task.groups(), lr=0.05, metric="block"),
    "lion": lambda task: proxmo.ProxLion(proxmo.param_groups(task.network, proxmo.L1(0.01)), lr=0.05),
    "storm": lambda task: proxmo.ProxSTORM(task.groups(), lr=0.2, momentum=0.8),
    "hybrid": lambda task: proxmo.ProxHybridSGD(task.groups(), lr=0.2, momentum=0.8),
    "spiderboost": lambda task: proxmo.ProxSpiderBoost(task.groups(), lr=0.2, period=4),
    "inexact": lambda task: proxmo.InexactProxSGD(task.params(), lr=0.2, inner=proxmo.InnerSGD(2, lr=0.05)),
}


def task_for(name: str, place: Place = Placed) -> Task:
    return Task(place, joint if "units" in name else separate)


def advance(task: Task, optimizer: proxmo.ProxOptimizer, steps: Iterable[int]) -> None:
    """Take these steps, each on its own batch."""
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
    """Return the numbers that an optimizer reports after a run."""
    if isinstance(optimizer, proxmo.InexactProxSGD):
        assert optimizer.report is not None
        return [torch.tensor(optimizer.report[1:3], dtype=torch.float64)]
    sparsity = optimizer.sparsity()
    shares = [share or 0.0 for zeros, groups, _ in sparsity for share in (zeros, groups)]
    shares += [family.zero / family.units for _, _, families in sparsity for family in families]
    group = optimizer.param_groups[0]
    estimates = [group[name] for name in ("lr", "momentum", "steps", "distance", "cut", "tuned_lr") if name in group]
    return [optimizer.penalty_value(), torch.tensor([*shares, *estimates], dtype=torch.float64)]


def train(name: str, place: Place) -> list[Tensor]:
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
    del columns["loss"], columns["objective"], columns["potential"]  # these contain the loss on the local samples
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
    **{name: functools.partial(train, name) for name in OPTIMIZERS},
    "certified": certified,
    "random_iterate": random_iterate,
}


def train_all(place: Place) -> dict[str, list[Tensor]]:
    return {name: method(place) for name, method in METHODS.items()}


def assert_equals_single_process(name: str, trained: list[dict[str, list[Tensor]]]) -> None:
    """Assert that ranks have equal results, which are those of a single process on the joined batch up to rounding."""
    single = METHODS[name](Placed)
    assert any((a != b).any() for a, b in zip(single, Task().weights(), strict=False))
    for rank, results in enumerate(trained):
        for found, expected in zip(results[name], single, strict=True):
            torch.testing.assert_close(
                found,
                expected,
                rtol=1e-9,
                atol=1e-11,
                equal_nan=True,
                msg=lambda text, rank=rank: f"rank {rank}: {text}",
            )
        for found, first in zip(results[name], trained[0][name], strict=True):
            assert torch.equal(found.nan_to_num(-1), first.nan_to_num(-1))  # equal to the bit: ranks must not drift


def rank_and_size() -> tuple[int, int]:
    return distributed.get_rank(), distributed.get_world_size()
