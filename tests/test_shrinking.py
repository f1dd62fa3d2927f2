"""shrink: the whole way from a model and a target to a smaller model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import proxmo


def regression(inputs: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, inputs, generator=generator)
    return list(zip(x.split(16), x[:, :2].sum(1, keepdim=True).sin().split(16), strict=True))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def test_share_of_units_is_exact_and_the_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if the extra `compact` were not installed
    model = network()
    before = copy.deepcopy(model.state_dict())
    small, report = proxmo.shrink(model, nn.functional.mse_loss, regression(), keep=0.25, epochs=6)
    assert report.units == (64, 16)
    assert small[0].out_features + small[2].out_features == 16
    assert report.compaction.parameters[1] == sum(p.numel() for p in small.parameters())
    assert report.file_size[1] < report.file_size[0]
    assert report.compaction.difference < 1e-5
    assert not small.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def error(model: nn.Module) -> float:
    return sum(nn.functional.mse_loss(model(x), y).item() for x, y in regression()) / 8


@pytest.mark.parametrize(
    "make", [proxmo.AutoProxSGD, partial(proxmo.ProxSGD, lr=0.3), partial(proxmo.ProxAdamW, lr=0.01)]
)
def test_it_trains(make: Callable[[proxmo.ParamGroups], proxmo.ProxOptimizer]) -> None:
    loss = nn.functional.mse_loss
    _, report = proxmo.shrink(network(), loss, regression(), keep=0.5, epochs=20, optimizer=make, evaluate=error)
    assert report.score is not None
    assert report.score[1] < 0.2 * report.score[0]
    assert report.units == (64, 32)
    assert "score" in str(report)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_lr_tunes_itself_to_the_scale_of_the_loss(scale: float) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return scale * nn.functional.mse_loss(outputs, targets)

    _, report = proxmo.shrink(network(), loss, regression(), keep=0.5, epochs=20, evaluate=error)
    assert report.score is not None
    assert report.score[1] < 0.2 * report.score[0]


def test_budget_of_parameters_is_met() -> None:
    _, report = proxmo.shrink(network(), nn.functional.mse_loss, regression(), parameters=0.3, epochs=4)
    before, after = report.compaction.parameters
    assert 0.15 * before < after <= 0.35 * before


def test_budget_of_latency_chooses_a_share() -> None:
    _, report = proxmo.shrink(network(), nn.functional.mse_loss, regression(), latency=1.0, epochs=1)
    assert 0 < report.keep <= 1


def test_channels_of_a_network_with_normalisation_vanish() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    )
    batches = [(torch.randn(8, 1, 6, 6), torch.randint(3, (8,))) for _ in range(5)]
    small, report = proxmo.shrink(model, nn.functional.cross_entropy, batches, keep=0.5, epochs=4)
    assert small[0].out_channels == 8
    assert report.compaction.widths["0"] == (16, 8)


def test_heads_and_neurons_each_keep_the_share() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), nn.Flatten(), nn.Linear(48, 2))
    batches = [(torch.randn(8, 3, 16), torch.randint(2, (8,))) for _ in range(5)]
    small, report = proxmo.shrink(model, nn.functional.cross_entropy, batches, keep=0.5, epochs=4)
    assert report.compaction.widths["0.self_attn"] == (4, 2)
    assert report.compaction.widths["0.linear1"] == (32, 16)
    assert small(batches[0][0]).shape == (8, 2)


def batches_once() -> Iterator[Any]:
    yield from regression()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keep": 0.0}, ValueError, r"keep must be a share in \(0, 1\], got 0.0"),
        ({"parameters": 1.5}, ValueError, r"parameters must be a share in \(0, 1\], got 1.5"),
        ({"keep": 0.5, "latency": 0.5}, ValueError, "keep, parameters and latency exclude each other"),
        ({"optimizer": partial(proxmo.ProxSGD, lr=-1.0)}, ValueError, "lr must be"),
        ({"optimizer": 0.1}, TypeError, "optimizer must be a function from parameter groups .*, got float"),
        ({"optimizer": lambda groups: None}, TypeError, "such as partial.*, got one that makes NoneType"),
        ({"epochs": 0}, ValueError, "epochs must be an integer >= 1, got 0"),
        ({"loss": "mse"}, TypeError, r"loss must be a function of outputs and targets, such as .*, got 'mse'"),
        ({"loss": nn.MSELoss}, TypeError, "loss must be a function of outputs and targets, .* got <class"),
        ({"loss": nn.MSELoss(reduction="none")}, TypeError, r"loss must return a tensor with one .*shape \(16, 1\)"),
        ({"loss": lambda outputs, targets: 1.0}, TypeError, "loss must return a tensor with one .*, got float"),
        ({"evaluate": 0.5}, TypeError, "evaluate must be a function from a model to a number, got 0.5"),
        ({"loader": nn.MSELoss()}, TypeError, r"loader must give pairs \(inputs, targets\), .*, got MSELoss"),
        ({"loader": []}, ValueError, "loader must have at least one batch, got an empty one"),
        ({"loader": [torch.zeros(2)]}, TypeError, r"loader must give pairs \(inputs, targets\), got Tensor"),
        ({"loader": batches_once()}, TypeError, "loader must be iterable more than once"),
        ({"model": nn.Linear(6, 1)}, ValueError, "model must have units that can be removed, got none\nnot penalised"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"model": network(), "loss": nn.functional.mse_loss, "loader": regression(), **arguments}
    with pytest.raises(error, match=message):
        proxmo.shrink(**given)


def test_evaluate_is_called_before_training() -> None:
    def evaluate(model: nn.Module) -> None:
        assert not model.training

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError("trained before evaluate was tried")

    with pytest.raises(TypeError, match="evaluate must return a number, got None"):
        proxmo.shrink(network(), loss, regression(), evaluate=evaluate)
    for one in (torch.ones(1), np.array(1.0)):
        _, report = proxmo.shrink(
            network(), nn.functional.mse_loss, regression(), epochs=1, evaluate=lambda model, one=one: one
        )
        assert report.score == (1.0, 1.0)
