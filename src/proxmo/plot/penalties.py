"""A penalty and its prox: as functions of one weight, and on the plane of two."""

from __future__ import annotations

from dataclasses import MISSING, fields
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from proxmo import checks
from proxmo.penalties import NM, Constraint, Nuclear, NuclearBall, Penalty, Rank, Trimmed
from proxmo.penalties.kinds import SumOverGroups
from proxmo.plot.style import BLUE, GREY, ORANGE, AxesArray, several_axes, tidy

Array = NDArray[np.float64]

POINTS = 201  # of a curve
GRID = 121  # points along each side of the plane, for level sets
SET_GRID = 41  # the same for sets, whose points are projections, which take longer
ARROWS = 9  # along each side of the plane
VIEW = 1.75  # half of the width of the picture, in units of the radius of the ball
WIDEST = 8.0  # the same at most, where the picture also shows from where on a penalty is constant
FAR = 1e6


def prox(penalty: Penalty, step: float | None = None, *, ax: Any = None) -> AxesArray:
    """Draw a penalty ψ and its prox: on the left as functions of one weight, on the right on the plane of two.

    Left, the prox in blue and ψ in orange; the second weight is 0, or for penalties that rank weights the number at
    the axis. Right, the unit ball ψ ≤ 1 in orange (a smaller level if ψ stays below 1), or the set of a constraint;
    arrows lead from points to their prox. The two weights are one group of a group penalty, two groups of a trimmed
    one, the diagonal of a matrix for penalties on singular values, and compete for the last free place of `NM`.

    Args:
        penalty: any penalty or constraint that takes a vector of two weights.
        step: the step of the prox, > 0; by default one that suits the size of the ball. The label of the axis has it.
        ax: two Axes to draw on.

    Returns:
        An array of two Axes.

    >>> import proxmo
    >>> line, plane = prox(proxmo.GroupL2(1.0), step=0.5)
    >>> line.get_title("left"), line.get_ylabel()
    ('GroupL2(1)', 'prox, step 0.5')
    """
    if not isinstance(penalty, Penalty):
        raise TypeError(f"penalty must be a proxmo.Penalty, got {type(penalty).__name__}")
    plane = _Plane.of(penalty)
    view = _View.of(plane) if step is None else _View.of(plane)._replace(step=checks.more_than(0, "step", step))
    line, square = several_axes(ax, ("one weight", "two weights"), rows=1, height=2.5)
    _draw_line(line, plane, view)
    _draw_plane(square, plane, view)
    return np.array([line, square], dtype=object)


class _Plane(NamedTuple):
    """The tensors that a penalty sees where two weights vary."""

    penalty: Penalty
    shape: tuple[int, ...]
    entries: tuple[int, int]
    """Where the two weights are in the flat tensor."""
    taken: int = 0
    """How many of the entries after the first two are large; all others are 0."""

    @classmethod
    def of(cls, penalty: Penalty) -> _Plane:
        taken = min(penalty.n, penalty.m - 1) - 1 if isinstance(penalty, NM) else 0
        plane = cls(penalty, *_two_weights(penalty), max(taken, 0))
        try:
            plane.values(np.zeros((1, 2)))
            plane.prox(np.zeros((1, 2)), 1.0)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"penalty must take a vector of two weights to be drawn, got {penalty}: {error}"
            ) from error
        return plane

    def values(self, points: Array) -> Array:
        """Return ψ at points of the plane, one in each row."""
        tensors = self._tensors(points)
        try:
            found = torch.vmap(self.penalty.value)(tensors)
        except RuntimeError:  # a penalty of a user may look at its values, which vmap does not allow
            found = torch.stack([self.penalty.value(x) for x in tensors])
        return np.asarray(found.numpy(), dtype=np.float64)

    def prox(self, points: Array, step: float) -> Array:
        """Return the prox of points of the plane, one in each row."""
        found = torch.stack([self.penalty.prox(x, step) for x in self._tensors(points)])
        return np.asarray(found.flatten(1)[:, list(self.entries)].numpy(), dtype=np.float64)

    def _tensors(self, points: Array) -> Tensor:
        flat = torch.zeros(len(points), *self.shape, dtype=torch.float64).flatten(1)
        flat[:, 2 : 2 + self.taken] = FAR
        flat[:, list(self.entries)] = torch.from_numpy(points)
        return flat.reshape(len(points), *self.shape)


def _two_weights(penalty: Penalty) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return a shape and the two entries of it that vary."""
    if isinstance(penalty, NM):
        return (max(2, penalty.m),), (0, 1)
    if isinstance(penalty, (Nuclear, NuclearBall, Rank)):
        shape, _ = _shape(penalty.dim, 2, 2)
        return shape, (0, 3)
    if isinstance(penalty, Trimmed) and isinstance(penalty.penalty, SumOverGroups):
        return _shape(penalty.penalty.dim, 2, 1)
    if isinstance(penalty, SumOverGroups):
        return _shape(penalty.dim, 1, 2)
    return (2,), (0, 1)


def _shape(dim: checks.Dim, groups: int, length: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the shape with so many groups along the first axis of ``dim``, and so many elements along another."""
    axes = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    least = 2 + max([axis if axis >= 0 else -axis - 1 for axis in axes], default=-1)
    size = next(n for n in count(least) if len({axis % n for axis in axes}) == len(axes) < n)  # one axis is free
    outer = [axis % size for axis in axes]
    free = next(axis for axis in range(size) if axis not in outer)
    sizes = {free: length, **({outer[0]: groups} if outer else {})}
    return tuple(sizes.get(axis, 1) for axis in range(size)), (0, 1)


class _View(NamedTuple):
    """How much of the plane to draw, which level set, and with which step."""

    radius: float
    level: float | None
    step: float
    flat: float = 0.0
    """Where ψ becomes constant along an axis; 0 if it does not, or at 0."""

    @classmethod
    def of(cls, plane: _Plane) -> _View:
        if isinstance(plane.penalty, Constraint):
            return cls(_radius_of_set(plane), None, 1.0)
        return _view_of_ball(plane)

    @property
    def limit(self) -> float:
        """The largest coordinate of the picture."""
        narrow, wide = VIEW * self.radius, 1.2 * self.flat
        return wide if narrow < wide < WIDEST * self.radius else narrow


def _radius_of_set(plane: _Plane) -> float:
    """Return the largest coordinate of projections of far points that did not stay far; 1 if it is 0."""
    far = FAR * np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1], [1, 1], [-1, -1]])
    found = np.abs(plane.prox(far, 1.0))
    return float(found[found < FAR / 2].max(initial=0.0)) or 1.0


def _view_of_ball(plane: _Plane) -> _View:
    """Return a view of the points with ψ ≤ 1, or at most 3/4 of its largest value if that is below 1."""
    sizes = 2.0 ** np.arange(-30, 31, 0.5)
    rays = np.array([[1.0, 0.0], [1.0, 1.0]])
    along = [plane.values(np.outer(sizes, ray)) for ray in rays]
    largest = max(values.max() for values in along)
    if largest == 0:
        return _View(1.0, None, 1.0)
    level = 1.0 if largest >= 1 else 0.75 * largest
    ray = next(ray for ray, values in zip(rays, along, strict=True) if values.max() >= level)
    radius = _first_size(plane, ray, sizes, level) or 1.0  # at 0, ψ jumps there, and any radius would do
    # For norms the prox moves points by half of the radius, and for ℓ0 it zeroes weights below the radius.
    step = radius**2 / (2 * float(plane.values(radius * ray[None])[0]))
    highest = along[0].max() * (1 - 1e-9)
    rises_to_the_end = along[0][-2] < highest
    return _View(radius, level, step, 0.0 if rises_to_the_end else _first_size(plane, rays[0], sizes, highest))


def _first_size(plane: _Plane, ray: Array, sizes: Array, level: float) -> float:
    """Return how far along a ray ψ reaches a level; 0 if it does before the first size."""
    first = int((plane.values(np.outer(sizes, ray)) >= level).argmax())
    if first == 0:
        return 0.0
    between = np.linspace(sizes[first - 1], sizes[first], 1000)
    return float(between[(plane.values(np.outer(between, ray)) >= level).argmax()])


def _draw_line(ax: Axes, plane: _Plane, view: _View) -> None:
    penalty, limit = plane.penalty, view.limit
    ranks = not (penalty.convex or penalty.separable)
    x = _symmetric(limit, POINTS)
    second = view.radius if ranks else 0.0
    if isinstance(penalty, Constraint) and penalty.separable:  # 0 may be outside
        second = plane.prox(np.zeros((1, 2)), 1.0)[0, 1]
    points = np.stack([x, np.full_like(x, second)], axis=1)
    near = plane.prox(points, view.step)
    jumps = np.abs(np.diff(near[:, 0])) > 8 * np.diff(x)
    ax.axline((0, 0), slope=1, color=GREY, linewidth=1, linestyle=":")
    ax.plot(x, np.where(np.append(jumps, False), np.nan, near[:, 0]), color=BLUE, linewidth=2.5)
    ax.set(xlim=(-limit, limit), ylim=(-limit, limit))
    ax.set_title(_short(penalty), loc="left")
    ax.set_xlabel(f"weight beside {view.radius:.3g}" if ranks else "weight")
    ax.set_ylabel("prox" if isinstance(penalty, Constraint) else f"prox, step {view.step:.3g}", color=BLUE)
    _set_ticks(ax)
    twin = ax.twinx()
    ax.set_zorder(twin.get_zorder() + 1)  # the prox lies above the penalty
    ax.patch.set_visible(False)
    if isinstance(penalty, Constraint):  # a set may lie between the points
        points = np.unique(np.concatenate([points, near[near[:, 1] == points[:, 1]]]), axis=0)
    _draw_values(twin, plane, points)
    for spines in (ax.spines, twin.spines):
        spines["top"].set_visible(False)


def _set_ticks(ax: Axes) -> None:
    """Label few numbers, short ones on the horizontal axis, where long ones would touch."""
    ax.locator_params(nbins=3)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-1, 3))


def _draw_values(ax: Axes, plane: _Plane, points: Array) -> None:
    """Draw ψ, with its zero at the height of that of the prox; outside of a set nothing."""
    values = plane.values(points)
    inside = np.isfinite(values)
    alone = inside.sum() == 1
    ax.plot(
        points[:, 0],
        np.where(inside, values, np.nan),
        color=ORANGE,
        linewidth=2.5,
        marker="o" if alone else "",
        markersize=8,
    )
    largest = values[inside].max(initial=0.0) or 1.0
    ax.set_ylim(-1.3 * largest, 1.3 * largest)
    constraint = isinstance(plane.penalty, Constraint)
    ticks = [0.0] if constraint else MaxNLocator(3).tick_values(0, largest)
    ax.set_yticks([tick for tick in ticks if 0 <= tick <= 1.3 * largest])
    ax.set_ylabel("ψ, ∞ outside" if constraint else "ψ", color=ORANGE)


def _draw_plane(ax: Axes, plane: _Plane, view: _View) -> None:
    limit = view.limit
    if isinstance(plane.penalty, Constraint):
        _draw_set(ax, plane, limit)
    else:
        _draw_levels(ax, plane, view, limit)
    starts = _grid(_symmetric(0.9 * limit, ARROWS))
    moves = plane.prox(starts, view.step) - starts
    ax.quiver(*starts.T, *moves.T, angles="xy", scale_units="xy", scale=1, color=BLUE, width=0.008, zorder=3)
    ax.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    _set_ticks(ax)
    ax.set(xlabel="weight", ylabel="second weight")
    tidy(ax)


def _draw_levels(ax: Axes, plane: _Plane, view: _View, limit: float) -> None:
    """Draw the ball ψ ≤ level, and level sets around it."""
    side = _symmetric(limit, GRID)
    values = plane.values(_grid(side)).reshape(GRID, GRID)
    if view.level is None:
        ax.set_title("ψ = 0", loc="right")
        return
    level = view.level * (1 + 1e-6)  # where ψ is constant at the level, this includes it
    ax.contourf(side, side, values, levels=[values.min(), level], colors=[ORANGE], alpha=0.25)
    for factor, width in ((0.5, 0.8), (1.0, 2.5), (1.5, 0.8), (2.0, 0.8)):
        if values.min() < factor * level < values.max():
            ax.contour(side, side, values, levels=[factor * level], colors=[ORANGE], linewidths=[width])
    ax.set_title(f"ψ ≤ {view.level:.3g}", loc="right")


def _draw_set(ax: Axes, plane: _Plane, limit: float) -> None:
    """Draw the border of a convex set, or the points of any other, as projections."""
    ax.set_title("the set", loc="right")
    side = _symmetric(1.1 * limit, SET_GRID)
    if plane.penalty.convex:
        edge = np.full_like(side, 1.1 * limit)
        around = [(side, -edge), (edge, side), (side[::-1], edge), (-edge, side[::-1])]
        border = plane.prox(np.concatenate([np.stack(part, axis=1) for part in around]), 1.0)
        ax.fill(*border.T, facecolor=(ORANGE, 0.25))
        ax.plot(*border.T, color=ORANGE, linewidth=2.5, marker="o", markersize=2.5, markeredgewidth=0, zorder=4)
        return
    points = _grid(side)
    near = np.unique(plane.prox(points, 1.0), axis=0)
    if len(near) == len(points):  # no point is outside
        ax.axhspan(-limit, limit, color=ORANGE, alpha=0.25, linewidth=0)
    else:
        ax.plot(*near.T, color=ORANGE, linestyle="", marker="s", markersize=4)


def _symmetric(limit: float, count: int) -> Array:
    """Return evenly spaced points in [−limit, limit], with an exact 0 in the middle."""
    half = np.linspace(0, limit, count // 2 + 1)
    return np.concatenate([-half[:0:-1], half])


def _grid(side: Array) -> Array:
    return np.stack([axis.ravel() for axis in np.meshgrid(side, side)], axis=1)


def _short(penalty: Penalty) -> str:
    """Return the penalty as one would write it, without the fields that have their default value."""
    shown = []
    for field in fields(penalty):
        value = getattr(penalty, field.name)
        if field.default is MISSING or value != field.default:
            text = (
                _short(value) if isinstance(value, Penalty) else f"{value:.3g}" if isinstance(value, float) else value
            )
            shown.append(f"{text}" if field.default is MISSING else f"{field.name}={text}")
    return f"{type(penalty).__name__}({', '.join(shown)})"
