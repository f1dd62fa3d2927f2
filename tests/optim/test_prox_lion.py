"""`ProxLion` minimises a linear model plus the penalty over a box around the point."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn import Parameter

import proxmo

PENALTIES = [
    proxmo.L1(0.3),
    proxmo.SquaredL2(0.7),
    proxmo.ElasticNet(0.2, 0.5),
    proxmo.Huber(0.4, 0.3),
    proxmo.Box(-0.6, 0.4),
    proxmo.NonNegative(),
]


def make_param(dtype: torch.dtype = torch.float64) -> Parameter:
    return Parameter(torch.linspace(-0.59, 0.39, 15, dtype=dtype).clone())


def gradient(step: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


@pytest.mark.parametrize("maximize", [False, True])
def test_without_penalty_it_is_lion(maximize: bool) -> None:
    x = make_param()
    optimizer = proxmo.ProxLion([x], lr=0.01, betas=(0.8, 0.95), weight_decay=0.3, maximize=maximize)
    expected, average = x.detach().clone(), torch.zeros_like(x)
    for k in range(20):
        g = gradient(k, x)
        x.grad = g.clone()
        optimizer.step()
        g = -g if maximize else g
        expected = expected * (1 - 0.01 * 0.3) - 0.01 * (0.8 * average + 0.2 * g).sign()
        average = 0.95 * average + 0.05 * g
        torch.testing.assert_close(x.detach(), expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(optimizer.state[x]["exp_avg"], average, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_step_minimises_the_linear_model_plus_penalty_within_lr(penalty: proxmo.Penalty) -> None:
    x = make_param() if not isinstance(penalty, proxmo.NonNegative) else Parameter(make_param().detach().abs())
    optimizer = proxmo.ProxLion([x], lr=0.05, betas=(0.0, 0.0), penalty=penalty)
    for k in range(4):
        before, g = x.detach().clone(), 0.5 * gradient(k, x)
        x.grad = g
        optimizer.step()
        for old, new, slope in zip(before.tolist(), x.tolist(), g.tolist(), strict=True):

            def model(u: float, slope: float = slope) -> float:
                return slope * u + float(penalty.value(torch.tensor([u], dtype=torch.float64)))

            if isinstance(penalty, (proxmo.Box, proxmo.NonNegative)):
                low, high = (-0.6, 0.4) if isinstance(penalty, proxmo.Box) else (0.0, np.inf)
                expected = np.clip(old - 0.05 * np.sign(slope), low, high)
                assert new == pytest.approx(expected, abs=1e-14)
            else:
                found = minimize_scalar(model, bounds=(old - 0.05, old + 0.05), options={"xatol": 1e-12})
                assert abs(new - old) <= 0.05 + 1e-15
                assert model(new) <= found.fun + 1e-12


def test_weights_walk_to_zero_and_stay_there() -> None:
    x = make_param(torch.float32)
    optimizer = proxmo.ProxLion([x], lr=0.1, penalty=proxmo.L1(0.5))
    for k in range(30):
        x.grad = (0.4 * gradient(k, x)).clamp(-0.45, 0.45)  # below the strength
        optimizer.step()
        if k >= 6:
            assert not x.any()
            assert not torch.signbit(x).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_buffer_in_float32(dtype: torch.dtype) -> None:
    x = make_param(dtype)
    optimizer = proxmo.ProxLion([x], lr=0.01, penalty=proxmo.L1(0.1))
    for k in range(3):
        x.grad = gradient(k, x)
        optimizer.step()
    twin = proxmo.ProxLion([x], lr=0.01, penalty=proxmo.L1(0.1))
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert twin.state[x]["exp_avg"].dtype == torch.float32
    assert torch.equal(twin.state[x]["exp_avg"], optimizer.state[x]["exp_avg"])


def test_compiled_step_equals_eager_step() -> None:
    eager, compiled = make_param(), make_param()
    one, other = (proxmo.ProxLion([x], torch.tensor(0.01), penalty=proxmo.L1(0.1)) for x in (eager, compiled))
    step = torch.compile(other.step, fullgraph=True, backend="eager")
    for k in range(3):
        eager.grad, compiled.grad = gradient(k, eager), gradient(k, eager)
        one.step()
        step()
    torch.testing.assert_close(eager, compiled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty": proxmo.GroupL2(0.1)}, "must be convex and a sum over elements"),
        ({"penalty": proxmo.L0(0.1)}, "must be convex and a sum over elements"),
        ({"penalty": proxmo.Trimmed(proxmo.L1(0.1), 0.5)}, "must be convex and a sum over elements"),
        ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\)"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proxmo.ProxLion([make_param()], **options)
