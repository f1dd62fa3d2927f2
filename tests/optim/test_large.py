"""Steps of large tensors go part by part, and give what steps of small ones do."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import proxmo
from penalties.cases import CASES, Case, noise, tolerance
from proxmo import ProxSGD, parts
from proxmo.optim import large

SHAPES = [(40,), (12, 5), (3, 50), (10, 3, 2, 2), (2, 2)]


def run(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES, **options: Any) -> tuple[list[Tensor], list[Any]]:
    params = [Parameter(noise(shape, dtype, seed=k)) for k, shape in enumerate(shapes)]
    optimizer = ProxSGD(params, **{"lr": 0.3, "momentum": 0.8, **options})
    for step in range(3):
        for k, p in enumerate(params):
            gradient = noise(tuple(p.shape), dtype, seed=100 * step + k)
            p.grad = gradient.t().contiguous().t() if gradient.dim() == 2 else gradient  # strides of its own
        optimizer.step()
    return [p.detach() for p in params], [optimizer.state[p].get("momentum_buffer") for p in params]


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Which moves were made as those of large tensors."""
    monkeypatch.setattr(parts, "PART", 12)
    monkeypatch.setattr(large, "LARGE", 10)
    taken: list[Any] = []
    parts_of = large._parts
    monkeypatch.setattr(large, "_parts", lambda *move: (taken.append(move), parts_of(*move))[1])
    return taken


@pytest.mark.parametrize("case", [None, *CASES], ids=str)
def test_every_penalty(case: Case | None, all_are_large: list[Any]) -> None:
    shapes = [shape for shape in SHAPES if case is None or len(shape) >= case.axes]
    penalty = None if case is None else case.make(0.3)
    expected = run(torch.float64, shapes, penalty=penalty, foreach=True)
    assert not all_are_large
    found = run(torch.float64, shapes, penalty=penalty)
    assert len(all_are_large) == 3 * sum(prod(shape) >= large.LARGE for shape in shapes)
    torch.testing.assert_close(found, expected, rtol=0, atol=3 * tolerance(torch.float64))


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"momentum": 0.0}, True),
        ({"initial": "zero"}, True),
        ({"maximize": True}, True),
        ({"lr": 0.0}, True),
        ({"lr": torch.tensor(0.3)}, False),
        ({"momentum_dtype": torch.float64}, False),
        ({"foreach": False}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("penalty", [None, proxmo.L1(0.1), proxmo.GroupL2(0.3), proxmo.Simplex(2.0)], ids=str)
def test_every_option(
    penalty: proxmo.Penalty | None, options: dict[str, Any], taken: bool, all_are_large: list[Any]
) -> None:
    expected = run(torch.float32, penalty=penalty, **{**options, "foreach": True})
    found = run(torch.float32, penalty=penalty, **options)
    assert bool(all_are_large) == taken
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_half_precision_rounds_once(all_are_large: list[Any]) -> None:
    """It is left to the other way, which computes in float32."""
    found, _ = run(torch.bfloat16, penalty=proxmo.L1(0.1))
    assert not all_are_large
    expected, _ = run(torch.bfloat16, penalty=proxmo.L1(0.1), foreach=True)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("elements", [20, 80])
@pytest.mark.usefixtures("all_are_large")
def test_a_parameter_that_was_resized_is_refused(elements: int) -> None:
    x = Parameter(torch.ones(40))
    x.grad = torch.ones(40)
    optimizer = ProxSGD([x])
    optimizer.step()
    x.data = torch.ones(elements)
    x.grad = torch.ones(elements)
    with pytest.raises(RuntimeError, match="must match the size"):
        optimizer.step()


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
@pytest.mark.usefixtures("all_are_large")
def test_a_penalty_is_asked_whether_it_fits_the_parameter_not_its_parts(lr: float) -> None:
    found, _ = run(torch.float64, [(40,)], lr=lr, penalty=ForFortyRows(0.3))
    expected, _ = run(torch.float64, [(40,)], lr=lr, penalty=proxmo.L1(0.3))
    assert torch.equal(found[0], expected[0])


def test_certificates_are_those_of_whole_parameters(all_are_large: list[Any]) -> None:
    x = Parameter(noise((40,), torch.float64))
    optimizer = ProxSGD([x], lr=0.5, penalty=proxmo.L1(0.1))
    optimizer.certify = True
    x.grad = torch.zeros_like(x)
    optimizer.step()
    assert optimizer.certificate(x).subgradient.shape == x.shape
    assert not all_are_large


@dataclass
class ByItsGradient(proxmo.Penalty):
    """‖x‖²/2 for a prox that looks at the gradient: step·∇ψ(prox) = x − prox."""

    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = False

    def _value(self, x: Tensor) -> Tensor:
        return x.square().sum() / 2

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self._value(x.requires_grad_()), x)
        return x.detach() - slope * step / (1 + step)


def test_a_penalty_that_differentiates(all_are_large: list[Any]) -> None:
    penalty = ByItsGradient()
    found, _ = run(torch.float64, penalty=penalty)
    assert all_are_large
    expected, _ = run(torch.float64, penalty=proxmo.SquaredL2(1.0), foreach=True)
    torch.testing.assert_close(found, expected)
