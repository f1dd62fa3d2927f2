"""The prox of one element, for each elementwise penalty: what compiled loops apply to every number they pass.

Each is a formula of `proxmo.penalties.elementwise` or `proxmo.penalties.constraints` with its constants worked out
beforehand. Comparisons are so put that NaN is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import njit

from proxmo.penalties.base import Penalty
from proxmo.penalties.constraints import Box, LInfBall, NonNegative
from proxmo.penalties.elementwise import L0, L1, MCP, SCAD, ElasticNet, Huber, LHalf, SquaredL2

inlined = njit(inline="always", error_model="numpy")


@njit(error_model="numpy", forceinline=True)
def write(target: Any, source: Any, prox: Any, c: Any) -> None:
    """target ← prox(source, c); two loops, since what may overlap is not vectorised, and the same array would."""
    if target.ctypes.data == source.ctypes.data:
        for i in range(len(target)):
            target[i] = prox(target[i], c)
    else:
        for i in range(len(target)):
            target[i] = prox(source[i], c)


class Elementwise(NamedTuple):
    """A compiled function (x, constants) ↦ prox, and the constants for a penalty and a step."""

    prox: Any
    constants: Callable[[Any, float], tuple[float, ...]]


@inlined
def as_it_is(x: Any) -> Any:
    """How to read an element whose sign counts."""
    return x


@inlined
def keep(x: Any, c: Any) -> Any:
    """The prox of no penalty."""
    return x


@inlined
def soft(x: Any, c: Any) -> Any:
    """The soft threshold c₀."""
    return x - x if abs(x) <= c[0] else x - math.copysign(c[0], x)


@inlined
def _divide(x: Any, c: Any) -> Any:
    return x / c[0]


@inlined
def _elastic(x: Any, c: Any) -> Any:
    return soft(x, c) / c[1]


@inlined
def _huber(x: Any, c: Any) -> Any:
    return x / c[2] if abs(x) <= c[1] else soft(x, c)


@inlined
def _hard(x: Any, c: Any) -> Any:
    return x - x if abs(x) <= c[0] else x


@inlined
def _bend(x: Any, corner: Any, slope: Any, lowest: Any) -> Any:
    magnitude = abs(x)
    moved = magnitude - (corner - magnitude) * slope
    return math.copysign(min(max(moved, lowest), magnitude), x)


@inlined
def _mcp(x: Any, c: Any) -> Any:
    magnitude = abs(x)
    if magnitude <= c[0]:
        return x - x
    return _bend(x, c[2], c[3], x - x) if magnitude <= c[1] else x


@inlined
def _scad(x: Any, c: Any) -> Any:
    magnitude = abs(x)
    if magnitude <= c[1]:
        return soft(x, c)
    return _bend(x, c[3], c[4], c[5]) if magnitude <= c[2] else x


@inlined
def _half(x: Any, c: Any) -> Any:
    magnitude = abs(x)
    if magnitude <= c[0]:
        return x - x
    angle = math.acos((magnitude / c[0]) ** c[1] * c[2])
    return c[3] * x * (c[5] + math.cos(c[4] - c[3] * angle))


@inlined
def clamp(x: Any, c: Any) -> Any:
    """To [c₀, c₁]."""
    return c[0] if x < c[0] else (c[1] if x > c[1] else x)


def _constants_of_mcp(p: MCP, step: float) -> tuple[float, ...]:
    gentle = step < p.concavity
    corner = p.concavity * p.strength
    threshold = step * p.strength if gentle else p.strength * math.sqrt(p.concavity * step)
    slope = step / (p.concavity - step) if gentle else 0.0
    return threshold, corner if gentle else threshold, corner, slope


def _constants_of_scad(p: SCAD, step: float) -> tuple[float, ...]:
    s, a = p.strength, p.concavity
    gentle = step < a - 1
    jump = s * (a + 1 + step) / 2 if step <= a + 1 else s * math.sqrt((a + 1) * step)
    slope = step / (a - 1 - step) if gentle else 0.0
    return step * s, s * (1 + step) if gentle else jump, a * s if gentle else jump, a * s, slope, s


def _constants_of_half(p: LHalf, step: float) -> tuple[float, ...]:
    threshold = 54 ** (1 / 3) / 4 * (2 * p.strength) ** (2 / 3) * step ** (2 / 3)
    return threshold, -1.5, math.sqrt(0.5), 2 / 3, 2 * math.pi / 3, 1.0


ELEMENTWISE: dict[type[Penalty] | None, Elementwise] = {
    None: Elementwise(keep, lambda p, step: (0.0,)),
    L1: Elementwise(soft, lambda p, step: (step * p.strength,)),
    SquaredL2: Elementwise(_divide, lambda p, step: (1 + step * p.strength,)),
    ElasticNet: Elementwise(_elastic, lambda p, step: (step * p.l1, 1 + step * p.l2)),
    Huber: Elementwise(
        _huber,
        lambda p, step: (step * p.strength * p.delta, p.delta * (1 + step * p.strength), 1 + step * p.strength),
    ),
    L0: Elementwise(_hard, lambda p, step: (math.sqrt(2 * p.strength) * math.sqrt(step),)),
    MCP: Elementwise(_mcp, _constants_of_mcp),
    SCAD: Elementwise(_scad, _constants_of_scad),
    LHalf: Elementwise(_half, _constants_of_half),
    Box: Elementwise(clamp, lambda p, step: (p.low, p.high)),
    NonNegative: Elementwise(clamp, lambda p, step: (0.0, math.inf)),
    LInfBall: Elementwise(clamp, lambda p, step: (-p.radius, p.radius)),
}
