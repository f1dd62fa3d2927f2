"""Single penalties where they are hardest: at kinks, jumps and boundaries, and for extreme numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import proxmo
from penalties.cases import CASES, assert_is_prox, every_dtype, noise, reference


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_newton_iteration_ends_despite_nonfinite_entries(bad: float) -> None:
    x = noise((64, 500), torch.float32)
    x[3, 7] = bad
    for penalty in (proxmo.GroupLInf(20.0), proxmo.L1Ball(20.0, dim=0), proxmo.Simplex(dim=0)):
        result = penalty.prox(x, 1.0)
        assert result[3].isnan().all()
        assert result[torch.arange(64) != 3].isfinite().all()


@pytest.mark.parametrize(
    ("penalty", "x"),
    [
        (proxmo.GroupL2(5.0), [[3.0, 4.0], [30.0, 40.0]]),
        (proxmo.GroupLInf(7.0), [[3.0, -4.0], [30.0, 40.0]]),
        (proxmo.SparseGroup(1.0, 3.7), [[3.0, 4.0], [30.0, 40.0]]),
        (proxmo.L1(4.0), [[3.0, -4.0], [30.0, 40.0]]),
        (proxmo.Nuclear(5.0), [[3.0, 4.0]]),
    ],
    ids=str,
)
@every_dtype
def test_points_in_the_dual_ball_become_exact_zeros(
    penalty: proxmo.Penalty, x: list[list[float]], dtype: torch.dtype
) -> None:
    """Including points on its boundary."""
    result = penalty.prox(torch.tensor(x, dtype=dtype), 1.0)
    assert (result[0] == 0).all()
    assert (result[1:] != 0).all()


@every_dtype
def test_long_groups_in_the_dual_ball_become_exact_zeros(dtype: torch.dtype) -> None:
    x = noise((256, 777), dtype)
    x[::2] *= 1e-3
    mean = float(x[1::2].double().abs().sum(1).mean())
    for penalty in (proxmo.GroupLInf(mean / 2), proxmo.GroupL2(10.0), proxmo.SparseGroup(0.01, 10.0)):
        result = penalty.prox(x, 1.0)
        assert (result[::2] == 0).all()
        assert (result[1::2] != 0).any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["MCP", "SCAD"])
def test_mcp_and_scad_equal_the_reference_where_their_formula_changes(kind: str, dtype: torch.dtype) -> None:
    """At, just below and just above the step where the prox becomes discontinuous, around every kink."""
    name = "MCP(" if kind == "MCP" else "SCAD(strength=0.6, concavity=1.8"
    case = next(case for case in CASES if case.name.startswith(name))
    penalty = case.make(1.0)
    s, c = penalty.strength, penalty.concavity  # type: ignore[attr-defined]
    switches = [c] if kind == "MCP" else [c - 1, c + 1]
    for switch in switches:
        for step in (switch, math.nextafter(switch, 0), math.nextafter(switch, 9), switch * (1 - 1e-8), switch * 0.999):
            kinks = torch.tensor([s, step * s, s * (1 + step), c * s, s * math.sqrt(c * step)], dtype=torch.float64)
            near = torch.tensor([1.0, 1 - 1e-15, 1 + 1e-15, 1 - 1e-7, 1 + 1e-7, 0.999, 1.001, 0.5], dtype=torch.float64)
            x = (kinks[:, None] * near).flatten().to(dtype)
            for size in (step, torch.tensor(step, dtype=torch.float64)):
                result = penalty.prox(x, size)
                assert (result.abs() <= x.abs()).all()
                assert_is_prox(case, penalty, result, x, step)


@pytest.mark.parametrize("step", [1.0, torch.tensor(1.0, dtype=torch.float64)], ids=str)
def test_fields_and_steps_beyond_float32_act_as_infinite_or_zero(step: float | Tensor) -> None:
    """A strength, radius or step that float32 cannot represent acts as infinity or zero."""
    x = torch.tensor([[1.0, -2.0], [0.0, 3e-40]])
    for penalty in (proxmo.L1(1e39), proxmo.GroupLInf(1e39), proxmo.GroupL2(1e39), proxmo.Nuclear(1e39)):
        assert (penalty.prox(x, step) == 0).all()
    for penalty in (proxmo.LInfBall(1e39), proxmo.L1Ball(1e39), proxmo.Box(-1e39, 1e39), proxmo.MCP(0.0, 1e39)):
        assert torch.equal(penalty.prox(x, step), x)
    assert torch.equal(proxmo.MCP(1e20, 1e20).prox(x, step), torch.zeros(2, 2))
    assert torch.equal(proxmo.L1(0.0).prox(x, torch.tensor(1e39, dtype=torch.float64)), x)
    assert proxmo.L2Ball(1.0).prox(x, torch.tensor(1e-60, dtype=torch.float64)).norm() == pytest.approx(1.0)


@pytest.mark.parametrize("concave", [3.0, 1e35])
@pytest.mark.parametrize("step", [1e6, 1e30, 1e38])
def test_infinite_entries_stay_infinite_if_thresholds_overflow(step: float, concave: float) -> None:
    """Also where the step is a tensor, whose product with the strength is infinite in float32."""
    x = torch.tensor([math.inf, -math.inf, 1.0, math.nan])
    shrinking = (proxmo.L1(1e30), proxmo.L0(1e30), proxmo.LHalf(1e30), proxmo.ElasticNet(1e30, 0.0))
    for penalty in (*shrinking, proxmo.MCP(1e30, concave), proxmo.SCAD(1e30, concave)):
        expected = torch.tensor([math.inf, -math.inf, 0.0, math.nan])
        for given in (step, torch.tensor(step), torch.full((4,), step), torch.full((4,), step, dtype=torch.float64)):
            torch.testing.assert_close(penalty.prox(x, given), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [5, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_group_norms_are_right_if_squares_overflow_or_underflow(width: int, dtype: torch.dtype) -> None:
    scales = [1.0, 0.0, 1e-30, 1e25, 1e-3] if dtype == torch.float32 else [1.0, 0.0, 1e-200, 1e180, 1e-3]
    noise = torch.randn(5, width, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x = noise * torch.tensor(scales, dtype=dtype).unsqueeze(1)
    for row, scale in zip(x, scales, strict=True):
        size = 1 if scale == 0 else scale
        norm = float((row.double() / size).square().sum().sqrt()) * size
        found = proxmo.GroupL2(norm / 4).prox(x, 1.0)
        kept = found[scales.index(scale)]
        torch.testing.assert_close(kept, 0.75 * row, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)
        assert all(bool((found[k] == 0).all()) == (other < scale / 2 or other == 0) for k, other in enumerate(scales))
    bad = x.clone()
    bad[0, 3] = math.nan
    found = proxmo.GroupL2(1e-3).prox(bad, 1.0)
    assert bool(found[0].isnan().all())
    assert torch.equal(found[1:], proxmo.GroupL2(1e-3).prox(x, 1.0)[1:])


def test_l2_ball_and_lhalf_are_right_at_mixed_scales() -> None:
    direction = torch.tensor([3.0, 4.0])
    for radius, scale in ((1e-20, 1e20), (1e-14, 1e30), (1e-30, 1e15)):
        result = proxmo.L2Ball(radius).prox(direction * scale, 1.0)
        torch.testing.assert_close(result.double(), direction.double() / 5 * radius, rtol=1e-6, atol=0)
    tiny = torch.tensor([1e-40, -2.0])
    assert proxmo.L2Ball(0.0).prox(tiny, 1.0).abs().max() == 0
    torch.testing.assert_close(proxmo.LHalf(0.0).prox(tiny, 1.0), tiny)


def test_points_just_outside_a_constraint_are_infeasible() -> None:
    """The tolerance of constraints covers rounding and no more."""
    for dtype, off in ((torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        ones = torch.ones(4, 4, dtype=dtype)
        for penalty, inside in (
            (proxmo.L1Ball(16.0), ones),
            (proxmo.L2Ball(4.0), ones),
            (proxmo.LInfBall(1.0), ones),
            (proxmo.Box(-1.0, 1.0), ones),
            (proxmo.Simplex(16.0), ones),
            (proxmo.NuclearBall(4.0), ones),
        ):
            assert penalty.value(inside) == 0
            assert penalty.value(inside * (1 + off)) == math.inf
        assert proxmo.NonNegative().value(torch.tensor([1.0, -1e-30], dtype=dtype)) == math.inf
        assert proxmo.Simplex(1.0).value(torch.tensor([1.5, -0.5], dtype=dtype)) == math.inf
        second = torch.diag(torch.tensor([1.0, 4 * off], dtype=dtype))
        assert proxmo.Rank(1).value(second) == math.inf
        assert proxmo.TopK(1).value(second) == math.inf
    assert proxmo.Rank(1).value(torch.randn(200, 200).bfloat16()) == math.inf
    assert proxmo.Rank(5).value(torch.tensor([[math.nan, 1.0], [1.0, 1.0]])) == math.inf


def test_projection_onto_nuclear_ball_of_radius_zero_is_zero() -> None:
    x = noise((64, 1), torch.float32) @ noise((1, 64), torch.float32)
    assert (proxmo.NuclearBall(0.0).prox(x, 1.0) == 0).all()


def test_values_are_finite_even_if_squares_overflow() -> None:
    x = torch.tensor([1e30, 2e30])
    assert proxmo.SquaredL2(1e-60).value(x) == pytest.approx(2.5, rel=1e-6)
    assert proxmo.ElasticNet(0.0, 1e-60).value(x) == pytest.approx(2.5, rel=1e-6)
    assert proxmo.GroupL2(1.0).value(torch.tensor([[math.inf, 1.0]])) == math.inf


def test_gradients_of_values_at_kinks_are_finite() -> None:
    for penalty, x, expected in (
        (proxmo.SCAD(1.0), [1.0, -1.0], [1.0, -1.0]),
        (proxmo.GroupL2(2.0), [0.0, 3.0], [0.0, 2.0]),
        (proxmo.SparseGroup(1.0, 2.0), [0.0, 3.0], [0.0, 3.0]),
        (proxmo.LHalf(2.0), [0.0, 4.0], [0.0, 0.5]),
    ):
        point = torch.tensor(x, requires_grad=True)
        penalty.value(point).backward()
        assert point.grad is not None
        torch.testing.assert_close(point.grad, torch.tensor(expected))


def test_linf_prox_of_long_rows_equals_the_reference() -> None:
    """Rows long enough for Newton's method, in float32, clipped a little and a lot."""
    case = next(case for case in CASES if case.name.startswith("GroupLInf") and case.axes == 1)
    x = noise((32, 700), torch.float32)
    for strength in (0.01, 5.0, 200.0, 540.0, 1000.0):
        penalty = proxmo.GroupLInf(strength)
        result = penalty.prox(x, 1.0)
        torch.testing.assert_close(result.double(), reference(case, penalty, x, 1.0), rtol=0, atol=4e-6)
