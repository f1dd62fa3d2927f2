"""Invalid arguments are refused with an error that names the argument, what it takes and what it got."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import proxmo
from penalties.cases import CASES, Case


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: proxmo.L1(-0.1), r"L1: strength must be a finite number >= 0, got -0\.1"),
        (lambda: proxmo.L1(math.nan), r"L1: strength must be a finite number >= 0, got nan"),
        (lambda: proxmo.L1(math.inf), r"L1: strength must be a finite number >= 0, got inf"),
        (lambda: proxmo.SquaredL2(-1), r"SquaredL2: strength must be a finite number >= 0, got -1"),
        (lambda: proxmo.ElasticNet(1.0, -2.0), r"ElasticNet: l2 must be a finite number >= 0, got -2\.0"),
        (lambda: proxmo.Huber(1.0, 0.0), r"Huber: delta must be a finite number > 0, got 0\.0"),
        (lambda: proxmo.L0(-1.0), r"L0: strength must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.MCP(1.0, 0.0), r"MCP: concavity must be a finite number > 0, got 0\.0"),
        (lambda: proxmo.SCAD(1.0, 1.0), r"SCAD: concavity must be a finite number > 1, got 1\.0"),
        (lambda: proxmo.LHalf(-1.0), r"LHalf: strength must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.GroupL2(-1.0), r"GroupL2: strength must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.GroupLInf(-1.0), r"GroupLInf: strength must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.GroupL2(1.0, dim=(0, 0)), r"GroupL2: dim must be an axis, .* got \(0, 0\)"),
        (lambda: proxmo.SparseGroup(1.0, -1.0), r"SparseGroup: group must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.Nuclear(-1.0), r"Nuclear: strength must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.Rank(-1), r"Rank: rank must be an integer >= 0, got -1"),
        (lambda: proxmo.NuclearBall(-1.0), r"NuclearBall: radius must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.Box(1.0, 0.5), r"Box: low must not exceed high, got low=1\.0 and high=0\.5"),
        (lambda: proxmo.Box(math.inf, math.inf), r"Box: low must not exceed high, got low=inf and high=inf"),
        (lambda: proxmo.Box(math.nan, 1.0), r"Box: low must be a number, got nan"),
        (lambda: proxmo.L1Ball(-1.0), r"L1Ball: radius must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.L2Ball(-1.0), r"L2Ball: radius must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.LInfBall(-1.0), r"LInfBall: radius must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.Simplex(-1.0), r"Simplex: radius must be a finite number >= 0, got -1\.0"),
        (lambda: proxmo.TopK(-1), r"TopK: k must be an integer >= 0, got -1"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], proxmo.Penalty], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: proxmo.L1("0.1"), r"L1: strength must be a finite number >= 0, got '0\.1'"),  # type: ignore[arg-type]
        (lambda: proxmo.L1(True), r"L1: strength must be a finite number >= 0, got True"),
        (lambda: proxmo.TopK(1.5), r"TopK: k must be an integer >= 0, got 1\.5"),  # type: ignore[arg-type]
        (lambda: proxmo.GroupL2(1.0, dim="rows"), r"GroupL2: dim must be an axis, .* got 'rows'"),  # type: ignore[arg-type]
        (lambda: proxmo.GroupL2(1.0, dim=(0, 0.5)), r"GroupL2: dim must be an axis, .* got \(0, 0\.5\)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_are_refused(make: Callable[[], proxmo.Penalty], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_fields_are_checked_whenever_they_are_set() -> None:
    penalty = proxmo.Box(0.0, 1.0)
    with pytest.raises(ValueError, match="low must not exceed high"):
        penalty.low = 2.0
    assert penalty == proxmo.Box(0.0, 1.0)
    ball = proxmo.L1Ball(1.0)
    with pytest.raises(ValueError, match="radius"):
        ball.radius = -1.0
    ball.radius = 2
    assert repr(ball) == "L1Ball(radius=2.0, dim=None)"


def test_misspelt_fields_are_refused() -> None:
    penalty = proxmo.L1(0.1)
    with pytest.raises(AttributeError, match=r"L1 has no field 'strenght', it has \['strength'\]"):
        penalty.strenght = 5.0  # type: ignore[attr-defined]


def test_numpy_numbers_become_python_numbers() -> None:
    """So that a checkpoint holds only Python numbers."""
    penalty = proxmo.GroupL2(np.float32(0.5), dim=[np.int64(0), 1])  # type: ignore[arg-type]
    assert type(penalty.strength) is float
    assert penalty.dim == (0, 1)
    assert all(type(axis) is int for axis in penalty.dim)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "step",
    [-1.0, math.nan, math.inf, torch.tensor(-1.0), torch.tensor(math.nan), torch.ones(3), -torch.ones(2)],
    ids=str,
)
def test_invalid_steps_are_refused_and_change_nothing(case: Case, step: float) -> None:
    x = torch.ones(2, 2, 2)
    with pytest.raises(ValueError, match="step must be"):
        case.make(1.0).prox(x, step, out=x)
    assert torch.equal(x, torch.ones(2, 2, 2))


@pytest.mark.parametrize("dim", [3, -4, (0, 3)])
@pytest.mark.parametrize("make", [proxmo.GroupL2, proxmo.GroupLInf, proxmo.Nuclear, proxmo.L1Ball, proxmo.Simplex])
def test_dim_beyond_the_axes_of_the_tensor_is_refused(make: Callable[..., proxmo.Penalty], dim: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"dim must name axes of the tensor, got dim={dim} for")):
        make(1.0, dim=dim).prox(torch.ones(2, 2, 2), 1.0)


def test_dim_that_names_an_axis_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dim must name each axis once, got dim=\(0, -2\)"):
        proxmo.GroupL2(1.0, dim=(0, -2)).value(torch.ones(2, 2))


@pytest.mark.parametrize("x", [torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.complex64)], ids=str)
def test_points_must_have_a_float_dtype(x: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="x must be a dense tensor of 16 to 64 bit floats, got torch"):
        proxmo.L1(1.0).prox(x, 1.0)
    with pytest.raises(TypeError, match="x must be a dense tensor"):
        proxmo.L1(1.0).value(x)


def test_points_must_be_dense_tensors() -> None:
    with pytest.raises(TypeError, match=r"x must be a dense .* layout torch.sparse_coo"):
        proxmo.L1(1.0).prox(torch.ones(2).to_sparse(), 1.0)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        proxmo.L1(1.0).prox([1.0], 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("out", [torch.ones(3), torch.ones(2, dtype=torch.float64)], ids=str)
def test_out_must_match_the_input(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="out must match x in shape, dtype and device"):
        proxmo.L1(1.0).prox(torch.ones(2), 1.0, out=out)
    assert torch.equal(out, torch.ones_like(out))
