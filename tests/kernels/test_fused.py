"""Fused steps and proxes equal the eager ones, up to rounding."""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor
from torch.nn import Parameter

import proxmo
from penalties.cases import CASES, noise, tolerance
from proxmo import ProxSGD, kernels
from proxmo.kernels import Kernel, tasks
from proxmo.kernels.step import _row_loop
from proxmo.kernels.tasks import from_ordered, ordered
from proxmo.penalties import compiled_rows

STEPS = 4
# groups of one, few and many elements; more elements than a task or a block of a row has
SHAPES = [(7,), (1, 1), (30, 40), (5, 3, 3, 2), (3, 70_000), (120, 600)]


def run(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, is_fused: bool, **options: Any
) -> tuple[list[Tensor], ProxSGD]:
    params = [Parameter(noise(shape, dtype, seed=k)) for k, shape in enumerate(shapes)]
    optimizer = ProxSGD(params, **{"lr": 0.3, "momentum": 0.8, **options}, fused=is_fused)
    for step in range(STEPS):
        for k, p in enumerate(params):
            p.grad = noise(tuple(p.shape), dtype, seed=100 * step + k)
        optimizer.step()
    return [p.detach() for p in params], optimizer


def assert_same(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(found, expected, strict=True):
        bound = STEPS * tolerance(dtype) * float(b.abs().max().clamp(min=1))
        torch.testing.assert_close(a, b, rtol=0, atol=bound)
        assert ((a == 0) != (b == 0)).sum() <= 1e-3 * a.numel()  # rounding may decide at a threshold


# The loops of both dtypes have one source, and compiling them takes seconds.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("case", [None, *CASES], ids=str)
def test_fused_step_equals_eager_step_for_every_penalty(case: Any, dtype: torch.dtype) -> None:
    penalty = None if case is None else case.make(0.3)
    shapes = [shape for shape in SHAPES if case is None or len(shape) >= case.axes]
    if penalty is not None and penalty.current_kernel(0.3) is None:  # then the eager path applies the prox, too
        shapes = [shape for shape in shapes if math.prod(shape) < 2000]
    found, optimizer = run(shapes, dtype, True, penalty=penalty)
    expected, eager = run(shapes, dtype, False, penalty=penalty)
    averages = [[state["momentum_buffer"] for state in o.state.values()] for o in (optimizer, eager)]
    assert_same(*averages, dtype)
    if penalty is None or penalty.convex:
        assert_same(found, expected, dtype)
        return
    for a, b in zip(found, expected, strict=True):
        far = (a - b).abs() > STEPS * tolerance(dtype) * float(b.abs().max().clamp(min=1))
        assert far.sum() <= 1e-3 * a.numel()  # rounding may decide at a jump


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"initial": "zero"},
        {"maximize": True},
        {"lr": torch.tensor(0.3)},
        {"lr": 0.0},
        {"lr": 1e30},
        {"lr": 1e-50},  # zero in float32, but averages are still updated
        {"momentum_dtype": torch.float64},
        {"nonfinite": "skip"},
    ],
    ids=str,
)
@pytest.mark.parametrize("penalty", [None, proxmo.L1(0.1), proxmo.GroupL2(0.3), proxmo.Simplex(2.0)], ids=str)
def test_fused_step_equals_eager_step_for_every_option(penalty: proxmo.Penalty | None, options: dict[str, Any]) -> None:
    found, optimizer = run(SHAPES[:4], torch.float32, True, penalty=penalty, **options)
    expected, eager = run(SHAPES[:4], torch.float32, False, penalty=penalty, **options)
    assert_same(found, expected, torch.float32)
    averages = [[state["momentum_buffer"] for state in o.state.values()] for o in (optimizer, eager)]
    assert_same(*averages, torch.float32)


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded gradient": lambda x: x,
    "channels last": lambda x: (
        x.reshape(*x.shape, 1, 1).expand(*x.shape, 2, 2).contiguous(memory_format=torch.channels_last)
    ),
    "bfloat16": lambda x: x.bfloat16(),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("penalty", [None, proxmo.L1(0.1), proxmo.GroupLInf(0.5), proxmo.GroupL2(0.5, dim=1)], ids=str)
def test_fused_step_equals_eager_step_for_every_layout(layout: str, penalty: proxmo.Penalty | None) -> None:
    """Also where the layouts of parameter, average and gradient differ."""
    results = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        x = Parameter(LAYOUTS[layout](torch.randn(6, 5)))
        optimizer = ProxSGD([x], lr=0.3, penalty=penalty, fused=is_fused)
        for step in range(STEPS):
            gradient = torch.randn(x.shape, dtype=x.dtype)
            if layout == "expanded gradient":
                gradient = gradient[:1].expand_as(x)
            x.grad = gradient if step % 2 else torch.empty_like(x).copy_(gradient)
            optimizer.step()
        results.append(x.detach())
    bound = {torch.bfloat16: 0.0}.get(results[0].dtype, 1e-6)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=bound)


@pytest.mark.parametrize("is_fused", [False, True])
def test_lr_beyond_float32_is_refused(is_fused: bool) -> None:
    with pytest.raises(RuntimeError, match="overflow"):
        run([(3,)], torch.float32, is_fused, lr=1e300)


@pytest.mark.parametrize("elements", [50, 200])
def test_resized_parameter_is_refused(elements: int) -> None:
    """As in eager steps; a kernel would read beyond the end of the averages."""
    x = Parameter(torch.ones(100))
    x.grad = torch.ones(100)
    optimizer = ProxSGD([x], fused=True)
    optimizer.step()
    x.data = torch.ones(elements)
    x.grad = torch.ones(elements)
    with pytest.raises(RuntimeError, match="must match the size"):
        optimizer.step()


@pytest.mark.parametrize("penalty", [proxmo.Simplex(dim=0), proxmo.L1Ball(1.0, dim=0), proxmo.GroupLInf(1.0)], ids=str)
def test_fused_prox_equals_eager_prox_if_sums_overflow(penalty: proxmo.Penalty) -> None:
    x = torch.full((1, 4), 2e38)
    torch.testing.assert_close(penalty.prox(x, 1.0, fused=True), penalty.prox(x, 1.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "penalty",
    [None, proxmo.L1(0.1), proxmo.MCP(0.1, 2.0), proxmo.LHalf(0.1), proxmo.Box(-1.0, 1.0), proxmo.GroupL2(0.3),
     proxmo.GroupLInf(0.3), proxmo.SparseGroup(0.1, 0.1), proxmo.L1Ball(1.0, dim=0), proxmo.L2Ball(1.0, dim=0),
     proxmo.Simplex(dim=0)],
    ids=str,
)  # fmt: skip
def test_fused_step_equals_eager_step_for_nonfinite_gradients(penalty: proxmo.Penalty | None, bad: float) -> None:
    results = []
    for is_fused in (True, False):
        x = Parameter(noise((4, 30), torch.float32))
        x.grad = noise((4, 30), torch.float32, seed=1)
        x.grad[2, 7] = bad
        ProxSGD([x], lr=0.1, penalty=penalty, fused=is_fused).step()
        results.append(x.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_prox_equals_eager_prox(case: Any, dtype: torch.dtype) -> None:
    penalty = case.make(1.0)
    for shape in ((3, 5, 2), (4, 900, 1)):
        x = noise(shape, dtype)
        untouched, expected = x.clone(), penalty.prox(x, 0.7)
        found = penalty.prox(x, 0.7, fused=True)
        assert torch.equal(x, untouched)
        bound = tolerance(dtype) * float(x.abs().max()) if dtype != torch.bfloat16 else 0.0
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)
        assert torch.equal(found == 0, expected == 0)
        out = torch.empty_like(x)
        assert penalty.prox(x, torch.tensor(0.7, dtype=torch.float64), out=out, fused=True) is out
        torch.testing.assert_close(out, expected, rtol=0, atol=2 * bound)
        assert penalty.prox(x, 0.7, out=x, fused=True) is x
        assert torch.equal(x, found)
        assert torch.equal(penalty.prox(untouched, 0.0, fused=True), untouched)


@pytest.mark.parametrize(
    "penalty",
    [proxmo.L1(0.3), proxmo.GroupL2(20.0), proxmo.GroupLInf(100.0), proxmo.Simplex(3.0, dim=0), proxmo.L2Ball(1.0)],
    ids=str,
)
def test_fused_prox_equals_eager_prox_of_tensors_with_many_tasks(penalty: proxmo.Penalty) -> None:
    for shape in ((3, 70_000), (400, 600)):
        x = noise(shape, torch.float32)
        expected = penalty.prox(x, 1.0)
        bound = tolerance(torch.float32) * float(x.abs().max())
        torch.testing.assert_close(penalty.prox(x, 1.0, fused=True), expected, rtol=0, atol=bound)
        in_another_order = torch.full(shape[::-1], math.nan).T
        assert penalty.prox(x, 1.0, out=in_another_order, fused=True) is in_another_order
        torch.testing.assert_close(in_another_order, expected, rtol=0, atol=bound)


def test_out_may_overlap_with_the_input() -> None:
    memory = noise((5000,), torch.float32)
    expected = proxmo.L1(0.3).prox(memory[:-1000], 1.0)
    found = proxmo.L1(0.3).prox(memory[:-1000], 1.0, out=memory[1000:], fused=True)
    torch.testing.assert_close(found, expected)


def test_fused_prox_is_not_recorded_by_autograd() -> None:
    penalty, x = proxmo.GroupL2(0.5), Parameter(noise((4, 30), torch.float32))
    expected = penalty.prox(x.detach(), 1.0)
    found = penalty.prox(x, 1.0, fused=True)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)
    in_another_order = torch.zeros(30, 4).T.requires_grad_()
    assert penalty.prox(x, 1.0, out=in_another_order, fused=True) is in_another_order
    torch.testing.assert_close(in_another_order.detach(), expected)
    torch.testing.assert_close(penalty.prox(x, torch.tensor(1.0, requires_grad=True), fused=True), expected)
    assert penalty.prox(x, 1.0, out=x, fused=True) is x
    torch.testing.assert_close(x.detach(), expected)


def test_out_may_be_a_negative_view() -> None:
    penalty, x = proxmo.GroupL2(0.5), noise((4, 30), torch.float32)
    out = torch._neg_view(torch.empty(4, 30))
    torch.testing.assert_close(penalty.prox(x, 1.0, out=out, fused=True).resolve_neg(), penalty.prox(x, 1.0))


@pytest.mark.parametrize("name", ["shrink", "cap", "soft_then_shrink", "simplex", "l1_ball", "l2_ball"])
def test_row_kernels_have_no_gathers(name: str) -> None:
    function = tasks._task_taker(_row_loop(getattr(compiled_rows, name)), np.float32)
    assert "masked.gather" not in function.inspect_llvm()  # gathers take five times as long on some processors


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ordered_integers_have_the_order_of_floats(dtype: type) -> None:
    huge, tiny = np.finfo(dtype).max, np.finfo(dtype).tiny
    numbers = np.array([-np.inf, -huge, -1.5, -1, -tiny, -tiny / 4, -0.0, 0, tiny / 4, tiny, 1, huge, np.inf], dtype)

    @njit
    def orders(numbers: Any) -> Any:
        return [ordered(x) for x in numbers], [from_ordered(ordered(x)) for x in numbers]

    found, back = orders(numbers)
    assert found == sorted(set(found))
    assert np.array(back, dtype).tobytes() == numbers.tobytes()


def test_traced_prox_equals_eager_prox() -> None:
    penalty, x = proxmo.Simplex(dim=0), noise((3, 20), torch.float32)

    def prox(x: Tensor) -> Tensor:
        return penalty.prox(x, 1.0, fused=True)

    expected = penalty.prox(x, 1.0)
    torch.testing.assert_close(torch.compile(prox, backend="eager")(x), expected)
    torch.testing.assert_close(torch.vmap(prox)(torch.stack([x, x]))[0], expected)


def test_fused_step_equals_eager_step_for_units_and_mixed_dtypes() -> None:
    results = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        network[2].bfloat16()
        neurons = {"params": list(network[0].parameters()), "units": (((0, 0, None), (1, 0, None)),)}
        others = {"params": list(network[2].parameters())}
        optimizer = ProxSGD([{**neurons, "penalty": proxmo.GroupL2(0.3)}, others], lr=0.2, fused=is_fused)
        for _ in range(STEPS):
            for p in network.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append([p.detach().float() for p in network.parameters()])
    assert_same(*results, torch.float32)


def test_autograd_sees_that_a_parameter_changed() -> None:
    x = Parameter(torch.ones(3))
    loss = x.square().sum()
    x.grad = torch.ones(3)
    ProxSGD([x], fused=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_sees_that_a_gradient_did_not_change() -> None:
    x, weight = Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    x.grad = torch.ones(3)
    product = (weight * x.grad).sum()
    ProxSGD([x], momentum=0.0, fused=True).step()
    product.backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_checkpoints_go_between_fused_and_eager() -> None:
    found, optimizer = run(SHAPES[:3], torch.float64, True, penalty=proxmo.L1(0.1))
    expected, eager = run(SHAPES[:3], torch.float64, False, penalty=proxmo.L1(0.1))
    eager.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert eager.param_groups[0]["fused"] is True
    for o in (optimizer, eager):
        for p in o.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        o.step()
    assert_same(found, expected, torch.float64)


@pytest.fixture
def some_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("pool", ["OpenMP", "own"])
@pytest.mark.usefixtures("some_threads")
def test_results_do_not_depend_on_the_number_of_threads(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if pool == "own":  # as if torch was built with another OpenMP than gcc's
        monkeypatch.setattr(tasks, "_openmp", lambda: None)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(run(SHAPES, torch.float32, True, penalty=proxmo.GroupLInf(0.1))[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("some_threads")
def test_forked_child_does_not_wait_for_threads_of_its_parent() -> None:
    _, optimizer = run([(4, 70_000)], torch.float32, True, penalty=proxmo.L1(0.1))
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forked_child_may_be_the_first_to_use_a_kernel() -> None:
    script = """
import os, torch, proxmo
torch.set_num_threads(2)
x = torch.randn(4, 70_000).exp()  # starts the threads of the parent
if os.fork() == 0:
    assert proxmo.L1(0.1).prox(x, 1.0, fused=True)[0, :9].min() >= 0  # few enough for one thread
    os._exit(0)
raise SystemExit(os.wait()[1])
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=100)


def test_changed_lr_momentum_and_strength_do_not_recompile() -> None:
    penalty = proxmo.GroupLInf(0.1)
    _, optimizer = run(SHAPES[:3], torch.float32, True, penalty=penalty)
    compiled_before = tasks._task_taker.cache_info().misses
    group = optimizer.param_groups[0]
    for lr, momentum, strength in [(0.1, 0.5, 0.2), (torch.tensor(0.01), 0.99, 1e-3), (1e-6, 0.0, 0.0)]:
        group["lr"], group["momentum"], penalty.strength = lr, momentum, strength
        optimizer.step()
    assert tasks._task_taker.cache_info().misses == compiled_before


def test_without_numba_fused_warns_once_and_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("proxmo.kernels.step", "proxmo.kernels.tasks"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(kernels, "step", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels.available.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"fused=True needs numba \(pip install 'proxmo\[fast\]'\)") as warned:
            found, _ = run(SHAPES[:3], torch.float32, True, penalty=proxmo.L1(0.1))
        assert len(warned) == 1
    finally:
        kernels.available.cache_clear()
    expected, _ = run(SHAPES[:3], torch.float32, False, penalty=proxmo.L1(0.1))
    assert all(map(torch.equal, found, expected))


def test_invalid_fused_options_are_refused() -> None:
    with pytest.raises(TypeError, match="fused must be True, False or None, got 'yes'"):
        ProxSGD([torch.zeros(2)], fused="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fused and foreach cannot both be True"):
        ProxSGD([torch.zeros(2)], fused=True, foreach=True)


@njit(inline="always")
def _tenth(x: Any, c: Any) -> Any:
    return x * c[0]


@dataclass
class Tenth(proxmo.Penalty):
    """9/2·‖x‖², with its own kernel, which differs from the eager prox by a factor of 10."""

    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return x / 10

    def kernel(self, step: float) -> Kernel:
        return Kernel(_tenth, (0.01,))


def test_custom_penalty_can_have_its_own_kernel() -> None:
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(Tenth().prox(x, 1.0), x / 10)
    torch.testing.assert_close(Tenth().prox(x, 1.0, fused=True), x / 100)
    p = Parameter(x.clone())
    p.grad = torch.zeros(2)
    ProxSGD([p], lr=1.0, penalty=Tenth(), fused=True).step()
    torch.testing.assert_close(p.detach(), x / 100)


@dataclass
class Doubled(proxmo.L1):
    """ℓ1 of twice the strength, with a new prox but no new kernel."""

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return proxmo.L1(2 * self.strength)._prox(x, step, out)


@dataclass
class Wider(proxmo.Box):
    """A box that is twice as wide, with a new projection but no new kernel."""

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        return x.clamp(2 * self.low, 2 * self.high)


@pytest.mark.parametrize("penalty", [Doubled(0.5), Wider(-0.5, 0.5)], ids=str)
def test_subclass_with_a_new_prox_does_not_inherit_the_kernel(penalty: proxmo.Penalty) -> None:
    x = torch.tensor([3.0, -0.7])
    assert torch.equal(penalty.prox(x, 1.0, fused=True), penalty.prox(x, 1.0))


def test_kernel_with_too_many_constants_is_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="a kernel takes at most 6 constants, got 7"):
        kernels.prox(x, Kernel(_tenth, (0.1,) * 7), x)
