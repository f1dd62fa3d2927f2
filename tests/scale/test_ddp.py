"""Data-parallel training is training on the joined batch, with every method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from scale import processes
from scale.task import METHODS, Placed, assert_as_alone, rank_and_size, train_all


def data_parallel(network: nn.Sequential) -> Placed:
    return Placed(DistributedDataParallel(network), *rank_and_size())


@pytest.fixture(scope="module", params=[2, 4])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    return processes.run_once(train_all, request.param, tmp_path_factory, f"ddp-{request.param}", data_parallel)


@pytest.mark.parametrize("method", METHODS)
def test_many_processes_are_one_on_the_joined_batch(trained: list[dict[str, list[Tensor]]], method: str) -> None:
    assert_as_alone(method, trained)


def test_the_folder_is_a_path(tmp_path: Path) -> None:
    assert processes.run(ranks_and_sum, 2, tmp_path, 5.0) == [(0, 2, 10.0), (1, 2, 10.0)]


def ranks_and_sum(value: float) -> tuple[int, int, float]:
    """That the processes of these tests are real ones that talk to each other."""
    total = torch.tensor(value)
    distributed.all_reduce(total)
    return *rank_and_size(), float(total)
