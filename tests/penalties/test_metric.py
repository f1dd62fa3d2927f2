"""The prox with a step for every element: argmin ψ(u) + Σ (u_i − x_i)²/(2·step_i)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from itertools import product
from typing import ClassVar

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import proxmo
from penalties.cases import CASES, Case, assert_is_prox, every_case, every_dtype, noise, objective, reference, tolerance

METRIC = [case for case in CASES if case.make(1.0).elementwise_step]
every_metric_case = pytest.mark.parametrize("case", METRIC, ids=str)
every_convex_metric_case = pytest.mark.parametrize("case", [c for c in METRIC if c.make(1.0).convex], ids=str)
SHAPES = [(), (1,), (6,), (3, 5), (2, 3, 2), (3, 2, 2, 2)]
entries = st.one_of(st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 0.7, 2.0]), st.floats(-3, 3, width=32))
step_entries = st.sampled_from([1 / 64, 0.25, 1.0, 1.0, 1.375, 2.5, 32.0])  # exact in float32


def steps_like(x: Tensor, seed: int = 7, decades: float = 4.0) -> Tensor:
    """Return steps that span some decades around 1, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return 10 ** (decades * (torch.rand(x.shape, dtype=torch.float64, generator=generator) - 0.5))


def assert_is_metric_prox(case: Case, penalty: proxmo.Penalty, x: Tensor, step: Tensor) -> None:
    result = penalty.prox(x, step)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    assert_is_prox(case, penalty, result, x, step.to(x.dtype) if x.dtype in (torch.float32, torch.float64) else step)


@every_metric_case
@every_dtype
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape], ids=str)
def test_prox_equals_the_reference_for_every_shape_and_dtype(
    case: Case, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if len(shape) >= case.axes:
        x = noise(shape, dtype)
        step = steps_like(x).float()  # exact in float32, so that the reference sees the same numbers
        assert_is_metric_prox(case, case.make(1.0), x, step)


@every_metric_case
@settings(max_examples=30)
@given(data=st.data(), dtype=st.sampled_from([np.float64, np.float32]))
def test_prox_equals_the_reference_at_ties_and_kinks(case: Case, data: st.DataObject, dtype: type) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=max(case.axes, 1), max_size=3).map(tuple))
    x = data.draw(hnp.arrays(dtype, shape, elements=entries).map(torch.from_numpy))
    step = data.draw(hnp.arrays(np.float32, shape, elements=step_entries.map(np.float32)).map(torch.from_numpy))
    penalty = case.make(1.0)
    assert_is_prox(case, penalty, penalty.prox(x, step), x, step)


@every_convex_metric_case
@settings(max_examples=30)
@given(data=st.data())
def test_three_point_inequality_in_the_metric(case: Case, data: st.DataObject) -> None:
    """For all u: ψ(p) + ‖p−x‖²/2 + ‖u−p‖²/2 ≤ ψ(u) + ‖u−x‖²/2 in the norm of the metric. This makes p the prox of x."""
    shape = data.draw(st.lists(st.integers(1, 3), min_size=max(case.axes, 1), max_size=3).map(tuple))
    x, u = (data.draw(hnp.arrays(np.float64, shape, elements=entries).map(torch.from_numpy)) for _ in range(2))
    step = data.draw(hnp.arrays(np.float64, shape, elements=step_entries).map(torch.from_numpy))
    penalty = case.make(1.0)
    if isinstance(penalty, proxmo.Constraint):
        u = reference(case, penalty, u, 1.0)  # a point of the set
    p = penalty.prox(x, step)
    left = objective(case, penalty, p, x, step) + float(((u - p).square() / (2 * step)).sum())
    right = objective(case, penalty, u, x, step)
    assert left <= right + 1e-9 * (1 + right)


@every_metric_case
@every_dtype
@pytest.mark.parametrize("step", [0.05, 0.8, 1.7, 30.0])
def test_equal_steps_give_the_scalar_prox(case: Case, step: float, dtype: torch.dtype) -> None:
    penalty = case.make(1.0)
    x = noise((3, 2, 2), dtype)
    expected = penalty.prox(x, step)
    for shape in [(3, 2, 2), (2,), (1, 1, 1)]:
        found = penalty.prox(x, torch.full(shape, step, dtype=torch.float64))
        torch.testing.assert_close(found, expected, rtol=0, atol=2 * tolerance(dtype) * float(x.abs().max()))
        assert torch.equal(found == 0, expected == 0)


@every_case
def test_block_shape_is_that_of_elements_groups_or_the_tensor(case: Case) -> None:
    penalty, x = case.make(1.0), noise((3, 2, 2))
    shape = penalty.block_shape(x)
    if isinstance(penalty, proxmo.Trimmed):
        assert shape == penalty.penalty.block_shape(x)
    elif penalty.separable:
        assert shape == (3, 2, 2)
    elif isinstance(penalty, (proxmo.Nuclear, proxmo.Rank, proxmo.NuclearBall)):
        assert shape == (1, 1, 1)
    else:
        dim = penalty.dim  # type: ignore[attr-defined]
        outer = {axis % 3 for axis in (() if dim is None else (dim,) if isinstance(dim, int) else dim)}
        assert shape == tuple(size if axis in outer else 1 for axis, size in enumerate((3, 2, 2)))
    assert x.sum_to_size(shape).shape == shape


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("expanded", [False, True])
def test_one_step_per_block_equals_the_reference(case: Case, dtype: torch.dtype, expanded: bool) -> None:
    penalty, x = case.make(1.0), noise((3, 2, 2), dtype)
    step = steps_like(torch.empty(penalty.block_shape(x))).to(dtype)
    result = penalty.prox(x, step.expand(x.shape) if expanded and penalty.elementwise_step else step)
    assert_is_prox(case, penalty, result, x, step if step.numel() > 1 else step.item())


def test_one_step_per_group_needs_no_root_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    from proxmo.penalties import groups

    monkeypatch.setattr(groups, "secular_root", None)
    x = noise((4, 6))
    step = steps_like(x[:, :1])
    expected = torch.cat([proxmo.GroupL2(0.9).prox(x[k : k + 1], float(step[k])) for k in range(4)])
    torch.testing.assert_close(proxmo.GroupL2(0.9).prox(x, step), expected)


@every_metric_case
def test_prox_does_not_depend_on_strides_of_point_and_step(case: Case) -> None:
    penalty, original = case.make(1.0), noise((3, 2, 2, 2))
    step = steps_like(original)
    expected = penalty.prox(original, step)
    strided = torch.zeros(6, 4, 2, 2, dtype=original.dtype)[::2, ::2]
    for x in (strided.copy_(original), original.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)):
        for other in (step, step.to(memory_format=torch.channels_last)):
            torch.testing.assert_close(penalty.prox(x, other), expected, rtol=1e-12, atol=1e-12)
    along_last = steps_like(original[0, 0, 0])
    torch.testing.assert_close(
        penalty.prox(original, along_last), penalty.prox(original, along_last.repeat(3, 2, 2, 1))
    )


@every_metric_case
@every_dtype
def test_out_gets_the_result_and_may_be_the_input(case: Case, dtype: torch.dtype) -> None:
    penalty, x = case.make(1.0), noise((3, 2, 2), dtype)
    step = steps_like(x)
    before, expected = x.clone(), penalty.prox(x, step)
    out = torch.full_like(x, math.nan)
    assert penalty.prox(x, step, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(x, before)
    assert penalty.prox(x, step, out=x, fused=True) is x
    assert torch.equal(x, expected)


@every_metric_case
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_prox_equals_the_reference_at_extreme_scales(case: Case, scale: float, dtype: torch.dtype) -> None:
    penalty = case.make(scale)
    x = (noise((3, 2, 2)) * scale).to(dtype)
    assert_is_metric_prox(case, penalty, x, steps_like(x).to(dtype))


@every_metric_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_entries_and_steps_of_very_different_scale_in_one_tensor(case: Case, dtype: torch.dtype) -> None:
    x = noise((3, 2, 2)).to(dtype) * torch.logspace(-12, 12, 12, dtype=dtype).reshape(3, 2, 2)
    assert_is_metric_prox(case, case.make(1.0), x, steps_like(x, decades=16.0).to(dtype))


@every_metric_case
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_entry_stays_in_its_element_or_group(case: Case, bad: float) -> None:
    penalty, clean = case.make(1.0), noise((3, 2, 2))
    step = steps_like(clean)
    x = clean.clone()
    x[1, 0, 1] = bad
    result, expected = penalty.prox(x, step), penalty.prox(clean, step)
    trimmed = isinstance(penalty, proxmo.Trimmed)  # the entry takes the place of another among those left alone
    block = torch.zeros((1, 1, 1) if trimmed else penalty.block_shape(x), dtype=torch.bool)
    block[tuple(index if size > 1 else 0 for index, size in zip((1, 0, 1), block.shape, strict=True))] = True
    assert torch.equal(result[~block.expand(x.shape)], expected[~block.expand(x.shape)])
    if math.isnan(bad):
        assert result[1, 0, 1].isnan()


@every_metric_case
def test_empty_tensors_keep_their_shape(case: Case) -> None:
    for shape in [(0, 2, 2), (2, 0, 3), (2, 2, 0)]:
        assert case.make(1.0).prox(torch.zeros(shape), torch.ones(shape)).shape == shape


@every_metric_case
@every_dtype
def test_zero_steps_return_the_input(case: Case, dtype: torch.dtype) -> None:
    penalty, x = case.make(1.0), 3 * noise((3, 2, 2), dtype)
    assert torch.equal(penalty.prox(x, torch.zeros(3, 2, 2)), x)
    some = steps_like(x)
    some[0] = 0
    if penalty.separable:
        torch.testing.assert_close(penalty.prox(x, some)[1:], penalty.prox(x[1:], some[1:]), rtol=0, atol=0)
        assert torch.equal(penalty.prox(x, some)[0], x[0])
    else:
        with pytest.raises(ValueError, match="step must be > 0 for all elements or 0 for all"):
            penalty.prox(x, some)


@every_metric_case
def test_steps_beyond_float32_act_as_in_float64(case: Case) -> None:
    """Not as zero, which would disable a constraint, nor as infinity."""
    penalty, x = case.make(1.0), noise((3, 2, 2), torch.float32)
    for size in (1e-60, 1e60):
        step = torch.full((3, 2, 2), size, dtype=torch.float64)
        step[0, 0, 0] *= 1.5
        found, expected = penalty.prox(x, step), penalty.prox(x.double(), step)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("penalty", "boundary"),
    [
        (proxmo.GroupL2(1.0), [3.0, 4.0, 0.0]),  # ‖x/t‖₂ = 1
        (proxmo.GroupLInf(1.0), [2.0, -3.0, 0.0]),  # Σ|x|/t = 1
        (proxmo.SparseGroup(1.0, 1.0), [8.0, 9.0, 7.0]),  # as for GroupL2, after the soft threshold t
    ],
    ids=str,
)
def test_groups_on_the_boundary_of_the_dual_ball_become_exact_zeros(
    penalty: proxmo.Penalty, boundary: list[float]
) -> None:
    x = torch.tensor([boundary, [30.0, 40.0, 10.0]], dtype=torch.float64)
    result = penalty.prox(x, torch.tensor([5.0, 5.0, 7.0], dtype=torch.float64))
    assert (result[0] == 0).all()
    assert (result[1] != 0).all()


@pytest.mark.parametrize("penalty", [proxmo.GroupL2(9.0), proxmo.GroupLInf(60.0), proxmo.L2Ball(3.0, dim=0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_prox_of_long_groups_equals_the_reference(penalty: proxmo.Penalty, dtype: torch.dtype) -> None:
    case = next(c for c in CASES if type(c.make(1.0)) is type(penalty))
    x = noise((40, 3000), dtype)
    step = steps_like(x).float()
    assert_is_prox(case, penalty, penalty.prox(x, step), x, step)


@pytest.mark.parametrize("penalty", [proxmo.Nuclear(0.1), proxmo.Rank(1), proxmo.NuclearBall(1.0)], ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (3, 1), (2,)], ids=str)
def test_penalties_on_singular_values_take_one_number(penalty: proxmo.Penalty, shape: tuple[int, ...]) -> None:
    x = noise((3, 2))
    with pytest.raises(ValueError, match=r"step must be one number for the prox of .*, got a tensor of shape"):
        penalty.prox(x, torch.ones(shape), out=x)
    assert torch.equal(x, noise((3, 2)))
    torch.testing.assert_close(penalty.prox(x, torch.full((1, 1), 0.5)), penalty.prox(x, 0.5))


@dataclass
class RowNorms(proxmo.penalties.kinds.Grouped):
    """A user's group penalty whose prox supports only scalar steps; its formula is wrong for others."""

    strength: float
    dim: int = 0
    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = False
    sum_over_groups: ClassVar[bool] = True

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        norms = x.norm(dim=tuple(range(1, x.dim())), keepdim=True)
        return x * (1 - step * self.strength / norms).clamp(min=0)


def test_penalty_that_supports_only_scalar_steps_refuses_others() -> None:
    x = noise((3, 2))
    torch.testing.assert_close(RowNorms(0.3).prox(x, 0.5), proxmo.GroupL2(0.3).prox(x, 0.5))
    for shape in [(3, 2), (3, 1), (2,)]:
        for call in (RowNorms(0.3).prox, lambda x, step: RowNorms(0.3).prox_([x, x], [step, step])):
            with pytest.raises(ValueError, match=r"one number for the prox of RowNorms.*elementwise_step = True"):
                call(x, torch.ones(shape))
    assert torch.equal(x, noise((3, 2)))
    tensors, steps = [noise((3, 2), seed=k) for k in range(3)], [torch.tensor(0.2 * k) for k in range(3)]
    expected = [RowNorms(0.3).prox(x, float(step)) for x, step in zip(tensors, steps, strict=True)]
    RowNorms(0.3).prox_(tensors, steps)
    torch.testing.assert_close(tensors, expected)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (torch.ones(3), r"broadcasts to x of shape \(2, 2\), got torch.float32 of shape \(3,\)"),
        (torch.ones(2, 2, 2), r"got torch.float32 of shape \(2, 2, 2\)"),
        (torch.ones(2, dtype=torch.long), "got torch.int64"),
        (torch.ones(2, dtype=torch.complex64), "got torch.complex64"),
        (torch.tensor([1.0, -2.0]), "got one with -2.0"),
        (torch.tensor([1.0, math.nan]), "got one with nan"),
        (torch.tensor([1.0, math.inf]), "got one with inf"),
    ],
    ids=str,
)
def test_bad_steps_are_refused_before_anything_changes(step: Tensor, message: str) -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="step must be a finite number >= 0, or a float tensor .*" + message):
        proxmo.L1(1.0).prox(x, step, out=x)
    assert torch.equal(x, torch.ones(2, 2))


@pytest.mark.parametrize("penalty", [proxmo.MCP(0.3, 2.0), proxmo.GroupL2(0.5), proxmo.GroupLInf(0.5)], ids=str)
def test_compiled_prox_equals_the_eager_one(penalty: proxmo.Penalty) -> None:
    x = noise((4, 5))
    step = steps_like(x, decades=2.0)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def prox_(x: Tensor, step: Tensor) -> Tensor:
        result = x.clone()
        with torch.no_grad():
            penalty.prox_([result], step)
        return result

    torch.testing.assert_close(prox_(x, step), penalty.prox(x, step))


LEVELS = [proxmo.Simplex, proxmo.L1Ball, proxmo.GroupLInf]


@pytest.mark.parametrize(
    ("make", "decades"),
    [*product([*LEVELS, proxmo.L2Ball, proxmo.GroupL2], [0.0, 8.0, 20.0, 40.0, 180.0])],
)
def test_steps_over_many_decades(make: Callable[..., proxmo.Penalty], decades: float) -> None:
    """On many groups at once, none of which may keep the others from ending."""
    penalty = make(1.0, dim=0)
    case = next(c for c in CASES if type(c.make(1.0)) is make)
    for seed in range(20):
        x = noise((50, 9), seed=seed)
        step = steps_like(x, seed=seed, decades=decades)
        assert_is_prox(case, penalty, penalty.prox(x, step), x, step)


@pytest.mark.parametrize("decades", [20.0, 180.0])
@pytest.mark.parametrize("length", [2, 9, 40])
def test_l2_ball_with_steps_over_many_decades_equals_exact_arithmetic(length: int, decades: float) -> None:
    for seed, radius in product(range(4), [1.0, 0.05]):
        x = noise((length,), seed=seed)
        step = steps_like(x, seed=seed, decades=decades)
        found, exact = proxmo.L2Ball(radius).prox(x, step), exact_l2_ball(x.tolist(), radius, step.tolist())
        torch.testing.assert_close(found, torch.tensor(exact, dtype=torch.float64), rtol=0, atol=1e-13)


def exact_l2_ball(x: list[float], radius: float, step: list[float]) -> list[float]:
    """Return x/(1 + θ·step) of norm ``radius``, with θ by bisection over its decades, in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        pairs = [(Decimal(a), Decimal(b)) for a, b in zip(x, step, strict=True)]

        def point(theta: Decimal) -> list[Decimal]:
            return [a / (1 + theta * b) for a, b in pairs]

        def excess(theta: Decimal) -> Decimal:
            return sum(a * a for a in point(theta)) - Decimal(radius) ** 2

        if excess(Decimal(0)) <= 0:
            return x
        low, high = Decimal("1e-300"), Decimal("1e300")
        for _ in range(250):
            middle = (low * high).sqrt()
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return list(map(float, point(high)))


def test_simplex_in_a_metric_that_all_but_fixes_an_element() -> None:
    x, step = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 1e-16], dtype=torch.float64)
    torch.testing.assert_close(proxmo.Simplex(1.5).prox(x, step), torch.tensor([0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(proxmo.L1Ball(1.5).prox(-x, step), torch.tensor([-0.5, -1.0], dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # where torch has no batching rule
@every_metric_case
def test_vmap_over_points_and_steps(case: Case) -> None:
    penalty, x = case.make(1.0), noise((4, 3, 2, 2))
    step = steps_like(x, decades=2.0)
    expected = torch.stack([penalty.prox(a, b) for a, b in zip(x, step, strict=True)])
    torch.testing.assert_close(torch.vmap(penalty.prox)(x, step), expected)


def test_one_step_per_group_stays_one_in_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    from proxmo.penalties import groups

    monkeypatch.setattr(groups, "secular_root", None)
    tensors = [noise((4, 6), seed=k) for k in range(3)]
    steps = [steps_like(torch.empty(4, 1), seed=k) for k in range(3)]
    expected = [proxmo.GroupL2(0.9).prox(x, step) for x, step in zip(tensors, steps, strict=True)]
    proxmo.GroupL2(0.9).prox_(tensors, steps)
    torch.testing.assert_close(tensors, expected)


@pytest.mark.parametrize(
    ("x", "step"), [([46.0, 30.0], [1.1e-12, 3e3]), ([600.0, 300.0], [1e-11, 3e4]), ([1e-18, 2e-18], [1e-10, 1.0])]
)
def test_groups_of_float32_with_steps_of_many_sizes_are_those_of_float64(x: list[float], step: list[float]) -> None:
    point, steps = torch.tensor([x]), torch.tensor([step])
    expected = proxmo.GroupL2(1.0).prox(point.double(), steps.double())
    torch.testing.assert_close(proxmo.GroupL2(1.0).prox(point, steps).double(), expected, rtol=1e-5, atol=1e-5 * max(x))
