"""Slow and simple float64 references for every value and prox, in numpy and scipy, independent of proxmo.

Elementwise: list all stationary points of the subproblem, each with the interval where it is valid, and take the best.
Groups: loop over the groups in Python. Thresholds: scipy's root finder. TopK: try all subsets. A step is a number or
an array that broadcasts to x.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]
Step = float | Array
EDGE = 1e-14  # how far rounding may push a stationary point out of its interval


def best(objective: Callable[[float], float], candidates: list[float]) -> float:
    return min(candidates, key=objective)


def elementwise(value: Callable[..., float], points: Callable[..., Iterator[tuple[float, float, float]]]) -> Any:
    """Make a prox from the scalar value and stationary points (u, low, high) for x ≥ 0, valid if low ≤ u ≤ high."""

    def prox(penalty: Any, x: Array, steps: Step) -> Array:
        def scalar(entry: float, step: float) -> float:
            y = abs(entry)
            valid = [
                u
                for u, low, high in points(penalty, y, step)
                if low * (1 - EDGE) <= u <= high * (1 + EDGE) and math.isfinite(u)
            ]
            u = best(lambda u: value(penalty, u) + (u - y) ** 2 / (2 * step), [0.0, *valid])
            return math.copysign(u, entry)

        pairs = zip(x.ravel(), np.broadcast_to(steps, x.shape).ravel(), strict=True)
        return np.array([scalar(float(entry), float(step)) for entry, step in pairs], dtype=np.float64).reshape(x.shape)

    return prox


def total(value: Callable[..., float]) -> Callable[..., float]:
    return lambda penalty, x: math.fsum(value(penalty, abs(entry)) for entry in x.ravel())


def l1_value(p: Any, y: float) -> float:
    return p.strength * y


def l1_points(p: Any, y: float, t: float) -> Iterator[tuple[float, float, float]]:
    yield y - t * p.strength, 0, math.inf


def squared_value(p: Any, y: float) -> float:
    return p.strength * y * y / 2


def squared_points(p: Any, y: float, t: float) -> Iterator[tuple[float, float, float]]:
    yield y / (1 + t * p.strength), 0, math.inf


def elastic_value(p: Any, y: float) -> float:
    return p.l1 * y + p.l2 * y * y / 2


def elastic_points(p: Any, y: float, t: float) -> Iterator[tuple[float, float, float]]:
    yield (y - t * p.l1) / (1 + t * p.l2), 0, math.inf


def huber_value(p: Any, y: float) -> float:
    return p.strength * (y * y / 2 if y <= p.delta else p.delta * (y - p.delta / 2))


def huber_points(p: Any, y: float, t: float) -> Iterator[tuple[float, float, float]]:
    yield y / (1 + t * p.strength), 0, p.delta
    yield y - t * p.strength * p.delta, p.delta, math.inf


def l0_value(p: Any, y: float) -> float:
    return p.strength if y else 0.0


def l0_points(p: Any, y: float, t: float) -> Iterator[tuple[float, float, float]]:
    yield y, 0, math.inf


def mcp_value(p: Any, y: float) -> float:
    s, c = p.strength, p.concavity
    return s * y - y * y / (2 * c) if y <= c * s else c * s * s / 2


def mcp_points(p: Any, y: float, t: float) -> Iterator[tuple[float, float, float]]:
    s, c = p.strength, p.concavity
    if t < c:
        yield (y - t * s) / (1 - t / c), 0, c * s
    yield y, c * s, math.inf


def scad_value(p: Any, y: float) -> float:
    s, a = p.strength, p.concavity
    if y <= s:
        return s * y
    if y <= a * s:
        return (2 * a * s * y - y * y - s * s) / (2 * (a - 1))
    return s * s * (a + 1) / 2


def scad_points(p: Any, y: float, t: float) -> Iterator[tuple[float, float, float]]:
    s, a = p.strength, p.concavity
    yield y - t * s, 0, s
    if t < a - 1:
        yield ((a - 1) * y - t * a * s) / (a - 1 - t), s, a * s
    yield y, a * s, math.inf


def lhalf_value(p: Any, y: float) -> float:
    return p.strength * math.sqrt(y)


def lhalf_points(p: Any, y: float, t: float) -> Iterator[tuple[float, float, float]]:
    # with v = √u the derivative vanishes where v³ − y·v + t·s/2 = 0; scaled to y = 1 for the root finder
    if y:
        for root in np.roots([1.0, 0.0, -1.0, t * p.strength / 2 / y**1.5]):
            if abs(root.imag) < 1e-9 and root.real > 0:
                yield root.real**2 * y, 0, math.inf


def groups(x: Array, dim: int | tuple[int, ...] | None) -> Iterator[Any]:
    """Yield the index of each group: a number on the axes of ``dim``, a full slice on the others."""
    named = () if dim is None else (dim,) if isinstance(dim, int) else dim
    axes = {axis % x.ndim for axis in named}
    yield from itertools.product(*(range(x.shape[i]) if i in axes else [slice(None)] for i in range(x.ndim)))


def by_group(project: Callable[[Any, Array, Step], Array]) -> Any:
    def prox(penalty: Any, x: Array, step: Step) -> Array:
        result, steps = x.copy(), np.broadcast_to(step, x.shape)
        for index in groups(x, penalty.dim):
            group = np.atleast_1d(x[index]).ravel()
            group_step = step if np.ndim(step) == 0 else np.atleast_1d(steps[index]).ravel()
            result[index] = project(penalty, group, group_step).reshape(np.shape(x[index]))
        return result

    return prox


def group_total(value: Callable[[Any, Array], float]) -> Any:
    return lambda penalty, x: math.fsum(
        value(penalty, np.atleast_1d(x[index]).ravel()) for index in groups(x, penalty.dim)
    )


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of a decreasing function, or a bound if rounding puts both bounds on one side of the root."""
    if function(low) <= 0 or function(high) >= 0:
        return low if function(low) <= 0 else high
    return float(brentq(function, low, high, xtol=1e-300, rtol=1e-15, maxiter=1000))


def shrink(x: Array, t: Step) -> Array:
    norm = math.hypot(*x)
    if np.ndim(t) == 0:
        return x * (1 - t / norm) if norm > t else 0 * x
    if math.hypot(*(x / t)) <= 1:
        return 0 * x
    rho = root(lambda rho: math.hypot(*(x / (rho + t))) - 1, 0.0, norm)
    return x * (rho / (rho + t))


def soft(x: Array, t: Step) -> Array:
    return np.sign(x) * np.maximum(np.abs(x) - t, 0)


def cap(x: Array, step: Step, strength: float) -> Array:
    """Return the prox of strength·max|x|."""
    if np.ndim(step) == 0:
        return x - l1_ball(x, step * strength)
    y = np.abs(x)
    if math.fsum(y / step) <= strength:
        return 0 * x
    level = root(lambda tau: math.fsum(np.maximum(y - tau, 0) / step) - strength, 0.0, y.max())
    return np.sign(x) * np.minimum(y, level)


def simplex(y: Array, radius: float, step: Step = 1.0) -> Array:
    top = y.max()
    if radius == 0:
        return 0 * y
    if np.ndim(step):
        low, high = ((y - radius) / step).max(), (y / step).max()
        theta = root(lambda theta: math.fsum(np.maximum(y - theta * step, 0)) - radius, low, high)
        active = y > theta * step
        return np.maximum(y - (math.fsum(y[active]) - radius) / math.fsum(step[active]) * step, 0)
    level = brentq(lambda t: math.fsum(np.maximum(y - t, 0)) - radius, top - 2 * radius, top, xtol=1e-300, rtol=1e-15)
    active = y > level
    level = (math.fsum(y[active]) - radius) / active.sum()
    return np.maximum(y - level, 0)


def l1_ball(x: Array, radius: float, step: Step = 1.0) -> Array:
    return x if math.fsum(np.abs(x)) <= radius else np.sign(x) * simplex(np.abs(x), radius, step)


def l2_ball(x: Array, radius: float, step: Step) -> Array:
    norm = math.hypot(*x)
    if np.ndim(step) == 0:
        return x - shrink(x, radius)
    if norm <= radius:
        return x
    high = (norm / radius - 1) / step.min()
    theta = root(lambda theta: math.hypot(*(x / (1 + theta * step))) - radius, 0.0, high)
    return x / (1 + theta * step)


def top_k(x: Array, k: int, step: Step = 1.0) -> Array:
    """Try all supports and return the best."""
    k, cost = min(k, x.size), x**2 / step
    support = min(itertools.combinations(range(x.size), k), key=lambda kept: math.fsum(np.delete(cost, kept)))
    result = np.zeros_like(x)
    result[list(support)] = x[list(support)]
    return result


def blocks_of(penalty: Any, x: Array) -> list[Any]:
    """Return the indices of the elements or groups that a trimmed penalty ranks."""
    return list(groups(x, getattr(penalty.penalty, "dim", tuple(range(x.ndim)))))


def count_to_keep(penalty: Any, blocks: int) -> int:
    return min(penalty.keep, blocks) if isinstance(penalty.keep, int) else max(1, round(penalty.keep * blocks))


def trimmed_value(value: Callable[[Any, Array], float]) -> Any:
    """Try all choices of blocks to leave out, and return the least sum."""

    def least(penalty: Any, x: Array) -> float:
        values = [value(penalty.penalty, np.atleast_1d(x[index]).ravel()) for index in blocks_of(penalty, x)]
        kept = itertools.combinations(range(len(values)), len(values) - count_to_keep(penalty, len(values)))
        return min(math.fsum(values[k] for k in others) for others in kept)

    return least


def cheapest_choice(costs: list[float], count: int) -> tuple[int, ...]:
    """Try all choices of blocks to leave alone, and return the one whose others cost least."""
    choices = itertools.combinations(range(len(costs)), count)
    return min(choices, key=lambda kept: math.fsum(np.delete(costs, kept)))


def trimmed_prox(value: Callable[[Any, Array], float], prox: Any, choose: Any = cheapest_choice) -> Any:
    def best_choice(penalty: Any, x: Array, step: Step) -> Array:
        near, blocks = prox(penalty.penalty, x, step), blocks_of(penalty, x)
        gaps = (near - x) ** 2 / (2 * np.broadcast_to(step, x.shape))
        costs = [
            value(penalty.penalty, np.atleast_1d(near[index]).ravel()) + math.fsum(np.atleast_1d(gaps[index]).ravel())
            for index in blocks
        ]
        result = near.copy()
        for k in choose(costs, count_to_keep(penalty, len(blocks))):
            result[blocks[k]] = x[blocks[k]]
        return result

    return best_choice


def matrix_axes(x: Array, dim: Any) -> tuple[Array, Callable[[Array], Array]]:
    named = () if dim is None else (dim,) if isinstance(dim, int) else dim
    rows = sorted(axis % x.ndim for axis in named)
    order = [*rows, *(axis for axis in range(x.ndim) if axis not in rows)]
    moved = np.transpose(x, order)
    matrix = moved.reshape(math.prod(x.shape[axis] for axis in rows), -1)
    return matrix, lambda m: np.transpose(m.reshape(moved.shape), np.argsort(order))


def spectral(change: Callable[[Any, Array, float], Array]) -> Any:
    def prox(penalty: Any, x: Array, step: float) -> Array:
        matrix, back = matrix_axes(x, penalty.dim)
        u, sigma, v = np.linalg.svd(matrix, full_matrices=False)
        return back(u * change(penalty, sigma, step) @ v)

    return prox


def nuclear_value(penalty: Any, x: Array) -> float:
    return float(penalty.strength * np.linalg.svd(matrix_axes(x, penalty.dim)[0], compute_uv=False).sum())


def indicator(penalty: Any, x: Array) -> float:
    """Return the value of a constraint at a feasible point, such as the result of a projection."""
    return 0.0
