"""Mixed-precision training: autocast, loss scaling, and parameters in half precision."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import proxmo

STEPS = 150


def task() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return a network with 32 neurons, far more than its task needs, with inputs and targets."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 6)
    network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    return network, inputs, inputs[:, :1] - 2 * inputs[:, 1:2].relu()


def zero_neurons(network: nn.Sequential) -> float:
    weight = network[0].weight
    assert isinstance(weight, Tensor)
    return float((weight == 0).all(1).float().mean())


def make(network: nn.Module) -> proxmo.ProxSGD:
    return proxmo.ProxSGD(proxmo.param_groups(network, proxmo.GroupL2(0.1), exclude=["2"]), lr=0.2)


def train(network: nn.Module, loss: Callable[[], Tensor], optimizer: proxmo.ProxSGD) -> float:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return float(loss().detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_training_under_autocast_zeroes_neurons_and_keeps_float32_state(dtype: torch.dtype) -> None:
    network, inputs, targets = task()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = network(inputs)
            assert outputs.dtype == dtype
        return nn.functional.mse_loss(outputs.float(), targets)

    optimizer = make(network)
    assert train(network, loss, optimizer) < 0.15
    assert 0.4 < zero_neurons(network) < 1
    assert all(p.dtype == torch.float32 for p in network.parameters())
    assert all(state["momentum_buffer"].dtype == torch.float32 for state in optimizer.state.values())


def test_steps_with_overflow_are_skipped_until_the_loss_scale_has_come_down() -> None:
    """The loss scale starts far too high: steps, including their prox, are skipped until it fits, then it trains."""
    network, inputs, targets = task()
    optimizer = make(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=1000)
    skipped = 0
    for _ in range(STEPS):
        before = copy.deepcopy([network.state_dict(), optimizer.state_dict()["state"]])
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = network(inputs)
        scaler.scale(nn.functional.mse_loss(outputs.float(), targets)).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < scale:
            torch.testing.assert_close([network.state_dict(), optimizer.state_dict()["state"]], before, rtol=0, atol=0)
            skipped += 1
    assert 3 <= skipped <= 26
    assert nn.functional.mse_loss(network(inputs), targets).item() < 0.15
    assert 0.4 < zero_neurons(network) < 1


def test_bfloat16_parameters_train_with_float32_averages() -> None:
    network, inputs, targets = task()
    network.to(torch.bfloat16)
    optimizer = proxmo.ProxSGD(
        proxmo.param_groups(network, proxmo.GroupL2(0.1), exclude=["2"]), lr=0.2, momentum_dtype=torch.float32
    )

    def loss() -> Tensor:
        return nn.functional.mse_loss(network(inputs.bfloat16()).float(), targets)

    assert train(network, loss, optimizer) < 0.2
    assert 0.4 < zero_neurons(network) < 1
    assert all(p.dtype == torch.bfloat16 for p in network.parameters())
