"""AutoProxSGD where things go wrong: extreme scales, vanishing gradients, long runs, small batches with BatchNorm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import cross_entropy, softplus

import proxmo

TARGET = torch.tensor([2.0, -1.0, 0.02])


def noisy_steps(x: Parameter, optimizer: proxmo.AutoProxSGD, steps: int, scale: float = 1.0) -> Tensor:
    """Minimise scale·E‖x − TARGET − noise‖²/2 and return the mean of the iterates in the last half."""
    noise = torch.Generator().manual_seed(0)
    total = torch.zeros(3, dtype=torch.float64)
    for step in range(steps):
        x.grad = ((x.detach() - TARGET + torch.randn(3, generator=noise)) * scale).to(x.dtype)
        optimizer.step()
        if step >= steps // 2:
            total += x.detach()
    return total / (steps - steps // 2)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_losses_of_any_scale_in_float32(scale: float) -> None:
    x, y = Parameter(torch.zeros(3)), Parameter(torch.zeros(3))
    noisy_steps(x, proxmo.AutoProxSGD([x], proxmo.L1(0.05)), 100)
    noisy_steps(y, proxmo.AutoProxSGD([y], proxmo.L1(0.05 * scale)), 100, scale)
    torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_single_sample_is_fitted_and_then_left_alone(start: float) -> None:
    """Gradients vanish, and lr stays where it was."""
    x = Parameter(torch.full((3,), start))
    optimizer = proxmo.AutoProxSGD([x])
    inputs = torch.tensor([1.0, -2.0, 0.5])
    found = []
    for _ in range(3):
        for _ in range(400):
            optimizer.zero_grad()
            (x @ inputs - 3).square().backward()
            optimizer.step()
        found.append(float((x.detach() @ inputs - 3).abs()))
    assert found[-1] < 1e-3
    assert found[-1] <= found[0]
    assert float(optimizer.param_groups[0]["distance"]) < 10


def test_single_separable_sample_does_not_run_away() -> None:
    """log(1 + e^−x) has its infimum at infinity: x has to grow slowly, and the loss has to fall."""
    x = Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = proxmo.AutoProxSGD([x])
    values = []
    for _ in range(500):
        optimizer.zero_grad()
        loss = softplus(-x).sum()
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[-1] < values[100] < values[20] < values[0]
    assert 1 < float(x.detach()) < 100


def test_zero_gradients_during_the_run_keep_everything_finite() -> None:
    x = Parameter(torch.ones(3))
    optimizer = proxmo.AutoProxSGD([x], proxmo.L1(0.05))
    noisy_steps(x, optimizer, 50)
    before = float(optimizer.param_groups[0]["tuned_lr"])
    for _ in range(100):
        x.grad = torch.zeros(3)
        optimizer.step()
    assert x.isfinite().all()
    assert 0 < float(optimizer.param_groups[0]["tuned_lr"]) <= 2 * before
    noisy_steps(x, optimizer, 600)
    torch.testing.assert_close(x.detach(), torch.tensor([1.95, -0.95, 0.0]), rtol=0, atol=0.2)


def test_error_falls_like_one_over_k_in_float32() -> None:
    """Neither freezes nor drifts: with independent noise the error of the best estimate falls like 1/k."""
    errors = []
    for steps in (500, 5000):
        x = Parameter(torch.zeros(3))
        noise = torch.Generator().manual_seed(1)
        optimizer = proxmo.AutoProxSGD([x])
        squares = []
        for step in range(steps):
            x.grad = x.detach() - TARGET + torch.randn(3, generator=noise)
            optimizer.step()
            if step >= 0.9 * steps:
                squares.append(float((x.detach() - TARGET).square().sum()))
        errors.append(sum(squares) / len(squares))
    assert errors[1] < errors[0] / 3


def test_run_after_a_million_steps_in_float32_neither_freezes_nor_drifts() -> None:
    """The counters are set to what they are after 10⁶ steps at this noise; then the run goes on."""
    x = Parameter(TARGET.clone())
    optimizer = proxmo.AutoProxSGD([x])
    noisy_steps(x, optimizer, 100)
    million = 1_000_000
    x.data.copy_(TARGET + 0.01)
    for group in optimizer.param_groups:
        group["gradient_squares"] *= million / group["steps"]
        group.update(steps=million, anchor_step=million - 7, cut=2.0**-10, distance=3.0)
    optimizer.state[x]["step"].fill_(million)
    optimizer.state[x]["momentum_buffer"].fill_(0.01)
    lr = 3.0 / 1024 / math.sqrt(optimizer.param_groups[0]["gradient_squares"])
    noisy_steps(x, optimizer, 2000)
    assert optimizer.param_groups[0]["steps"] == million + 2000
    assert lr / 20 < optimizer.param_groups[0]["tuned_lr"] < 1.01 * lr
    moved = x.detach() - TARGET - 0.01
    assert (moved < 0).all()  # towards the target, by more than the rounding of float32
    assert (moved > -0.02).all()


@pytest.mark.slow
def test_a_million_steps_in_float32() -> None:
    x = Parameter(torch.zeros(3))
    optimizer = proxmo.AutoProxSGD([x])
    noisy_steps(x, optimizer, 1_000_000)
    assert (x.detach() - TARGET).abs().max() < 0.02
    assert 0 < optimizer.param_groups[0]["tuned_lr"] < 1e-3


@pytest.mark.parametrize("batch", [2, 8])
def test_small_batches_with_batch_norm(batch: int) -> None:
    """Weights before BatchNorm have gradients that grow as the weights shrink; lr must not collapse or explode."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = proxmo.AutoProxSGD(proxmo.param_groups(net, proxmo.L1(1e-4)))

    def sample(count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, 8, generator=generator)
        return inputs, (inputs[:, 0] > inputs[:, 1]).long()

    for _ in range(600):
        optimizer.zero_grad()
        inputs, labels = sample(batch)
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    inputs, labels = sample(1000)
    with torch.no_grad():
        accuracy = (net.eval()(inputs).argmax(1) == labels).float().mean()
    assert accuracy > 0.8


@pytest.mark.parametrize("init", [1e-3, 1.0, 1e2])
def test_weights_that_start_far_from_their_scale_get_there(init: float) -> None:
    """Linear regression with weights of size 1 from a start at other scales."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(10, generator=generator)
    x = Parameter(init * torch.randn(10, generator=generator))
    optimizer = proxmo.AutoProxSGD([x])
    for _ in range(1500):
        inputs = torch.randn(16, 10, generator=generator)
        residuals = inputs @ (x.detach() - truth) - 0.1 * torch.randn(16, generator=generator)
        x.grad = inputs.T @ residuals / 16
        optimizer.step()
    assert (x.detach() - truth).norm() < 0.05 * truth.norm()
