"""The root-finder: Newton's method and sorting agree with each other and with a float64 reference."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import proxmo
from penalties import references
from proxmo.penalties import thresholds
from proxmo.penalties.axes import Groups

ROWS = {
    "normal": lambda g: torch.randn(64, 300, generator=g),
    "equal": lambda g: torch.ones(64, 300),
    "one large": lambda g: torch.cat([torch.full((64, 1), 1e6), torch.rand(64, 299, generator=g)], dim=1),
    "geometric": lambda g: torch.logspace(-30, 0, 300).expand(64, 300).clone(),
    "heavy tails": lambda g: torch.randn(64, 300, generator=g).pow(-3),
    "close together": lambda g: 1e6 + torch.rand(64, 300, generator=g),
    "many ties": lambda g: torch.randint(0, 3, (64, 300), generator=g).float(),
    "equal, rounded": lambda g: torch.full((64, 300), 123.456),
    "a few roundings apart": lambda g: 1.7 + torch.arange(300.0).expand(64, 300) % 3 * 2**-22,
}


def below_top(y: Tensor) -> Groups:
    """Return the rows of a matrix as groups, after subtracting from each its largest element."""
    return Groups(y - y.amax(1, keepdim=True), dim=0)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("radius", [0.0, 1e-12, 1e-3, 1.0, 50.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_newton_sort_and_reference_agree(kind: str, radius: float, dtype: torch.dtype) -> None:
    rows = below_top(ROWS[kind](torch.Generator().manual_seed(1)).to(dtype))
    y = rows.elements
    newton = thresholds._depth_by_newton(y, radius, rows)
    sort = thresholds._depth_by_sort(y, radius, rows)
    rounding = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(newton, sort, rtol=rounding, atol=0)
    exact = np.stack([references.simplex(row, radius) for row in rows.tensor[:3].double().numpy()])
    found = thresholds.project_simplex(y, radius, rows)[:3].double()
    torch.testing.assert_close(found, torch.from_numpy(exact), rtol=0, atol=rounding * radius)
    torch.testing.assert_close(found.sum(1), torch.full((3,), radius, dtype=torch.float64), rtol=rounding, atol=0)


@given(
    y=hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.floats(-1e6, 1e6, width=32)),
    radius=st.floats(1e-6, 1e6),
)
def test_depths_solve_their_equation(y: np.ndarray, radius: float) -> None:
    rows = below_top(torch.from_numpy(y))
    for find in (thresholds._depth_by_newton, thresholds._depth_by_sort):
        depth = find(rows.elements, radius, rows)
        total = (rows.elements + depth).clamp(min=0).sum(rows.axes)
        torch.testing.assert_close(total, torch.full_like(total, radius), rtol=1e-9, atol=0)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sorting_in_numpy_equals_sorting_in_torch(length: int, dtype: torch.dtype) -> None:
    y = torch.randn(50, length, generator=torch.Generator().manual_seed(2), dtype=dtype)
    y[:10] = y[:10].round()  # ties
    y[10, -1], y[11, -1] = math.nan, math.inf
    rows = below_top(y)
    in_numpy = thresholds._depth_by_sort(rows.elements, 0.7, rows)
    in_torch = thresholds._depth_by_sort(rows.elements, torch.tensor(0.7, dtype=torch.float64), rows)
    torch.testing.assert_close(in_numpy, in_torch, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
    assert in_numpy.isnan().flatten().nonzero().flatten().tolist() == [10, 11]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("share", [1e-4, 0.1, 0.9])
def test_projections_of_long_groups_equal_the_reference(share: float, fused: bool) -> None:
    x = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    radius = share * float(x[0].abs().sum())
    for penalty, reference in (
        (proxmo.L1Ball(radius, dim=0), references.l1_ball),
        (proxmo.Simplex(radius, dim=0), references.simplex),
    ):
        found = penalty.prox(x, 1.0, fused=fused).double().numpy()
        exact = np.stack([reference(row, radius) for row in x.double().numpy()])
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


def exact_level(values: list[Fraction], radius: float) -> Fraction:
    """Return the level at which Σ max(value − level, 0) is the radius, in exact arithmetic."""
    total, level = Fraction(0), max(values) - Fraction(radius)
    for count, value in enumerate(sorted(values, reverse=True), 1):
        if value <= level:
            break
        total += value
        level = (total - Fraction(radius)) / count
    return level


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("radius", [0.0, 1e-12, 1e-3, 1.0, 50.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_fused_prox_is_exact_if_the_blocks_of_a_row_differ(kind: str, radius: float, dtype: torch.dtype) -> None:
    """The kernel skips blocks with nothing above the level."""
    row = ROWS[kind](torch.Generator().manual_seed(1))[0].to(dtype)
    x = torch.cat([row * 0.01, row * 0.5, -row * 0.3, row, row * 0.9, -row * 1e-3]).repeat(2, 1)  # four blocks
    rounding = 1e-6 if dtype == torch.float32 else 1e-13
    fractions = list(map(Fraction, x[0].tolist()))
    level, level_of_magnitudes = exact_level(fractions, radius), exact_level(list(map(abs, fractions)), radius)
    inside = sum(map(abs, fractions)) <= radius
    lowered = [max(abs(f) - level_of_magnitudes, 0) * (1 if f > 0 else -1) for f in fractions]
    for penalty, exact, bound in (
        (proxmo.Simplex(radius, dim=0), [max(f - level, 0) for f in fractions], rounding * radius),
        (proxmo.L1Ball(radius, dim=0), fractions if inside else lowered, 0.0 if inside else rounding * radius),
        (
            proxmo.GroupLInf(radius),
            [Fraction(0) if inside else f - low for f, low in zip(fractions, lowered, strict=True)],
            rounding * float(x.abs().max()),
        ),
    ):
        found = penalty.prox(x, 1.0, fused=True)
        expected = torch.tensor(list(map(float, exact)), dtype=torch.float64)
        torch.testing.assert_close(found[1].double(), expected, rtol=0, atol=bound)
        assert torch.equal(penalty.prox(x, 1.0, out=x.clone(), fused=True), found)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("length", [5, 163, 600, 2999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_projections_of_nearly_equal_elements_sum_to_the_radius(dtype: torch.dtype, length: int, fused: bool) -> None:
    eps = torch.finfo(dtype).eps
    for height in (123.456, 1.128782e7, 1.7):
        x = height * (1 + torch.arange(length, dtype=dtype) % 4 * eps)
        for radius in (height * eps, 10 * height * eps, 1e-3 * height):
            for penalty in (proxmo.Simplex(radius), proxmo.L1Ball(radius)):
                total = float(penalty.prox(x, 1.0, fused=fused).double().sum())
                assert total == pytest.approx(radius, rel=16 * eps)


@pytest.mark.parametrize("fused", [False, True])
def test_simplex_projection_is_right_if_sums_overflow_in_both_directions(fused: bool) -> None:
    h = 3e38
    for row in ([h, -h] * 300, [h] * 512 + [-h] * 512, [h] * 600 + [-math.inf] * 10):
        found = proxmo.Simplex(1.0).prox(torch.tensor(row), 1.0, fused=fused)
        assert float(found.sum()) == pytest.approx(1.0)
    assert bool(proxmo.Simplex(1.0).prox(torch.tensor([h, -h, math.nan]), 1.0, fused=fused).isnan().all())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [(50, 10), (20, 90), (30, 600)], ids=str)
@pytest.mark.parametrize("penalty", [proxmo.Simplex(2.0, dim=0), proxmo.L1Ball(2.0, dim=0), proxmo.Simplex()], ids=str)
def test_repeated_projection_keeps_the_zeros(penalty: proxmo.Penalty, shape: tuple[int, int], fused: bool) -> None:
    once = penalty.prox(torch.randn(shape, generator=torch.Generator().manual_seed(0)), 1.0, fused=fused)
    again = once
    for _ in range(5):
        again = penalty.prox(again, 1.0, fused=fused)
    assert (once == 0).sum() > 0.5 * once.numel()
    assert torch.equal(once == 0, again == 0)
    torch.testing.assert_close(again, once, rtol=0, atol=1e-6)


def test_short_rows_are_sorted_and_long_rows_use_newton(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for name in ("_depth_by_newton", "_depth_by_sort"):
        method = getattr(thresholds, name)
        monkeypatch.setattr(
            thresholds, name, lambda *args, method=method, name=name: (used.append(name), method(*args))[1]
        )
    for shape in [(1000, 10), (10, 100), (100, 1000)]:
        groups = Groups(torch.rand(shape), dim=0)
        thresholds.cap(groups.elements, 1.0, groups)
    assert used == ["_depth_by_sort", "_depth_by_sort", "_depth_by_newton"]
