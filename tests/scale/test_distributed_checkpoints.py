"""A distributed checkpoint of two ranks resumes on one and on four ranks with the same result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)

import proxmo
from scale import processes
from scale.task import OPTIMIZERS, STEPS, Place, Placed, Task, advance, task_for
from scale.test_fsdp import sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAVED_AFTER = {"before training": 0, "during training": STEPS + 3}  # after the learning phase of `AutoProxSGD`


def train_and_save(folder: Path) -> None:
    for name in OPTIMIZERS:
        task = task_for(name, sharded)
        optimizer = OPTIMIZERS[name](task)
        done = 0
        for moment, steps in SAVED_AFTER.items():
            advance(task, optimizer, range(done, steps))
            done = steps
            model_state, optimizer_state = get_state_dict(task.network, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / name / moment)


def resume_all(folder: Path, place: Place) -> dict[str, list[Tensor]]:
    return {f"{name} {moment}": resume(folder, name, moment, place) for name in OPTIMIZERS for moment in SAVED_AFTER}


def resume(folder: Path, name: str, moment: str, place: Place) -> list[Tensor]:
    task = with_other_weights(task_for(name, place))
    optimizer = OPTIMIZERS[name](task)
    for group in optimizer.param_groups:
        if group["penalty"] is not None:
            group["penalty"].strength = 7.0  # not the saved value
    model_state, optimizer_state = get_state_dict(task.network, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / name / moment)
    set_state_dict(task.network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    advance(task, optimizer, range(SAVED_AFTER[moment], 2 * STEPS))
    return task.weights()


def with_other_weights(task: Task) -> Task:
    """Change the weights, so that loading must restore them."""
    with torch.no_grad():
        for p in task.params():
            p.mul_(-3)
    return task


def train_in_single_process(name: str) -> list[Tensor]:
    task = task_for(name)
    optimizer = OPTIMIZERS[name](task)
    advance(task, optimizer, range(2 * STEPS))
    return task.weights()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = processes.shared_folder(tmp_path_factory) / "checkpoints"
    processes.run_once(train_and_save, 2, tmp_path_factory, "saved", folder)
    return folder


@pytest.fixture(scope="module")
def on_four(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    return processes.run_once(resume_all, 4, tmp_path_factory, "loaded", saved, sharded)


@pytest.mark.parametrize("moment", SAVED_AFTER)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoint_of_two_ranks_resumes_on_one_and_four(
    saved: Path, on_four: list[dict[str, list[Tensor]]], name: str, moment: str
) -> None:
    expected = train_in_single_process(name)
    for found in (resume(saved, name, moment, Placed), *(results[f"{name} {moment}"] for results in on_four)):
        for weight, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(weight, wanted, rtol=1e-9, atol=1e-11)


def test_checkpoint_of_other_penalty_is_refused_and_changes_nothing(saved: Path) -> None:
    task = task_for("prox_sgd")
    optimizer = proxmo.ProxSGD(proxmo.param_groups(task.network, proxmo.L1(0.1)), lr=0.3)
    model_state, optimizer_state = get_state_dict(task.network, optimizer)
    before, options = task.weights(), [dict(group) for group in optimizer.param_groups]
    state = {"model": model_state, "optimizer": optimizer_state}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: .*penalty\.L1"):
        dcp.load(state, checkpoint_id=saved / "prox_sgd" / "during training")
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())
    assert [dict(group) for group in optimizer.param_groups] == options
    assert optimizer.param_groups[0]["penalty"] == proxmo.L1(0.1)
    assert all(map(torch.equal, task.weights(), before))
