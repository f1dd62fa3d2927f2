"""Options, checkpoints and schedulers of other optimizers are converted or refused, never ignored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import proxmo
from optim.stateful_model import same_bits


def point() -> Parameter:
    return Parameter(torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"weight_decay": 0.01}, r"weight_decay is not an option .* got 0\.01; take the penalty SquaredL2\(0\.01\)"),
        ({"betas": (0.9, 0.999)}, r"'betas' is an option of another optimizer, got \(0\.9, 0\.999\)"),
        ({"nesterov": True}, "'nesterov' is an option of another optimizer, got True"),
        ({"eps": 1e-8}, "'eps' is an option of another optimizer"),
        ({"amsgrad": True}, "'amsgrad' is an option of another optimizer"),
        ({"dampening": 0.0}, r"dampening must equal momentum = 0\.9, .* got 0\.0"),
        ({"strength": 0.1}, "'strength' is not an option of a parameter group but a field of its penalty"),
        ({"momentun": 0.5}, "'momentun' is not an option of a parameter group; did you mean 'momentum'"),
        ({"regularizer": proxmo.L1(0.1)}, "'regularizer' is not an option .* did you mean 'penalty'"),
        ({"penalties": [proxmo.L1(0.1)]}, "'penalties' is not an option .* did you mean 'penalty'"),
        ({"eps": torch.ones(2)}, "'eps' is an option of another optimizer"),
    ],
    ids=str,
)
def test_foreign_option_is_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proxmo.ProxSGD([{"params": [point()], **option}])
    optimizer = proxmo.ProxSGD([point()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [point()], **option})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "option",
    [{"weight_decay": 0.0}, {"nesterov": False}, {"amsgrad": False}, {"capturable": False}, {"dampening": 0.9}],
    ids=str,
)
def test_neutral_value_of_a_foreign_option_is_accepted(option: dict[str, Any]) -> None:
    proxmo.ProxSGD([{"params": [point()], **option}], momentum=0.9)


def test_keys_of_schedulers_are_accepted() -> None:
    optimizer = proxmo.ProxSGD([point()], lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    other = proxmo.ProxSGD([point()], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.5, 0.9])
def test_checkpoint_of_sgd_becomes_an_average_of_gradients(dampening: float, maximize: bool) -> None:
    """With lr scaled by (1 − dampening)/(1 − momentum), training goes on as with SGD."""
    x, y = point(), point()
    sgd = torch.optim.SGD([x], lr=0.1, momentum=0.9, dampening=dampening, maximize=maximize)
    ours = proxmo.ProxSGD([y], lr=0.1, momentum=0.9, maximize=maximize)
    for step in range(5):
        x.grad = torch.tensor([0.3, -0.1]) * step
        sgd.step()
    ours.load_state_dict(copy.deepcopy(sgd.state_dict()))
    assert "dampening" not in ours.param_groups[0]
    ours.param_groups[0]["lr"] *= (1 - dampening) / (1 - 0.9)
    with torch.no_grad():
        y.copy_(x)
    for step in range(5):
        x.grad = y.grad = torch.tensor([-0.2, 0.4]) * step
        sgd.step()
        ours.step()
    torch.testing.assert_close(y, x)


def test_checkpoint_of_sgd_without_momentum() -> None:
    x = point()
    sgd = torch.optim.SGD([x], lr=0.3)
    x.grad = torch.ones(2)
    sgd.step()
    ours = proxmo.ProxSGD([point()], lr=0.1, momentum=0.0)
    ours.load_state_dict(sgd.state_dict())
    assert ours.param_groups[0]["lr"] == 0.3
    assert not any(ours.state.values())


def test_checkpoint_of_sgd_keeps_the_dtype_of_the_average() -> None:
    x, y = Parameter(point().detach().bfloat16()), Parameter(point().detach().bfloat16())
    sgd = torch.optim.SGD([x], lr=0.1, momentum=0.5)
    x.grad = torch.ones(2, dtype=torch.bfloat16)
    sgd.step()
    ours = proxmo.ProxSGD([y], lr=0.1, momentum=0.5, momentum_dtype=torch.float32)
    ours.load_state_dict(sgd.state_dict())
    average = ours.state[y]["momentum_buffer"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": 0.1}, "SquaredL2"),
        ({"nesterov": True}, "'nesterov' is an option of another optimizer"),
        ({"dampening": 1.0}, "dampening = 1"),
    ],
    ids=str,
)
def test_checkpoint_of_sgd_that_cannot_be_converted_is_refused(options: dict[str, Any], message: str) -> None:
    x = point()
    sgd = torch.optim.SGD([x], lr=0.1, momentum=0.9, **options)
    x.grad = torch.ones(2)
    sgd.step()
    ours = proxmo.ProxSGD([point()], lr=0.7)
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(sgd.state_dict())
    assert ours.param_groups[0]["lr"] == 0.7


def test_state_dict_hooks_see_plain_data_and_may_return_another_dict() -> None:
    optimizer = proxmo.ProxSGD([point()], penalty=proxmo.L1(0.1))
    seen: list[Any] = []
    optimizer.register_state_dict_post_hook(
        lambda _, state: seen.append(copy.deepcopy(state["param_groups"][0]["penalty"])), prepend=True
    )
    optimizer.register_state_dict_post_hook(lambda _, state: {"wrapped": state})
    saved = optimizer.state_dict()
    assert seen == [{"L1": {"strength": 0.1}}]
    assert saved["wrapped"]["param_groups"][0]["penalty"] == {"L1": {"strength": 0.1}}
    assert optimizer.param_groups[0]["penalty"] == proxmo.L1(0.1)


def test_pre_hook_sees_the_live_penalty() -> None:
    optimizer = proxmo.ProxSGD([point()], penalty=proxmo.L1(0.1))
    optimizer.register_state_dict_pre_hook(lambda o: setattr(o.param_groups[0]["penalty"], "strength", 0.2))
    assert optimizer.state_dict()["param_groups"][0]["penalty"] == {"L1": {"strength": 0.2}}


def quadratic(x: Tensor) -> Any:
    def closure() -> float:
        loss = x.square().sum() / 2
        loss.backward()
        return loss.item()

    return closure


NEED_CLOSURES = [proxmo.ProxSTORM, proxmo.ProxSpiderBoost, proxmo.ProxHybridSGD]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("make", NEED_CLOSURES)
def test_closure_without_backward_is_refused(make: Any, steps_before: int) -> None:
    x = point()
    optimizer = make([x])
    closures = [quadratic(x)] * (2 if make is proxmo.ProxHybridSGD else 1)
    for _ in range(steps_before):
        optimizer.step(*closures)
    before = copy.deepcopy((x.detach(), optimizer.state_dict()))
    for forgetful in range(len(closures) if steps_before else 1):  # the first step calls only one closure
        given = [(lambda: 1.0) if i == forgetful else closure for i, closure in enumerate(closures)]
        name = ["closure", "other"][forgetful]
        with pytest.raises(RuntimeError, match=f"{name} must call backward, got no gradient for any parameter"):
            optimizer.step(*given)
        assert same_bits((x, optimizer.state_dict()), before)


def test_report_of_the_inner_solver_survives_copies() -> None:
    x = point()
    optimizer = proxmo.InexactProxSGD([x], lr=0.5, inner=proxmo.InnerSGD(5, lr=0.2))
    optimizer.step(quadratic(x), quadratic(x))
    assert optimizer.report is not None
    assert copy.deepcopy(optimizer).report == optimizer.report


def test_nonfinite_skip_can_be_compiled_with_a_graph_break() -> None:
    x = point()
    optimizer = proxmo.ProxSGD([x], lr=torch.tensor(0.1), nonfinite="skip")
    x.grad = torch.ones(2)
    optimizer.step()
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")
    step()
    before = x.detach().clone()
    x.grad = torch.tensor([1.0, torch.nan])
    step()
    assert torch.equal(x, before)
    torch.compiler.reset()
    with pytest.raises(Exception, match="nonfinite='skip' and 'raise' read the gradients; set nonfinite='propagate'"):
        torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_momentum_may_be_a_tensor(fused: bool, compiled: bool) -> None:
    x, y = point(), point()
    number = proxmo.ProxSGD([x], lr=0.1, momentum=0.8, penalty=proxmo.L1(0.1))
    tensor = proxmo.ProxSGD([y], lr=0.1, momentum=torch.tensor(0.8), penalty=proxmo.L1(0.1), fused=fused)
    torch.compiler.reset()
    step = torch.compile(tensor.step, backend="aot_eager", fullgraph=True) if compiled else tensor.step
    for k in range(4):
        x.grad = y.grad = torch.tensor([0.3, -0.1]) * k
        number.step()
        step()
    torch.testing.assert_close(y, x)
    with pytest.raises(ValueError, match=r"momentum must be a number in \[0, 1\), got tensor\(5\.\)"):
        proxmo.ProxSGD([point()], momentum=torch.tensor(5.0))
    with pytest.raises(ValueError, match=r"Tensor momentum must be 1-element, got shape \(2,\)"):
        proxmo.ProxSGD([point()], momentum=torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_cyclic_schedulers_take_a_tensor_momentum(kind: str) -> None:
    found = []
    for lr, momentum in ((0.1, 0.9), (torch.tensor(0.1), torch.tensor(0.9))):
        x = point()
        optimizer = proxmo.ProxSGD([x], lr=lr, momentum=momentum)
        options = {"max_lr": 0.1, "total_steps": 10} if kind == "OneCycleLR" else {"base_lr": 0.01, "max_lr": 0.1}
        scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)
        for step in range(5):
            x.grad = torch.tensor([1.0, 0.3]) * step
            optimizer.step()
            scheduler.step()
        found.append(x.detach())
    torch.testing.assert_close(*found)


def test_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="ProxSGD got an unexpected keyword argument 'weight_decay'"):
        proxmo.ProxSGD([point()], weight_decay=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="ProxSTORM got an unexpected keyword argument 'fused'"):
        proxmo.ProxSTORM([point()], fused=True)  # type: ignore[call-arg]


def test_models_and_groups_without_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match=r"params must be .*, got a Linear: pass model.parameters\(\) or proxmo.param_"):
        proxmo.ProxSGD(nn.Linear(2, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a parameter group must have the key 'params', got 'param', 'lr'"):
        proxmo.ProxSGD([{"param": [point()], "lr": 0.1}])


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_many_small_tensors_are_taken_together(lr: float | Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a step of a network with many small layers would be mostly calls."""
    weights = [nn.Linear(8, 8).weight for _ in range(10)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    shapes: list[tuple[int, ...]] = []
    hook = proxmo.GroupL2._prox

    def counted(self: proxmo.GroupL2, x: Tensor, step: Any, out: Tensor | None) -> Tensor:
        shapes.append(tuple(x.shape))
        return hook(self, x, step, out)

    monkeypatch.setattr(proxmo.GroupL2, "_prox", counted)
    proxmo.ProxSGD(weights, lr=lr, penalty=proxmo.GroupL2(0.1)).step()
    assert shapes == [(10, 8, 8)]


def test_large_tensors_on_a_device_stay_in_one_foreach_call(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.empty(300, 300, device="meta")) for _ in range(5)]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = proxmo.ProxSGD(params, lr=0.1)
    optimizer.step()
    calls: list[int] = []
    add = torch._foreach_add_
    monkeypatch.setattr(
        torch, "_foreach_add_", lambda tensors, *a, **k: (calls.append(len(tensors)), add(tensors, *a, **k))
    )
    optimizer.step()
    assert calls == [5]
