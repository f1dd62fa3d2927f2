"""InexactProxSGD as a torch optimizer: steps are all or nothing, runs resume, errors are clear."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

import proxmo
from optim.smooth_problem import DOUBLE, noisy_f, smooth_psi, start
from optim.stateful_model import same_bits
from proxmo import InexactProxSGD, InnerSGD


class FailingPsi:
    """A closure for ψ that fails at a given call."""

    def __init__(self, x: Parameter, at: int, how: str) -> None:
        self._x, self._left, self._how = x, at, how

    def __call__(self) -> float:
        self._left -= 1
        self._x.grad = self._x.detach().clone()
        if self._left == 0:
            if self._how == "raise":
                raise ArithmeticError("on purpose")
            if self._how == "gradient":
                self._x.grad[0, 0] = math.inf
            else:
                return math.nan
        return float(self._x.detach().square().sum() / 2)


@pytest.mark.parametrize("how", ["raise", "gradient", "value"])
@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_failed_psi_closure_changes_nothing(how: str, at: int, steps_before: int) -> None:
    x = start()
    optimizer = InexactProxSGD([x], lr=0.2, inner=InnerSGD(5, lr=0.05))
    for k in range(steps_before):
        optimizer.step(noisy_f(x, k), smooth_psi(x, proxmo.SquaredL2(1.0)))
    point, state, report = x.detach().clone(), copy.deepcopy(optimizer.state_dict()), optimizer.report
    message = (
        "on purpose" if how == "raise" else f"psi_closure gave a value or gradient that is not finite in its call {at}"
    )
    with pytest.raises(ArithmeticError, match=message):
        optimizer.step(noisy_f(x, 9), FailingPsi(x, at, how))
    assert torch.equal(x, point)
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
    assert optimizer.report == report
    # the run then continues as if nothing had happened
    twin_x = start()
    twin = InexactProxSGD([twin_x], lr=0.2, inner=InnerSGD(5, lr=0.05))
    for k in range(4):
        twin.step(noisy_f(twin_x, k), smooth_psi(twin_x, proxmo.SquaredL2(1.0)))
        if k >= steps_before:
            optimizer.step(noisy_f(x, k), smooth_psi(x, proxmo.SquaredL2(1.0)))
    assert torch.equal(x, twin_x)


def test_failed_loss_closure_changes_nothing() -> None:
    x = start()
    optimizer = InexactProxSGD([x], lr=0.2, inner=InnerSGD(5, lr=0.05))
    point = x.detach().clone()
    psi = smooth_psi(x, proxmo.SquaredL2(1.0))

    def not_finite() -> float:
        x.grad = torch.full_like(x, math.nan)
        return 0.0

    def raising() -> float:
        raise ArithmeticError

    with pytest.raises(FloatingPointError, match="the gradient of f is not finite"):
        optimizer.step(not_finite, psi)
    with pytest.raises(ArithmeticError):
        optimizer.step(raising, psi)
    assert torch.equal(x, point)
    assert not optimizer.state


def test_undone_step_restores_running_statistics() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    inputs = torch.randn(8, 3)
    mean = net[1].running_mean
    assert isinstance(mean, Tensor)

    def f() -> float:
        loss = net[0](inputs).square().mean()
        loss.backward()
        return loss.item()

    def increasing_psi() -> float:
        value = net(inputs).square().mean()
        value.backward()
        return 1e9 * float(net[0].weight.detach().sub(weight).abs().sum())

    weight = net[0].weight.detach().clone()
    optimizer = InexactProxSGD(net.parameters(), lr=0.1, inner=InnerSGD(3, lr=0.01))
    optimizer.step(f, increasing_psi)
    assert optimizer.report is not None
    assert optimizer.report.fell_back
    assert torch.equal(mean, torch.zeros(4))
    optimizer.step(f, lambda: net(inputs).square().mean().backward())
    assert not torch.equal(mean, torch.zeros(4))


def test_failed_loss_closure_restores_running_statistics() -> None:
    net = nn.BatchNorm1d(2)
    optimizer = InexactProxSGD(net.parameters(), lr=0.1, inner=InnerSGD(3, lr=0.01))

    def f() -> None:
        net(torch.full((4, 2), math.nan)).sum().backward()

    with pytest.raises(FloatingPointError, match="the gradient of f is not finite"):
        optimizer.step(f, lambda: None)
    assert net.running_mean is not None
    assert torch.equal(net.running_mean, torch.zeros(2))
    assert net.num_batches_tracked == 0


def test_parameters_only_in_psi_are_optimized_and_frozen_ones_stay() -> None:
    """A parameter without a gradient of f still has one of ψ."""
    a, b, frozen = (Parameter(torch.ones(2, dtype=DOUBLE)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = InexactProxSGD([a, b, frozen], lr=0.5, momentum=0.9, inner=InnerSGD(100, lr=0.2))

    def psi() -> float:
        value = (a.square().sum() + b.square().sum()) / 2
        value.backward()
        return value.item()

    for k in range(60):
        optimizer.step(noisy_f(a, k), psi)
    assert b.abs().max() < 1e-6
    assert b.grad is None  # as the closure of f left it
    assert torch.equal(frozen, torch.ones(2, dtype=DOUBLE))


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=str)
def test_zero_lr_updates_the_average_but_moves_nothing(lr: float | Tensor) -> None:
    x = start()
    optimizer = InexactProxSGD([x], lr=lr, inner=InnerSGD(5, lr=0.05))
    optimizer.step(noisy_f(x, 0), smooth_psi(x, proxmo.SquaredL2(1.0)))
    assert torch.equal(x, start())
    assert "momentum_buffer" in optimizer.state[x]
    assert optimizer.report is None


@pytest.mark.parametrize("cut", [1, 4])
def test_resumed_run_equals_uninterrupted_run(cut: int, tmp_path: Path) -> None:
    def fresh() -> tuple[Parameter, InexactProxSGD]:
        x = start()
        return x, InexactProxSGD([x], lr=0.2, inner=InnerSGD(50, lr=0.05, S=1e-3))

    def run(x: Parameter, optimizer: InexactProxSGD, steps: range) -> None:
        for k in steps:
            optimizer.step(noisy_f(x, k), smooth_psi(x, proxmo.Huber(1.0, 1.0)))

    uninterrupted_x, uninterrupted = fresh()
    run(uninterrupted_x, uninterrupted, range(8))
    x, optimizer = fresh()
    run(x, optimizer, range(cut))
    torch.save((x.data, optimizer.state_dict()), tmp_path / "state.pt")
    point, state = torch.load(tmp_path / "state.pt", weights_only=True)
    twin_x, twin = pickle.loads(pickle.dumps((x, optimizer)))
    x, optimizer = fresh()
    x.data.copy_(point)
    optimizer.load_state_dict(state)
    run(x, optimizer, range(cut, 8))
    run(twin_x, twin, range(cut, 8))
    assert torch.equal(x, uninterrupted_x)
    assert torch.equal(twin_x, uninterrupted_x)
    assert optimizer.param_groups[0]["psi_evaluations"] == uninterrupted.param_groups[0]["psi_evaluations"] > 8


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_of_a_fresh_optimizer_moves_nothing() -> None:
    net = nn.Linear(3, 2)
    optimizer = InexactProxSGD(net.parameters(), lr=0.1, inner=InnerSGD(5, lr=0.05))
    before = copy.deepcopy(net.state_dict())
    state = get_optimizer_state_dict(net, optimizer)
    assert set(state["state"]["weight"]) == {"momentum_buffer", "started"}
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    set_optimizer_state_dict(net, optimizer, state)


def test_failed_first_step_after_a_distributed_checkpoint_changes_nothing() -> None:
    x = start()
    optimizer = InexactProxSGD([x], lr=0.0, inner=InnerSGD(5, lr=0.05))
    x.grad = torch.zeros_like(x)
    optimizer.step()  # as distributed checkpoints ask for the state
    optimizer.param_groups[0]["lr"] = 0.1
    before = copy.deepcopy((x.detach(), optimizer.state_dict()))
    with pytest.raises(TypeError, match="psi_closure must be a function"):
        optimizer.step(noisy_f(x, 0), 3)  # type: ignore[arg-type]
    assert same_bits((x, optimizer.state_dict()), before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0, "lr": 0.1}, ValueError, "steps must be an integer >= 1, got 0"),
        ({"steps": 1.5, "lr": 0.1}, TypeError, r"steps must be an integer >= 1, got 1\.5"),
        ({"steps": 5, "lr": 0.0}, ValueError, "lr must be a finite number > 0, got 0.0"),
        ({"steps": 5, "lr": 0.1, "S": -1.0}, ValueError, "S must be a finite number >= 0, got -1.0"),
    ],
)
def test_invalid_inner_solvers_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        InnerSGD(**arguments)


def test_invalid_arguments_are_refused_and_change_nothing() -> None:
    x = Parameter(torch.ones(2))
    f, psi = noisy_f(x, 0), smooth_psi(x, proxmo.SquaredL2(1.0))
    with pytest.raises(TypeError, match=r"inner must be a proxmo\.InnerSGD, got 20"):
        InexactProxSGD([x], inner=20)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"penalty must be None: ψ comes from psi_closure; got L1"):
        InexactProxSGD([{"params": [x], "penalty": proxmo.L1(1.0)}], lr=0.1, inner=InnerSGD(5, lr=0.01))
    optimizer = InexactProxSGD([x], lr=0.1, inner=InnerSGD(5, lr=0.05))
    with pytest.raises(TypeError, match="needs closures for f and for ψ, got None for psi_closure"):
        optimizer.step(f)
    with pytest.raises(TypeError, match="needs closures for f and for ψ, got None for closure"):
        optimizer.step(None, psi)
    with pytest.raises(TypeError, match="psi_closure must be a function"):
        optimizer.step(f, 3)  # type: ignore[arg-type]
    x.grad = torch.ones(2)
    with pytest.raises(TypeError, match="needs closures for f and for ψ, got None"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = -0.001
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.step(f, psi)
    with pytest.raises(RuntimeError, match="does not know the value of ψ"):
        optimizer.penalty_value()
    assert torch.equal(x, torch.ones(2))
    assert not optimizer.state
