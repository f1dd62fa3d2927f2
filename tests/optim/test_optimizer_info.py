"""PyTorch's own table of optimizer inputs and its expectations, run on our optimizers.

The wheel ships `OptimizerInfo` but not the tests that use it, so the loop over its inputs is ours.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

import proxmo


def inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    kwargs: list[dict[str, Any]] = [
        {"lr": 1e-3},  # the default oscillates here for more than the few steps taken: lr·L is 1.1
        {"lr": 1e-2},
        {"lr": torch.tensor(0.001)},
        {"momentum": 0.0},
        {"momentum": 0.5, "initial": "zero"},
        {"momentum": 0.9, "maximize": True},
        {"penalty": proxmo.L1(1e-3), "lr": 1e-3},
        {"penalty": proxmo.GroupLInf(1e-3), "lr": torch.tensor(1e-2)},
        {"penalty": proxmo.L2Ball(100.0), "momentum": 0.0},
    ]
    return [OptimizerInput(params=None, kwargs=kw, desc=str(kw)) for kw in kwargs]


def auto_inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    kwargs: list[dict[str, Any]] = [
        {},
        {"lr": torch.tensor(0.5)},
        {"maximize": True},
        {"penalty": proxmo.L1(1e-3), "lr": 0.1},
        {"penalty": proxmo.GroupLInf(1e-3), "lr": torch.tensor(0.1)},
        {"penalty": proxmo.L2Ball(100.0)},
    ]
    return [OptimizerInput(params=None, kwargs=kw, desc=str(kw)) for kw in kwargs]


def adamw_inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    kwargs: list[dict[str, Any]] = [
        {},
        {"lr": torch.tensor(0.01)},
        {"weight_decay": 0.0, "betas": (0.0, 0.9)},
        {"maximize": True},
        {"penalty": proxmo.L1(1e-3), "lr": 0.01},
        {"penalty": proxmo.GroupL2(1e-3), "lr": torch.tensor(0.01)},
        {"penalty": proxmo.GroupLInf(1e-3), "metric": "block"},
        {"penalty": proxmo.L2Ball(100.0)},
    ]
    return [OptimizerInput(params=None, kwargs=kw, desc=str(kw)) for kw in kwargs]


def lion_inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    kwargs: list[dict[str, Any]] = [
        {},
        {"lr": torch.tensor(0.01), "weight_decay": 0.1},
        {"maximize": True},
        {"penalty": proxmo.L1(1e-3), "lr": 0.01},
        {"penalty": proxmo.Box(-10.0, 10.0), "lr": torch.tensor(0.01)},
    ]
    return [OptimizerInput(params=None, kwargs=kw, desc=str(kw)) for kw in kwargs]


def errors(device: str, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    bad_momentum = OptimizerInput(params=None, kwargs={"momentum": -0.5}, desc="momentum in [0, 1)")
    return [
        *get_error_inputs_for_all_optims(device, dtype),
        ErrorOptimizerInput(bad_momentum, error_type=ValueError, error_regex=r"momentum must be a number in \[0, 1\)"),
    ]


INFO = OptimizerInfo(
    proxmo.ProxSGD,
    optim_inputs_func=inputs,
    optim_error_inputs_func=errors,
    supported_impls=("foreach",),
    supports_complex=False,
)
AUTO = OptimizerInfo(
    proxmo.AutoProxSGD, optim_inputs_func=auto_inputs, supported_impls=("foreach",), supports_complex=False
)
ADAMW = OptimizerInfo(
    proxmo.ProxAdamW, optim_inputs_func=adamw_inputs, supported_impls=("foreach",), supports_complex=False
)
LION = OptimizerInfo(
    proxmo.ProxLion, optim_inputs_func=lion_inputs, supported_impls=("foreach",), supports_complex=False
)
every_input = pytest.mark.parametrize(
    ("info", "given"),
    [
        pytest.param(info, given, id=f"{info.optim_cls.__name__} {given.desc}")
        for info in (INFO, AUTO, ADAMW, LION)
        for given in info.optim_inputs_func("cpu")
    ],
)


def problem() -> tuple[Parameter, Parameter, Any]:
    """The problem of torch's own tests: fit a linear layer to zero."""
    torch.manual_seed(1)
    weight, bias = Parameter(torch.randn(10, 5)), Parameter(torch.randn(10))
    data = torch.randn(5)
    return weight, bias, lambda: (weight.mv(data) + bias).square().sum()


def run(info: OptimizerInfo, params: list[Parameter], closure: Any, steps: int, **kwargs: Any) -> tuple[float, float]:
    optimizer = info.optim_cls(params, **kwargs)

    def evaluate() -> float:
        optimizer.zero_grad()
        loss = closure()
        loss.backward()
        return loss.item()  # type: ignore[no-any-return]

    first = evaluate()
    for _ in range(steps):
        optimizer.step(evaluate)
    return first, evaluate()


@every_input
@pytest.mark.parametrize("foreach", [False, True])
def test_loss_moves_in_the_right_direction(info: OptimizerInfo, given: OptimizerInput, foreach: bool) -> None:
    weight, bias, closure = problem()
    first, last = run(info, [weight, bias], closure, 20, **given.kwargs, foreach=foreach)
    assert last > first if given.kwargs.get("maximize") else last < first


@every_input
def test_foreach_equals_the_loop(info: OptimizerInfo, given: OptimizerInput) -> None:
    results = []
    for foreach in (False, True):
        weight, bias, closure = problem()
        run(info, [weight, bias], closure, 7, **given.kwargs, foreach=foreach)
        results.append((weight.detach(), bias.detach()))
    torch.testing.assert_close(results[0], results[1])


@every_input
def test_loss_moves_in_the_right_direction_with_every_scheduler(info: OptimizerInfo, given: OptimizerInput) -> None:
    for make_scheduler in info.scheduler_inputs[0]:
        weight, bias, closure = problem()
        optimizer = info.optim_cls([weight, bias], **copy.deepcopy(given.kwargs))
        scheduler = make_scheduler(optimizer)
        first = closure().item()
        for _ in range(20):
            optimizer.zero_grad()
            loss = closure()
            loss.backward()
            optimizer.step()
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss.item())
            else:
                scheduler.step()
        last = closure().item()
        assert math.isfinite(last)
        assert last > first if given.kwargs.get("maximize") else last < first


@every_input
def test_optimizer_loaded_from_a_state_dict_continues_identically(info: OptimizerInfo, given: OptimizerInput) -> None:
    weight, bias, _ = problem()
    original = info.optim_cls([weight, bias], **given.kwargs)

    def step(optimizer: torch.optim.Optimizer, w: Parameter, b: Parameter) -> None:
        w.grad, b.grad = torch.ones_like(w) * 0.1, w.detach().sum(1)
        optimizer.step()

    for _ in range(3):
        step(original, weight, bias)
    twin_weight, twin_bias = copy.deepcopy((weight, bias))
    twin = info.optim_cls([twin_weight, twin_bias], **given.kwargs)
    twin.load_state_dict(copy.deepcopy(original.state_dict()))  # loading shares tensors, as in torch
    for _ in range(3):
        step(original, weight, bias)
        step(twin, twin_weight, twin_bias)
    assert torch.equal(weight, twin_weight)
    assert torch.equal(bias, twin_bias)


@every_input
def test_zero_dim_and_empty_parameters_are_supported(info: OptimizerInfo, given: OptimizerInput) -> None:
    if isinstance(given.kwargs.get("penalty"), (proxmo.GroupL2, proxmo.GroupLInf)):
        return  # a 0-d parameter has no axis to index groups and is refused, as another test checks
    scalar, empty = Parameter(torch.tensor(5.0)), Parameter(torch.zeros(0, 3))
    optimizer = info.optim_cls([scalar, empty], **given.kwargs)
    for _ in range(2):
        scalar.grad, empty.grad = torch.tensor(1.0), torch.zeros(0, 3)
        optimizer.step()
    assert (scalar > 5) if given.kwargs.get("maximize") else (scalar < 5)


@pytest.mark.parametrize(
    "wrong", INFO.optim_error_inputs_func("cpu", torch.float32), ids=lambda wrong: wrong.optimizer_error_input.desc
)
def test_invalid_inputs_are_refused(wrong: ErrorOptimizerInput) -> None:
    given = wrong.optimizer_error_input
    params = given.params if given.params is not None else [Parameter(torch.randn(2, 3))]
    if issubclass(wrong.error_type, Warning):
        with pytest.warns(wrong.error_type, match=wrong.error_regex):
            INFO.optim_cls(params, **given.kwargs)
    else:
        with pytest.raises(wrong.error_type, match=wrong.error_regex):
            INFO.optim_cls(params, **given.kwargs)
