"""AutoProxSGD: its estimates, exact resumption, and errors close to those of a tuned grid."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import auto
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

import proxmo
from proxmo.experiments.problems import Problem, Quadratic, RobustRegression

DOUBLE = torch.float64


def drive(problem: Problem, x: Parameter, optimizer: proxmo.AutoProxSGD, seeds: range) -> None:
    for seed in seeds:
        sample = problem.sample(1, torch.Generator().manual_seed(seed))

        def closure(sample: Tensor = sample, seed: int = seed) -> float:
            x.grad = problem.gradient(x.detach(), sample)
            return float(seed)

        assert optimizer.step(closure) == seed


def fails_at_its_second_call(x: Parameter) -> Callable[[], float]:
    calls = iter([1, 2])

    def closure() -> float:
        if next(calls) == 2:
            raise ArithmeticError
        x.grad = torch.ones_like(x)
        return 0.0

    return closure


def test_estimates_converge_to_the_constants_of_a_quadratic() -> None:
    problem = Quadratic("test", [2.0, 2.0, 2.0], shift=5.0, strength=1.0, sigma=3.0)
    x = Parameter(problem.start(1))
    optimizer = proxmo.AutoProxSGD([x], penalty=problem.penalty)
    drive(problem, x, optimizer, range(8))
    group = optimizer.param_groups[0]
    assert torch.equal(x, problem.start(1))  # the learning phase moves nothing
    gradients = [problem.gradient(x.detach(), problem.sample(1, torch.Generator().manual_seed(s))) for s in range(8)]
    stacked = torch.stack(gradients)
    torch.testing.assert_close(optimizer.state[x]["momentum_buffer"], stacked.mean(0))
    assert group["noise_variance"] == pytest.approx(float((stacked - stacked.mean(0)).square().sum() / 7))
    assert group["momentum_error"] == pytest.approx(group["noise_variance"] / 8)
    assert group["smoothness"] == pytest.approx(2.0, rel=1e-6)
    assert group["extra_gradients"] == 8
    drive(problem, x, optimizer, range(8, 2000))
    assert group["noise_variance"] == pytest.approx(9.0, rel=0.1)
    assert group["smoothness"] == pytest.approx(2.0, rel=1e-3)
    assert 8 < group["extra_gradients"] < 60
    assert problem.error(x.detach()) < 0.1
    assert 0 < group["lr"] <= 1 / 8
    assert 0.9 < group["momentum"] < 1


def test_step_follows_the_formulas_for_lr_and_momentum() -> None:
    problem = Quadratic("test", [2.0, 2.0], shift=5.0, strength=1.0, sigma=3.0)
    x = Parameter(problem.start(1))
    optimizer = proxmo.AutoProxSGD([x], penalty=problem.penalty)
    drive(problem, x, optimizer, range(30))
    old = copy.deepcopy(optimizer.param_groups[0])
    average, before = optimizer.state[x]["momentum_buffer"].clone(), x.detach().clone()
    drive(problem, x, optimizer, range(30, 31))
    gradient = x.grad
    assert gradient is not None
    variance = old["noise_variance"] + (float((gradient - average).square().sum()) - old["noise_variance"]) / 31
    drifted = (math.sqrt(old["momentum_error"]) + old["smoothness"] * old["movement"]) ** 2
    gamma = drifted / (drifted + variance)
    M = max(4 * old["smoothness"], 2 * old["smoothness"] / gamma)
    m = (1 - gamma) * average + gamma * gradient
    torch.testing.assert_close(x.detach(), (before - m / M) / (1 + 1 / M))
    assert optimizer.param_groups[0]["momentum_error"] == pytest.approx(drifted * variance / (drifted + variance))


@pytest.mark.parametrize("cut", [3, 8, 10, 41])
def test_resumed_run_equals_uninterrupted_run(cut: int, tmp_path: Path) -> None:
    """Including checkpoints from the learning phase and from the middle of a window of secants."""
    problem = RobustRegression("test", "linf1", batch=4)

    def fresh() -> tuple[Parameter, proxmo.AutoProxSGD]:
        x = Parameter(problem.start(1))
        return x, proxmo.AutoProxSGD([x], penalty=copy.deepcopy(problem.penalty))

    uninterrupted, optimizer = fresh()
    drive(problem, uninterrupted, optimizer, range(60))
    x, optimizer = fresh()
    drive(problem, x, optimizer, range(cut))
    torch.save((x.data, optimizer.state_dict()), tmp_path / "state.pt")
    point, state = torch.load(tmp_path / "state.pt", weights_only=True)
    x, optimizer = fresh()
    x.data.copy_(point)
    optimizer.load_state_dict(state)
    drive(problem, x, optimizer, range(cut, 60))
    assert torch.equal(x, uninterrupted)


def test_converges_without_noise() -> None:
    """Drift is then mistaken for noise, which slows convergence but does not prevent it."""
    problem = Quadratic("test", [1.0, 4.0], shift=2.0, strength=0.0, sigma=0.0)
    x = Parameter(problem.start(1))
    optimizer = proxmo.AutoProxSGD([x])
    drive(problem, x, optimizer, range(400))
    assert problem.error(x.detach()) < 1e-3 * problem.error(problem.start(1))


def test_groups_have_their_own_penalty_and_parameter_without_gradient_stays() -> None:
    a, b, unused = (Parameter(torch.full((3,), 2.0, dtype=DOUBLE)) for _ in range(3))
    optimizer = proxmo.AutoProxSGD([{"params": [a], "penalty": proxmo.L1(10.0)}, {"params": [b, unused]}])
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        shift = torch.randn(3, generator=generator, dtype=DOUBLE)

        def closure(shift: Tensor = shift) -> float:
            optimizer.zero_grad()
            loss = (a - shift).square().sum() / 2 + (b - 1 - shift).square().sum() / 2
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
    assert (a == 0).all()
    assert (b - 1).abs().max() < 0.5
    assert torch.equal(unused, torch.full((3,), 2.0, dtype=DOUBLE))


def test_failed_steps_change_nothing() -> None:
    x = Parameter(torch.ones(2))
    optimizer = proxmo.AutoProxSGD([x])
    x.grad = torch.ones(2)
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()

    def closure_with_nan_gradient() -> float:
        x.grad = torch.tensor([math.nan, 1.0])
        return 0.0

    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        optimizer.step(closure_with_nan_gradient)
    fresh = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ArithmeticError):
        optimizer.step(fails_at_its_second_call(x))
    assert torch.equal(x, torch.ones(2))
    assert optimizer.state_dict()["param_groups"] == fresh
    assert all((value == 0).all() for value in optimizer.state[x].values())


@pytest.mark.parametrize("when", [0, 4, 7, 9, 10])
def test_run_continues_unchanged_after_a_closure_raises(when: int) -> None:
    """Whether it fails in the learning phase or at a later secant, the run continues as if nothing had happened."""
    problem = Quadratic("test", [1.0, 3.0], shift=2.0, strength=0.1, sigma=1.0)
    x, y = Parameter(problem.start(1)), Parameter(problem.start(1))
    undisturbed, disturbed = (proxmo.AutoProxSGD([p], penalty=proxmo.SquaredL2(0.1)) for p in (x, y))
    drive(problem, x, undisturbed, range(20))
    drive(problem, y, disturbed, range(when))
    with pytest.raises(ArithmeticError):
        disturbed.step(fails_at_its_second_call(y))
    drive(problem, y, disturbed, range(when, 20))
    assert torch.equal(x, y)


def test_learning_phase_lasts_while_gradients_are_zero() -> None:
    """Eight zero gradients carry no information; the optimizer keeps learning instead of stalling forever."""
    x = Parameter(torch.zeros(2, dtype=DOUBLE))
    optimizer = proxmo.AutoProxSGD([x])
    for k in range(300):

        def closure(k: int = k) -> float:
            x.grad = torch.zeros_like(x) if k < 12 else x.detach() - 1
            return 0.0

        optimizer.step(closure)
    torch.testing.assert_close(x.detach(), torch.ones(2, dtype=DOUBLE), rtol=0, atol=0.1)


def test_parameters_added_late_are_optimized() -> None:
    first, late = Parameter(torch.ones(2, dtype=DOUBLE)), Parameter(torch.ones(2, dtype=DOUBLE))
    optimizer = proxmo.AutoProxSGD([first])
    for k in range(200):
        if k == 5:
            optimizer.add_param_group({"params": [late]})

        def closure(k: int = k) -> float:
            first.grad = first.detach().clone()
            late.grad = late.detach().clone() if k >= 10 else None
            return 0.0

        optimizer.step(closure)
    assert first.abs().max() < 0.1
    assert late.abs().max() < 0.5


def test_distributed_checkpoint_of_a_fresh_optimizer_moves_nothing() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = proxmo.AutoProxSGD(net.parameters(), penalty=proxmo.L1(0.1))
    before = copy.deepcopy(net.state_dict())
    state = get_optimizer_state_dict(net, optimizer)
    assert set(state["state"]["weight"]) == {"momentum_buffer", "secant_sum", "probe"}
    assert optimizer.param_groups[0]["samples"] == 0
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    set_optimizer_state_dict(net, optimizer, state)
    with pytest.raises(ValueError, match="the checkpoint of another optimizer"):
        optimizer.load_state_dict(proxmo.ProxSGD(net.parameters(), penalty=proxmo.L1(0.1)).state_dict())


@pytest.mark.parametrize(
    "problem",
    [
        Quadratic("shifted", [1.0] * 5, 10.0, 1.0, 5.0),
        pytest.param(Quadratic("paper", [1.0] * 5, 0.0, 1e4, 25.0), marks=pytest.mark.slow),
        pytest.param(RobustRegression("lasso", "l1", batch=8), marks=pytest.mark.slow),
        pytest.param(RobustRegression("rows", "linf1", batch=8), marks=pytest.mark.slow),
    ],
    ids=lambda problem: problem.name,
)
def test_error_is_close_to_the_best_of_a_tuned_grid(problem: Problem) -> None:
    """A small version of benchmarks/auto.py."""
    best, _, _ = auto.grid_error(problem, samples=2000, seeds=3)
    runs = [auto.auto_error(problem, samples=2000, seed=seed)[0] for seed in range(3)]
    assert sum(runs) / 3 <= 1.5 * best
