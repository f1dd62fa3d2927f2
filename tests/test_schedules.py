"""RateScheduler: the indexing of the paper, resuming, and torch's own schedulers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import Parameter

import proxmo
from proxmo import theory
from proxmo.theory import Rates


def rates(k: int) -> Rates:
    return Rates(lr=1 / (k + 2), momentum=1 - 1 / (k + 3))


def run(steps: int) -> tuple[Parameter, proxmo.ProxSGD, proxmo.RateScheduler]:
    x = Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = proxmo.ProxSGD([x], penalty=proxmo.SquaredL2(0.1))
    scheduler = proxmo.RateScheduler(optimizer, rates)
    advance(x, optimizer, scheduler, steps)
    return x, optimizer, scheduler


def advance(x: Parameter, optimizer: proxmo.ProxSGD, scheduler: proxmo.RateScheduler, steps: int) -> None:
    for _ in range(steps):
        x.grad = x.detach() * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) - 1
        optimizer.step()
        scheduler.step()


def test_step_k_uses_lr_of_k_and_momentum_of_k_minus_one() -> None:
    x, _, _ = run(6)
    expected = torch.ones(3, dtype=torch.float64)
    average = None
    for k in range(6):
        gradient = expected * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) - 1
        gamma = 1 - rates(k - 1).momentum
        average = gradient if average is None else (1 - gamma) * average + gamma * gradient
        lr = rates(k).lr
        expected = (expected - lr * average) / (1 + lr * 0.1)
    torch.testing.assert_close(x.detach(), expected, rtol=1e-13, atol=1e-13)


def test_average_is_kept_while_momentum_is_zero() -> None:
    """With γ = 1 at first, as in the increasing schedule, the average is the last gradient, where later ones start."""
    x = Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = proxmo.ProxSGD([x])
    scheduler = proxmo.RateScheduler(optimizer, lambda k: Rates(lr=0.1, momentum=0.0 if k < 2 else 0.5))
    gradients = [torch.full((3,), float(k), dtype=torch.float64) for k in range(5)]
    average = None
    for k, gradient in enumerate(gradients):
        x.grad = gradient.clone()
        optimizer.step()
        scheduler.step()
        gamma = 1.0 if k - 1 < 2 else 0.5
        average = gradient if average is None else (1 - gamma) * average + gamma * gradient
        torch.testing.assert_close(optimizer.state[x]["momentum_buffer"], average, rtol=0, atol=0)


def test_first_rates_are_set_in_all_groups() -> None:
    optimizer = proxmo.ProxSGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 7.0}])
    scheduler = proxmo.RateScheduler(optimizer, rates)
    assert [(g["lr"], g["momentum"]) for g in optimizer.param_groups] == [tuple(rates(0))] * 2
    assert scheduler.get_last_lr() == [0.5, 0.5]


def test_resumed_run_equals_uninterrupted_run() -> None:
    uninterrupted, _, _ = run(10)
    x, optimizer, scheduler = run(4)
    saved = copy.deepcopy((x.data, optimizer.state_dict(), scheduler.state_dict()))
    assert "rates" not in saved[2]
    fresh = Parameter(saved[0])
    new_optimizer = proxmo.ProxSGD([fresh], penalty=proxmo.SquaredL2(0.1))
    new_scheduler = proxmo.RateScheduler(new_optimizer, rates)
    new_scheduler.load_state_dict(saved[2])
    new_optimizer.load_state_dict(saved[1])
    advance(fresh, new_optimizer, new_scheduler, 6)
    assert torch.equal(fresh, uninterrupted)


def test_plan_and_increasing_schedule_can_be_scheduled() -> None:
    known = {"smoothness": 1.0, "noise_variance": 4.0}
    plan = theory.plan(**known, initial_gap=2.0, horizon=100)
    optimizer = proxmo.ProxSGD([torch.zeros(1, requires_grad=True)])
    scheduler = proxmo.RateScheduler(optimizer, plan)
    for _ in range(3):
        group = optimizer.param_groups[0]
        assert (group["lr"], group["momentum"]) == (plan.lr, plan.momentum)
        optimizer.step()
        scheduler.step()
    schedule = theory.IncreasingSchedule(**known, phi0=3.0)
    optimizer = proxmo.ProxSGD([torch.zeros(1, requires_grad=True)])
    scheduler = proxmo.RateScheduler(optimizer, schedule)
    for k in range(50):
        group = optimizer.param_groups[0]
        assert group["lr"] == 1 / schedule.M(k)
        assert group["momentum"] == pytest.approx(1 - 3 / (schedule.M(max(k - 1, 0)) - 1))
        optimizer.step()
        scheduler.step()


def test_torch_lr_scheduler_leaves_momentum_alone() -> None:
    optimizer = proxmo.ProxSGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.7)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["momentum"] == 0.7


def test_optimizer_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer must have a momentum in each group, got Adagrad"):
        proxmo.RateScheduler(torch.optim.Adagrad([torch.zeros(1, requires_grad=True)]), rates)
