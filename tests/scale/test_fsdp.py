"""Sharded training equals training on the joined batch, for every method and mesh; state stays sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.communication import Messages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import proxmo
from scale import processes
from scale.task import METHODS, Placed, Task, advance, assert_equals_single_process, joint, rank_and_size, train_all


def sharded(network: nn.Sequential) -> Placed:
    fully_shard(network)
    return Placed(network, *rank_and_size())


def replicated_and_sharded(network: nn.Sequential) -> Placed:
    """Two replicas of two shards."""
    fully_shard(network, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    return Placed(network, *rank_and_size())


def tensor_parallel_and_sharded(network: nn.Sequential) -> Placed:
    """Tensor parallelism over two ranks, sharded again over two data-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(network, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(network, mesh=mesh["data"])
    return Placed(network, mesh["data"].get_local_rank(), 2)


PLACES = [
    pytest.param((sharded, 2), marks=pytest.mark.slow),  # checkpoints of two ranks are tested in any case
    (sharded, 4),
    (replicated_and_sharded, 4),
    (tensor_parallel_and_sharded, 4),
]


def train_and_check_state(place: Any) -> dict[str, list[Tensor]]:
    results = train_all(place)
    assert_state_is_sharded(Task(place))
    return results


def refit(task: Task) -> list[Tensor]:
    """Train until some neurons are zero, and on with these fixed; return the weights at both times."""
    optimizer = proxmo.ProxSGD(task.groups(), lr=0.2)
    for group in optimizer.param_groups:
        if group["penalty"] is not None:
            group["penalty"].strength = 0.5
    advance(task, optimizer, range(6))
    before = task.weights()
    proxmo.freeze_zeros(optimizer)
    advance(task, optimizer, range(6, 12))
    return [*before, *task.weights()]


def edge_cases() -> dict[str, Any]:
    """Train units with empty local shards, refit, count messages, swap iterates, and load unsharded state."""
    found: dict[str, Any] = {}
    for hidden in (9, 3):
        task = Task(sharded, joint, hidden)
        optimizer = proxmo.ProxSGD(task.groups(), lr=0.2)
        advance(task, optimizer, range(3))
        with Messages() as messages:
            optimizer.step()
        found[f"sent {hidden}"] = len(messages.sent)
        found[f"units {hidden}"] = [*task.weights(), optimizer.penalty_value()]
    found["refit"] = refit(Task(sharded))
    task = Task(sharded)
    optimizer = proxmo.ProxSGD(task.groups(), lr=0.2)
    iterate = proxmo.RandomIterate(task.params(), torch.Generator().manual_seed(3))
    advance(task, optimizer, range(3))
    iterate.update()
    advance(task, optimizer, range(3, 6))

    def outputs() -> Tensor:
        with torch.no_grad():
            return task.network(task.inputs[0])

    found["last"] = outputs()
    with iterate.swapped_in(task.network):
        found["kept"] = outputs()
    found["last again"] = outputs()
    version = task.params()[0]._version
    advance(task, optimizer, [6])
    found["written"] = task.params()[0]._version > version
    try:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": torch.zeros(9, 6)}}})
    except ValueError as error:
        found["error"] = str(error)
    return found


def test_units_iterates_and_state_when_sharded(tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = {}
    for hidden in (9, 3):
        task = Task(make_groups=joint, hidden=hidden)
        optimizer = proxmo.ProxSGD(task.groups(), lr=0.2)
        advance(task, optimizer, range(3))
        optimizer.step()
        expected[hidden] = [*task.weights(), optimizer.penalty_value()]
    single = refit(Task())
    zeros = [p == 0 for p in single]
    assert 0 < zeros[0].all(1).sum() < 8
    assert torch.equal(zeros[0], zeros[4])
    for found in processes.run(edge_cases, 4, tmp_path_factory.mktemp("edge")):
        for hidden in (9, 3):
            torch.testing.assert_close(found[f"units {hidden}"], expected[hidden], rtol=1e-9, atol=1e-11)
            assert found[f"sent {hidden}"] == 0
        torch.testing.assert_close(found["refit"], single, rtol=1e-9, atol=1e-11)
        assert all(torch.equal(p == 0, zero) for p, zero in zip(found["refit"], zeros, strict=True))
        assert torch.equal(found["last"], found["last again"])
        assert not torch.equal(found["last"], found["kept"])
        assert found["written"]
        assert found["error"].startswith("cannot load the state of ")


def assert_state_is_sharded(task: Task) -> None:
    for method in (proxmo.ProxSGD, proxmo.ProxSTORM):
        optimizer = method(task.groups(), lr=0.2)
        optimizer.step(task.closure(optimizer, 0))
        for p, state in optimizer.state.items():
            for name in state.keys() - {"started", "step"}:
                assert isinstance(p, DTensor)
                assert isinstance(state[name], DTensor)
                assert state[name].placements == p.placements
                assert state[name].to_local().shape == p.to_local().shape


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0].__name__}-{place[1]}")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    place, ranks = request.param
    return processes.run_once(train_and_check_state, ranks, tmp_path_factory, f"fsdp-{place.__name__}-{ranks}", place)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_equal_single_process_on_joined_batch(trained: list[dict[str, list[Tensor]]], method: str) -> None:
    assert_equals_single_process(method, trained)
