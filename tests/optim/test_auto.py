"""AutoProxSGD: its formulas, invariances and exact resumption, and errors close to those of a tuned grid."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import auto
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import proxmo
from proxmo.experiments.problems import Problem, Quadratic, RobustRegression

DOUBLE = torch.float64
QUADRATIC = Quadratic("test", [1.0, 3.0], shift=2.0, strength=0.1, sigma=1.0)


def drive(problem: Problem, x: Parameter, optimizer: proxmo.AutoProxSGD, seeds: range, scale: float = 1.0) -> None:
    for seed in seeds:
        sample = problem.sample(1, torch.Generator().manual_seed(seed))
        x.grad = (problem.gradient(x.detach().to(DOUBLE), sample) * scale).to(x.dtype)
        optimizer.step()


def toward(target: Tensor, *params: Parameter, scale: float = 1.0) -> None:
    """Set the gradients of scale/2·Σ‖p − target‖²."""
    for p in params:
        p.grad = scale * (p.detach() - target)


def penalty_of_weight(weight: float) -> proxmo.L1:
    return proxmo.L1(0.3 * weight)


def test_step_follows_the_formulas() -> None:
    """A run of 200 steps equals the rule written out for one vector, prox and halvings included."""
    problem = RobustRegression("test", "l1", batch=1)
    x = Parameter(problem.start(1) + 0.5)
    optimizer = proxmo.AutoProxSGD([x], problem.penalty, lr=3.0)
    y = x.detach().clone()
    start, anchor, average, anchor_step, travelled, factor = y, y, torch.zeros_like(y), 0, 0.0, 1.0
    reach, squares = 0.01 * float(y.norm()), 0.0
    for k in range(200):
        drive(problem, x, optimizer, range(k, k + 1))
        gradient = problem.gradient(y, problem.sample(1, torch.Generator().manual_seed(k)))
        squares += float(gradient.square().sum())
        reach = max(reach, float((y - start).norm()))
        if k - anchor_step in (20, 40, 80, 160):
            before, travelled = travelled, float((y - anchor).norm())
            if k - anchor_step > 20 and math.log2(travelled**2 / before**2) < 0.3 and factor > 1 / k:
                factor, anchor, anchor_step = factor / 2, y, k
        gamma = (k + 1) ** (-2 / 3)
        average = (1 - gamma) * average + gamma * gradient
        lr = factor * reach / math.sqrt(squares)
        assert optimizer.param_groups[0]["tuned_lr"] == pytest.approx(lr, rel=1e-8)
        assert problem.penalty is not None
        y = problem.penalty.prox(y - 3 * lr * average, 3 * lr)
        torch.testing.assert_close(x.detach(), y, rtol=1e-8, atol=1e-10)
    assert factor < 1  # the run has seen a halving


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20, 1e-6, 1e6])
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_scale_of_the_objective_changes_nothing(scale: float, start: float) -> None:
    """Multiplying f and ψ by a number leaves the run as it is: to the bit for powers of 2."""
    runs = []
    for factor in (1.0, scale):
        x = Parameter(QUADRATIC.start(1) + start)
        drive(QUADRATIC, x, proxmo.AutoProxSGD([x], penalty_of_weight(factor)), range(100), factor)
        runs.append(x.detach())
    if math.log2(scale).is_integer():
        assert torch.equal(*runs)
    else:
        torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("unit", [2.0**-20, 2.0**20])
def test_unit_of_the_parameters_changes_nothing_if_they_start_off_zero(unit: float) -> None:
    """With x = unit·y, gradients are those of y divided by the unit, and so is the strength of ℓ1."""
    runs = []
    for factor in (1.0, unit):
        y = Parameter(QUADRATIC.start(1) + 1)
        x = Parameter(y.detach() * factor)
        optimizer = proxmo.AutoProxSGD([x], penalty_of_weight(1 / factor))
        for seed in range(100):
            sample = QUADRATIC.sample(1, torch.Generator().manual_seed(seed))
            x.grad = QUADRATIC.gradient(x.detach() / factor, sample) / factor
            optimizer.step()
        runs.append(x.detach() / factor)
    assert torch.equal(*runs)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e2, 1e4])
def test_scale_of_the_solution_is_found_from_zero(scale: float) -> None:
    x = Parameter(torch.zeros(3, dtype=DOUBLE))
    optimizer = proxmo.AutoProxSGD([x])
    for _ in range(1000):
        toward(torch.full((3,), scale, dtype=DOUBLE), x)
        optimizer.step()
    assert (x / scale - 1).abs().max() < 1e-3


def test_lr_is_halved_when_the_iterates_stop_travelling_but_not_to_zero() -> None:
    """On a triangle all distances are the same, so that each comparison finds a stall."""
    corners = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    x = Parameter(corners[0].clone())
    optimizer = proxmo.AutoProxSGD([x])
    for k in range(1, 3001):
        x.grad = torch.ones(3)
        optimizer.step()
        x.data.copy_(corners[k % 3])
        cut = optimizer.param_groups[0]["cut"]
        assert k > 40 or cut == 1
        assert k != 100 or cut == 1 / 4
    assert 1 / 6000 < cut < 1 / 1000


def test_lr_is_kept_while_nothing_moves() -> None:
    """A penalty that holds all weights at zero is no reason to lower lr."""
    x = Parameter(torch.zeros(3))
    optimizer = proxmo.AutoProxSGD([x], proxmo.L1(10.0))
    for _ in range(500):
        x.grad = torch.ones(3)
        optimizer.step()
    assert (x == 0).all()
    assert optimizer.param_groups[0]["cut"] == 1


@pytest.mark.parametrize("cut", [1, 15, 20, 40, 45])
def test_resumed_run_equals_uninterrupted_run(cut: int, tmp_path: Path) -> None:
    """Lr is halved at steps 40 and 120."""
    problem = RobustRegression("test", "linf1", batch=4)

    def fresh() -> tuple[Parameter, proxmo.AutoProxSGD]:
        x = Parameter(problem.start(1))
        return x, proxmo.AutoProxSGD([x], copy.deepcopy(problem.penalty), lr=10.0)

    uninterrupted, optimizer = fresh()
    drive(problem, uninterrupted, optimizer, range(130))
    assert optimizer.param_groups[0]["anchor_step"] == 120
    x, optimizer = fresh()
    drive(problem, x, optimizer, range(cut))
    torch.save((x.data, optimizer.state_dict()), tmp_path / "state.pt")
    point, state = torch.load(tmp_path / "state.pt", weights_only=True)
    x, optimizer = fresh()
    x.data.copy_(point)
    optimizer.load_state_dict(state)
    drive(problem, x, optimizer, range(cut, 130))
    assert torch.equal(x, uninterrupted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("penalty", [None, proxmo.L1(0.5)], ids=str)
def test_half_precision_is_averaged_in_float32_and_resumed_exactly(dtype: torch.dtype, penalty: Any) -> None:
    x = Parameter(torch.zeros(1, 2, dtype=dtype))
    optimizer = proxmo.AutoProxSGD([x], penalty)
    drive(QUADRATIC, x, optimizer, range(600), scale=1e-4)  # lr is then beyond the range of float16
    minimizer = torch.tensor([[2.0, 2 / 3]])
    if penalty is None:
        assert (x.detach().float() - minimizer).abs().max() < 0.25
    else:
        assert (x == 0).all()  # the gradients were scaled, ψ was not
    average = optimizer.state[x]["momentum_buffer"]
    assert average.dtype == torch.float32
    y = Parameter(x.detach().clone())
    resumed = proxmo.AutoProxSGD([y], penalty)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(resumed.state[y]["momentum_buffer"], average)
    drive(QUADRATIC, x, optimizer, range(600, 620), scale=1e-4)
    drive(QUADRATIC, y, resumed, range(600, 620), scale=1e-4)
    assert torch.equal(x, y)


def test_average_in_float32_follows_after_a_million_steps() -> None:
    x = Parameter(torch.zeros(4))
    optimizer = proxmo.AutoProxSGD([x])
    x.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[x]["step"].fill_(1e6)
    for _ in range(1000):
        x.grad = torch.full((4,), 1.01)
        optimizer.step()
    expected = 1.01 - 0.01 * math.prod(1 - (1e6 + k) ** (-2 / 3) for k in range(1, 1001))
    torch.testing.assert_close(optimizer.state[x]["momentum_buffer"], torch.full((4,), expected), rtol=0, atol=3e-5)


def test_converges_without_noise() -> None:
    problem = Quadratic("test", [1.0, 4.0], shift=2.0, strength=0.0, sigma=0.0)
    x = Parameter(problem.start(1))
    drive(problem, x, proxmo.AutoProxSGD([x]), range(400))
    assert problem.error(x.detach()) < 1e-3 * problem.error(problem.start(1))


def test_zero_gradients_at_the_start_do_not_move_or_count() -> None:
    x, y = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    dead, fresh = (proxmo.AutoProxSGD([p], proxmo.L1(0.1)) for p in (x, y))
    for _ in range(5):
        x.grad = torch.zeros(2)
        dead.step()
    assert torch.equal(x, torch.ones(2))
    for p, optimizer in ((x, dead), (y, fresh)):
        for _ in range(50):
            toward(torch.tensor([3.0, 0.05]), p)
            optimizer.step()
    assert torch.equal(x, y)
    assert dead.param_groups[0]["steps"] == 50


def test_lr_is_a_factor_that_groups_and_schedulers_set() -> None:
    target = torch.tensor([3.0, 0.2])

    def moves(lr: float | Tensor, scheduler: Callable[[Any], Any] | None = None) -> tuple[Tensor, proxmo.AutoProxSGD]:
        x = Parameter(torch.ones(2))
        optimizer = proxmo.AutoProxSGD([{"params": [x], "lr": lr}], proxmo.SquaredL2(0.1))
        if scheduler is not None:
            scheduler(optimizer)
        toward(target, x)
        optimizer.step()
        return x.detach() - 1, optimizer

    whole, optimizer = moves(1.0)
    tuned = optimizer.param_groups[0]["tuned_lr"]
    assert optimizer.param_groups[0]["lr"] == 1.0
    expected = (1 - 0.5 * tuned * (1 - target)) / (1 + 0.05 * tuned) - 1
    for half, _ in (moves(0.5), moves(torch.tensor(0.5)), moves(1.0, lambda o: LambdaLR(o, lambda k: 0.5))):
        torch.testing.assert_close(half, expected)
    assert whole.norm() > half.norm()
    with pytest.raises(ValueError, match="'momentum' is an option of another optimizer"):
        proxmo.AutoProxSGD([{"params": [Parameter(torch.ones(2))], "momentum": 0.9}])
    with pytest.raises(ValueError, match="optimizer must support momentum"):
        OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)
    with pytest.raises(ValueError, match="lr must be"):
        proxmo.AutoProxSGD([Parameter(torch.ones(2))], lr=-1.0)


def test_maximize_mirrors_minimize() -> None:
    x, y = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    down, up = proxmo.AutoProxSGD([x], proxmo.L1(0.1)), proxmo.AutoProxSGD([y], proxmo.L1(0.1), maximize=True)
    for _ in range(30):
        toward(torch.tensor([3.0, 0.05]), x)
        toward(torch.tensor([3.0, 0.05]), y, scale=-1.0)
        down.step()
        up.step()
    assert torch.equal(x, y)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_refused_gradient_leaves_all_estimates_as_they_were(nonfinite: Any, bad: float) -> None:
    x, y = Parameter(QUADRATIC.start(1)), Parameter(QUADRATIC.start(1))
    undisturbed, disturbed = (proxmo.AutoProxSGD([p], proxmo.L1(0.1), nonfinite=nonfinite) for p in (x, y))
    drive(QUADRATIC, x, undisturbed, range(80))
    for when in range(80):
        if when in (0, 1, 20, 41):
            y.grad = torch.tensor([[1.0, bad]], dtype=DOUBLE)
            if nonfinite == "skip":
                disturbed.step()
            else:
                with pytest.raises(FloatingPointError, match="a gradient is not finite"):
                    disturbed.step()
        drive(QUADRATIC, y, disturbed, range(when, when + 1))
    assert torch.equal(x, y)
    first, second = (o.param_groups[0] for o in (undisturbed, disturbed))
    assert all(first[name] == second[name] for name in ("steps", "gradient_squares", "distance", "tuned_lr"))


def test_closure_is_optional_and_its_loss_is_returned() -> None:
    x = Parameter(torch.ones(2))
    optimizer = proxmo.AutoProxSGD([x])

    def closure() -> float:
        optimizer.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert closure() < 2.0


@pytest.mark.parametrize("sparse", [proxmo.Trimmed(proxmo.L1(10.0), keep=2), proxmo.TopK(2)], ids=str)
def test_constraints_and_joint_penalties_hold(sparse: proxmo.Penalty) -> None:
    x = Parameter(torch.zeros(5, dtype=DOUBLE))
    optimizer = proxmo.AutoProxSGD([x], sparse)
    for _ in range(300):
        toward(torch.tensor([0.1, 3.0, -0.2, -2.0, 0.3], dtype=DOUBLE), x)
        optimizer.step()
    torch.testing.assert_close(x.detach(), torch.tensor([0.0, 3, 0, -2, 0], dtype=DOUBLE), rtol=0, atol=0.05)


def test_groups_have_their_own_penalty_and_parameter_without_gradient_stays() -> None:
    a, b, unused = (Parameter(torch.full((3,), 2.0, dtype=DOUBLE)) for _ in range(3))
    optimizer = proxmo.AutoProxSGD([{"params": [a], "penalty": proxmo.L1(10.0)}, {"params": [b, unused]}])
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        toward(1 + torch.randn(3, generator=generator, dtype=DOUBLE), a, b)
        optimizer.step()
    assert (a == 0).all()
    assert (b - 1).abs().max() < 0.3
    assert torch.equal(unused, torch.full((3,), 2.0, dtype=DOUBLE))
    assert unused not in optimizer.state


def test_parameters_added_late_start_with_their_first_gradient() -> None:
    first, late = Parameter(torch.ones(2, dtype=DOUBLE)), Parameter(torch.ones(2, dtype=DOUBLE))
    optimizer = proxmo.AutoProxSGD([first])
    for k in range(400):
        if k == 5:
            optimizer.add_param_group({"params": [late]})
        toward(torch.zeros(2, dtype=DOUBLE), first, *([late] if k >= 10 else []))
        optimizer.step()
        assert k != 10 or torch.equal(optimizer.state[late]["momentum_buffer"], torch.ones(2, dtype=DOUBLE))
    assert first.abs().max() < 0.05
    assert late.abs().max() < 0.05


def test_step_without_any_gradient_does_not_count() -> None:
    x = Parameter(torch.ones(2))
    optimizer = proxmo.AutoProxSGD([x])
    toward(torch.zeros(2), x)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.param_groups[0]["steps"] == 1


def test_distributed_checkpoint_of_a_fresh_optimizer_moves_nothing() -> None:
    net, twin = (torch.nn.Linear(3, 2) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    optimizer, untouched = (proxmo.AutoProxSGD(m.parameters(), penalty=proxmo.L1(0.1)) for m in (net, twin))
    state = get_optimizer_state_dict(net, optimizer)
    assert set(state["state"]["weight"]) == {"step", "momentum_buffer", "start", "anchor"}
    assert optimizer.param_groups[0]["steps"] == 0
    for value, expected in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(value, expected)
    set_optimizer_state_dict(net, optimizer, state)
    for module in (net, twin):  # what the request noted as x₀ is out of date
        torch.nn.init.ones_(module.weight)
    for _ in range(5):
        for module, method in ((net, optimizer), (twin, untouched)):
            method.zero_grad()
            module(torch.ones(1, 3)).square().sum().backward()
            method.step()
    assert torch.equal(net.weight, twin.weight)


def test_checkpoint_of_another_optimizer_is_refused() -> None:
    x = Parameter(torch.ones(2))
    saved = proxmo.ProxSGD([x], momentum=0.0).state_dict()
    with pytest.raises(ValueError, match="the checkpoint of another optimizer"):
        proxmo.AutoProxSGD([x]).load_state_dict(saved)


@pytest.mark.parametrize(
    "problem",
    [
        Quadratic("paper", [1.0] * 5, 0.0, 1e4, 25.0),
        Quadratic("shifted", [1.0] * 5, 10.0, 1.0, 5.0),
        RobustRegression("rows", "linf1", batch=8),
    ],
    ids=lambda problem: problem.name,
)
def test_error_is_close_to_the_best_of_a_tuned_grid(problem: Problem) -> None:
    """A small version of benchmarks/auto.py."""
    best, _, _ = auto.grid_error(problem, steps=2000, seeds=2)
    runs = [auto.auto_error(problem, steps=2000, seed=seed) for seed in range(2)]
    assert sum(runs) / 2 <= 1.5 * best
