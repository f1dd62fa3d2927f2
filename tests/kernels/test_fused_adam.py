"""Fused steps of `ProxAdamW` equal the eager ones, up to rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import proxmo
from penalties.cases import noise, tolerance
from proxmo import ProxAdamW

STEPS = 5
# groups of one, few and many elements; more elements than a task or a block of a row has
SHAPES = [(7,), (1, 1), (30, 40), (5, 3, 3, 2), (3, 70_000)]
PENALTIES = [
    None,
    proxmo.L1(0.3),
    proxmo.SquaredL2(0.5),
    proxmo.ElasticNet(0.2, 0.5),
    proxmo.Huber(0.3, 0.2),
    proxmo.L0(0.3),
    proxmo.MCP(0.3),
    proxmo.MCP(0.3, concavity=0.03),  # most steps are beyond its concavity
    proxmo.SCAD(0.3),
    proxmo.SCAD(0.3, concavity=1.03),
    proxmo.LHalf(0.3),
    proxmo.Box(-0.5, 0.5),
    proxmo.NonNegative(),
    proxmo.LInfBall(0.4),
    proxmo.GroupL2(2.0),
    proxmo.GroupL2(2.0, dim=None),
    proxmo.GroupL2(0.0),
    proxmo.GroupLInf(5.0),
    proxmo.GroupLInf(0.0),
    proxmo.SparseGroup(0.1, 1.0),
]


def run(
    is_fused: bool, dtype: torch.dtype, penalty: proxmo.Penalty | None, scale: float = 1.0, **options: Any
) -> tuple[list[Tensor], ProxAdamW]:
    params = [Parameter(scale * noise(shape, dtype, seed=k)) for k, shape in enumerate(SHAPES)]
    optimizer = ProxAdamW(params, **{"lr": 0.05 * scale, **options}, penalty=penalty, fused=is_fused)
    for step in range(STEPS):
        for k, p in enumerate(params):
            p.grad = noise(tuple(p.shape), dtype, seed=100 * step + k)
        if step == 2:  # then the first parameter is one step behind the others
            params[0].grad = None
        optimizer.step()
    return [p.detach() for p in params], optimizer


def assert_same(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(found, expected, strict=True):
        bound = STEPS * tolerance(dtype) * float(b.abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=bound)
        assert ((a == 0) != (b == 0)).sum() <= 1e-3 * a.numel()  # rounding may decide at a threshold


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_fused_step_equals_eager_step_for_every_penalty(
    penalty: proxmo.Penalty | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, eager = run(False, torch.float32, penalty)
    monkeypatch.setattr("proxmo.optim.prox_adamw._take_step", None)  # so that nothing is left to the eager path
    found, fused = run(True, torch.float32, penalty)
    assert_same(found, expected, torch.float32)
    for p, q in zip(fused.param_groups[0]["params"], eager.param_groups[0]["params"], strict=True):
        for key, value in eager.state[q].items():
            torch.testing.assert_close(fused.state[p][key], value, rtol=1e-6, atol=1e-6)  # of gradients of size 1


@pytest.mark.parametrize("penalty", [proxmo.L1(0.3), proxmo.GroupL2(2.0), proxmo.GroupLInf(5.0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"maximize": True, "weight_decay": 0.0, "betas": (0.5, 0.9), "eps": 0.1}])
def test_fused_step_equals_eager_step_in_float64(penalty: proxmo.Penalty, options: dict[str, Any]) -> None:
    expected, _ = run(False, torch.float64, penalty, **options)
    found, _ = run(True, torch.float64, penalty, **options)
    assert_same(found, expected, torch.float64)


@pytest.mark.parametrize("scale", [1e-18, 1e18])
@pytest.mark.parametrize("penalty", [proxmo.GroupL2(2.0), proxmo.GroupLInf(5.0)], ids=str)
def test_rows_whose_squares_leave_the_range_of_float32_are_solved_in_float64(
    penalty: proxmo.Penalty, scale: float
) -> None:
    """Large weights have steps of the same size, so that the prox is that of weights of size 1, scaled."""
    ordinary, _ = run(True, torch.float64, penalty)
    found, _ = run(True, torch.float32, penalty, scale, weight_decay=0.01 / scale)
    assert_same([x.double() / scale for x in found], ordinary, torch.float32)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("penalty", [proxmo.L1(0.3), proxmo.GroupL2(0.3), proxmo.GroupLInf(0.3)], ids=str)
def test_bad_gradient_is_seen_in_its_group_and_nowhere_else(penalty: proxmo.Penalty, bad: float) -> None:
    x = Parameter(noise((4, 6), torch.float32))
    optimizer = ProxAdamW([x], 0.1, penalty=penalty, fused=True)
    x.grad = noise((4, 6), torch.float32, seed=1)
    x.grad[2, 3] = bad
    optimizer.step()
    assert not x[2].isfinite().all()
    assert x[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("penalty", "options"),
    [
        (proxmo.Nuclear(0.3), {}),
        (proxmo.Trimmed(proxmo.L1(0.3), keep=0.5), {}),
        (proxmo.GroupL2(0.3), {"metric": "block"}),
        (proxmo.GroupL2(0.3, dim=1), {}),
    ],
)
def test_eager_path_takes_what_loops_cannot(penalty: proxmo.Penalty, options: dict[str, Any]) -> None:
    results = []
    for fused in (False, True):
        x = Parameter(noise((4, 6), torch.float32))
        optimizer = ProxAdamW([x], 0.1, penalty=penalty, fused=fused, **options)
        for seed in range(3):
            x.grad = noise((4, 6), torch.float32, seed=seed)
            optimizer.step()
        results.append(x.detach())
    assert torch.equal(*results)


def test_subclass_that_changes_the_prox_does_not_inherit_the_kernel() -> None:
    class Doubled(proxmo.L1):
        def _prox(self, x: Tensor, step: Any, out: Tensor | None) -> Tensor:
            return super()._prox(x, 2 * step, out)

    assert Doubled(0.3).current_metric_kernel() is None
    assert proxmo.L1(0.3).current_metric_kernel() is not None


def test_fused_and_foreach_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="fused and foreach cannot both be True"):
        ProxAdamW([Parameter(torch.ones(2))], fused=True, foreach=True)


@pytest.mark.parametrize("penalty", [proxmo.GroupL2(1e-3), proxmo.GroupLInf(1e-3)], ids=str)
def test_step_of_zero_keeps_its_element(penalty: proxmo.Penalty) -> None:
    """The square of a gradient of 1e21 is infinite in float32."""
    results = []
    for fused in (False, True):
        x = Parameter(torch.tensor([[0.1, 1.0]]))
        optimizer = ProxAdamW([x], 1e-3, weight_decay=0.0, penalty=penalty, fused=fused)
        x.grad = torch.tensor([[1e21, 1e-3]])
        optimizer.step()
        results.append(x.detach())
    assert results[0][0, 0] == 0.1
    torch.testing.assert_close(*results)
