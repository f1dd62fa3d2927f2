"""What holds for every penalty, whatever the shape, dtype, layout, scale and step."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor

import proxmo
from penalties.cases import CASES, Case, assert_is_prox, reference, tolerance

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
SHAPES = [(), (1,), (6,), (3, 5), (2, 3, 2), (3, 2, 2, 2), (2, 2, 1, 2, 2)]
STEP = 0.8


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def point(dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor that every case takes: three axes, few enough elements for the reference to try all supports of TopK."""
    return noise((3, 2, 2), dtype)


@every_case
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype(case: Case, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = noise(shape, dtype)
    penalty = case.make(1.0)
    if len(shape) < case.axes:
        with pytest.raises(ValueError, match=r"dim must name axes of the tensor, got dim=.* for a tensor of shape"):
            penalty.prox(x, STEP)
        with pytest.raises(ValueError, match="dim must name axes of the tensor"):
            penalty.value(x)
        return
    before = x.clone()
    result = penalty.prox(x, STEP)
    assert result.dtype == dtype
    assert result.shape == x.shape
    assert torch.equal(x, before)
    assert_is_prox(case, penalty, result, x, STEP)
    value = penalty.value(result)
    assert value.shape == ()
    assert value.isfinite()


@every_case
def test_empty_tensors(case: Case) -> None:
    penalty = case.make(1.0)
    for shape in [(0, 2, 2), (2, 0, 3), (2, 2, 0)]:
        x = torch.zeros(shape)
        assert penalty.prox(x, STEP).shape == shape
        assert penalty.value(x) == 0


@every_case
def test_layouts(case: Case) -> None:
    """Strides are nobody's business: transposed, strided, expanded and channels_last input give the same numbers."""
    penalty = case.make(1.0)
    plain = noise((3, 2, 2, 2))
    expected = penalty.prox(plain, STEP)
    strided = torch.zeros(6, 4, 2, 2, dtype=plain.dtype)[::2, ::2]
    strided.copy_(plain)
    moved = plain.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    channels_last = plain.to(memory_format=torch.channels_last)
    for x in (strided, moved, channels_last):
        assert not x.is_contiguous()
        torch.testing.assert_close(penalty.prox(x, STEP), expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(penalty.prox(x.clone(), STEP, out=x), expected, rtol=1e-13, atol=1e-13)
    expanded = plain[:, :, :, :1].expand(-1, -1, -1, 2)
    torch.testing.assert_close(
        penalty.prox(expanded, STEP), penalty.prox(expanded.contiguous(), STEP), rtol=1e-13, atol=1e-13
    )


@every_case
@every_dtype
@pytest.mark.parametrize("step", [STEP, torch.tensor(STEP), torch.tensor([STEP], dtype=torch.float64)], ids=str)
def test_out(case: Case, dtype: torch.dtype, step: float | Tensor) -> None:
    penalty = case.make(1.0)
    x = point(dtype)
    expected = penalty.prox(x, step)
    out = torch.full_like(x, math.nan)
    assert penalty.prox(x, step, out=out) is out
    assert torch.equal(out, expected)
    assert penalty.prox(x, step, out=x) is x
    assert torch.equal(x, expected)


@every_case
@pytest.mark.parametrize("step", [0.05, 0.8, 1.7, 30.0])
@pytest.mark.parametrize("shape", [(), (3, 2, 2)], ids=str)
def test_tensor_step(case: Case, step: float, shape: tuple[int, ...]) -> None:
    if len(shape) < case.axes:
        return
    penalty = case.make(1.0)
    x = noise(shape)
    expected = penalty.prox(x, step)
    for tensor in (torch.tensor(step, dtype=torch.float64), torch.tensor([step], dtype=torch.float64)):
        result = penalty.prox(x, tensor)
        assert result.dtype == x.dtype
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)
    single = x.float()
    assert penalty.prox(single, torch.tensor(step, dtype=torch.float64)).dtype == torch.float32


@every_case
@every_dtype
def test_step_of_zero_gives_the_point_itself(case: Case, dtype: torch.dtype) -> None:
    """Also for constraints: a distributed checkpoint initialises optimizers by a step with lr = 0."""
    penalty = case.make(1.0)
    x = 3 * point(dtype)
    for zero in (0, 0.0, torch.tensor(0.0), torch.zeros(1, dtype=torch.float64)):
        result = penalty.prox(x, zero)
        assert torch.equal(result, x)
        assert result is not x


@every_case
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_scales(case: Case, scale: float, dtype: torch.dtype) -> None:
    penalty = case.make(scale)
    x = (noise((3, 2, 2)) * scale).to(dtype)
    for step in (STEP, torch.tensor(STEP, dtype=torch.float64)):
        assert_is_prox(case, penalty, penalty.prox(x, step), x, STEP)
    result = penalty.prox(x, STEP)
    expected = case.value(penalty, result.double().numpy())
    if expected > torch.finfo(dtype).max:
        assert penalty.value(result) == math.inf
    else:
        smallest = torch.finfo(dtype).tiny
        assert float(penalty.value(result)) == pytest.approx(expected, rel=10 * tolerance(dtype), abs=smallest)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_entries_of_very_different_scale_in_one_tensor(case: Case, dtype: torch.dtype) -> None:
    penalty = case.make(1.0)
    x = noise((3, 2, 2)).to(dtype) * torch.logspace(-12, 12, 12, dtype=dtype).reshape(3, 2, 2)
    assert_is_prox(case, penalty, penalty.prox(x, STEP), x, STEP)


@every_case
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [STEP, torch.tensor(STEP, dtype=torch.float64)], ids=str)
def test_a_bad_entry_stays_in_its_element_or_group(case: Case, bad: float, step: float | Tensor) -> None:
    penalty = case.make(1.0)
    clean = point()
    x = clean.clone()
    x[1, 0, 1] = bad
    result, expected = penalty.prox(x, step), penalty.prox(clean, step)
    same_group = torch.ones_like(x, dtype=torch.bool)
    dim = getattr(penalty, "dim", None)
    if penalty.separable:
        same_group[...] = False
        same_group[1, 0, 1] = True
    elif dim is not None and not isinstance(penalty, (proxmo.Nuclear, proxmo.Rank, proxmo.NuclearBall)):
        for axis in (dim,) if isinstance(dim, int) else dim:
            shape = [1, 1, 1]
            shape[axis] = -1
            same_group &= (torch.arange(x.shape[axis]) == (1, 0, 1)[axis]).reshape(shape)
    assert torch.equal(result[~same_group], expected[~same_group])
    if math.isnan(bad):
        assert result[1, 0, 1].isnan()
        inside = penalty.value(result)
        assert inside.isnan() or inside == math.inf or isinstance(penalty, proxmo.L0)
    elif not result[same_group].isnan().any():
        # no NaN: then it is the limit, which a very large entry shows
        x[1, 0, 1] = math.copysign(1e9, bad)
        limit = penalty.prox(x, step)
        assert (result[1, 0, 1] == bad) == (limit[1, 0, 1].abs() > 1e8)
        others = same_group.clone()
        others[1, 0, 1] = False
        torch.testing.assert_close(result[others], limit[others], rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_entries_in_long_rows_end_the_newton_iteration(bad: float) -> None:
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
def test_what_lies_in_the_dual_ball_vanishes_exactly(
    penalty: proxmo.Penalty, x: list[list[float]], dtype: torch.dtype
) -> None:
    """Its boundary included; no residues."""
    result = penalty.prox(torch.tensor(x, dtype=dtype), 1.0)
    assert (result[0] == 0).all()
    assert (result[1:] != 0).all()


@every_dtype
def test_groups_far_inside_the_dual_ball_vanish_exactly_in_long_rows(dtype: torch.dtype) -> None:
    x = noise((256, 777), dtype)
    x[::2] *= 1e-3
    mean = float(x[1::2].double().abs().sum(1).mean())
    for penalty in (proxmo.GroupLInf(mean / 2), proxmo.GroupL2(10.0), proxmo.SparseGroup(0.01, 10.0)):
        result = penalty.prox(x, 1.0)
        assert (result[::2] == 0).all()
        assert (result[1::2] != 0).any(dim=1).all()


@every_case
def test_equal_rows_are_treated_alike(case: Case) -> None:
    penalty = case.make(1.0)
    x = noise((1, 2, 2)).expand(3, 2, 2)
    result = penalty.prox(x, STEP)
    if penalty.convex:
        torch.testing.assert_close(result, result[:1].expand(3, 2, 2), rtol=1e-13, atol=1e-13)
    assert_is_prox(case, penalty, result, x, STEP)


@every_case
@every_dtype
def test_all_entries_equal(case: Case, dtype: torch.dtype) -> None:
    penalty = case.make(1.0)
    x = torch.full((2, 2, 2), 1.5, dtype=dtype)
    assert_is_prox(case, penalty, penalty.prox(x, STEP), x, STEP)
    zero = torch.zeros(2, 2, 2, dtype=dtype)
    assert_is_prox(case, penalty, penalty.prox(zero, STEP), zero, STEP)


@every_case
def test_zero_strength_or_wide_constraint_changes_nothing(case: Case) -> None:
    penalty = case.make(1.0)
    x = point().abs() if isinstance(penalty, proxmo.NonNegative) else point()
    if isinstance(penalty, proxmo.Simplex):
        return  # no simplex holds every point
    for name in vars(penalty):
        if name in ("strength", "l1", "l2", "group"):
            setattr(penalty, name, 0.0)
        elif name in ("k", "rank"):
            setattr(penalty, name, 100)
        elif name in ("radius", "high"):
            setattr(penalty, name, 100.0)
        elif name == "low":
            setattr(penalty, name, -100.0)
    torch.testing.assert_close(penalty.prox(x, STEP), x, rtol=1e-15, atol=0)
    assert penalty.value(x) == 0


@every_case
def test_penalties_print_copy_and_pickle(case: Case) -> None:
    penalty = case.make(1.0)
    assert eval(repr(penalty), vars(proxmo)) == penalty
    assert copy.deepcopy(penalty) == penalty
    assert pickle.loads(pickle.dumps(penalty)) == penalty


@every_case
def test_value_is_differentiable(case: Case) -> None:
    """So that a penalty can also be added to a loss."""
    penalty = case.make(1.0)
    if isinstance(penalty, (proxmo.Constraint, proxmo.L0)):
        return  # flat where it is finite
    x = point()[:, :, :1].clone().requires_grad_()
    assert torch.autograd.gradcheck(penalty.value, x)


@every_case
def test_prox_stays_outside_autograd(case: Case) -> None:
    x = point().requires_grad_()
    assert not case.make(1.0).prox(x, STEP).requires_grad


@every_case
def test_projections_end_inside(case: Case) -> None:
    """To rounding, in every dtype and far from the set: what was projected counts as a point of the set."""
    penalty = case.make(1.0)
    if not isinstance(penalty, proxmo.Constraint):
        return
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for scale in (1e-3, 1.0, 1e4):
            x = (noise((40, 30, 20)) * scale).to(dtype)
            assert penalty.value(penalty.prox(x, STEP)) == 0
    outside = torch.full((3, 3, 3), -7.0)
    outside[0, 0, 0] = 50.0
    outside[1, 1, 1] = -60.0
    assert penalty.value(outside) == math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["MCP", "SCAD"])
def test_steps_where_the_form_changes(kind: str, dtype: torch.dtype) -> None:
    """At, just below and just above the step at which the prox begins to jump, around every kink."""
    name = "MCP(" if kind == "MCP" else "SCAD(strength=0.6, concavity=1.8"
    case = next(case for case in CASES if case.name.startswith(name))
    penalty = case.make(1.0)
    s, c = penalty.strength, penalty.concavity  # type: ignore[attr-defined]
    changes = [c] if kind == "MCP" else [c - 1, c + 1]
    for change in changes:
        for step in (change, math.nextafter(change, 0), math.nextafter(change, 9), change * (1 - 1e-8), change * 0.999):
            kinks = torch.tensor([s, step * s, s * (1 + step), c * s, s * math.sqrt(c * step)], dtype=torch.float64)
            near = torch.tensor([1.0, 1 - 1e-15, 1 + 1e-15, 1 - 1e-7, 1 + 1e-7, 0.999, 1.001, 0.5], dtype=torch.float64)
            x = (kinks[:, None] * near).flatten().to(dtype)
            for size in (step, torch.tensor(step, dtype=torch.float64)):
                result = penalty.prox(x, size)
                assert (result.abs() <= x.abs()).all()
                assert_is_prox(case, penalty, result, x, step)


@pytest.mark.parametrize("step", [1.0, torch.tensor(1.0, dtype=torch.float64)], ids=str)
def test_numbers_beyond_float32(step: float | Tensor) -> None:
    """A strength, radius or step that float32 cannot hold is as good as infinite, or as zero."""
    x = torch.tensor([[1.0, -2.0], [0.0, 3e-40]])
    for penalty in (proxmo.L1(1e39), proxmo.GroupLInf(1e39), proxmo.GroupL2(1e39), proxmo.Nuclear(1e39)):
        assert (penalty.prox(x, step) == 0).all()
    for penalty in (proxmo.LInfBall(1e39), proxmo.L1Ball(1e39), proxmo.Box(-1e39, 1e39), proxmo.MCP(0.0, 1e39)):
        assert torch.equal(penalty.prox(x, step), x)
    assert torch.equal(proxmo.MCP(1e20, 1e20).prox(x, step), torch.zeros(2, 2))
    assert torch.equal(proxmo.L1(0.0).prox(x, torch.tensor(1e39, dtype=torch.float64)), x)
    assert proxmo.L2Ball(1.0).prox(x, torch.tensor(1e-60, dtype=torch.float64)).norm() == pytest.approx(1.0)


def test_balls_and_roots_at_mixed_scales() -> None:
    direction = torch.tensor([3.0, 4.0])
    for radius, scale in ((1e-20, 1e20), (1e-14, 1e30), (1e-30, 1e15)):
        result = proxmo.L2Ball(radius).prox(direction * scale, 1.0)
        torch.testing.assert_close(result.double(), direction.double() / 5 * radius, rtol=1e-6, atol=0)
    tiny = torch.tensor([1e-40, -2.0])
    assert proxmo.L2Ball(0.0).prox(tiny, 1.0).abs().max() == 0
    torch.testing.assert_close(proxmo.LHalf(0.0).prox(tiny, 1.0), tiny)


def test_points_just_outside_are_outside() -> None:
    """The allowance for rounding is that and no more."""
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


def test_a_nuclear_ball_of_radius_zero_is_zero() -> None:
    x = noise((64, 1), torch.float32) @ noise((1, 64), torch.float32)
    assert (proxmo.NuclearBall(0.0).prox(x, 1.0) == 0).all()


def test_values_that_only_their_product_keeps_finite() -> None:
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


def test_long_rows_against_the_reference() -> None:
    """Long enough for the Newton path, in float32, with little and much cut off."""
    case = next(case for case in CASES if case.name.startswith("GroupLInf") and case.axes == 1)
    x = noise((32, 700), torch.float32)
    for strength in (0.01, 5.0, 200.0, 540.0, 1000.0):
        penalty = proxmo.GroupLInf(strength)
        result = penalty.prox(x, 1.0)
        torch.testing.assert_close(result.double(), reference(case, penalty, x, 1.0), rtol=0, atol=4e-6)
