"""A large tensor is taken part by part, and nothing shows of it."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import proxmo
from penalties.cases import CASES, Case, noise, tolerance
from proxmo import parts
from proxmo.penalties.base import Dim, Grouped

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


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "one row for all": lambda x: x[:1].expand_as(x),
    "not a number": lambda x: torch.where(x == x[7, 3], torch.nan, x),
}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("penalty", [proxmo.L1(0.3), proxmo.GroupLInf(0.5), proxmo.Simplex(dim=0)], ids=str)
def test_every_layout(penalty: proxmo.Penalty, layout: str) -> None:
    x = LAYOUTS[layout](noise((12, 5)))
    expected = torch.cat([penalty.prox(row, 1.0) for row in x.contiguous().split(1)])
    torch.testing.assert_close(penalty.prox(x, 1.0), expected, equal_nan=True)
    other = torch.empty(5, 12, dtype=x.dtype).t()
    assert penalty.prox(x, 1.0, out=other) is other
    torch.testing.assert_close(other, expected, equal_nan=True)


@pytest.mark.usefixtures("small_parts")
def test_an_out_that_overlaps_with_the_input() -> None:
    square = noise((6, 6))
    expected = proxmo.L1(0.3).prox(square.clone(), 1.0)
    proxmo.L1(0.3).prox(square, 1.0, out=square.t())
    torch.testing.assert_close(square.t(), expected)
    same_row = torch.empty(1, 6, dtype=square.dtype).expand(6, 6)
    with pytest.raises(RuntimeError, match="single memory location"):
        proxmo.L1(0.3).prox(square, 1.0, out=same_row)
    with pytest.raises(RuntimeError, match="single memory location"):
        proxmo.L1(0.3).prox(same_row, 1.0, out=same_row)


@dataclass
class LargestGroups(Grouped):
    """At most k groups that are not zero: groups are not on their own."""

    k: int
    dim: Dim = 0
    convex: ClassVar[bool] = False
    separable: ClassVar[bool] = False

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        norms = x.norm(dim=1, keepdim=True)
        return torch.where(norms >= norms.flatten().topk(self.k).values[-1], x, 0.0)


@pytest.mark.usefixtures("small_parts")
def test_groups_that_are_not_on_their_own_are_seen_together() -> None:
    assert (LargestGroups(3).prox(noise((12, 5)), 1.0) != 0).any(1).sum() == 3


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("shape", [(12, 5), (4, 30)], ids=str)  # by sort and by Newton's method where they are large
@pytest.mark.parametrize("penalty", [proxmo.SquaredL2(0.3), proxmo.GroupLInf(0.5), proxmo.Simplex(dim=0)], ids=str)
def test_operations_that_are_recorded(penalty: proxmo.Penalty, shape: tuple[int, int]) -> None:
    """What is recorded with some numbers must be right for others."""

    def prox(x: Tensor) -> Tensor:
        return penalty.prox(x, 1.0)

    first, second = noise(shape), noise(shape, seed=1)
    expected = prox(second)
    torch.testing.assert_close(torch.vmap(prox)(torch.stack([first, second]))[1], expected)
    torch.testing.assert_close(make_fx(prox)(first)(second), expected)
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        torch.testing.assert_close(torch.jit.trace(prox, first)(second), expected)


@pytest.mark.parametrize("shape", [(4, 9), (8, 1 << 17)], ids=str)  # sorted, and a result in huge pages
@pytest.mark.parametrize("penalty", [proxmo.L1(0.1), proxmo.GroupLInf(0.5), proxmo.Simplex(dim=0)], ids=str)
def test_a_prox_of_something_fixed_within_what_is_transformed(penalty: proxmo.Penalty, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = penalty.prox(x, 1.0)
    found = torch.func.grad(lambda w: (w * penalty.prox(x, 1.0)).sum())(torch.ones(shape))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(penalty.prox(x, 1.0), expected)


def test_no_mode_of_torch_is_remembered() -> None:
    x, penalty = noise((4, 11)), proxmo.Simplex(dim=0)
    expected = penalty.prox(noise((4, 13)), 1.0)
    with contextlib.suppress(RuntimeError):  # torch cannot do this
        torch.func.functionalize(lambda w: (w * penalty.prox(x, 1.0)).sum())(x)
    with torch.inference_mode():
        penalty.prox(noise((4, 13)), 1.0)
    torch.testing.assert_close(penalty.prox(x, 1.0).sum(1), torch.ones(4, dtype=x.dtype))
    assert torch.equal(penalty.prox(noise((4, 13)), 1.0), expected)


@pytest.mark.usefixtures("small_parts")
def test_autograd_goes_through_a_prox_that_is_applied() -> None:
    x = noise((12, 5)).requires_grad_()
    proxmo.L1(0.3).apply(x, 1.0, None).sum().backward()
    torch.testing.assert_close(x.grad, (x.abs() > 0.3).double())


@pytest.mark.parametrize(
    ("penalty", "shape", "expected"),
    [
        (proxmo.L1(1.0), (40,), [14, 14, 12]),
        (proxmo.GroupL2(1.0), (12, 5), [15] * 4),
        (proxmo.GroupL2(1.0, dim=(0, 1)), (12, 5), [15] * 4),
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
