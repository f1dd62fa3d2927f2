"""Saving, loading and copying: state dicts are plain data, loading updates the live penalty or changes nothing."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

import proxmo
from optim.networks import assert_same, make, model, train


def test_state_holds_tensors_only() -> None:
    net = model()
    optimizer = make(net)
    train(net, optimizer, range(2))
    assert len(optimizer.state) == 4
    for state in optimizer.state.values():
        assert list(state) == ["momentum_buffer", "started"]
        assert all(isinstance(value, Tensor) for value in state.values())


def test_state_dict_round_trip_with_weights_only(tmp_path: Path) -> None:
    net = model()
    optimizer = make(net)
    train(net, optimizer, range(3))
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    train(net, optimizer, range(3, 6))

    resumed = model(seed=9)
    fresh = make(resumed)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["penalty"] == {"GroupLInf": {"strength": 0.3, "dim": 0}}
    resumed.load_state_dict(saved["net"])
    fresh.load_state_dict(saved["optimizer"])
    train(resumed, fresh, range(3, 6))
    assert_same(net, resumed)


def test_loading_updates_the_live_penalty() -> None:
    saved = proxmo.ProxSGD([torch.zeros(2, 2)], penalty=proxmo.GroupL2(0.5, dim=(0, 1))).state_dict()
    live = proxmo.GroupL2(0.1)
    optimizer = proxmo.ProxSGD([torch.zeros(2, 2)], penalty=live)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["penalty"] is live
    assert live == proxmo.GroupL2(0.5, dim=(0, 1))
    box = proxmo.Box(0.0, 1.0)  # both bounds must change at once: the new low exceeds the old high
    optimizer = proxmo.ProxSGD([torch.zeros(2)], penalty=box)
    optimizer.load_state_dict(proxmo.ProxSGD([torch.zeros(2)], penalty=proxmo.Box(5.0, 6.0)).state_dict())
    assert box == proxmo.Box(5.0, 6.0)


def saved_with(penalty: proxmo.Penalty | None, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    state = proxmo.ProxSGD([torch.zeros(2, 2)], lr=0.7, penalty=penalty).state_dict()
    if fields is not None:
        state["param_groups"][0]["penalty"] = fields
    return state


@pytest.mark.parametrize(
    ("live", "state", "message"),
    [
        (proxmo.L1(0.1), saved_with(proxmo.L0(0.5)), "made with penalty L0 into one with penalty L1"),
        (proxmo.L1(0.1), saved_with(None), "made with penalty None into one with penalty L1"),
        (None, saved_with(proxmo.L1(0.5)), "made with penalty L1 into one with penalty None"),
        (proxmo.L1(0.1), saved_with(None, {"L1": {"weight": 1.0}}), "cannot load penalty L1 from the fields"),
        (proxmo.L1(0.1), saved_with(None, {"L1": {"strength": -1.0}}), "L1: strength must be a finite number"),
    ],
)
def test_mismatched_checkpoint_is_refused_and_changes_nothing(
    live: proxmo.Penalty | None, state: dict[str, Any], message: str
) -> None:
    optimizer = proxmo.ProxSGD([torch.zeros(2, 2)], lr=0.1, penalty=live)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict() == before
    assert optimizer.param_groups[0]["penalty"] is live


@pytest.mark.parametrize("shape", [(3, 2), (2,), (1, 2)], ids=str)
def test_state_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    saved, live = (torch.ones(shape, requires_grad=True), torch.ones(2, 2, requires_grad=True))
    optimizers = []
    for x in (saved, live):
        x.grad = torch.ones_like(x)
        optimizers.append(proxmo.ProxSGD([x]))
        optimizers[-1].step()
    before = copy.deepcopy(optimizers[1].state_dict())
    with pytest.raises(ValueError, match=re.escape(f"state of shape {shape} for a parameter of shape (2, 2)")):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert str(optimizers[1].state_dict()) == str(before)


def test_shared_penalty_cannot_be_loaded_with_two_values() -> None:
    def optimizer(first: proxmo.Penalty, second: proxmo.Penalty) -> proxmo.ProxSGD:
        return proxmo.ProxSGD(
            [{"params": [torch.zeros(2)], "penalty": first}, {"params": [torch.zeros(2)], "penalty": second}]
        )

    saved = optimizer(proxmo.L1(0.1), proxmo.L1(0.2)).state_dict()
    shared = proxmo.L1(0.5)
    with pytest.raises(ValueError, match="shared by parameter groups whose loaded penalties differ"):
        optimizer(shared, shared).load_state_dict(saved)
    assert shared == proxmo.L1(0.5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_distributed_checkpoint_round_trip(tmp_path: Path) -> None:
    """A fresh optimizer's state is initialised by a step with zero gradients and lr = 0, which must move nothing."""
    net = model()
    optimizer = make(net, lr=0.1)
    with torch.no_grad():
        net[0].weight.mul_(100)  # type: ignore[operator]
    optimizer.param_groups[0]["penalty"] = proxmo.L2Ball(1.0)  # not satisfied yet
    before = copy.deepcopy(net)
    state = get_optimizer_state_dict(net, optimizer)
    assert_same(net, before)

    twin = copy.deepcopy(before)
    untouched = make(twin, lr=0.1)
    untouched.param_groups[0]["penalty"] = proxmo.L2Ball(1.0)
    train(net, optimizer, range(3))
    train(twin, untouched, range(3))
    assert_same(net, twin)  # asking for the state early does not change how the average starts
    state = {"net": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    train(net, optimizer, range(3, 6))

    resumed = model(seed=4)
    fresh = make(resumed, lr=7.0)
    fresh.param_groups[0]["penalty"] = proxmo.L2Ball(9.0)
    loaded = {"net": resumed.state_dict(), "optimizer": get_optimizer_state_dict(resumed, fresh)}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    resumed.load_state_dict(loaded["net"])
    set_optimizer_state_dict(resumed, fresh, loaded["optimizer"])
    assert fresh.param_groups[0]["penalty"] == proxmo.L2Ball(1.0)
    train(resumed, fresh, range(3, 6))
    assert_same(net, resumed)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopied_and_pickled_optimizers_continue_identically(duplicate: Any) -> None:
    net = model()
    optimizer = make(net)
    train(net, optimizer, range(2))
    twin_net, twin = duplicate((net, optimizer))
    assert twin.param_groups[0]["penalty"] == optimizer.param_groups[0]["penalty"]
    assert twin.param_groups[0]["penalty"] is not optimizer.param_groups[0]["penalty"]
    train(net, optimizer, range(2, 4))
    train(twin_net, twin, range(2, 4))
    assert_same(net, twin_net)


def test_checkpoint_of_torch_sgd_can_be_resumed() -> None:
    ours, theirs = Parameter(torch.ones(3, dtype=torch.float64)), Parameter(torch.ones(3, dtype=torch.float64))
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, dampening=0.9)
    theirs.grad = torch.ones(3, dtype=torch.float64)
    sgd.step()
    prox = proxmo.ProxSGD([ours], lr=0.5)
    prox.load_state_dict(copy.deepcopy(sgd.state_dict()))
    ours.data.copy_(theirs.data)
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(3, dtype=torch.float64)
        sgd.step()
        prox.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    penalised = proxmo.ProxSGD([ours], penalty=proxmo.L1(0.1))
    penalised.load_state_dict(sgd.state_dict())
    assert penalised.param_groups[0]["penalty"] == proxmo.L1(0.1)


def test_fields_that_a_checkpoint_lacks_take_their_defaults() -> None:
    """They are newer than the checkpoint, which was written by a penalty that did what the default does."""
    x = Parameter(torch.ones(3))
    optimizer = proxmo.ProxSGD([x], penalty=proxmo.TopK(2, scope="all"))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["penalty"] = {"TopK": {"k": 1, "dim": None}}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["penalty"] == proxmo.TopK(1, scope="each")
    saved["param_groups"][0]["penalty"] = {"TopK": {"dim": None}}
    with pytest.raises(ValueError, match=r"cannot load penalty TopK from the fields .*'k'"):
        optimizer.load_state_dict(saved)


def test_checkpoint_of_units_names_how_its_groups_were_made() -> None:
    def optimizer(with_units: bool) -> proxmo.ProxSGD:
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        penalty = proxmo.GroupL2(0.1)
        groups = (
            proxmo.unit_groups(net, torch.zeros(1, 3), penalty) if with_units else proxmo.param_groups(net, penalty)
        )
        return proxmo.ProxSGD(groups)

    for saved, live in ((True, False), (False, True)):
        names = ["unit_groups" if units else "param_groups" for units in (saved, live)]
        with pytest.raises(ValueError, match=f"groups as {names[0]} makes them into those of {names[1]}"):
            optimizer(live).load_state_dict(optimizer(saved).state_dict())
    optimizer(True).load_state_dict(optimizer(True).state_dict())
