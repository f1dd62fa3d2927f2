"""The prox of one element, compiled by numba, for each elementwise penalty.

Functions (x, c) ↦ prox with the constants c worked out beforehand by `Penalty.kernel`; formulas are those of
`proxmo.penalties.elementwise` and `proxmo.penalties.constraints`. Comparisons are written so that NaN is kept.
"""

from __future__ import annotations

import math
from typing import Any

from proxmo.kernels.tasks import inlined


@inlined
def soft(x: Any, c: Any) -> Any:
    """Apply the soft threshold c₀."""
    return x - x if abs(x) <= c[0] else x - math.copysign(c[0], x)


@inlined
def divide(x: Any, c: Any) -> Any:
    return x / c[0]


@inlined
def elastic(x: Any, c: Any) -> Any:
    return soft(x, c) / c[1]


@inlined
def huber(x: Any, c: Any) -> Any:
    return x / c[2] if abs(x) <= c[1] else soft(x, c)


@inlined
def hard(x: Any, c: Any) -> Any:
    return x - x if abs(x) <= c[0] else x


@inlined
def in_pieces(x: Any, c: Any) -> Any:
    """Apply the prox of MCP and SCAD."""
    magnitude = abs(x)
    if magnitude <= c[1]:
        return soft(x, c)
    moved = magnitude - (c[3] - magnitude) * c[4]
    return math.copysign(min(max(moved, c[5]), magnitude), x) if magnitude <= c[2] else x


@inlined
def half(x: Any, c: Any) -> Any:
    magnitude = abs(x)
    if magnitude <= c[0]:
        return x - x
    angle = math.acos((magnitude / c[0]) ** c[1] * c[2])
    return c[3] * x * (c[5] + math.cos(c[4] - c[3] * angle))


@inlined
def clamp(x: Any, c: Any) -> Any:
    """Clamp to [c₀, c₁]."""
    return c[0] if x < c[0] else (c[1] if x > c[1] else x)
