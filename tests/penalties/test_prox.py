"""Every value and prox against its reference, its optimality condition and its claims."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import proxmo
from penalties.cases import CASES, CONVEX, NON_CONVEX, Case, assert_is_prox, objective, reference

# Round numbers among arbitrary ones, so that ties, zeros, equal rows and entries at a threshold all occur.
entries = st.one_of(st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 0.7, 2.0]), st.floats(-3, 3, width=32))
steps = st.sampled_from([0.05, 0.5, 1.0, 1.4, 2.5, 30.0])
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_convex_case = pytest.mark.parametrize("case", CONVEX, ids=str)


def tensors(axes: int, *, dtype: type = np.float64) -> st.SearchStrategy[Tensor]:
    shapes = st.lists(st.integers(1, 3), min_size=axes, max_size=max(axes, 3)).map(tuple)
    return hnp.arrays(dtype, shapes, elements=entries).map(torch.from_numpy)


@every_case
@given(data=st.data(), step=steps, dtype=st.sampled_from([np.float64, np.float32]))
def test_prox_equals_the_reference(case: Case, data: st.DataObject, step: float, dtype: type) -> None:
    x = data.draw(tensors(case.axes, dtype=dtype))
    penalty = case.make(1.0)
    assert_is_prox(case, penalty, penalty.prox(x, step), x, step)


@every_case
@given(data=st.data())
def test_value_equals_the_reference(case: Case, data: st.DataObject) -> None:
    x = data.draw(tensors(case.axes))
    penalty = case.make(1.0)
    if isinstance(penalty, proxmo.Constraint):
        x = penalty.prox(x, 1.0)
    expected = torch.tensor(case.value(penalty, x.numpy()), dtype=torch.float64)
    torch.testing.assert_close(penalty.value(x), expected, rtol=1e-12, atol=1e-12)


@every_convex_case
@given(data=st.data(), step=steps)
def test_convex_prox_satisfies_the_three_point_inequality(case: Case, data: st.DataObject, step: float) -> None:
    """For all u: ψ(p) + ‖p−x‖²/2t + ‖u−p‖²/2t ≤ ψ(u) + ‖u−x‖²/2t. This is what makes p the prox of x."""
    x = data.draw(tensors(case.axes))
    u = data.draw(hnp.arrays(np.float64, tuple(x.shape), elements=entries).map(torch.from_numpy))
    penalty = case.make(1.0)
    if isinstance(penalty, proxmo.Constraint):
        u = reference(case, penalty, u, 1.0)  # a point of the set
    p = penalty.prox(x, step)
    left = objective(case, penalty, p, x, step) + float((u - p).square().sum()) / (2 * step)
    right = objective(case, penalty, u, x, step)
    assert left <= right + 1e-9 * (1 + right)


@every_convex_case
@given(data=st.data(), step=steps)
def test_convex_prox_is_firmly_nonexpansive(case: Case, data: st.DataObject, step: float) -> None:
    x = data.draw(tensors(case.axes))
    y = data.draw(hnp.arrays(np.float64, tuple(x.shape), elements=entries).map(torch.from_numpy))
    penalty = case.make(1.0)
    moved = penalty.prox(x, step) - penalty.prox(y, step)
    assert float(moved.square().sum()) <= float((moved * (x - y)).sum()) + 1e-11


@every_convex_case
@given(data=st.data(), weight=st.floats(0, 1))
def test_convex_value_lies_below_its_chords(case: Case, data: st.DataObject, weight: float) -> None:
    x = data.draw(tensors(case.axes))
    y = data.draw(hnp.arrays(np.float64, tuple(x.shape), elements=entries).map(torch.from_numpy))
    penalty = case.make(1.0)
    if isinstance(penalty, proxmo.Constraint):
        x, y = penalty.prox(x, 1.0), penalty.prox(y, 1.0)
    between = penalty.value(weight * x + (1 - weight) * y)
    assert between <= weight * penalty.value(x) + (1 - weight) * penalty.value(y) + 1e-12


@pytest.mark.parametrize("case", NON_CONVEX, ids=str)
def test_non_convex_value_rises_above_a_chord(case: Case) -> None:
    penalty = case.make(1.0)
    generator = torch.Generator().manual_seed(0)

    def gap() -> Tensor:
        x, y = (penalty.prox(torch.randn(2, 3, 2, generator=generator) * 2, 0.5) for _ in range(2))
        return penalty.value((x + y) / 2) - (penalty.value(x) + penalty.value(y)) / 2

    assert max(gap() for _ in range(50)) > 1e-3


@pytest.mark.parametrize("case", [case for case in NON_CONVEX if case.make(1.0).separable], ids=str)
@given(x=st.floats(-6, 6), step=st.floats(0.01, 20))
def test_non_convex_prox_beats_every_point_of_a_fine_grid(case: Case, x: float, step: float) -> None:
    penalty = case.make(1.0)
    point = torch.tensor([x], dtype=torch.float64)
    reached = objective(case, penalty, penalty.prox(point, step), point, step)
    grid = torch.linspace(-abs(x), abs(x), 2001, dtype=torch.float64)
    values = torch.tensor([case.value(penalty, u.reshape(1).numpy()) for u in grid], dtype=torch.float64)
    possible = float((values + (grid - x).square() / (2 * step)).min())
    assert reached <= possible + 1e-12 * (1 + possible)


@pytest.mark.parametrize("case", [case for case in CASES if case.make(1.0).separable], ids=str)
@given(data=st.data(), step=steps)
def test_separable_prox_acts_on_each_element_alone(case: Case, data: st.DataObject, step: float) -> None:
    x = data.draw(tensors(1))
    penalty = case.make(1.0)
    alone = torch.stack([penalty.prox(entry, step) for entry in x.flatten()]).reshape(x.shape)
    assert torch.equal(penalty.prox(x, step), alone)
    values = torch.stack([penalty.value(entry) for entry in x.flatten()])
    torch.testing.assert_close(penalty.value(x), values.sum())


@pytest.mark.parametrize("case", [case for case in CASES if not case.make(1.0).separable], ids=str)
def test_non_separable_prox_depends_on_other_elements(case: Case) -> None:
    penalty = case.make(1.0)
    x = torch.tensor([[[2.0, 1.0], [-1.0, 0.4]], [[2.2, -2.0], [0.3, 1.1]]], dtype=torch.float64)
    larger = x.clone()
    larger[0, 1, 1] = 5.0
    changed = (penalty.prox(x, 0.5) - penalty.prox(larger, 0.5)).abs() > 1e-9
    changed[0, 1, 1] = False
    assert changed.any()


@pytest.mark.parametrize(
    ("penalty", "dual_ball"),
    [
        (proxmo.L1(1.0), proxmo.LInfBall(1.0)),
        (proxmo.GroupL2(1.0, dim=0), proxmo.L2Ball(1.0, dim=0)),
        (proxmo.GroupLInf(1.0, dim=0), proxmo.L1Ball(1.0, dim=0)),
        (proxmo.GroupLInf(1.0, dim=()), proxmo.L1Ball(1.0)),
        (proxmo.GroupL2(1.0, dim=(0, 1)), proxmo.L2Ball(1.0, dim=(0, 1))),
    ],
    ids=str,
)
@given(data=st.data(), step=steps)
def test_moreau_identity_holds_for_norms(
    penalty: proxmo.Penalty, dual_ball: proxmo.Penalty, data: st.DataObject, step: float
) -> None:
    """The prox of a norm and the projection onto its dual ball add up to x: x = prox(x) + step·project(x/step)."""
    x = data.draw(tensors(2))
    total = penalty.prox(x, step) + step * dual_ball.prox(x / step, 1.0)
    torch.testing.assert_close(total, x, rtol=1e-12, atol=1e-12)


@given(x=tensors(0))
def test_moreau_identity_holds_for_the_nonnegative_cone(x: Tensor) -> None:
    positive = proxmo.NonNegative()
    assert torch.equal(positive.prox(x, 1.0) - positive.prox(-x, 1.0), x)


@given(x=tensors(0), step=steps)
def test_moreau_identity_holds_for_the_square(x: Tensor, step: float) -> None:
    """ψ = s/2·‖x‖² has the conjugate ‖x‖²/(2s)."""
    strength = 0.7
    conjugate = proxmo.SquaredL2(1 / strength).prox(x / step, 1 / step)
    torch.testing.assert_close(proxmo.SquaredL2(strength).prox(x, step) + step * conjugate, x)
