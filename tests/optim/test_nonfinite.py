"""Gradients with NaN or inf are propagated, refused or skipped, according to ``nonfinite``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import proxmo
from proxmo import AutoProxSGD, ProxAdamW, ProxHybridSGD, ProxLion, ProxOptimizer, ProxSGD, ProxSpiderBoost, ProxSTORM

Closure = Callable[[], float]


class Run:
    """An optimizer on a quadratic, with a bad gradient at chosen evaluations."""

    def __init__(self, method: type[ProxOptimizer], **options: Any) -> None:
        self.params = [torch.full((3,), 2.0).requires_grad_(), torch.ones(2, 2).requires_grad_()]
        if method is ProxSpiderBoost:
            options["period"] = 3
        self.optimizer = method(self.params, lr=0.1, penalty=proxmo.L1(0.1), **options)  # type: ignore[call-arg]
        self.evaluations = 0

    def closure(self, bad: float | None, at: int = 0) -> Closure:
        """Return a closure that writes ``bad`` into one gradient at its evaluation number ``at``."""
        calls = 0

        def evaluate() -> float:
            nonlocal calls
            self.optimizer.zero_grad()
            loss = sum(((p - 1).square().sum() for p in self.params), torch.zeros(())) / 2
            loss.backward()
            if bad is not None and calls == at:
                assert self.params[1].grad is not None
                self.params[1].grad[0, 1] = bad
            calls += 1
            self.evaluations += 1
            return loss.item()

        return evaluate

    def step(self, bad: float | None = None, at: int = 0) -> float | None:
        if isinstance(self.optimizer, ProxHybridSGD):
            other = self.closure(bad if at == 2 else None)
            return self.optimizer.step(self.closure(None if at == 2 else bad, at), other)
        return self.optimizer.step(self.closure(bad, at))

    def snapshot(self) -> tuple[list[Tensor], dict[str, Any]]:
        return [p.detach().clone() for p in self.params], copy.deepcopy(self.optimizer.state_dict())


def same(a: Any, b: Any) -> bool:
    """Return whether nested data are exactly equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


CASES = [  # method, bad evaluation: 0 at the current point, 1 at the previous point, 2 on the second sample
    (ProxSGD, 0),
    (AutoProxSGD, 0),
    (ProxAdamW, 0),
    (ProxLion, 0),
    (ProxSTORM, 0),
    (ProxSTORM, 1),
    (ProxHybridSGD, 0),
    (ProxHybridSGD, 1),
    (ProxHybridSGD, 2),
    (ProxSpiderBoost, 0),
    (ProxSpiderBoost, 1),
]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("method", "at"), CASES)
def test_skipped_step_changes_nothing(method: type[ProxOptimizer], at: int, bad: float) -> None:
    run, clean = Run(method, nonfinite="skip"), Run(method)
    for k in range(7):
        if k in (1, 4):
            before = run.snapshot()
            run.step(bad, at)
            assert same(run.snapshot(), before)
        run.step()
        clean.step()
    assert same(run.snapshot()[0], clean.snapshot()[0])


@pytest.mark.parametrize(("method", "at"), CASES)
def test_step_that_raises_changes_nothing(method: type[ProxOptimizer], at: int) -> None:
    run = Run(method, nonfinite="raise")
    run.step()
    before = run.snapshot()
    with pytest.raises(FloatingPointError, match="a gradient is not finite"):
        run.step(math.nan, at)
    assert same(run.snapshot(), before)


@pytest.mark.parametrize("method", [ProxSGD, ProxSTORM])
def test_default_propagates_nonfinite_values_in_their_element(method: type[ProxOptimizer]) -> None:
    run = Run(method)
    run.step()
    run.step(math.nan)
    assert run.params[1].isnan().tolist() == [[False, True], [False, False]]
    assert not run.params[0].isnan().any()


def test_first_step_can_be_skipped() -> None:
    run, clean = Run(ProxSGD, nonfinite="skip"), Run(ProxSGD)
    run.step(math.inf)
    assert not run.optimizer.state
    run.step()
    clean.step()
    assert same(run.snapshot()[0], clean.snapshot()[0])


def test_large_empty_and_half_precision_gradients_count_as_finite() -> None:
    params = [torch.zeros(2), torch.zeros(0), torch.zeros(2, dtype=torch.float16)]
    optimizer = ProxSGD(params, lr=1e-38, momentum=0.0, nonfinite="raise")
    params[0].grad = torch.full((2,), 3e38)  # its square overflows
    params[1].grad = torch.zeros(0)
    params[2].grad = torch.full((2,), 6e4, dtype=torch.float16)
    optimizer.step()
    assert params[0].tolist() == pytest.approx([-3.0, -3.0])
    params[2].grad[1] = math.inf
    with pytest.raises(FloatingPointError):
        optimizer.step()


def test_parameter_groups_may_differ_in_nonfinite() -> None:
    params = [torch.zeros(2), torch.zeros(2)]
    optimizer = ProxSGD([{"params": params[:1]}, {"params": params[1:], "nonfinite": "skip"}], lr=0.1)
    for p in params:
        p.grad = torch.ones(2)
    params[0].grad[0] = math.nan  # type: ignore[index]
    optimizer.step()
    assert params[0].isnan().tolist() == [True, False]
    assert params[1].tolist() == pytest.approx([-0.1, -0.1])


def test_unknown_nonfinite_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nonfinite must be one of \('propagate', 'raise', 'skip'\), got 'ignore'"):
        ProxSGD([torch.zeros(2)], nonfinite="ignore")  # type: ignore[arg-type]
