"""ProxSpiderBoost, ProxHybridSGD and ProxSTORM against numpy, step by step, and against simpler special cases."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import proxmo
from optim.finite_sum import (
    ALL,
    BATCHES,
    LR,
    METHODS,
    REFERENCES,
    START,
    STEPS,
    STRENGTH,
    Array,
    closure_of,
    each_method,
    fresh,
    gradient,
    hybrid,
    step_on,
    storm,
    take_step,
    vanilla,
)
from proxmo.optim.recursive import RecursiveOptimizer


@each_method
@pytest.mark.parametrize("foreach", [False, True])
def test_every_step_equals_the_numpy_reference(name: str, foreach: bool) -> None:
    x, optimizer = fresh(name, foreach=foreach)
    for k, expected in enumerate(REFERENCES[name]()):
        take_step(optimizer, x, k)
        np.testing.assert_allclose(x.detach().numpy(), expected, rtol=1e-12, atol=1e-13)
    assert k == STEPS - 1


def assert_follows(optimizer: RecursiveOptimizer, x: Parameter, expected: Iterator[Array]) -> None:
    for k, point in enumerate(expected):
        take_step(optimizer, x, k)
        np.testing.assert_allclose(x.detach().numpy(), point, rtol=1e-11, atol=1e-12)
    assert k == STEPS - 1


def test_special_cases_equal_simpler_methods() -> None:
    """STORM and hybrid are SGD at momentum 0 and SARAH at 1; SpiderBoost of period 1 is full gradient descent."""
    sarah = list(hybrid(1.0, 1.0))  # on BATCHES[0], [2], [4] …
    cases = [
        (lambda p: proxmo.ProxSTORM(p, LR, 0.0, proxmo.L1(STRENGTH)), vanilla(BATCHES[:STEPS])),
        (lambda p: proxmo.ProxSTORM(p, LR, 1.0, proxmo.L1(STRENGTH)), storm(0.0)),
        (
            lambda p: proxmo.ProxHybridSGD(p, LR, 0.0, 1.0, proxmo.L1(STRENGTH)),
            vanilla([BATCHES[0], *BATCHES[3 : 2 * STEPS : 2]]),
        ),
        (lambda p: proxmo.ProxHybridSGD(p, LR, 1.0, 1.0, proxmo.L1(STRENGTH)), iter(sarah)),
        (lambda p: proxmo.ProxSpiderBoost(p, LR, 1, proxmo.L1(STRENGTH)), vanilla([ALL] * STEPS)),
    ]
    for make, expected in cases:
        x = Parameter(torch.tensor(START))
        assert_follows(make([x]), x, expected)


@pytest.mark.parametrize("period", [3, 100])
def test_spiderboost_on_all_data_equals_gradient_descent(period: int) -> None:
    """The recursion telescopes: on all data its estimate is the full gradient, up to rounding."""
    x, y = Parameter(torch.tensor(START)), Parameter(torch.tensor(START))
    spider, sgd = proxmo.ProxSpiderBoost([x], LR, period), torch.optim.SGD([y], LR)
    for _ in range(STEPS):
        spider.step(closure_of(x, ALL))
        sgd.zero_grad()
        sgd.step(closure_of(y, ALL))
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert spider.param_groups[0]["steps"] == STEPS


@each_method
def test_every_method_on_one_sample_is_proximal_gradient_descent(name: str) -> None:
    only = np.array([3])
    x = Parameter(torch.tensor(START))
    options = {"hybrid": {"averaging": 1.0}}.get(name, {})
    optimizer = METHODS[name]([{"params": [x], **options}], penalty=proxmo.L1(STRENGTH))
    for expected in vanilla([only] * STEPS):
        closure = closure_of(x, only)
        step_on(optimizer, closure)
        np.testing.assert_allclose(x.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


@each_method
@pytest.mark.parametrize("cut", [1, 4, 6, 13])
def test_resumed_run_equals_uninterrupted_run(name: str, cut: int, tmp_path: Path) -> None:
    """Including checkpoints from the middle of a period."""
    uninterrupted, optimizer = fresh(name)
    for k in range(STEPS):
        take_step(optimizer, uninterrupted, k)
    x, optimizer = fresh(name)
    for k in range(cut):
        take_step(optimizer, x, k)
    torch.save((x.data, optimizer.state_dict()), tmp_path / "state.pt")
    point, state = torch.load(tmp_path / "state.pt", weights_only=True)
    x, optimizer = fresh(name)
    x.data.copy_(point)
    optimizer.load_state_dict(state)
    for k in range(cut, STEPS):
        take_step(optimizer, x, k)
    assert torch.equal(x, uninterrupted)


@each_method
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_continue_identically(name: str, duplicate: Any) -> None:
    x, optimizer = fresh(name)
    for k in range(4):
        take_step(optimizer, x, k)
    y, twin = duplicate((x, optimizer))
    for k in range(4, 8):
        take_step(optimizer, x, k)
        take_step(twin, y, k)
    assert torch.equal(x, y)
    assert twin.param_groups[0]["penalty"] is not optimizer.param_groups[0]["penalty"]


def test_storm_schedule_sets_lr_and_momentum_in_the_order_of_pstorm() -> None:
    """The scheduler's order of α_k and β_k is PStorm's: the estimate at k + 1 uses β_k."""
    schedule = proxmo.theory.StormSchedule(smoothness=2.0)
    x = Parameter(torch.tensor(START))
    optimizer = proxmo.ProxSTORM([x], penalty=proxmo.L1(STRENGTH))
    scheduler = proxmo.RateScheduler(optimizer, schedule)
    point, before, d = START, START, gradient(START, BATCHES[0])
    for k, rows in enumerate(BATCHES[:STEPS]):
        if k > 0:
            d = gradient(point, rows) + schedule(k - 1).momentum * (d - gradient(before, rows))
        step = schedule(k).lr
        moved = point - step * d
        point, before = np.sign(moved) * np.maximum(np.abs(moved) - step * STRENGTH, 0), point
        optimizer.step(closure_of(x, rows))
        scheduler.step()
        np.testing.assert_allclose(x.detach().numpy(), point, rtol=1e-11, atol=1e-13)


def test_large_batch_is_due_at_the_start_of_each_period() -> None:
    x = Parameter(torch.tensor(START))
    optimizer = proxmo.ProxSpiderBoost([x], LR, period=3)
    seen = []
    for _ in range(7):
        seen.append(optimizer.large_batch_is_due)
        optimizer.step(closure_of(x, ALL))
    assert seen == [True, False, False, True, False, False, True]
