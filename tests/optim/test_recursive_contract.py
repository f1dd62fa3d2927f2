"""The two-point methods as torch optimizers: failures, running statistics, checkpoints, options, clear errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

import proxmo
from optim.finite_sum import (
    ALL,
    BATCHES,
    DOUBLE,
    INPUTS,
    LR,
    METHODS,
    START,
    STRENGTH,
    closure_of,
    each_method,
    fresh,
    gradient,
    step_on,
    take_step,
)


class Failing:
    """A closure that raises at a given call."""

    def __init__(self, x: Parameter, at: int) -> None:
        self._closure, self._left = closure_of(x, ALL), at

    def __call__(self) -> float:
        self._left -= 1
        loss = self._closure()
        if self._left == 0:
            raise ArithmeticError
        return loss


@each_method
@pytest.mark.parametrize(("when", "at"), [(0, 1), (1, 1), (1, 2), (3, 1), (3, 2)])  # the first step evaluates one point
def test_closure_that_raises_changes_nothing(name: str, at: int, when: int) -> None:
    x, optimizer = fresh(name)
    for k in range(when):
        take_step(optimizer, x, k)
    point, state = x.detach().clone(), copy.deepcopy(optimizer.state_dict())
    failing = Failing(x, at)
    with pytest.raises(ArithmeticError):
        step_on(optimizer, failing, closure_of(x, ALL))
    assert torch.equal(x, point)
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    if at == 2:  # the gradient is that of the current point, not of the previous one
        np.testing.assert_allclose(x.grad, gradient(point.numpy(), ALL), rtol=1e-12)


@each_method
def test_grad_is_the_gradient_at_the_start_of_the_step(name: str) -> None:
    x, optimizer = fresh(name)
    for k in range(5):
        here = x.detach().numpy().copy()
        take_step(optimizer, x, k)
        rows = ALL if name == "spiderboost" and k == 0 else BATCHES[2 * k if name == "hybrid" else k]
        np.testing.assert_allclose(x.grad, gradient(here, rows), rtol=1e-12, atol=1e-15)


def test_hybrid_supports_gradients_in_reused_memory() -> None:
    """A DDP reducer, for example, hands out views of its buckets."""
    x, bucket = Parameter(torch.zeros(1)), torch.zeros(1)
    optimizer = proxmo.ProxHybridSGD([x], lr=0.1, momentum=0.0)

    def closure_with_gradient(value: float) -> Callable[[], float]:
        def closure() -> float:
            bucket.fill_(value)
            x.grad = bucket
            return value

        return closure

    optimizer.step(closure_with_gradient(1.0), closure_with_gradient(2.0))
    optimizer.step(closure_with_gradient(5.0), closure_with_gradient(7.0))
    assert optimizer.state[x]["estimate"].item() == 7


@each_method
def test_checkpoint_of_another_optimizer_is_refused_and_changes_nothing(name: str) -> None:
    x, optimizer = fresh(name)
    take_step(optimizer, x, 0)
    before = copy.deepcopy(optimizer.state_dict())
    other = proxmo.ProxSGD([x], lr=0.7, penalty=proxmo.L1(0.5))
    other.step()
    with pytest.raises(ValueError, match=r"checkpoint of another optimizer into Prox.*: its state has momentum_buffer"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    with pytest.raises(ValueError, match="checkpoint of another optimizer into ProxSGD"):
        other.load_state_dict(before)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))


@each_method
def test_batch_norm_and_dropout_see_each_sample_once(name: str) -> None:
    """Evaluations at previous points leave no trace in running statistics and random numbers."""
    net, twin = network(), network()
    optimizer = METHODS[name](net.parameters())
    inputs = torch.tensor(INPUTS, dtype=torch.float32)
    masks: list[list[list[bool]]] = []

    def record_mask(module: nn.Module, _: Any, output: Tensor) -> None:
        masks[-1].append((output == 0).flatten().tolist())

    net[2].register_forward_hook(record_mask)
    for k in range(8):
        points = copy.deepcopy(net.state_dict())
        rows = [ALL] if name == "spiderboost" and k % 6 == 0 else [BATCHES[2 * k], BATCHES[2 * k + 1]]
        batches = [inputs[r] for r in rows]

        def closure(batch: Tensor = batches[0]) -> float:
            loss = net(batch).square().mean()
            loss.backward()
            return loss.item()

        def other(batch: Tensor = batches[-1]) -> float:
            return closure(batch)

        torch.manual_seed(k)
        masks.append([])
        step_on(optimizer, closure, other)
        drawn = torch.rand(3)

        twin.load_state_dict(points)
        torch.manual_seed(k)
        if name == "hybrid" and k > 0:
            twin(batches[1])
        twin(batches[0])
        for mine, expected in zip(net.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, expected)
        assert torch.equal(drawn, torch.rand(3))
        if not (k == 0 or (name == "spiderboost" and k == 6)):
            assert masks[-1][-1] == masks[-1][-2]  # the same dropout mask at both points


@each_method
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_of_a_fresh_optimizer_moves_nothing(name: str) -> None:
    net = nn.Linear(3, 2)
    optimizer = METHODS[name](net.parameters(), penalty=proxmo.L2Ball(0.1))
    before = copy.deepcopy(net.state_dict())
    state = get_optimizer_state_dict(net, optimizer)
    assert set(state["state"]["weight"]) == {"step", "estimate", "previous"}
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    set_optimizer_state_dict(net, optimizer, state)
    twin = copy.deepcopy(net)
    untouched = METHODS[name](twin.parameters(), penalty=proxmo.L2Ball(0.1))
    for model, method in ((net, optimizer), (twin, untouched)):  # asking for state early does not change the start

        def closure(model: nn.Module = model) -> float:
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss.item()

        for _ in range(3):
            step_on(method, closure)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@each_method
def test_parameter_without_gradient_stays_and_restarts_its_estimate(name: str) -> None:
    """Covers parameters whose first gradient comes late, those that lose it for a while, and frozen ones."""
    a, b, frozen = (Parameter(torch.tensor(START)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = METHODS[name]([{"params": [a, frozen]}, {"params": [b]}])
    for k in range(12):
        uses_b = k in (3, 4, 8, 9, 10)

        def closure(uses_b: bool = uses_b) -> float:
            loss = (a - 1).square().sum() / 2 + ((b + 1).square().sum() / 2 if uses_b else 0)
            loss.backward()
            return loss.item()

        b_before = b.detach().clone()
        step_on(optimizer, closure)
        if uses_b:  # with one quadratic sample every estimate is the gradient
            averaging = 0.7 if name == "hybrid" else 1.0
            torch.testing.assert_close(b.detach(), b_before - averaging * LR * (b_before + 1))
        else:
            assert torch.equal(b, b_before)
    assert torch.equal(frozen, torch.tensor(START))
    a.requires_grad_(False)  # its last gradient must not move it
    frozen_at = a.detach().clone()
    for _ in range(3):
        step_on(optimizer, lambda: (b.square().sum() / 2).backward())
    assert torch.equal(a, frozen_at)


@each_method
def test_tensor_lr_bfloat16_and_maximize_give_the_expected_decay(name: str) -> None:
    x, y = Parameter(torch.ones(3, dtype=torch.bfloat16)), Parameter(torch.ones(3))
    down = METHODS[name]([{"params": [x], "lr": torch.tensor(0.1)}])
    up = METHODS[name]([{"params": [y], "lr": 0.1, "maximize": True}])
    for p, optimizer, sign in ((x, down, 1.0), (y, up, -1.0)):

        def closure(p: Parameter = p, sign: float = sign) -> float:
            loss = sign * p.square().sum() / 2
            loss.backward()
            return loss.item()

        for _ in range(5):
            step_on(optimizer, closure)
    factor = (1 - 0.1 * (0.7 if name == "hybrid" else 1.0)) ** 5
    torch.testing.assert_close(x.detach().float(), torch.full((3,), factor), rtol=0, atol=0.02)
    torch.testing.assert_close(y.detach(), torch.full((3,), factor))


@each_method
def test_scheduled_lr_of_zero_moves_nothing(name: str) -> None:
    x, optimizer = fresh(name)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for k in range(10):
        before = x.detach().clone()
        take_step(optimizer, x, k)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
    point = x.detach().clone()
    take_step(optimizer, x, 10)
    torch.testing.assert_close(x.detach(), point)
    assert not torch.equal(point, before)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: proxmo.ProxSpiderBoost(p, 0.1, 0), ValueError, "period must be an integer >= 1, got 0"),
        (lambda p: proxmo.ProxSpiderBoost(p, 0.1, 2.5), TypeError, "period must be an integer >= 1, got 2.5"),
        (lambda p: proxmo.ProxSTORM(p, 0.1, 1.5), ValueError, r"momentum must be a number in \[0, 1\], got 1.5"),
        (lambda p: proxmo.ProxHybridSGD(p, 0.1, 0.9, -1.0), ValueError, r"averaging must be a number in \[0, 1\]"),
        (
            lambda p: proxmo.ProxHybridSGD(p, 0.1, math.nan),
            ValueError,
            r"momentum must be a number in \[0, 1\], got nan",
        ),
        (lambda p: proxmo.ProxSTORM(p, -0.1), ValueError, "lr must be a finite number >= 0"),
    ],
)
def test_invalid_options_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make([Parameter(torch.ones(2))])


def test_invalid_calls_are_refused_and_change_nothing() -> None:
    x = Parameter(torch.ones(5, dtype=DOUBLE))
    closure = closure_of(x, ALL)
    for make in METHODS.values():
        optimizer = make([x])
        x.grad = torch.ones(5, dtype=DOUBLE)
        with pytest.raises(TypeError, match=r"\.step needs a closure that evaluates the loss on a sample, got None"):
            optimizer.step()
        with pytest.raises(TypeError, match=r"closure must be a function .*, got 3"):
            step_on(optimizer, 3, closure)
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(ValueError, match="lr must be"):
            step_on(optimizer, closure)
        assert not optimizer.state
    with pytest.raises(TypeError, match=r"needs a second closure, other, .* ProxSTORM does the same"):
        proxmo.ProxHybridSGD([x]).step(closure)
    mixed = proxmo.ProxSpiderBoost([{"params": [x]}, {"params": [Parameter(torch.ones(1))], "period": 7}], period=5)
    with pytest.raises(ValueError, match=r"period must be the same in all parameter groups, got \[5, 7\]"):
        mixed.step(closure)
    assert torch.equal(x, torch.ones(5, dtype=DOUBLE))


def test_certificate_exists_only_if_the_step_ends_at_the_prox() -> None:
    x, optimizer = fresh("storm")
    optimizer.certify = True
    take_step(optimizer, x, 0)
    assert optimizer.certificate(x).subgradient.abs().max() <= STRENGTH * (1 + 1e-9)
    x, optimizer = fresh("hybrid")
    optimizer.certify = True
    take_step(optimizer, x, 0)
    with pytest.raises(RuntimeError, match="written to after its last step"):
        optimizer.certificate(x)
