"""ProxSGD is Algorithm 1: the recursion, its special cases, its options, penalty values and sparsity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import proxmo


def gradients(count: int, shape: tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def run(optimizer: torch.optim.Optimizer, param: Tensor, grads: list[Tensor]) -> list[Tensor]:
    trajectory = []
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        trajectory.append(param.detach().clone())
    return trajectory


def start(dtype: torch.dtype = torch.float64) -> Parameter:
    return Parameter(gradients(1, dtype=dtype)[0] * 2)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_penalty_equals_torch_sgd_with_dampening(
    foreach: bool | None, momentum: float, maximize: bool, dtype: torch.dtype
) -> None:
    ours, theirs = start(dtype), start(dtype)
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, dampening=momentum, maximize=maximize)
    prox = proxmo.ProxSGD([ours], lr=0.1, momentum=momentum, maximize=maximize, foreach=foreach)
    grads = gradients(50, dtype=dtype)
    rounding = 10 * torch.finfo(dtype).eps
    for mine, other in zip(run(prox, ours, grads), run(sgd, theirs, grads), strict=True):
        torch.testing.assert_close(mine, other, rtol=rounding, atol=rounding)


def test_lr_warm_up_from_zero_equals_torch_sgd() -> None:
    ours, theirs = start(), start()
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, dampening=0.9)
    prox = proxmo.ProxSGD([ours], lr=0.1, momentum=0.9)
    for k, grad in enumerate(gradients(6)):
        for optimizer, param in ((prox, ours), (sgd, theirs)):
            optimizer.param_groups[0]["lr"] = 0.1 * k
            run(optimizer, param, [grad])
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)])
@pytest.mark.parametrize("maximize", [False, True])
def test_steps_follow_the_recursion_of_algorithm_1(foreach: bool, lr: float | Tensor, maximize: bool) -> None:
    x, momentum, penalty = start(), 0.8, proxmo.GroupL2(0.7)
    optimizer = proxmo.ProxSGD([x], lr, momentum, penalty, foreach=foreach, maximize=maximize)
    expected, average = x.detach().clone(), None
    grads = gradients(30)
    for grad, reached in zip(grads, run(optimizer, x, grads), strict=True):
        average = grad if average is None else momentum * average + (1 - momentum) * grad
        moved = expected + 0.3 * average if maximize else expected - 0.3 * average
        expected = penalty.prox(moved, 0.3)
        torch.testing.assert_close(reached, expected, rtol=1e-13, atol=1e-13)


def test_zero_momentum_keeps_no_state() -> None:
    x = start()
    optimizer = proxmo.ProxSGD([x], 0.1, momentum=0, penalty=proxmo.L1(0.1))
    run(optimizer, x, gradients(3))
    assert len(optimizer.state) == 0


def test_zero_momentum_for_one_step_restarts_the_average() -> None:
    """m ← 0·m + g: a schedule that passes through 0 leaves no stale average behind."""
    x = start()
    optimizer = proxmo.ProxSGD([x], 0.1, momentum=0.9)
    grads = gradients(3)
    run(optimizer, x, grads[:1])
    optimizer.param_groups[0]["momentum"] = 0.0
    run(optimizer, x, grads[1:2])
    assert torch.equal(optimizer.state[x]["momentum_buffer"], grads[1])
    optimizer.param_groups[0]["momentum"] = 0.9
    run(optimizer, x, grads[2:])
    torch.testing.assert_close(optimizer.state[x]["momentum_buffer"], 0.9 * grads[1] + 0.1 * grads[2])


def test_average_starts_at_the_first_gradient_or_at_zero() -> None:
    first, second = gradients(2)
    for initial, average in [("gradient", first), ("zero", 0 * first)]:
        x = start()
        before = x.detach().clone()
        optimizer = proxmo.ProxSGD([x], 0.1, 0.9, initial=initial)  # type: ignore[arg-type]
        run(optimizer, x, [first])
        assert torch.equal(optimizer.state[x]["momentum_buffer"], average)
        torch.testing.assert_close(x.detach(), before - 0.1 * average)
        run(optimizer, x, [second])
        torch.testing.assert_close(optimizer.state[x]["momentum_buffer"], 0.9 * average + 0.1 * second)


def test_each_parameter_group_has_its_own_penalty_lr_and_momentum() -> None:
    names = ["none", "lasso", "rows", "box"]
    options: dict[str, dict[str, Any]] = {
        "none": {"penalty": None, "lr": 0.2, "momentum": 0.0},
        "lasso": {"penalty": proxmo.L1(2.0), "lr": 0.1, "momentum": 0.5},
        "rows": {"penalty": proxmo.GroupLInf(3.0), "lr": 0.3, "momentum": 0.9},
        "box": {"penalty": proxmo.Box(-0.1, 0.1)},
    }
    together = {name: start() for name in names}
    optimizer = proxmo.ProxSGD([{"params": [together[n]], **options[n]} for n in names], lr=0.05, momentum=0.7)
    grads = gradients(5)
    for grad in grads:
        for param in together.values():
            param.grad = grad.clone()
        optimizer.step()
    for name in names:
        alone = start()
        run(proxmo.ProxSGD([alone], **{"lr": 0.05, "momentum": 0.7, **options[name]}), alone, grads)
        assert torch.equal(alone, together[name])


@pytest.mark.parametrize("foreach", [None, False, True])
def test_mixed_shapes_and_dtypes_equal_one_optimizer_per_parameter(foreach: bool | None) -> None:
    def params() -> list[Parameter]:
        shapes = [
            ((2, 3), torch.float32),
            ((5,), torch.float64),
            ((2, 2, 3, 3), torch.bfloat16),
            ((0, 4), torch.float32),
            ((600, 500), torch.float32),  # too large to be stacked with others
        ]
        generator = torch.Generator().manual_seed(0)
        return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in shapes]

    together, alone = params(), params()
    one = proxmo.ProxSGD(together, 0.1, 0.9, proxmo.GroupL2(1.0), foreach=foreach)
    each = [proxmo.ProxSGD([p], 0.1, 0.9, proxmo.GroupL2(1.0), foreach=False) for p in alone]
    for seed in range(3):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
            q.grad = p.grad.clone()
        one.step()
        for optimizer in each:
            optimizer.step()
    for p, q in zip(together, alone, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once_per_step(dtype: torch.dtype) -> None:
    """The gradient step and the shrinkage are each less than half an ulp, but their sum is more."""
    ulp = torch.finfo(dtype).eps / 2  # between 0.5 and 1
    x = Parameter(torch.full((3,), 0.75, dtype=dtype))
    optimizer = proxmo.ProxSGD([x], lr=1.0, momentum=0.0, penalty=proxmo.L1(0.4 * ulp))
    x.grad = torch.full((3,), 0.4 * ulp, dtype=dtype)
    optimizer.step()
    assert torch.equal(x.detach().double(), torch.full((3,), 0.75 - ulp, dtype=torch.float64))


def test_lasso_solution_has_exact_zeros_and_is_optimal() -> None:
    """The optimality condition of f + ψ holds at the final point."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(200, 30, generator=generator, dtype=torch.float64)
    truth = torch.zeros(30, dtype=torch.float64)
    truth[:4] = torch.tensor([2.0, -3.0, 1.5, 1.0])
    target = data @ truth + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    x = Parameter(torch.zeros(30, dtype=torch.float64))
    strength = 0.2
    optimizer = proxmo.ProxSGD([x], lr=0.2, momentum=0.9, penalty=proxmo.L1(strength))

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (data @ x - target).square().mean() / 2
        value.backward()
        return value

    for _ in range(2000):
        optimizer.step(loss)  # type: ignore[arg-type]
    loss()
    assert x.grad is not None
    assert (x[4:] == 0).sum() >= 20
    assert (x[:4] != 0).all()
    zero = x == 0
    assert (x.grad[zero].abs() <= strength + 1e-9).all()
    torch.testing.assert_close(x.grad[~zero], -strength * x.detach()[~zero].sign(), rtol=0, atol=1e-9)


def test_penalty_value_and_sparsity_of_each_parameter_group() -> None:
    weight = Parameter(torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.0]]))
    bias = Parameter(torch.tensor([0.0, 5.0, 1.0, 0.0]))
    bounded = Parameter(torch.tensor([0.5, 2.0]))
    optimizer = proxmo.ProxSGD(
        [
            {"params": [weight], "penalty": proxmo.GroupL2(2.0)},
            {"params": [bias], "penalty": proxmo.L1(0.5)},
            {"params": [bounded]},
        ]
    )
    assert optimizer.penalty_value() == pytest.approx(2 * math.sqrt(5) + 3.0)
    assert not optimizer.penalty_value().requires_grad
    assert optimizer.sparsity() == [
        proxmo.Sparsity(zeros=4 / 6, groups=0.5),
        proxmo.Sparsity(zeros=0.5, groups=None),
        proxmo.Sparsity(zeros=0.0, groups=None),
    ]
    optimizer.param_groups[2]["penalty"] = proxmo.Box(-1.0, 1.0)
    assert optimizer.penalty_value() == math.inf


def test_sparsity_for_other_axes_empty_parameters_and_matrix_penalties() -> None:
    kernel = torch.zeros(4, 3, 2, 2)
    kernel[:, 1] = 1.0
    empty = torch.zeros(0, 3)
    optimizer = proxmo.ProxSGD(
        [
            {"params": [kernel, torch.ones(1, 2)], "penalty": proxmo.GroupLInf(1.0, dim=1)},
            {"params": [empty], "penalty": proxmo.GroupL2(1.0)},
            {"params": [torch.zeros(3)], "penalty": proxmo.Nuclear(1.0)},
        ]
    )
    assert optimizer.sparsity() == [
        proxmo.Sparsity(zeros=32 / 50, groups=2 / 5),
        proxmo.Sparsity(zeros=0.0, groups=None),
        proxmo.Sparsity(zeros=1.0, groups=None),
    ]
