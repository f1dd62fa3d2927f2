"""StrengthScheduler: the strength of each step, other schedulers, and resuming."""

from __future__ import annotations

import io

import pytest
import torch
from torch.nn import Parameter

import proxmo
from proxmo import StrengthScheduler


def warm_up(k: int) -> float:
    return min(1.0, k / 4)


def make() -> tuple[Parameter, proxmo.ProxSGD, StrengthScheduler]:
    x = Parameter(torch.full((3,), 10.0, dtype=torch.float64))
    optimizer = proxmo.ProxSGD([x], lr=0.5, penalty=proxmo.L1(2.0))
    return x, optimizer, StrengthScheduler(optimizer, warm_up)


def advance(x: Parameter, optimizer: proxmo.ProxSGD, scheduler: StrengthScheduler, steps: int) -> None:
    for _ in range(steps):
        x.grad = torch.zeros(3, dtype=torch.float64)
        optimizer.step()
        scheduler.step()


def test_step_k_uses_factor_of_k() -> None:
    x, optimizer, scheduler = make()
    expected = 10.0
    for k in range(7):
        advance(x, optimizer, scheduler, 1)
        expected -= 0.5 * 2.0 * warm_up(k)
        assert x.tolist() == pytest.approx([expected] * 3, rel=1e-14)


def test_strength_and_lr_can_both_be_scheduled() -> None:
    x, optimizer, scheduler = make()
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    expected = 10.0
    for k in range(5):
        advance(x, optimizer, scheduler, 1)
        rates.step()
        expected -= 0.5 * 0.5**k * 2.0 * warm_up(k)
    assert x.tolist() == pytest.approx([expected] * 3, rel=1e-14)


def test_resumed_run_equals_uninterrupted_run() -> None:
    uninterrupted, *rest = make()
    advance(uninterrupted, *rest, 6)
    x, optimizer, scheduler = make()
    advance(x, optimizer, scheduler, 3)
    file = io.BytesIO()
    torch.save([x.detach(), optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    point, optimizer_state, scheduler_state = torch.load(file, weights_only=True)
    resumed = Parameter(point)
    new_optimizer = proxmo.ProxSGD([resumed], lr=0.1, penalty=proxmo.L1(7.0))
    new_scheduler = StrengthScheduler(new_optimizer, warm_up)
    new_optimizer.load_state_dict(optimizer_state)
    new_scheduler.load_state_dict(scheduler_state)
    assert new_optimizer.param_groups[0]["penalty"] == proxmo.L1(1.5)
    advance(resumed, new_optimizer, new_scheduler, 3)
    assert torch.equal(resumed, uninterrupted)


def test_all_strengths_of_a_penalty_are_multiplied_and_shared_penalties_once() -> None:
    net = proxmo.ElasticNet(l1=1.0, l2=2.0)
    both = proxmo.SparseGroup(l1=3.0, group=4.0)
    shared = proxmo.GroupL2(5.0)
    params = [Parameter(torch.zeros(2, 2)) for _ in range(6)]
    penalties = [net, both, shared, shared, proxmo.Box(-1, 1), None]
    groups = [{"params": [p], "penalty": penalty} for p, penalty in zip(params, penalties, strict=True)]
    StrengthScheduler(proxmo.ProxSGD(groups), lambda k: 0.1)
    assert net == proxmo.ElasticNet(0.1, 0.2)
    assert both == proxmo.SparseGroup(3.0 * 0.1, 0.4)
    assert shared == proxmo.GroupL2(0.5)


def test_warm_up_from_zero_keeps_weights_that_full_strength_zeroes() -> None:
    """The use case: the full penalty from the start zeroes a network before it has learnt anything."""

    def zeros(factor: float) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        inputs = torch.randn(256, 4)
        optimizer = proxmo.ProxSGD(proxmo.param_groups(model, proxmo.GroupL2(1.6)), lr=0.1)
        scheduler = StrengthScheduler(optimizer, lambda k: min(1.0, factor + k / 200))
        for _ in range(400):
            optimizer.zero_grad()
            (model(inputs).squeeze(1) - 3 * inputs[:, 0].relu()).square().mean().backward()
            optimizer.step()
            scheduler.step()
        return optimizer.sparsity()[0].zeros

    assert zeros(1.0) == 1.0
    assert zeros(0.0) < 1.0


@pytest.mark.parametrize(
    ("penalty", "factor", "message"),
    [
        (None, warm_up, "penalty with a strength in one of its parameter groups, got none"),
        (proxmo.Box(-1, 1), warm_up, "penalty with a strength in one of its parameter groups, got none"),
        (proxmo.L1(1.0), lambda k: -1.0, r"factor\(0\) must be a finite number >= 0, got -1.0"),
    ],
)
def test_invalid_arguments_are_refused(penalty: proxmo.Penalty | None, factor: object, message: str) -> None:
    optimizer = proxmo.ProxSGD([Parameter(torch.zeros(2))], penalty=penalty)
    with pytest.raises(ValueError, match=message):
        StrengthScheduler(optimizer, factor)  # type: ignore[arg-type]


def test_state_for_other_penalties_is_refused() -> None:
    _, _, scheduler = make()
    other = proxmo.ProxSGD([Parameter(torch.zeros(2))], penalty=proxmo.ElasticNet(1.0, 1.0))
    with pytest.raises(ValueError, match="for other penalties"):
        StrengthScheduler(other, warm_up).load_state_dict(scheduler.state_dict())
