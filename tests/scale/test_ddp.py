"""Data-parallel training equals training on the joined batch, for every method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from scale import processes
from scale.task import METHODS, Placed, assert_equals_single_process, rank_and_size, train_all


def data_parallel(network: nn.Sequential) -> Placed:
    return Placed(DistributedDataParallel(network), *rank_and_size())


@pytest.fixture(scope="module", params=[2, 4])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    return processes.run_once(train_all, request.param, tmp_path_factory, f"ddp-{request.param}", data_parallel)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_equal_single_process_on_joined_batch(trained: list[dict[str, list[Tensor]]], method: str) -> None:
    assert_equals_single_process(method, trained)


def test_run_starts_ranks_that_communicate(tmp_path: Path) -> None:
    assert processes.run(ranks_and_sum, 2, tmp_path, 5.0) == [(0, 2, 10.0), (1, 2, 10.0)]


def ranks_and_sum(value: float) -> tuple[int, int, float]:
    """Return the rank, the number of ranks, and the sum of ``value`` over them."""
    total = torch.tensor(value)
    distributed.all_reduce(total)
    return *rank_and_size(), float(total)
