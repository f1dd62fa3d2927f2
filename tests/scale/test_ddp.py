"""Data-parallel training is training on the joined batch, with every method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import proxmo
from scale import processes

STEPS, BATCH = 12, 8


class Task:
    """A small network with batches that every rank knows, of which it takes its part."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(4 * STEPS, BATCH, 6, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(3, (4 * STEPS, BATCH), generator=generator)
        self.rank, self.ranks = 0, 1
        self.model: nn.Module = self.network
        if distributed.is_initialized():
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
            self.model = DistributedDataParallel(self.network)

    def groups(self) -> proxmo.ParamGroups:
        return proxmo.param_groups(self.network, proxmo.GroupL2(0.02))

    def closure(self, optimizer: proxmo.ProxOptimizer, batch: int) -> Callable[[], float]:
        part = slice(self.rank * BATCH // self.ranks, (self.rank + 1) * BATCH // self.ranks)

        def evaluate() -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.inputs[batch][part]), self.labels[batch][part])
            loss.backward()
            return loss.item()

        return evaluate

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.network.parameters()]


def prox_sgd() -> list[Tensor]:
    task = Task()
    optimizer = proxmo.ProxSGD(task.groups(), lr=0.2, momentum=0.8)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
    return task.weights()


def joint_units() -> list[Tensor]:
    task = Task()
    example = torch.zeros(2, 6, dtype=torch.float64)
    optimizer = proxmo.ProxSGD(proxmo.unit_groups(task.network, example, proxmo.GroupLInf(0.05)), lr=0.2)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
    return task.weights()


def random_iterate() -> list[Tensor]:
    task = Task()
    optimizer = proxmo.ProxSGD(task.groups(), lr=0.2)
    params = list(task.network.parameters())
    iterate = proxmo.RandomIterate(params, torch.Generator().manual_seed(3))
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
        iterate.update()
    iterate.copy_to(params)
    return task.weights()


def auto() -> list[Tensor]:
    task = Task()
    optimizer = proxmo.AutoProxSGD(task.groups())
    for step in range(2 * STEPS):
        optimizer.step(task.closure(optimizer, step))
    group = optimizer.param_groups[0]
    estimates = [group[name] for name in ("lr", "momentum", "smoothness", "noise_variance")]
    return [*task.weights(), torch.tensor(estimates, dtype=torch.float64)]


def storm() -> list[Tensor]:
    task = Task()
    optimizer = proxmo.ProxSTORM(task.groups(), lr=0.2, momentum=0.8)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
    return task.weights()


def hybrid() -> list[Tensor]:
    task = Task()
    optimizer = proxmo.ProxHybridSGD(task.groups(), lr=0.2, momentum=0.8)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step), task.closure(optimizer, STEPS + step))
    return task.weights()


def spiderboost() -> list[Tensor]:
    task = Task()
    optimizer = proxmo.ProxSpiderBoost(task.groups(), lr=0.2, period=4)
    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step))
    return task.weights()


def inexact() -> list[Tensor]:
    task = Task()
    optimizer = proxmo.InexactProxSGD(task.network.parameters(), lr=0.2, inner=proxmo.InnerSGD(5, lr=0.05))

    def psi() -> float:
        optimizer.zero_grad()
        value = 0.01 * sum((p.square().sum() for p in task.network.parameters()), torch.zeros((), dtype=torch.float64))
        value.backward()
        return value.item()

    for step in range(STEPS):
        optimizer.step(task.closure(optimizer, step), psi)
    return task.weights()


METHODS = (prox_sgd, joint_units, random_iterate, auto, storm, hybrid, spiderboost, inexact)


def train_all() -> dict[str, list[Tensor]]:
    return {method.__name__: method() for method in METHODS}


@pytest.fixture(scope="module", params=[2, 4])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return processes.run(train_all, request.param, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_many_processes_are_one_on_the_joined_batch(trained: list[dict[str, list[Tensor]]], method: Any) -> None:
    alone = method()
    assert any((a != b).any() for a, b in zip(alone, Task().weights(), strict=False))
    for rank, results in enumerate(trained):
        for found, expected in zip(results[method.__name__], alone, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=f"rank {rank}")
        for found, first in zip(results[method.__name__], trained[0][method.__name__], strict=True):
            assert torch.equal(found, first)  # ranks do not drift apart, not even by rounding


def test_the_folder_is_a_path(tmp_path: Path) -> None:
    assert processes.run(ranks_and_sum, 2, tmp_path, 5.0) == [(0, 2, 10.0), (1, 2, 10.0)]


def ranks_and_sum(value: float) -> tuple[int, int, float]:
    """That the processes of these tests are real ones that talk to each other."""
    total = torch.tensor(value)
    distributed.all_reduce(total)
    return distributed.get_rank(), distributed.get_world_size(), float(total)
