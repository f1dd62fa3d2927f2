"""History: what it records, that it survives a checkpoint, and who keeps one."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import proxmo


def rows_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, requires_grad=True)


def test_row_has_loss_penalty_zeros_and_groups() -> None:
    first, second = rows_of([0.0, 0.0], [3.0, 4.0]), rows_of([0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0])
    groups = [
        {"params": [first], "penalty": proxmo.GroupL2(2.0)},
        {"params": [second], "penalty": proxmo.Trimmed(proxmo.GroupL2(1.0), 0.5)},
        {"params": [torch.tensor([0.0, 5.0])], "penalty": None},
    ]
    history = proxmo.History()
    history.record(proxmo.ProxSGD(groups), 7, torch.tensor(0.25, requires_grad=True))
    assert {name: values.tolist() for name, values in history.arrays().items()} == {
        "step": [7.0],
        "loss": [0.25],
        "penalty": [10.0 + 2.0],
        "zeros": [(2 + 4 + 1) / (4 + 8 + 2)],
        "kept": [5 / 6],
        "keep": [0.5],
    }
    assert repr(history) == "History(1 rows: step, loss, penalty, zeros, kept, keep)"


def test_unknown_values_are_nan() -> None:
    history = proxmo.History()
    history.record(proxmo.ProxSGD([torch.ones(2)], penalty=proxmo.L1(1.0)), 1)
    history.record(proxmo.ProxSGD([torch.ones(2)]), 2, math.inf)
    history.record(proxmo.ProxSGD([torch.ones(2)], penalty=proxmo.Trimmed(proxmo.L1(1.0), 1)), 3, 1.0)
    arrays = history.arrays()
    assert np.isnan([arrays["kept"], arrays["keep"]]).all()
    assert str(arrays["loss"].tolist()) == "[nan, inf, 1.0]"


def test_empty_history_has_empty_arrays() -> None:
    assert {len(values) for values in proxmo.History().arrays().values()} == {0}


def test_round_trips_through_a_checkpoint_and_pickle() -> None:
    history = proxmo.History()
    history.record(proxmo.ProxSGD([torch.ones(2)], penalty=proxmo.L1(1.0)), 1)
    file = io.BytesIO()
    torch.save(history.state_dict(), file)
    file.seek(0)
    loaded = proxmo.History()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    loaded.record(proxmo.ProxSGD([torch.ones(2)]), 2)
    assert loaded.arrays()["step"].tolist() == [1, 2]
    assert len(history) == len(pickle.loads(pickle.dumps(history))) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.optim.SGD([torch.ones(1)]), 1), TypeError, "optimizer must be a proxmo.ProxOptimizer, got SGD"),
        ((proxmo.ProxSGD([torch.ones(1)]), -1), ValueError, "step must be an integer >= 0, got -1"),
    ],
)
def test_bad_rows_are_refused_and_leave_no_trace(arguments: Any, error: type[Exception], message: str) -> None:
    history = proxmo.History()
    with pytest.raises(error, match=message):
        history.record(*arguments)
    assert {len(values) for values in history.arrays().values()} == {0}


def test_other_states_are_refused() -> None:
    with pytest.raises(ValueError, match=r"state must have the columns step, loss, .*, got loss"):
        proxmo.History().load_state_dict({"loss": [1.0]})


def run(scheduler: proxmo.KeepScheduler, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        x.grad = torch.zeros_like(x)
        scheduler.optimizer.step()
        scheduler.step(x.detach().square().sum())


def make(horizon: int) -> tuple[proxmo.KeepScheduler, torch.Tensor]:
    x = torch.arange(1.0, 9.0)[:, None].requires_grad_()
    optimizer = proxmo.ProxSGD([x], lr=0.1, penalty=proxmo.Trimmed(proxmo.GroupL2(0.0), keep=1.0))
    return proxmo.KeepScheduler(optimizer, 0.25, horizon), x


def test_scheduler_records_the_way_to_its_target() -> None:
    scheduler, x = make(40)
    run(scheduler, x, 40)
    arrays = scheduler.history.arrays()
    assert arrays["step"].tolist() == list(range(1, 41))
    assert (arrays["kept"][0], arrays["kept"][-1], arrays["keep"][-1]) == (1.0, 0.25, 0.25)
    assert (np.diff(arrays["keep"]) <= 0).all()
    assert arrays["loss"][-1] == 7**2 + 8**2


def test_scheduler_records_long_runs_a_hundred_times() -> None:
    scheduler, x = make(1005)
    run(scheduler, x, 1005)
    steps = scheduler.history.arrays()["step"]
    assert steps.tolist() == [*range(11, 1002, 11), 1005]


def test_resumed_scheduler_continues_its_history() -> None:
    whole, x = make(20)
    run(whole, x, 20)
    half, y = make(20)
    run(half, y, 11)
    resumed, z = make(20)
    with torch.no_grad():
        z.copy_(y)
    resumed.optimizer.load_state_dict(half.optimizer.state_dict())
    resumed.load_state_dict(half.state_dict())
    run(resumed, z, 9)
    assert str(resumed.history.state_dict()) == str(whole.history.state_dict())


def test_shrink_returns_its_history() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)]
    _, report = proxmo.shrink(model, nn.functional.mse_loss, batches, keep=0.25, epochs=4)
    arrays = report.history.arrays()
    assert arrays["step"].tolist() == list(range(1, 21))
    assert np.isfinite(arrays["loss"]).all()
    assert arrays["kept"][-1] == 0.25
