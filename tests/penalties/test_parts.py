"""A large tensor is taken part by part, and nothing shows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import proxmo
from penalties.cases import CASES, Case, noise, tolerance
from proxmo import parts

SHAPES = [(40,), (12, 5), (3, 50), (10, 3, 2, 2)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 12)


@dataclass
class Weighted(proxmo.Penalty):
    """Σ w·|x| with a weight for each element."""

    weights: Tensor
    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return torch.sub(x, x.clamp(-step * self.weights, step * self.weights), out=out)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [0.8, torch.tensor(0.8)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_penalty(case: Case, step: float | Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    penalty = case.make(1.0)
    for shape in (shape for shape in SHAPES if len(shape) >= case.axes):
        x = noise(shape, dtype)
        found, in_place = penalty.prox(x, step), x.clone()
        penalty.prox(in_place, step, out=in_place)
        with monkeypatch.context() as patch:
            patch.setattr(parts, "PART", 1 << 19)
            whole = penalty.prox(x, step)
        torch.testing.assert_close(found, whole, rtol=0, atol=tolerance(dtype))
        assert torch.equal(found, in_place)


@pytest.mark.parametrize(
    ("penalty", "shape", "expected"),
    [
        (proxmo.L1(1.0), (40,), [12, 12, 12, 4]),
        (proxmo.GroupL2(1.0), (12, 5), [10] * 6),
        (proxmo.GroupL2(1.0, dim=(0, 1)), (12, 5), [10] * 6),
        (proxmo.GroupL2(1.0), (3, 50), [50] * 3),  # a row stays whole
        (proxmo.GroupL2(1.0, dim=1), (12, 5), [60]),
        (proxmo.Simplex(), (40,), [40]),
        (proxmo.L1(1.0), (2, 11), [22]),  # not large
        (Weighted(torch.ones(40)), (40,), [40]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_parts")
def test_parts_are_rows(
    penalty: proxmo.Penalty, shape: tuple[int, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, plain = [], type(penalty)._prox
    monkeypatch.setattr(
        type(penalty), "_prox", lambda self, x, *rest: (seen.append(x.numel()), plain(self, x, *rest))[1]
    )
    penalty.prox(torch.randn(shape), 1.0)
    assert seen == expected
