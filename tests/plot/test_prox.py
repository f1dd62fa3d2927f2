"""plot.prox: every penalty is drawn, as its value and its prox say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver
from torch import Tensor

import proxmo
from proxmo import plot

Tensors = Callable[[float, float], Tensor]


class Drawn(NamedTuple):
    """A penalty, the tensors that it gets for two weights, and its picture."""

    penalty: proxmo.Penalty
    tensor: Tensors
    line: Axes
    plane: Axes


def vector(a: float, b: float) -> Tensor:
    return torch.tensor([a, b], dtype=torch.float64)


def group(a: float, b: float) -> Tensor:
    return vector(a, b)[None]


def two_groups(a: float, b: float) -> Tensor:
    return vector(a, b)[:, None]


def diagonal(a: float, b: float) -> Tensor:
    return vector(a, b).diag()


CASES: list[tuple[proxmo.Penalty, Tensors]] = [
    (proxmo.L1(0.5), vector),
    (proxmo.SquaredL2(2.0), vector),
    (proxmo.ElasticNet(0.5, 1.0), vector),
    (proxmo.L0(1.0), vector),
    (proxmo.MCP(0.1), vector),
    (proxmo.SCAD(1.0), vector),
    (proxmo.LHalf(1.0), vector),
    (proxmo.Huber(1.0, 0.5), vector),
    (proxmo.GroupL2(0.01), group),
    (proxmo.GroupL2(1.0, dim=-1), two_groups),
    (proxmo.GroupL2(1.0, dim=(0, 2)), lambda a, b: vector(a, b)[None, :, None]),
    (proxmo.GroupL2(1.0, dim=()), vector),
    (proxmo.GroupLInf(1.0), group),
    (proxmo.SparseGroup(0.5, 0.5), group),
    (proxmo.Nuclear(1.0), diagonal),
    (proxmo.Trimmed(proxmo.L1(1.0), 0.1), vector),
    (proxmo.Trimmed(proxmo.GroupL2(1.0), 1), two_groups),
    (proxmo.Box(-0.5, 0.8), vector),
    (proxmo.Box(1.0, math.inf), vector),
    (proxmo.NonNegative(), vector),
    (proxmo.L1Ball(2.0), vector),
    (proxmo.L2Ball(0.5, dim=0), group),
    (proxmo.LInfBall(1.0), vector),
    (proxmo.Simplex(), vector),
    (proxmo.TopK(1), vector),
    (proxmo.NM(1, 2), vector),
    (proxmo.Rank(1), diagonal),
    (proxmo.NuclearBall(1.0), diagonal),
]
FLAT: list[proxmo.Penalty] = [proxmo.L1(0.0), proxmo.TopK(5), proxmo.L2Ball(0.0), proxmo.Trimmed(proxmo.L1(1.0), 1.0)]
IDS = [str(penalty) for penalty, _ in CASES]


def prox_curve(line: Any) -> tuple[np.ndarray, np.ndarray]:
    return next(curve.get_data() for curve in line.lines if len(curve.get_xdata()) > 2)


def penalty_curve(line: Any) -> tuple[np.ndarray, np.ndarray]:
    (twin,) = (ax for ax in line.figure.axes if ax.bbox.bounds == line.bbox.bounds and ax is not line)
    return twin.lines[0].get_data()


def test_every_penalty_is_a_case() -> None:
    public = [getattr(proxmo, name) for name in proxmo.__all__]
    penalties = {x for x in public if isinstance(x, type) and issubclass(x, proxmo.Penalty)}
    assert {type(penalty) for penalty, _ in CASES} == penalties - {proxmo.Penalty, proxmo.Constraint}


STEP = 0.7


@pytest.fixture(scope="module", params=CASES, ids=IDS)
def drawn(request: pytest.FixtureRequest) -> Drawn:
    penalty, tensor = request.param
    return Drawn(penalty, tensor, *plot.prox(penalty, step=STEP))


def test_curves_are_the_prox_and_the_penalty(drawn: Drawn) -> None:
    penalty, tensor, line, _ = drawn
    _, _, number = line.get_xlabel().partition(" beside ")
    second = float(number or 0) if not isinstance(penalty, proxmo.Box) else penalty.low
    x, y = prox_curve(line)
    for point, near in list(zip(x, y, strict=True))[::10]:
        expected = penalty.prox(tensor(point, second), STEP).flatten()[0]
        assert math.isnan(near) or near == pytest.approx(float(expected), abs=1e-12)
    assert np.isnan(y).sum() <= 2
    x, y = penalty_curve(line)
    for point, value in list(zip(x, y, strict=True))[::10]:
        expected = float(penalty.value(tensor(point, second)))
        assert value == pytest.approx(expected) if math.isfinite(expected) else math.isnan(value)
    assert np.isfinite(y).any()


def test_arrows_lead_to_the_prox(drawn: Drawn) -> None:
    penalty, tensor, _, plane = drawn
    (arrows,) = (found for found in plane.collections if isinstance(found, Quiver))
    for (a, b), u, v in list(zip(arrows.XY, arrows.U, arrows.V, strict=True))[::7]:
        near = penalty.prox(tensor(a, b), STEP).flatten()
        assert (a + u, b + v) == pytest.approx((float(near[0]), float(near[-1])), abs=1e-12)


def test_border_has_the_level_or_lies_in_the_set(drawn: Drawn) -> None:
    penalty, tensor, _, plane = drawn
    if isinstance(penalty, proxmo.Constraint):
        points = np.stack(plane.lines[0].get_data(), axis=1)[::17]
        assert all(float(penalty.value(tensor(*point))) == 0 for point in points)
    elif not isinstance(penalty, proxmo.L0):  # whose level is that of a jump, at the axes
        level = float(plane.get_title("right").removeprefix("ψ ≤ "))
        (border,) = (c for c in plane.collections if isinstance(c, ContourSet) and max(c.get_linewidths()) > 2)
        points = np.concatenate([path.vertices for path in border.get_paths()])[::7]
        assert np.allclose([float(penalty.value(tensor(*point))) for point in points], level, rtol=0.05)


def test_default_step_and_window_follow_the_strength() -> None:
    for strength in (1e-3, 1.0, 1e3):
        line, plane = plot.prox(proxmo.L1(strength))
        assert line.get_ylabel() == f"prox, step {1 / (2 * strength**2):.3g}"
        assert plane.get_xlim()[1] == pytest.approx(1.75 / strength, rel=5e-3)


@pytest.mark.parametrize("penalty", FLAT, ids=str)
def test_penalties_that_do_nothing_or_everything_are_drawn(penalty: proxmo.Penalty) -> None:
    line, plane = plot.prox(penalty)
    line.figure.canvas.draw()
    assert plane.get_title("right")


@pytest.mark.parametrize(("penalty", "flat"), [(proxmo.MCP(1.0), 3.0), (proxmo.SCAD(1.0), 3.7)], ids=str)
def test_window_shows_where_large_weights_are_not_shrunk(penalty: proxmo.Penalty, flat: float) -> None:
    line, plane = plot.prox(penalty)
    assert flat < line.get_xlim()[1] == plane.get_xlim()[1] < 1.5 * flat
    far = plot.prox(proxmo.MCP(1.0, concavity=1000.0))[0]
    assert far.get_xlim()[1] < 3  # the unit ball would be a dot beside it


def test_groups_along_first_and_last_axis_are_drawn() -> None:
    assert plot.prox(proxmo.GroupL2(1.0, dim=(0, -1)))[0].get_title("left") == "GroupL2(1, dim=(0, -1))"


@pytest.mark.parametrize("strength", [100.0, 1.0, 1e-4])
def test_numbers_at_the_axes_do_not_touch(strength: float) -> None:
    line, plane = plot.prox(proxmo.L1(strength))
    line.figure.canvas.draw()
    for ax in (line, plane):
        boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
        shown = sorted((box.x0, box.x1) for box in boxes)
        assert all(before[1] < after[0] for before, after in pairwise(shown))


def test_many_places_leave_the_last_one_to_two_weights() -> None:
    line, _ = plot.prox(proxmo.NM(2, 4))
    x, y = prox_curve(line)
    assert np.allclose(y[np.abs(x) < 0.9], 0)
    assert np.allclose(y[np.abs(x) > 1.1], x[np.abs(x) > 1.1])


def test_titles_name_the_penalty_as_one_writes_it() -> None:
    for penalty, title in [
        (proxmo.Trimmed(proxmo.GroupL2(0.1, dim=1), 0.25), "Trimmed(GroupL2(0.1, dim=1), 0.25)"),
        (proxmo.Box(-0.5, 0.8), "Box(-0.5, 0.8)"),
        (proxmo.Simplex(), "Simplex()"),
    ]:
        assert plot.prox(penalty)[0].get_title("left") == title


@dataclass
class Anchor(proxmo.Penalty):
    """A penalty that looks at its values, and is smallest at 1."""

    strength: float
    convex = separable = elementwise_step = True

    def _value(self, x: Tensor) -> Tensor:
        return x.new_tensor(self.strength / 2 * sum((float(one) - 1) ** 2 for one in x.flatten()))

    def _prox(self, x: Tensor, step: Any, out: Tensor | None) -> Tensor:
        return (x + step * self.strength) / (1 + step * self.strength)


def test_penalty_of_a_user_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxmo.plot.penalties.GRID", 21)
    line, _ = plot.prox(Anchor(1.0), step=1.0)
    x, y = prox_curve(line)
    assert np.allclose(y, (x + 1) / 2)


def test_draws_on_the_axes_that_it_is_given() -> None:
    figure = Figure()
    axes = figure.subplots(2, 1)
    drawn = plot.prox(proxmo.L1(1.0), ax=axes)
    assert list(drawn) == list(axes)
    assert plt.get_fignums() == []


def test_opens_one_figure_without_axes() -> None:
    axes = plot.prox(proxmo.L1(1.0))
    assert axes.shape == (2,)
    assert [plt.figure(number) for number in plt.get_fignums()] == [axes[0].figure]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"penalty": 0.1}, TypeError, "penalty must be a proxmo.Penalty, got float"),
        ({"step": 0.0}, ValueError, "step must be a finite number > 0, got 0.0"),
        ({"ax": Figure().subplots()}, TypeError, r"ax must be 2 Axes of matplotlib, for one weight, two weights, got"),
        ({"ax": "left"}, TypeError, "ax must be 2 Axes of matplotlib"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plot.prox(**{"penalty": proxmo.L1(1.0), **arguments})
    assert plt.get_fignums() == []


def test_penalty_of_other_shapes_is_refused() -> None:
    @dataclass
    class Triples(Anchor):
        def check(self, x: Tensor) -> None:
            if x.numel() != 3:
                raise ValueError("three weights are needed")

    with pytest.raises(ValueError, match=r"penalty must take a vector of two weights.*three weights are needed"):
        plot.prox(Triples(1.0))
