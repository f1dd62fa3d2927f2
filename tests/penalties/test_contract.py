"""What holds for every penalty, whatever the shape, dtype, layout, scale and step."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor

import proxmo
from penalties.cases import Case, assert_is_prox, every_case, every_dtype, noise, tolerance

SHAPES = [(), (1,), (6,), (3, 5), (2, 3, 2), (3, 2, 2, 2), (2, 2, 1, 2, 2)]
STEP = 0.8


def point(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a tensor for every case: three axes, and few enough elements to try all supports of TopK."""
    return noise((3, 2, 2), dtype)


@every_case
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prox_equals_the_reference_for_every_shape_and_dtype(
    case: Case, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
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
def test_empty_tensors_keep_their_shape_and_have_value_zero(case: Case) -> None:
    penalty = case.make(1.0)
    for shape in [(0, 2, 2), (2, 0, 3), (2, 2, 0)]:
        x = torch.zeros(shape)
        assert penalty.prox(x, STEP).shape == shape
        assert penalty.value(x) == 0


@every_case
def test_prox_does_not_depend_on_strides(case: Case) -> None:
    """Permuted, strided, expanded and channels_last inputs give the same numbers as contiguous ones."""
    penalty = case.make(1.0)
    original = noise((3, 2, 2, 2))
    expected = penalty.prox(original, STEP)
    strided = torch.zeros(6, 4, 2, 2, dtype=original.dtype)[::2, ::2]
    strided.copy_(original)
    moved = original.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    channels_last = original.to(memory_format=torch.channels_last)
    for x in (strided, moved, channels_last):
        assert not x.is_contiguous()
        torch.testing.assert_close(penalty.prox(x, STEP), expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(penalty.prox(x.clone(), STEP, out=x), expected, rtol=1e-13, atol=1e-13)
    expanded = original[:, :, :, :1].expand(-1, -1, -1, 2)
    torch.testing.assert_close(
        penalty.prox(expanded, STEP), penalty.prox(expanded.contiguous(), STEP), rtol=1e-13, atol=1e-13
    )


@every_case
@every_dtype
@pytest.mark.parametrize("step", [STEP, torch.tensor(STEP), torch.tensor([STEP], dtype=torch.float64)], ids=str)
def test_out_gets_the_result_and_may_be_the_input(case: Case, dtype: torch.dtype, step: float | Tensor) -> None:
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
def test_tensor_step_equals_number_step(case: Case, step: float, shape: tuple[int, ...]) -> None:
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
def test_zero_step_returns_a_copy_of_the_input(case: Case, dtype: torch.dtype) -> None:
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
def test_prox_and_value_equal_the_reference_at_extreme_scales(case: Case, scale: float, dtype: torch.dtype) -> None:
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
def test_prox_equals_the_reference_for_mixed_scales_in_one_tensor(case: Case, dtype: torch.dtype) -> None:
    penalty = case.make(1.0)
    x = noise((3, 2, 2)).to(dtype) * torch.logspace(-12, 12, 12, dtype=dtype).reshape(3, 2, 2)
    assert_is_prox(case, penalty, penalty.prox(x, STEP), x, STEP)


@every_case
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [STEP, torch.tensor(STEP, dtype=torch.float64)], ids=str)
def test_nonfinite_entry_stays_in_its_element_or_group(case: Case, bad: float, step: float | Tensor) -> None:
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
        # without NaN the result is the limit of ever larger entries
        x[1, 0, 1] = math.copysign(1e9, bad)
        limit = penalty.prox(x, step)
        assert (result[1, 0, 1] == bad) == (limit[1, 0, 1].abs() > 1e8)
        others = same_group.clone()
        others[1, 0, 1] = False
        torch.testing.assert_close(result[others], limit[others], rtol=0, atol=1e-6)


@every_case
def test_equal_rows_have_equal_results(case: Case) -> None:
    penalty = case.make(1.0)
    x = noise((1, 2, 2)).expand(3, 2, 2)
    result = penalty.prox(x, STEP)
    if penalty.convex:
        torch.testing.assert_close(result, result[:1].expand(3, 2, 2), rtol=1e-13, atol=1e-13)
    assert_is_prox(case, penalty, result, x, STEP)


@every_case
@every_dtype
def test_prox_of_constant_tensors_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
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
    inner = penalty.penalty if isinstance(penalty, proxmo.Trimmed) else penalty
    for name in vars(inner):
        if name in ("strength", "l1", "l2", "group"):
            setattr(inner, name, 0.0)
        elif name in ("k", "rank"):
            setattr(penalty, name, 100)
        elif name in ("radius", "high"):
            setattr(penalty, name, 100.0)
        elif name == "low":
            setattr(penalty, name, -100.0)
    torch.testing.assert_close(penalty.prox(x, STEP), x, rtol=1e-15, atol=0)
    assert penalty.value(x) == 0


@every_case
def test_penalties_round_trip_through_repr_copy_and_pickle(case: Case) -> None:
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
def test_prox_is_not_recorded_by_autograd(case: Case) -> None:
    x = point().requires_grad_()
    assert not case.make(1.0).prox(x, STEP).requires_grad


@every_case
def test_projections_are_feasible(case: Case) -> None:
    """Up to rounding, in every dtype and from points far outside the set."""
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
