"""Whatever works with torch's optimizers works with ours: schedulers, hooks, precision, compilation, clear errors."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

import proxmo
from optim.networks import assert_same, make, model, train


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, step_size=2),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
        lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    ],
)
def test_schedulers_reach_gradient_step_and_prox(schedule: Any) -> None:
    x = Parameter(torch.tensor([4.0, -3.0], dtype=torch.float64))
    optimizer = proxmo.ProxSGD([x], lr=0.1, momentum=0.8, penalty=proxmo.L1(0.7))
    scheduler = schedule(optimizer)
    expected, average = x.detach().clone(), None
    seen = set()
    for _ in range(10):
        group = optimizer.param_groups[0]
        lr, momentum = group["lr"], group["momentum"]
        seen.add(lr)
        gradient = expected.clone()
        average = gradient if average is None else momentum * average + (1 - momentum) * gradient
        expected = proxmo.L1(0.7).prox(expected - lr * average, lr)
        x.grad = x.detach().clone()
        optimizer.step()
        scheduler.step()
        torch.testing.assert_close(x.detach(), expected, rtol=1e-13, atol=1e-13)
    assert len(seen) > 1


def test_reduce_on_plateau_lowers_a_tensor_lr() -> None:
    x = Parameter(torch.ones(2))
    lr = torch.tensor(0.5)
    optimizer = proxmo.ProxSGD([x], lr=lr, penalty=proxmo.L1(0.1))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(4):
        x.grad = torch.ones(2)
        optimizer.step()
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.5


def test_closure_is_optional_and_its_loss_is_returned() -> None:
    x = Parameter(torch.ones(2))
    optimizer = proxmo.ProxSGD([x], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = x.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert optimizer.step() is None


def test_closure_that_raises_changes_nothing() -> None:
    net = model()
    optimizer = make(net)
    train(net, optimizer, range(2))
    twin, state = copy.deepcopy(net), copy.deepcopy(optimizer.state_dict()["state"])

    def closure() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert_same(net, twin)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_are_never_modified_and_missing_ones_are_skipped(foreach: bool, momentum: float) -> None:
    used, unused = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = proxmo.ProxSGD([used, unused], 0.1, momentum, proxmo.L1(1.0), foreach=foreach, maximize=True)
    gradient = torch.arange(3.0)
    for _ in range(3):
        used.grad = gradient
        optimizer.step()
        assert torch.equal(gradient, torch.arange(3.0))
    assert torch.equal(unused, torch.ones(3))
    assert unused not in optimizer.state
    if momentum:
        assert optimizer.state[used]["momentum_buffer"].data_ptr() != gradient.data_ptr()


def test_repr_shows_the_penalty() -> None:
    assert "penalty: GroupLInf(strength=0.3, dim=0)" in repr(make(model()))


def test_hooks_are_called_in_order() -> None:
    net = model()
    optimizer = make(net)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(type(o.param_groups[0]["penalty"]).__name__))
    train(net, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "saved", "GroupLInf"]


class NoTensorReads(TorchDispatchMode):
    """Fails when a tensor is read into Python, which would synchronize with an accelerator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "penalty", [None, proxmo.L1(0.1), proxmo.GroupL2(0.1), proxmo.MCP(0.1, 3.0), proxmo.L2Ball(1.0)]
)
def test_tensor_lr_is_not_read_after_the_first_step(
    penalty: proxmo.Penalty | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxmo.penalties.groups.is_eager_cpu", lambda x: False)  # as on an accelerator
    x, y = Parameter(torch.ones(3, 2)), Parameter(torch.ones(3, 2))
    tensor = proxmo.ProxSGD([x], lr=torch.tensor(0.1), penalty=penalty)
    number = proxmo.ProxSGD([y], lr=0.1, penalty=penalty)
    for step in range(3):
        x.grad, y.grad = torch.ones(3, 2), torch.ones(3, 2)
        with NoTensorReads() if step else nullcontext():  # the first step may read it, to detect a checkpoint's request
            tensor.step()
        number.step()
    torch.testing.assert_close(x, y)


def test_compiled_step_of_large_groups_has_no_graph_break() -> None:
    """The number of Newton iterations for a threshold depends on the data; compiled code sorts instead."""
    torch.compiler.reset()
    for penalty in (proxmo.GroupLInf(5.0), proxmo.L1Ball(20.0, dim=0), proxmo.Simplex(dim=0)):
        x = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
        y = x.clone()
        eager = proxmo.ProxSGD([Parameter(x)], 0.1, 0.9, penalty)
        compiled = proxmo.ProxSGD([Parameter(y)], 0.1, 0.9, penalty)
        step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
        for optimizer in (eager, compiled):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(100, 100)
        eager.step()
        step()
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=str)
def test_half_precision_run_follows_the_float32_run(dtype: torch.dtype, lr: float | Tensor) -> None:
    def run(run_dtype: torch.dtype) -> Tensor:
        x = Parameter(torch.linspace(-2, 2, 12).reshape(4, 3).to(run_dtype))
        optimizer = proxmo.ProxSGD([x], lr, 0.9, proxmo.GroupLInf(1.0))
        for _ in range(5):
            x.grad = x.detach() * 0.5
            optimizer.step()
        assert x.dtype == run_dtype
        return x.detach().float()

    half, single = run(dtype), run(torch.float32)
    torch.testing.assert_close(half, single, rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert torch.equal(half == 0, single == 0)


def test_grad_scaler_skips_the_whole_step_if_a_gradient_is_inf() -> None:
    x = Parameter(torch.tensor([2.0, 0.5]))
    optimizer = proxmo.ProxSGD([x], lr=0.1, penalty=proxmo.L1(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf, 1.0):
        before, state = x.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.zero_grad()
        scaler.scale((x * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if math.isinf(factor):
            assert torch.equal(x, before)
            torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
        else:
            torch.testing.assert_close(x.detach(), (before - 0.2).clamp(min=0))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=str)
def test_compiled_step_has_no_graph_break(lr: float | Tensor) -> None:
    """A parameter group for each penalty, so that all of them are compiled at once."""
    torch.compiler.reset()
    penalties = [
        None,
        proxmo.L1(0.1),
        proxmo.SCAD(0.1),
        proxmo.GroupL2(0.1),
        proxmo.GroupLInf(0.1),
        proxmo.L1Ball(1.0),
        proxmo.Nuclear(0.1),
    ]
    params = [[Parameter(torch.linspace(-2, 2, 12).reshape(4, 3)) for _ in range(2 * 7)] for _ in range(2)]
    eager, compiled = (
        proxmo.ProxSGD(
            [{"params": ps[2 * k : 2 * k + 2], "penalty": penalty} for k, penalty in enumerate(penalties)],
            lr,
            0.9,
            foreach=False,
        )
        for ps in params
    )
    step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        for p in (p for ps in params for p in ps):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        eager.step()
        step()
    for p, q in zip(*params, strict=True):
        torch.testing.assert_close(p, q)


def test_named_parameters_keep_their_names_in_checkpoints() -> None:
    optimizer = proxmo.ProxSGD(model().named_parameters(), penalty=proxmo.L1(0.1))
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -0.1}, ValueError, r"lr must be a finite number >= 0, got -0\.1"),
        ({"lr": math.nan}, ValueError, "lr must be a finite number >= 0, got nan"),
        ({"lr": 10**400}, ValueError, "lr must be a finite number >= 0, got 1000"),
        ({"lr": torch.tensor(-0.1)}, ValueError, "lr must be a finite number >= 0, got -0.1"),
        ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
        ({"lr": "fast"}, TypeError, "lr must be a finite number >= 0, got 'fast'"),
        ({"momentum": 1.0}, ValueError, r"momentum must be a number in \[0, 1\), got 1\.0"),
        ({"momentum": -0.1}, ValueError, r"momentum must be a number in \[0, 1\), got -0\.1"),
        ({"momentum": math.nan}, ValueError, r"momentum must be a number in \[0, 1\), got nan"),
        ({"initial": "random"}, ValueError, r"initial must be one of \('gradient', 'zero'\), got 'random'"),
        ({"penalty": 0.1}, TypeError, r"penalty must be a proxmo.Penalty or None, got 0\.1"),
        ({"penalty": proxmo.L1}, TypeError, "penalty must be a proxmo.Penalty or None, got <class"),
        ({"penalty": proxmo.GroupL2(0.1)}, ValueError, r"GroupL2.* does not fit parameter 1: dim .* shape \(\)"),
        ({"penalty": proxmo.GroupL2(0.1, dim=1)}, ValueError, "does not fit parameter 0: dim must name axes"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    params = [Parameter(torch.ones(2)), Parameter(torch.tensor(1.0))]
    with pytest.raises(error, match=message):
        proxmo.ProxSGD(params, **options)
    optimizer = proxmo.ProxSGD([Parameter(torch.ones(2))])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": params, **options})
    assert len(optimizer.param_groups) == 1


def test_misspelt_options_are_refused() -> None:
    x = Parameter(torch.ones(2))
    for key in ("penality", "momentun", "lambda"):
        with pytest.raises(ValueError, match=f"'{key}' is not an option of a parameter group; did you mean"):
            proxmo.ProxSGD([{"params": [x], key: proxmo.L1(0.1)}])
    proxmo.ProxSGD([{"params": [x], "name": "weights", "initial_lr": 0.1}])


def test_error_names_the_parameter_that_does_not_fit() -> None:
    named = [("weight", Parameter(torch.ones(2, 2))), ("scale", Parameter(torch.tensor(1.0)))]
    with pytest.raises(ValueError, match=r"GroupL2\(strength=0.1, dim=0\) does not fit parameter 'scale'"):
        proxmo.ProxSGD(named, penalty=proxmo.GroupL2(0.1))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("lr", -0.1, ValueError),
        ("lr", torch.ones(2), ValueError),
        ("momentum", 1.5, ValueError),
        ("penalty", "L1", TypeError),
        ("initial", 0, ValueError),
        ("maximize", "no", TypeError),
        ("foreach", "no", TypeError),
    ],
)
def test_options_set_later_are_checked_before_anything_moves(name: str, value: Any, error: type[Exception]) -> None:
    net = model()
    optimizer = make(net)
    train(net, optimizer, range(1))
    before = copy.deepcopy(net)
    optimizer.param_groups[1][name] = value
    with pytest.raises(error, match=f"{name} must be"):
        optimizer.step()
    assert_same(net, before)


def test_penalty_that_no_longer_fits_is_refused_before_anything_moves() -> None:
    net = model()
    optimizer = make(net)
    train(net, optimizer, range(1))
    before = copy.deepcopy(net)
    optimizer.param_groups[0]["penalty"].dim = 3  # the linear layer has two axes
    with pytest.raises(ValueError, match="does not fit parameter 1"):
        optimizer.step()
    assert_same(net, before)
    saved = optimizer.state_dict()
    fresh = make(net)
    with pytest.raises(ValueError, match="does not fit parameter 1"):
        fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["penalty"] == proxmo.GroupLInf(0.3)


def test_sparse_and_complex_gradients_are_refused_before_anything_moves() -> None:
    first = Parameter(torch.ones(2))
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    first.grad = torch.ones(2)
    optimizer = proxmo.ProxSGD([first, *table.parameters()])
    with pytest.raises(RuntimeError, match="ProxSGD does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(first, torch.ones(2))
    assert not optimizer.state
    wave = Parameter(torch.ones(2, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    with pytest.raises(RuntimeError, match="ProxSGD does not support complex gradients"):
        proxmo.ProxSGD([wave]).step()


def test_lazy_parameters_are_optimized_once_they_have_a_shape() -> None:
    net = nn.Sequential(nn.LazyLinear(4))
    optimizer = proxmo.ProxSGD(net.parameters(), lr=0.1, penalty=proxmo.GroupL2(0.1, dim=0))
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2
