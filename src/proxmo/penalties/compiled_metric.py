"""The prox with a step of its own for every element, compiled by numba, as `ProxAdamW(fused=True)` needs it.

Functions of an element are (x, step, c) ↦ prox. Functions of a row (row, steps, c) write the prox of the row in place
and may overwrite the steps. The constants c are fields of the penalty, from `Penalty.metric_kernel`. Formulas are those
of `proxmo.penalties.compiled_elements` and `proxmo.penalties.thresholds`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from proxmo.kernels.tasks import BLOCK, inlined, reordered
from proxmo.penalties import compiled_elements as elements

LEAST = 1e-100  # stands for a step of zero beside weights of size 1
MAX_PASSES = 60  # Newton's method takes 2 to 8


@inlined
def soft(x: Any, step: Any, c: Any) -> Any:
    return elements.soft(x, (step * c[0],))


@inlined
def divide(x: Any, step: Any, c: Any) -> Any:
    return x / (1 + step * c[0])


@inlined
def elastic(x: Any, step: Any, c: Any) -> Any:
    return elements.soft(x, (step * c[0],)) / (1 + step * c[1])


@inlined
def huber(x: Any, step: Any, c: Any) -> Any:
    t, delta = step * c[0], c[1]
    return elements.huber(x, (t * delta, delta * (1 + t), 1 + t))


@inlined
def hard(x: Any, step: Any, c: Any) -> Any:
    return elements.hard(x, (c[0] * math.sqrt(step),))


@inlined
def mcp(x: Any, step: Any, c: Any) -> Any:
    s, a = c[0], c[1]
    if step < a:
        return elements.in_pieces(x, (step * s, step * s, a * s, a * s, step / (a - step), s - s))
    return elements.hard(x, (s * math.sqrt(a * step),))


@inlined
def scad(x: Any, step: Any, c: Any) -> Any:
    s, a = c[0], c[1]
    if step < a - 1:
        return elements.in_pieces(x, (step * s, s * (1 + step), a * s, a * s, step / (a - 1 - step), s))
    jump = s * (a + 1 + step) / 2 if step <= a + 1 else s * math.sqrt((a + 1) * step)
    return elements.soft(x, (step * s,)) if abs(x) <= jump else x


@inlined
def half(x: Any, step: Any, c: Any) -> Any:
    return elements.half(x, (c[0] * step ** c[3], c[1], c[2], c[3], c[4], c[5]))


@inlined
def clamp(x: Any, step: Any, c: Any) -> Any:
    return elements.clamp(x, c)


@reordered
def _weighted_sums(row: Any, steps: Any, s: Any) -> Any:
    """Σ x² and Σ x²·t, with t = step·s."""
    squares, products = 0.0, 0.0
    for block in range(-(-len(row) // BLOCK)):
        start = block * BLOCK
        part, weighted = row.dtype.type(0), row.dtype.type(0)
        for i in range(min(BLOCK, len(row) - start)):
            square = row[start + i] * row[start + i]
            part += square
            weighted += square * (steps[start + i] * s)
        squares += part
        products += weighted
    return squares, products


@reordered
def _ratios(row: Any, steps: Any, s: Any, theta: Any) -> Any:
    """Σ r² and Σ r²/(t + θ), with r = x/(t + θ)."""
    squares, cubes = 0.0, 0.0
    for block in range(-(-len(row) // BLOCK)):
        start = block * BLOCK
        part, steep = row.dtype.type(0), row.dtype.type(0)
        for i in range(min(BLOCK, len(row) - start)):
            inverse = row.dtype.type(1) / (steps[start + i] * s + theta)
            ratio = row[start + i] * inverse
            part += ratio * ratio
            steep += ratio * ratio * inverse
        squares += part
        cubes += steep
    return squares, cubes


@inlined
def _norm_after(row: Any, steps: Any, s: Any) -> float:
    """ρ = ‖u‖ with ‖x/(ρ + t)‖ = 1, or 0 if there is none; NaN if numbers leave the range of the row."""
    squares, products = _weighted_sums(row, steps, s)
    theta = max(math.sqrt(squares) - products / squares, 0.0) if squares > 0 else 0.0
    for _ in range(MAX_PASSES):
        squares, cubes = _ratios(row, steps, s, row.dtype.type(theta))
        before, rise = theta, (math.sqrt(squares) - 1.0) * squares / cubes if squares > 0 else -theta
        theta = max(theta + rise, 0.0)
        if not math.isfinite(rise + products):
            return np.nan
        if abs(theta - before) <= 4.0 * np.finfo(row.dtype).eps * theta:
            break
    return theta


@reordered
def _above(row: Any, inverses: Any, level: Any) -> Any:
    """Σ (|x| − level)₊/t and Σ 1/t over what is above."""
    reached, mass, zero = 0.0, 0.0, row.dtype.type(0)
    for block in range(-(-len(row) // BLOCK)):
        start = block * BLOCK
        part, weight = zero, zero
        for i in range(min(BLOCK, len(row) - start)):
            excess, inverse = abs(row[start + i]) - level, inverses[start + i]
            part += excess * inverse if excess > zero else zero
            weight += inverse if excess > zero else zero
        reached += part
        mass += weight
    return reached, mass


@inlined
def _level_after(row: Any, inverses: Any) -> float:
    """τ ≥ 0 with Σ (|x| − τ)₊/t = 1, or 0 if there is none; NaN if numbers leave the range of the row."""
    level = 0.0
    for _ in range(MAX_PASSES):
        reached, mass = _above(row, inverses, row.dtype.type(level))
        rise = (reached - 1.0) / mass if mass > 0 else 0.0
        if not rise > 4.0 * np.finfo(row.dtype).eps * level:
            return level + max(rise, 0.0) if math.isfinite(reached) and math.isfinite(mass) else np.nan
        level += rise
    return level


@njit(error_model="numpy")
def _largest(row: Any) -> float:
    """The largest magnitude; NaN if there is one."""
    largest = 0.0
    for i in range(len(row)):
        largest = largest if abs(row[i]) <= largest else float(abs(row[i]))
    return largest


@njit(error_model="numpy")
def _norm_in_float64(row: Any, steps: Any, s: float) -> float:
    scale = _largest(row)
    steps = np.maximum(steps.astype(np.float64) / scale, LEAST)
    return _norm_after(row.astype(np.float64) / scale, steps, s) * scale


@njit(error_model="numpy")
def _level_in_float64(row: Any, inverses: Any) -> float:
    scale = _largest(row)
    inverses = np.minimum(inverses.astype(np.float64) * scale, 1 / LEAST)
    return _level_after(row.astype(np.float64) / scale, inverses) * scale


@inlined
def shrink(row: Any, steps: Any, c: Any) -> None:
    rho = _norm_after(row, steps, c[0])
    if math.isnan(rho):
        rho = _norm_in_float64(row, steps, float(c[0]))
    norm = row.dtype.type(rho)
    for i in range(len(row)):
        row[i] = norm - norm if norm == 0 else row[i] * (norm / (norm + steps[i] * c[0]))


@inlined
def soft_then_shrink(row: Any, steps: Any, c: Any) -> None:
    for i in range(len(row)):
        row[i] = elements.soft(row[i], (steps[i] * c[1],))
    shrink(row, steps, c)


@inlined
def cap(row: Any, steps: Any, c: Any) -> None:
    if c[0] == 0:
        return
    for i in range(len(row)):
        steps[i] = row.dtype.type(1) / (steps[i] * c[0])
    tau = _level_after(row, steps)
    if math.isnan(tau):
        tau = _level_in_float64(row, steps)
    level = row.dtype.type(tau)
    for i in range(len(row)):
        row[i] = elements.clamp(row[i], (row.dtype.type(0) - level, level)) if level == level else level
