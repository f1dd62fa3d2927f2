"""ProxSpiderBoost, ProxHybridSGD and ProxSTORM against numpy, step by step, and in the cases where they coincide."""

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
def test_every_step_is_that_of_numpy(name: str, foreach: bool) -> None:
    x, optimizer = fresh(name, foreach=foreach)
    for k, expected in enumerate(REFERENCES[name]()):
        take_step(optimizer, x, k)
        np.testing.assert_allclose(x.detach().numpy(), expected, rtol=1e-12, atol=1e-13)
    assert k == STEPS - 1


def follow(optimizer: RecursiveOptimizer, x: Parameter, expected: Iterator[Array]) -> None:
    for k, point in enumerate(expected):
        take_step(optimizer, x, k)
        np.testing.assert_allclose(x.detach().numpy(), point, rtol=1e-11, atol=1e-12)
    assert k == STEPS - 1


def test_special_cases() -> None:
    """STORM without momentum is SGD, with momentum 1 it is SARAH; hybrid is either at its ends; SpiderBoost with a
    period of 1 is full gradient descent."""
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
        follow(make([x]), x, expected)


@pytest.mark.parametrize("period", [3, 100])
def test_without_a_penalty_spiderboost_is_spider(period: int) -> None:
    """Also: the recursion telescopes, so that on all data it is the full gradient to rounding."""
    x, y = Parameter(torch.tensor(START)), Parameter(torch.tensor(START))
    spider, plain = proxmo.ProxSpiderBoost([x], LR, period), torch.optim.SGD([y], LR)
    for _ in range(STEPS):
        spider.step(closure_of(x, ALL))
        plain.zero_grad()
        plain.step(closure_of(y, ALL))
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert spider.param_groups[0]["steps"] == STEPS


@each_method
def test_with_one_sample_in_the_data_all_are_proximal_gradient_descent(name: str) -> None:
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
def test_a_resumed_run_is_the_same_run(name: str, cut: int, tmp_path: Path) -> None:
    """In the middle of a period too."""
    straight, optimizer = fresh(name)
    for k in range(STEPS):
        take_step(optimizer, straight, k)
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
    assert torch.equal(x, straight)


@each_method
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_alike(name: str, duplicate: Any) -> None:
    x, optimizer = fresh(name)
    for k in range(4):
        take_step(optimizer, x, k)
    y, twin = duplicate((x, optimizer))
    for k in range(4, 8):
        take_step(optimizer, x, k)
        take_step(twin, y, k)
    assert torch.equal(x, y)
    assert twin.param_groups[0]["penalty"] is not optimizer.param_groups[0]["penalty"]


def test_storm_with_its_own_schedule() -> None:
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


def test_large_batch_is_due_tells_which_closure_is_next() -> None:
    x = Parameter(torch.tensor(START))
    optimizer = proxmo.ProxSpiderBoost([x], LR, period=3)
    seen = []
    for _ in range(7):
        seen.append(optimizer.large_batch_is_due)
        optimizer.step(closure_of(x, ALL))
    assert seen == [True, False, False, True, False, False, True]
