"""Large tensors are cut into row chunks and small ones stacked, with the same results as for each tensor alone."""

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
from proxmo import ProxSGD, eager
from proxmo.penalties.base import Dim
from proxmo.penalties.kinds import Grouped

SHAPES = [(40,), (12, 5), (3, 50), (10, 3, 2, 2)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "ROW_CHUNK", 12)


@dataclass
class Weighted(proxmo.Penalty):
    """Σ w·|x| with a weight for each element."""

    weights: Tensor
    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return torch.sub(x, x.clamp(-step * self.weights, step * self.weights), out=out)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [0.8, torch.tensor(0.8)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_chunks_equal_the_whole_tensor(
    case: Case, step: float | Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    penalty = case.make(1.0)
    for shape in (shape for shape in SHAPES if len(shape) >= case.axes):
        x = noise(shape, dtype)
        found, in_place = penalty.prox(x, step), x.clone()
        penalty.prox(in_place, step, out=in_place)
        with monkeypatch.context() as patch:
            patch.setattr(eager, "ROW_CHUNK", 1 << 19)
            whole = penalty.prox(x, step)
        torch.testing.assert_close(found, whole, rtol=0, atol=tolerance(dtype))
        assert torch.equal(found, in_place)


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "one row for all": lambda x: x[:1].expand_as(x),
    "not a number": lambda x: torch.where(x == x[7, 3], torch.nan, x),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("penalty", [proxmo.L1(0.3), proxmo.GroupLInf(0.5), proxmo.Simplex(dim=0)], ids=str)
def test_row_chunks_equal_single_rows_for_every_layout(penalty: proxmo.Penalty, layout: str) -> None:
    x = LAYOUTS[layout](noise((12, 5)))
    expected = torch.cat([penalty.prox(row, 1.0) for row in x.contiguous().split(1)])
    torch.testing.assert_close(penalty.prox(x, 1.0), expected, equal_nan=True)
    other = torch.empty(5, 12, dtype=x.dtype).t()
    assert penalty.prox(x, 1.0, out=other) is other
    torch.testing.assert_close(other, expected, equal_nan=True)


@pytest.mark.usefixtures("small_chunks")
def test_out_may_overlap_with_the_input() -> None:
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
    """At most k non-zero groups: which ones stay depends on all of them."""

    k: int
    dim: Dim = 0
    convex: ClassVar[bool] = False
    separable: ClassVar[bool] = False

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        norms = x.norm(dim=1, keepdim=True)
        return torch.where(norms >= norms.flatten().topk(self.k).values[-1], x, 0.0)


@pytest.mark.usefixtures("small_chunks")
def test_groups_that_depend_on_each_other_are_not_cut_apart() -> None:
    assert (LargestGroups(3).prox(noise((12, 5)), 1.0) != 0).any(1).sum() == 3


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shape", [(12, 5), (4, 30)], ids=str)  # by sort and by Newton's method if compiled
@pytest.mark.parametrize("penalty", [proxmo.SquaredL2(0.3), proxmo.GroupLInf(0.5), proxmo.Simplex(dim=0)], ids=str)
def test_traced_prox_is_right_for_other_inputs(penalty: proxmo.Penalty, shape: tuple[int, int]) -> None:
    def prox(x: Tensor) -> Tensor:
        return penalty.prox(x, 1.0)

    first, second = noise(shape), noise(shape, seed=1)
    expected = prox(second)
    torch.testing.assert_close(torch.vmap(prox)(torch.stack([first, second]))[1], expected)
    torch.testing.assert_close(make_fx(prox)(first)(second), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.testing.assert_close(torch.jit.trace(prox, first)(second), expected)


@pytest.mark.parametrize("shape", [(4, 9), (8, 1 << 17)], ids=str)  # by sort and by Newton's method
@pytest.mark.parametrize("penalty", [proxmo.L1(0.1), proxmo.GroupLInf(0.5), proxmo.Simplex(dim=0)], ids=str)
def test_transformed_function_may_take_the_prox_of_a_constant(penalty: proxmo.Penalty, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = penalty.prox(x, 1.0)
    found = torch.func.grad(lambda w: (w * penalty.prox(x, 1.0)).sum())(torch.ones(shape))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(penalty.prox(x, 1.0), expected)


def test_no_torch_mode_leaks_into_later_calls() -> None:
    x, penalty = noise((4, 11)), proxmo.Simplex(dim=0)
    expected = penalty.prox(noise((4, 13)), 1.0)
    with contextlib.suppress(RuntimeError):  # torch does not support this
        torch.func.functionalize(lambda w: (w * penalty.prox(x, 1.0)).sum())(x)
    with torch.inference_mode():
        penalty.prox(noise((4, 13)), 1.0)
    torch.testing.assert_close(penalty.prox(x, 1.0).sum(1), torch.ones(4, dtype=x.dtype))
    assert torch.equal(penalty.prox(noise((4, 13)), 1.0), expected)


@pytest.mark.parametrize(
    ("penalty", "shape", "expected"),
    [
        (proxmo.L1(1.0), (40,), [14, 14, 12]),
        (proxmo.GroupL2(1.0), (12, 5), [15] * 4),
        (proxmo.GroupL2(1.0, dim=(0, 1)), (12, 5), [15] * 4),
        (proxmo.GroupL2(1.0), (3, 50), [50] * 3),  # a row is not cut
        (proxmo.GroupL2(1.0, dim=1), (12, 5), [60]),
        (proxmo.Simplex(), (40,), [40]),
        (proxmo.L1(1.0), (2, 11), [22]),  # not large enough
        (Weighted(torch.ones(40)), (40,), [40]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_chunks")
def test_chunks_are_rows(
    penalty: proxmo.Penalty, shape: tuple[int, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, hook = [], type(penalty)._prox
    monkeypatch.setattr(
        type(penalty), "_prox", lambda self, x, *rest: (seen.append(x.numel()), hook(self, x, *rest))[1]
    )
    penalty.prox(torch.randn(shape), 1.0)
    assert seen == expected


def small_tensors(axes: int, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of several shapes, most of them repeated, some transposed, the last one NaN."""
    shapes = [shape for shape in [(), (6,), (3, 5), (2, 3, 2), (3, 5), (3, 5), (6,), (3, 5)] if len(shape) >= axes]
    found = [noise(shape, dtype, seed=k) for k, shape in enumerate([*shapes, *shapes[-3:]])]
    found[-1][...] = torch.nan
    return [x.t().contiguous().t() if x.shape == (3, 5) and k % 2 else x for k, x in enumerate(found)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["number", "tensor", "one for each tensor"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.make(1.0).joint], ids=str)
def test_small_tensors_taken_together_equal_each_alone(case: Case, form: str, dtype: torch.dtype) -> None:
    penalty = case.make(1.0)
    tensors = small_tensors(case.axes, dtype)
    if form == "one for each tensor" and penalty.elementwise_step:
        step: list[Tensor] | Tensor | float = [noise(tuple(x.shape), seed=50 + k).exp() for k, x in enumerate(tensors)]
    elif form == "one for each tensor":
        step = [torch.tensor(0.3 + 0.1 * k) for k in range(len(tensors))]
    else:
        step = 0.7 if form == "number" else torch.tensor(0.7, dtype=torch.float64)
    steps = step if isinstance(step, list) else [step] * len(tensors)
    expected = [penalty.prox(x, s) for x, s in zip(tensors, steps, strict=True)]
    penalty.prox_(tensors, step)
    for found, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance(dtype), equal_nan=True)
        assert torch.equal(found == 0, wanted == 0)


def test_tensors_with_a_weight_for_each_element_are_not_stacked() -> None:
    tensors, penalty = [noise((4,), seed=1), noise((4,), seed=2)], Weighted(torch.tensor([0.0, 0.1, 1.0, 9.0]))
    expected = [penalty.prox(x, 1.0) for x in tensors]
    penalty.prox_(tensors, 1.0)
    torch.testing.assert_close(tensors, expected)


def test_hook_is_called_once_for_many_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, hook = [], proxmo.GroupL2._prox
    monkeypatch.setattr(proxmo.GroupL2, "_prox", lambda self, x, *rest: (calls.append(x), hook(self, x, *rest))[1])
    proxmo.GroupL2(0.1).prox_([torch.randn(16, 16) for _ in range(20)] + [torch.randn(300, 100)], 1.0)
    assert [tuple(x.shape) for x in calls] == [(20, 16, 16), (300, 100)]


@dataclass
class ForFortyRows(proxmo.Penalty):
    """|x| for tensors of 40 rows only."""

    strength: float
    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def check(self, x: Tensor) -> None:
        if x.shape[0] != 40:
            raise ValueError(f"x must have 40 rows, got {x.shape[0]}")

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return proxmo.L1(self.strength).prox(x, step, out=out)


@pytest.mark.parametrize("lr", [0.0, 0.3])
@pytest.mark.usefixtures("small_chunks")
def test_penalty_is_checked_against_parameters_not_chunks(lr: float) -> None:
    found = []
    for penalty in (ForFortyRows(0.3), proxmo.L1(0.3)):
        x = noise((40,))
        x.grad = noise((40,), seed=1)
        ProxSGD([x], lr=lr, penalty=penalty).step()
        found.append(x)
    assert torch.equal(*found)


@dataclass
class ByItsGradient(proxmo.Penalty):
    """‖x‖²/2 with a prox that uses autograd: step·∇ψ(prox) = x − prox."""

    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = False

    def _value(self, x: Tensor) -> Tensor:
        return x.square().sum() / 2

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self._value(x.requires_grad_()), x)
        return x.detach() - slope * step / (1 + step)


def test_penalty_may_use_autograd_in_its_prox() -> None:
    found = []
    for penalty in (ByItsGradient(), proxmo.SquaredL2(1.0)):
        x = torch.nn.Parameter(noise((12, 5)))
        x.grad = noise((12, 5), seed=1)
        ProxSGD([x], lr=0.3, penalty=penalty).step()
        found.append(x.detach())
    torch.testing.assert_close(*found)
