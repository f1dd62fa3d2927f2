"""RateScheduler: the indexing of the paper, resuming, and torch's own schedulers; CosineRates: both rates together."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

import proxmo
from proxmo import CosineRates, theory
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
    optimizer = proxmo.ProxSGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}])
    scheduler = proxmo.RateScheduler(optimizer, rates)
    assert [(g["lr"], g["momentum"]) for g in optimizer.param_groups] == [tuple(rates(0))] * 2
    assert scheduler.get_last_lr() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("given", "factors"),
    [
        ((7.0, 7.0), (1.0, 1.0)),
        ((1.0, 0.25), (1.0, 0.25)),
        ((0.0, 3.0), (0.0, 1.0)),
        ((0.0, 0.0), (1.0, 1.0)),
        ((torch.tensor(2.0), torch.tensor([0.5])), (1.0, 0.25)),
    ],
)
def test_groups_keep_the_ratios_of_their_lr(given: tuple[float, float], factors: tuple[float, float]) -> None:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in given]
    optimizer = proxmo.ProxSGD(groups)
    scheduler = proxmo.RateScheduler(optimizer, rates)
    for k in range(4):
        expected = [rates(k).lr * factor for factor in factors]
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-6)
        assert {group["momentum"] for group in optimizer.param_groups} == {rates(max(k - 1, 0)).momentum}
        optimizer.step()
        scheduler.step()


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
    for wrong in (0.1, CosineRates):
        with pytest.raises(TypeError, match=r"rates must be CosineRates, a plan or a function .*, got (0\.1|<class)"):
            proxmo.RateScheduler(proxmo.ProxSGD([torch.zeros(2)]), wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer must have a momentum in each group, got Adagrad"):
        proxmo.RateScheduler(torch.optim.Adagrad([torch.zeros(1, requires_grad=True)]), rates)


@pytest.mark.parametrize(("horizon", "warmup"), [(10, 0), (10, 3), (10, 9), (1, 0), (10**12, 0)])
def test_cosine_rates_follow_their_formula(horizon: int, warmup: int) -> None:
    schedule = CosineRates(lr=0.5, momentum=0.8, horizon=horizon, warmup=warmup)
    assert schedule(warmup) == Rates(0.5, 0.8)
    for k in {*range(min(horizon, 10)), horizon - 1}:
        lr, momentum = schedule(k)
        cosine = (1 + math.cos(math.pi * (k - warmup) / (horizon - warmup))) / 2
        assert lr == pytest.approx(0.5 * (cosine if k >= warmup else (k + 1) / (warmup + 1)), rel=1e-12, abs=1e-15)
        assert 1 - momentum == pytest.approx(0.2 * lr / 0.5, rel=1e-12, abs=2e-16)
        assert 0 < lr <= 0.5
        assert 0.8 <= momentum < 1
    assert schedule(horizon - 1) == schedule(horizon) == schedule(horizon + 100)


def test_optimizer_takes_cosine_rates_to_the_horizon_and_beyond() -> None:
    x = Parameter(torch.ones(2))
    optimizer = proxmo.ProxSGD([x], lr=0.3)
    scheduler = proxmo.RateScheduler(optimizer, CosineRates(0.3, 0.0, horizon=5, warmup=2))
    for k in range(8):
        assert optimizer.param_groups[0]["lr"] == CosineRates(0.3, 0.0, horizon=5, warmup=2)(k).lr > 0
        x.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()


def test_resumed_run_with_cosine_rates_equals_uninterrupted_run() -> None:
    schedule = CosineRates(0.4, 0.9, horizon=10, warmup=3)

    def start(x: Parameter) -> tuple[proxmo.ProxSGD, proxmo.RateScheduler]:
        groups = [{"params": [x]}, {"params": [torch.zeros(1)], "lr": 0.01}]
        optimizer = proxmo.ProxSGD(groups, lr=0.04, penalty=proxmo.L1(0.1))
        return optimizer, proxmo.RateScheduler(optimizer, schedule)

    whole = Parameter(torch.ones(3, dtype=torch.float64))
    advance(whole, *start(whole), 10)
    part = Parameter(torch.ones(3, dtype=torch.float64))
    optimizer, scheduler = start(part)
    advance(part, optimizer, scheduler, 5)
    saved = copy.deepcopy((part.data, optimizer.state_dict(), scheduler.state_dict()))
    resumed = Parameter(saved[0])
    optimizer, scheduler = start(resumed)
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    advance(resumed, optimizer, scheduler, 5)
    assert torch.equal(resumed, whole)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"] / 4)


def test_annealing_both_rates_finds_the_zeros_that_annealing_lr_alone_misses() -> None:
    """On an ℓ1 logistic regression, whose solution is found to high accuracy by full gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 50, generator=generator, dtype=torch.float64)
    logits = inputs[:, :5] @ torch.tensor([2.0, -1.5, 1.0, -1.0, 0.8], dtype=torch.float64)
    labels = (torch.rand(1000, generator=generator, dtype=torch.float64) < logits.sigmoid()).double()
    penalty, steps = proxmo.L1(0.05), 600
    batches = torch.randint(1000, (steps, 8), generator=generator)

    def gradient(x: torch.Tensor, batch: torch.Tensor | slice) -> torch.Tensor:
        residual = (inputs[batch] @ x).sigmoid() - labels[batch]
        return inputs[batch].T @ residual / len(residual)

    def train(make_scheduler: Callable[[proxmo.ProxSGD], torch.optim.lr_scheduler.LRScheduler]) -> int:
        x = Parameter(torch.zeros(50, dtype=torch.float64))
        optimizer = proxmo.ProxSGD([x], lr=0.3, momentum=0.9, penalty=penalty)
        scheduler = make_scheduler(optimizer)
        for batch in batches:
            x.grad = gradient(x.detach(), batch)
            optimizer.step()
            scheduler.step()
        return int(x.count_nonzero())

    solution = torch.zeros(50, dtype=torch.float64)
    for _ in range(500):
        solution = penalty.prox(solution - gradient(solution, slice(None)), 1.0)
    alone = train(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))
    together = train(lambda optimizer: proxmo.RateScheduler(optimizer, CosineRates(0.3, 0.9, steps)))
    assert solution.count_nonzero() == 5
    assert together <= 7
    assert alone >= 15


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lr": 0.0}, ValueError, "lr must be a finite number > 0, got 0.0"),
        ({"lr": "fast"}, TypeError, "lr must be a finite number > 0, got 'fast'"),
        ({"momentum": 1.0}, ValueError, r"momentum must be a number in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, ValueError, r"momentum must be a number in \[0, 1\), got -0.1"),
        ({"horizon": 0}, ValueError, "horizon must be an integer >= 1, got 0"),
        ({"horizon": 10.0}, TypeError, "horizon must be an integer >= 1, got 10.0"),
        ({"warmup": 10}, ValueError, "warmup must be less than horizon = 10, got 10"),
        ({"warmup": -1}, ValueError, "warmup must be an integer >= 0, got -1"),
    ],
)
def test_invalid_cosine_rates_are_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CosineRates(**{"lr": 0.1, "momentum": 0.9, "horizon": 10, **changes})  # type: ignore[arg-type]
