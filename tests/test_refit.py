"""freeze_zeros: zeros stay exact for every optimizer, the rest is refitted, resumed runs equal uninterrupted ones."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import proxmo
from proxmo import freeze_zeros

Make = Callable[[nn.Module], Optimizer]
INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (64,), generator=torch.Generator().manual_seed(2))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@torch.no_grad()
def prune(model: nn.Sequential) -> None:
    """Zero small weights, a whole neuron and the output biases: in the midst of a run, momentum would move them."""
    for layer in (model[0], model[3]):
        layer.weight[layer.weight.abs() < 0.15] = 0.0
    for p in (*model[0].parameters(), *model[1].parameters()):
        p[2] = 0.0
    model[3].bias.zero_()


def groups(model: nn.Module) -> proxmo.ParamGroups:
    return proxmo.param_groups(model, proxmo.L1(1e-3))


MAKE: dict[str, Make] = {
    "prox_sgd": lambda model: proxmo.ProxSGD(groups(model)),
    "foreach": lambda model: proxmo.ProxSGD(groups(model), foreach=True),
    "for_loop": lambda model: proxmo.ProxSGD(groups(model), foreach=False),
    "storm": lambda model: proxmo.ProxSTORM(groups(model)),
    "hybrid": lambda model: proxmo.ProxHybridSGD(groups(model)),
    "spiderboost": lambda model: proxmo.ProxSpiderBoost(groups(model), period=3),
    "auto": lambda model: proxmo.AutoProxSGD(groups(model)),
    "prox_adamw": lambda model: proxmo.ProxAdamW(groups(model), lr=0.01),
    "prox_lion": lambda model: proxmo.ProxLion(groups(model), lr=0.01, weight_decay=0.5),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "fused_sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
if importlib.util.find_spec("numba"):
    MAKE["fused"] = lambda model: proxmo.ProxSGD(groups(model), fused=True)


def advance(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:

        def closure(batch: slice = slice(8 * (step % 8), 8 * (step % 8) + 8)) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(INPUTS[batch].to(model[0].weight.dtype)), LABELS[batch])
            loss.backward()
            return loss.item()

        two = isinstance(optimizer, (proxmo.ProxHybridSGD, proxmo.ProxSpiderBoost))
        optimizer.step(closure, lambda: closure(slice(None))) if two else optimizer.step(closure)  # type: ignore[call-arg]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", MAKE)
def test_zeros_of_weights_stay_and_everything_else_moves(name: str) -> None:
    model = network()
    optimizer = MAKE[name](model)
    advance(model, optimizer, range(12))
    prune(model)
    before = weights(model)
    freeze_zeros(optimizer)
    zeros = [p == 0 for p in before]
    advance(model, optimizer, range(12, 30))
    for p, old, zero in zip(weights(model), before, zeros, strict=True):
        if p.dim() > 1:
            assert 3 < zero.sum() < zero.numel()
            assert torch.equal(p == 0, zero)
        assert (p != old).any()
    assert model[3].bias.all()  # it has no penalty, and one axis


@pytest.mark.parametrize("name", ["prox_sgd", "sgd"])
def test_zero_weights_move_without_frozen_zeros_and_after_remove(name: str) -> None:
    model = network()
    prune(model)
    optimizer = MAKE[name](model)
    handle = freeze_zeros(optimizer)
    zeros = model[3].weight == 0
    advance(model, optimizer, range(3))
    assert torch.equal(model[3].weight == 0, zeros)
    handle.remove()
    advance(model, optimizer, range(3))
    assert (model[3].weight != 0)[zeros].any()


def test_refit_undoes_the_shrinkage() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(100, 8, generator=generator, dtype=torch.float64)
    true = torch.tensor([2.0, -1.0, 1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    targets = inputs @ true + 0.1 * torch.randn(100, generator=generator, dtype=torch.float64)
    x = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    optimizer = proxmo.ProxSGD([x], penalty=proxmo.L1(0.2))
    for phase in range(2):
        for _ in range(400):
            optimizer.zero_grad()
            (inputs @ x - targets).square().mean().div(2).backward()
            optimizer.step()
        if phase == 0:
            support = x.detach() != 0
            assert torch.equal(support, true != 0)
            freeze_zeros(optimizer)
    least_squares = torch.linalg.lstsq(inputs[:, support], targets[:, None]).solution[:, 0]
    torch.testing.assert_close(x.detach()[support], least_squares, rtol=1e-6, atol=0)
    assert torch.equal(x != 0, support)


def test_zero_units_stay_zero_in_all_their_parameters() -> None:
    model = network()
    optimizer = proxmo.ProxSGD(proxmo.unit_groups(model, INPUTS[:2], proxmo.GroupL2(0.05)), lr=0.5)
    advance(model, optimizer, range(60))
    assert 0 < optimizer.sparsity()[0].groups < 1  # type: ignore[operator]
    dead = (model[0].weight == 0).all(1) & (model[0].bias == 0)
    assert 0 < dead.sum() < 8
    freeze_zeros(optimizer)
    assert all(group["penalty"] is None for group in optimizer.param_groups)
    assert any(group["units"] is not None for group in optimizer.param_groups)
    advance(model, optimizer, range(20))
    for p in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
        assert not p[dead].any()
        assert p[~dead].any()
    _, report = proxmo.compact(model, INPUTS[:2])
    assert report.widths["0"] == (8, int((~dead).sum()))
    assert optimizer.penalty_value() == 0


def load(file: io.BytesIO, model: nn.Module, optimizer: Optimizer, model_first: bool) -> None:
    file.seek(0)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    parts = [(model, saved["model"]), (optimizer, saved["optimizer"])]
    for part, state in parts if model_first else reversed(parts):
        part.load_state_dict(state)


def make_with_units(model: nn.Module) -> Optimizer:
    return proxmo.ProxSGD(proxmo.unit_groups(model, INPUTS[:2], proxmo.GroupL2(0.05)), lr=0.5)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("make", [*MAKE.values(), make_with_units], ids=[*MAKE, "units"])
def test_resumed_refit_equals_uninterrupted_one(make: Make, model_first: bool) -> None:
    model = network()
    optimizer = make(model)
    advance(model, optimizer, range(12))
    prune(model)
    zeros = model[0].weight == 0
    freeze_zeros(optimizer)
    advance(model, optimizer, range(12, 18))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    advance(model, optimizer, range(18, 30))

    resumed = network()
    with torch.no_grad():
        resumed[0].weight.fill_(1.0)  # no zeros yet when they are frozen
    new = make(resumed)
    freeze_zeros(new)
    load(file, resumed, new, model_first)
    advance(resumed, new, range(18, 30))
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(model), strict=True))
    assert 6 <= zeros.sum() < zeros.numel()
    assert torch.equal(resumed[0].weight == 0, zeros)


def test_checkpoint_of_a_refit_is_refused_while_the_penalty_is_there() -> None:
    model = network()
    optimizer = MAKE["prox_sgd"](model)
    freeze_zeros(optimizer)
    with pytest.raises(ValueError, match="made with penalty None into one with penalty L1"):
        MAKE["prox_sgd"](network()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = nn.Parameter(torch.tensor([[0.0, 1.0, -0.0]], dtype=dtype))
    optimizer = proxmo.ProxSGD([x], penalty=proxmo.L1(0.1))
    freeze_zeros(optimizer)
    for _ in range(3):
        x.grad = torch.ones_like(x)
        optimizer.step()
    assert (x == 0).tolist() == [[True, False, True]]


def test_step_that_raises_leaves_later_steps_as_they_are() -> None:
    x = nn.Parameter(torch.tensor([0.0, 1.0]))
    optimizer = proxmo.ProxSGD([x], penalty=proxmo.L1(0.1), nonfinite="raise")
    freeze_zeros(optimizer)
    x.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(FloatingPointError):
        optimizer.step()
    x.grad = torch.ones(2)
    optimizer.step()
    assert x.tolist() == pytest.approx([0.0, 0.9])


def test_params_choose_what_is_frozen() -> None:
    model = network()
    prune(model)
    optimizer = MAKE["prox_sgd"](model)
    freeze_zeros(optimizer, [model[3].weight])
    assert all(group["penalty"] is None for group in optimizer.param_groups)
    zeros = [model[0].weight == 0, model[3].weight == 0]
    advance(model, optimizer, range(3))
    assert (model[0].weight != 0)[zeros[0]].any()
    assert torch.equal(model[3].weight == 0, zeros[1])


X = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("optimizer", "params", "error", "message"),
    [
        ("adam", None, TypeError, "optimizer must be a torch.optim.Optimizer, got str"),
        (proxmo.ProxSGD([X]), None, ValueError, "no parameter in a group with a penalty, got None"),
        (torch.optim.SGD([X]), None, ValueError, "no parameter with at least two axes, got None"),
        (torch.optim.SGD([X]), X, TypeError, "params must be an iterable of parameters of the optimizer"),
        (torch.optim.SGD([X]), [], ValueError, "params must be parameters of the optimizer, got none"),
        (torch.optim.SGD([X]), [torch.zeros(3)], ValueError, r"got another tensor of shape \(3,\)"),
        (torch.optim.SGD([X]), ["weight"], ValueError, "params must be parameters of the optimizer, got 'weight'"),
    ],
)
def test_invalid_arguments_are_refused(optimizer: Any, params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        freeze_zeros(optimizer, params)


def test_refused_params_leave_the_penalty() -> None:
    optimizer = proxmo.ProxSGD([nn.Parameter(torch.zeros(2))], penalty=proxmo.L1(0.1))
    with pytest.raises(ValueError, match="params must be"):
        freeze_zeros(optimizer, [torch.zeros(2)])
    assert optimizer.param_groups[0]["penalty"] == proxmo.L1(0.1)
