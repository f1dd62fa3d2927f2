"""The table of cases: every penalty, with the scaling law of its fields and its reference.

A new penalty is one row here, and all tests of this folder run on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import proxmo
from penalties import references as ref
from proxmo import Penalty


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[float], Penalty]
    """Makes the penalty for entries of scale c: the prox of make(c) at c·x is c times the prox of make(1) at x."""
    value: Callable[[Any, Any], float]
    prox: Callable[[Any, Any, Any], Any]
    axes: int = 0
    """The smallest number of axes that a tensor may have."""

    def __str__(self) -> str:
        return self.name


TRIMMED: list[tuple[Callable[[float], Any], float | int, Any, Any, int]] = [
    # what is trimmed, how many blocks are kept, the value of a block, the prox of a tensor
    (lambda c: proxmo.L1(0.7 * c), 2, ref.total(ref.l1_value), ref.elementwise(ref.l1_value, ref.l1_points), 0),
    (lambda c: proxmo.SCAD(0.6 * c), 1, ref.total(ref.scad_value), ref.elementwise(ref.scad_value, ref.scad_points), 0),
    (
        lambda c: proxmo.GroupL2(0.9 * c),
        0.4,
        lambda p, g: p.strength * math.hypot(*g),
        ref.by_group(lambda p, g, t: ref.shrink(g, t * p.strength)),
        1,
    ),
    (
        lambda c: proxmo.GroupLInf(0.9 * c),
        1,
        lambda p, g: p.strength * np.abs(g).max(),
        ref.by_group(lambda p, g, t: ref.cap(g, t, p.strength)),
        1,
    ),
]

ROWS: list[tuple[Callable[[float], Penalty], Any, Any, int]] = [
    (lambda c: proxmo.L1(0.7 * c), ref.total(ref.l1_value), ref.elementwise(ref.l1_value, ref.l1_points), 0),
    (
        lambda c: proxmo.SquaredL2(0.7),
        ref.total(ref.squared_value),
        ref.elementwise(ref.squared_value, ref.squared_points),
        0,
    ),
    (
        lambda c: proxmo.ElasticNet(0.5 * c, 0.7),
        ref.total(ref.elastic_value),
        ref.elementwise(ref.elastic_value, ref.elastic_points),
        0,
    ),
    (
        lambda c: proxmo.Huber(0.7, 0.6 * c),
        ref.total(ref.huber_value),
        ref.elementwise(ref.huber_value, ref.huber_points),
        0,
    ),
    (lambda c: proxmo.L0(0.7 * c * c), ref.total(ref.l0_value), ref.elementwise(ref.l0_value, ref.l0_points), 0),
    (
        lambda c: proxmo.MCP(0.7 * c, 1.5),
        ref.total(ref.mcp_value),
        ref.elementwise(ref.mcp_value, ref.mcp_points),
        0,
    ),
    (
        lambda c: proxmo.SCAD(0.6 * c),
        ref.total(ref.scad_value),
        ref.elementwise(ref.scad_value, ref.scad_points),
        0,
    ),
    (
        lambda c: proxmo.SCAD(0.6 * c, 1.8),
        ref.total(ref.scad_value),
        ref.elementwise(ref.scad_value, ref.scad_points),
        0,
    ),
    (
        lambda c: proxmo.LHalf(0.7 * c**1.5),
        ref.total(ref.lhalf_value),
        ref.elementwise(ref.lhalf_value, ref.lhalf_points),
        0,
    ),
    *(
        (
            lambda c, dim=dim: proxmo.GroupL2(0.9 * c, dim=dim),
            ref.group_total(lambda p, g: p.strength * math.hypot(*g)),
            ref.by_group(lambda p, g, t: ref.shrink(g, t * p.strength)),
            axes,
        )
        for dim, axes in [(0, 1), (-1, 1), ((0, 2), 3), ((), 0)]
    ),
    *(
        (
            lambda c, dim=dim: proxmo.GroupLInf(0.9 * c, dim=dim),
            ref.group_total(lambda p, g: p.strength * np.abs(g).max()),
            ref.by_group(lambda p, g, t: ref.cap(g, t, p.strength)),
            axes,
        )
        for dim, axes in [(0, 1), (1, 2), ((2, 0), 3)]
    ),
    (
        lambda c: proxmo.SparseGroup(0.4 * c, 0.6 * c),
        ref.group_total(lambda p, g: p.l1 * np.abs(g).sum() + p.group * math.hypot(*g)),
        ref.by_group(lambda p, g, t: ref.shrink(ref.soft(g, t * p.l1), t * p.group)),
        1,
    ),
    *(
        (
            lambda c, dim=dim: proxmo.Nuclear(0.9 * c, dim=dim),
            ref.nuclear_value,
            ref.spectral(lambda p, sigma, t: np.maximum(sigma - t * p.strength, 0)),
            axes,
        )
        for dim, axes in [(0, 1), (1, 2), ((0, 2), 3)]
    ),
    (
        lambda c: proxmo.Rank(1),
        ref.indicator,
        ref.spectral(lambda p, sigma, t: np.where(np.arange(len(sigma)) < p.rank, sigma, 0)),
        1,
    ),
    (
        lambda c: proxmo.NuclearBall(1.5 * c),
        ref.indicator,
        ref.spectral(lambda p, sigma, t: ref.l1_ball(sigma, p.radius)),
        1,
    ),
    (
        lambda c: proxmo.Box(-0.5 * c, 0.8 * c),
        ref.indicator,
        lambda p, x, t: np.minimum(np.maximum(x, p.low), p.high),
        0,
    ),
    (lambda c: proxmo.NonNegative(), ref.indicator, lambda p, x, t: np.maximum(x, 0), 0),
    *(
        (
            lambda c, dim=dim: proxmo.L1Ball(1.5 * c, dim=dim),
            ref.indicator,
            ref.by_group(lambda p, g, t: ref.l1_ball(g, p.radius, t)),
            axes,
        )
        for dim, axes in [(None, 0), (0, 1), ((1, 2), 3)]
    ),
    *(
        (
            lambda c, dim=dim: proxmo.L2Ball(0.9 * c, dim=dim),
            ref.indicator,
            ref.by_group(lambda p, g, t: ref.l2_ball(g, p.radius, t)),
            axes,
        )
        for dim, axes in [(None, 0), (1, 2)]
    ),
    (
        lambda c: proxmo.LInfBall(0.6 * c),
        ref.indicator,
        lambda p, x, t: np.sign(x) * np.minimum(np.abs(x), p.radius),
        0,
    ),
    *(
        (
            lambda c, dim=dim: proxmo.Simplex(1.2 * c, dim=dim),
            ref.indicator,
            ref.by_group(lambda p, g, t: ref.simplex(g, p.radius, t)),
            axes,
        )
        for dim, axes in [(None, 0), (0, 1)]
    ),
    *(
        (
            lambda c, dim=dim: proxmo.TopK(2, dim=dim),
            ref.indicator,
            ref.by_group(lambda p, g, t: ref.top_k(g, p.k, t)),
            axes,
        )
        for dim, axes in [(None, 0), (0, 1)]
    ),
    (
        lambda c: proxmo.TopK(2, scope="all"),
        ref.indicator,
        ref.by_group(lambda p, g, t: ref.top_k(g, p.k, t)),
        0,
    ),
    *(
        (
            lambda c, penalty=penalty, keep=keep: proxmo.Trimmed(penalty(c), keep),
            ref.trimmed_value(value),
            ref.trimmed_prox(value, prox),
            axes,
        )
        for penalty, keep, value, prox, axes in TRIMMED
    ),
]

CASES = [Case(repr(make(1.0)), make, value, prox, axes) for make, value, prox, axes in ROWS]
CONVEX = [case for case in CASES if case.make(1.0).convex]
NON_CONVEX = [case for case in CASES if not case.make(1.0).convex]


every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_reference_step(step: float | Tensor) -> Any:
    """Return the step as a number, or as a float64 array."""
    return step.double().numpy() if isinstance(step, Tensor) else step


def objective(case: Case, penalty: Penalty, u: Tensor, x: Tensor, step: float | Tensor) -> float:
    """Return ψ(u) + Σ (u − x)²/(2·step) in float64, with the reference value of ψ; u must be feasible."""
    u64, x64 = u.double().numpy(), x.double().numpy()
    return case.value(penalty, u64) + float(((u64 - x64) ** 2 / (2 * as_reference_step(step))).sum())


def reference(case: Case, penalty: Penalty, x: Tensor, step: float | Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(case.prox(penalty, x.double().numpy(), as_reference_step(step))))


def tolerance(dtype: torch.dtype) -> float:
    """Return the promised relative error: 1e-12 in float64, 1e-6 in float32, one rounding in half precision."""
    promised = {torch.float64: 1e-12, torch.float32: 1e-6}
    return promised.get(dtype) or torch.finfo(dtype).eps


def assert_is_prox(case: Case, penalty: Penalty, result: Tensor, x: Tensor, step: float | Tensor) -> None:
    """Assert that ``result`` is the reference to the promised error, or as good a point if ψ is not convex."""
    expected = reference(case, penalty, x, step)
    allowed = tolerance(x.dtype) * float(torch.maximum(x.double().abs(), expected.abs()).max())
    if penalty.convex:
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=allowed)
        return
    if penalty.separable:
        steps = torch.as_tensor(step, dtype=torch.float64).expand(x.shape).flatten()
        blocks = [
            (p.reshape(1), e.reshape(1), v.reshape(1), s.reshape(1))
            for p, e, v, s in zip(result.flatten(), expected.flatten(), x.flatten(), steps, strict=True)
        ]
    else:
        blocks = [(result, expected, x, torch.as_tensor(step))]
        assert not isinstance(penalty, proxmo.Constraint) or penalty.value(result) == 0
    for found, wanted, point, block_step in blocks:
        if (found.double() - wanted).abs().max() > allowed:
            reached = objective(case, penalty, found, point, block_step)
            possible = objective(case, penalty, wanted, point, block_step)
            scale = float((point.double().square() / block_step.double()).sum())
            assert reached <= possible + 4 * tolerance(x.dtype) * (possible + scale)
