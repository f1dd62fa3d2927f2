"""ProxSpiderBoost, ProxHybridSGD and ProxSTORM against numpy, step by step, and in the cases where they coincide."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

import proxmo
from proxmo.optim.recursive import RecursiveOptimizer

Array = NDArray[np.float64]
Gradient = Callable[[Array, Array], Array]
DOUBLE = torch.float64
LR, STRENGTH, STEPS = 0.3, 0.02, 25

generator = np.random.default_rng(0)
INPUTS = generator.normal(size=(40, 5))
TARGETS = np.where(INPUTS @ generator.normal(size=5) > 0, 1.0, -1.0)
START = generator.normal(size=5)
BATCHES = [generator.integers(40, size=4) for _ in range(2 * STEPS)]
ALL = np.arange(40)


# The reference: plain numpy on f = mean of the non-convex 1 − tanh(y·<a, x>), with an ℓ1 penalty.


def gradient(x: Array, rows: Array) -> Array:
    a, y = INPUTS[rows], TARGETS[rows]
    return -(y / np.cosh(y * (a @ x)) ** 2) @ a / len(rows)


def soft(x: Array) -> Array:
    return np.sign(x) * np.maximum(np.abs(x) - LR * STRENGTH, 0)


def spiderboost(period: int) -> Iterator[Array]:
    x, before, v = START, START, START
    for k, rows in enumerate(BATCHES[:STEPS]):
        v = gradient(x, ALL) if k % period == 0 else v + gradient(x, rows) - gradient(before, rows)
        x, before = soft(x - LR * v), x
        yield x


def hybrid(beta: float, gamma: float) -> Iterator[Array]:
    x, before, v = START, START, gradient(START, BATCHES[0])
    for k in range(STEPS):
        if k > 0:
            one, other = BATCHES[2 * k], BATCHES[2 * k + 1]
            v = beta * (v + gradient(x, one) - gradient(before, one)) + (1 - beta) * gradient(x, other)
        x, before = (1 - gamma) * x + gamma * soft(x - LR * v), x
        yield x


def storm(beta: float) -> Iterator[Array]:
    x, before, d = START, START, gradient(START, BATCHES[0])
    for k, rows in enumerate(BATCHES[:STEPS]):
        if k > 0:
            d = gradient(x, rows) + (1 - beta) * (d - gradient(before, rows))
        x, before = soft(x - LR * d), x
        yield x


def vanilla(batches: list[Array]) -> Iterator[Array]:
    x = START
    for rows in batches:
        x = soft(x - LR * gradient(x, rows))
        yield x


# The same problem in torch.


def closure_of(x: Parameter, rows: Array) -> Callable[[], float]:
    a, y = torch.tensor(INPUTS[rows]), torch.tensor(TARGETS[rows])

    def closure() -> float:
        loss = (1 - torch.tanh(y * (a @ x))).mean()
        loss.backward()  # without zero_grad: the optimizer clears gradients between evaluations
        return loss.item()

    return closure


def take_step(optimizer: RecursiveOptimizer, x: Parameter, k: int) -> None:
    if isinstance(optimizer, proxmo.ProxSpiderBoost):
        optimizer.step(closure_of(x, BATCHES[k]), closure_of(x, ALL))
    elif isinstance(optimizer, proxmo.ProxHybridSGD):
        optimizer.step(closure_of(x, BATCHES[2 * k]), closure_of(x, BATCHES[2 * k + 1]))
    elif isinstance(optimizer, proxmo.ProxSTORM):
        optimizer.step(closure_of(x, BATCHES[k]))


def step_on(optimizer: RecursiveOptimizer, closure: Any, other: Any = None) -> None:
    """A step with one closure for all that the method asks for, unless there is another."""
    if isinstance(optimizer, proxmo.ProxHybridSGD):
        optimizer.step(closure, other or closure)
    else:
        optimizer.step(closure)  # type: ignore[call-arg]


METHODS: dict[str, Callable[..., RecursiveOptimizer]] = {
    "spiderboost": lambda params, **options: proxmo.ProxSpiderBoost(params, LR, 6, **options),
    "hybrid": lambda params, **options: proxmo.ProxHybridSGD(params, LR, 0.8, 0.7, **options),
    "storm": lambda params, **options: proxmo.ProxSTORM(params, LR, 0.8, **options),
}
REFERENCES = {
    "spiderboost": lambda: spiderboost(6),
    "hybrid": lambda: hybrid(0.8, 0.7),
    "storm": lambda: storm(0.2),
}
each_method = pytest.mark.parametrize("name", METHODS)


def fresh(name: str, **options: Any) -> tuple[Parameter, RecursiveOptimizer]:
    x = Parameter(torch.tensor(START))
    return x, METHODS[name]([x], penalty=proxmo.L1(STRENGTH), **options)


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
@pytest.mark.parametrize(("when", "at"), [(0, 1), (1, 1), (1, 2), (3, 1), (3, 2)])  # the first looks at one point only
def test_a_closure_that_raises_leaves_everything_as_it_was(name: str, at: int, when: int) -> None:
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
    if at == 2:  # the gradient is that of this point, not of the one before
        np.testing.assert_allclose(x.grad, gradient(point.numpy(), ALL), rtol=1e-12)


@each_method
def test_gradients_stay_those_of_the_present_point(name: str) -> None:
    x, optimizer = fresh(name)
    for k in range(5):
        here = x.detach().numpy().copy()
        take_step(optimizer, x, k)
        rows = ALL if name == "spiderboost" and k == 0 else BATCHES[2 * k if name == "hybrid" else k]
        np.testing.assert_allclose(x.grad, gradient(here, rows), rtol=1e-12, atol=1e-15)


def test_hybrid_with_gradients_in_memory_that_is_used_again() -> None:
    """As a DDP reducer hands out views of its buckets."""
    x, bucket = Parameter(torch.zeros(1)), torch.zeros(1)
    optimizer = proxmo.ProxHybridSGD([x], lr=0.1, momentum=0.0)

    def gives(value: float) -> Callable[[], float]:
        def closure() -> float:
            bucket.fill_(value)
            x.grad = bucket
            return value

        return closure

    optimizer.step(gives(1.0), gives(2.0))
    optimizer.step(gives(5.0), gives(7.0))
    assert optimizer.state[x]["estimate"].item() == 7


@each_method
def test_the_checkpoint_of_another_optimizer_is_refused_before_anything_changes(name: str) -> None:
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
    """Running statistics and random numbers are those of evaluations at the present points alone."""
    net, twin = network(), network()
    optimizer = METHODS[name](net.parameters())
    inputs = torch.tensor(INPUTS, dtype=torch.float32)
    masks: list[list[list[bool]]] = []

    def watched(module: nn.Module, _: Any, output: Tensor) -> None:
        masks[-1].append((output == 0).flatten().tolist())

    net[2].register_forward_hook(watched)
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
            assert masks[-1][-1] == masks[-1][-2]  # the same dropout at both points


@each_method
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_of_a_fresh_one(name: str) -> None:
    net = nn.Linear(3, 2)
    optimizer = METHODS[name](net.parameters(), penalty=proxmo.L2Ball(0.1))
    before = copy.deepcopy(net.state_dict())
    state = get_optimizer_state_dict(net, optimizer)
    assert set(state["state"]["weight"]) == {"step", "estimate", "previous"}
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    set_optimizer_state_dict(net, optimizer, state)
    twin = copy.deepcopy(net)
    plain = METHODS[name](twin.parameters(), penalty=proxmo.L2Ball(0.1))
    for model, method in ((net, optimizer), (twin, plain)):  # asking early does not change how the estimate starts

        def closure(model: nn.Module = model) -> float:
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss.item()

        for _ in range(3):
            step_on(method, closure)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@each_method
def test_parameters_that_come_late_rest_or_are_frozen(name: str) -> None:
    """A parameter without a gradient stays, and its estimate starts anew when it has one again."""
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
    a.requires_grad_(False)  # its last gradient must not drive it on
    at = a.detach().clone()
    for _ in range(3):
        step_on(optimizer, lambda: (b.square().sum() / 2).backward())
    assert torch.equal(a, at)


@each_method
def test_maximize_tensor_lr_and_half_precision(name: str) -> None:
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
def test_schedulers(name: str) -> None:
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
def test_bad_options(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make([Parameter(torch.ones(2))])


def test_bad_calls_change_nothing() -> None:
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


def test_large_batch_is_due_tells_which_closure_is_next() -> None:
    x = Parameter(torch.tensor(START))
    optimizer = proxmo.ProxSpiderBoost([x], LR, period=3)
    seen = []
    for _ in range(7):
        seen.append(optimizer.large_batch_is_due)
        optimizer.step(closure_of(x, ALL))
    assert seen == [True, False, False, True, False, False, True]


def test_a_certificate_is_given_where_the_step_ends_at_the_prox() -> None:
    x, optimizer = fresh("storm")
    optimizer.certify = True
    take_step(optimizer, x, 0)
    assert optimizer.certificate(x).subgradient.abs().max() <= STRENGTH * (1 + 1e-9)
    x, optimizer = fresh("hybrid")
    optimizer.certify = True
    take_step(optimizer, x, 0)
    with pytest.raises(RuntimeError, match="written to after its last step"):
        optimizer.certificate(x)
