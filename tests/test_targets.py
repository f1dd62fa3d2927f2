"""KeepScheduler: the ramp, exact targets without a strength, resuming, and what it says if a target is missed."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import proxmo
from proxmo import KeepScheduler, Trimmed


class Run:
    """A small noisy regression with a trimmed penalty."""

    def __init__(
        self, inner: Any = None, keep: float = 0.25, horizon: int = 60, scope: Any = "all", **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.penalty = Trimmed(proxmo.GroupL2(0.5) if inner is None else inner, 1.0, scope)
        groups = proxmo.param_groups(self.model, self.penalty)
        self.optimizer: proxmo.ProxOptimizer = proxmo.ProxSGD(groups, lr=0.2, momentum=0.8)
        self.live: Trimmed = self.optimizer.param_groups[0]["penalty"]
        self.scheduler = KeepScheduler(self.optimizer, keep, horizon, **options)
        self.horizon = horizon

    def train(self, steps: range | None = None) -> list[tuple[float, float]]:
        seen = []
        for k in steps or range(self.horizon):
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(16, 6, generator=generator)
            self.optimizer.zero_grad()
            (self.model(x) - x[:, :4].sin() * 3).square().mean().backward()
            seen.append((self.live.keep, getattr(self.live.penalty, "strength", 0.0)))
            self.optimizer.step()
            self.scheduler.step()
        return seen

    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("keep", [0.25, 0.05])
@pytest.mark.parametrize("inner", [proxmo.GroupL2(0.5), proxmo.GroupLInf(0.5), proxmo.L1(0.5)], ids=str)
def test_target_is_met_exactly_without_choosing_a_strength(inner: Any, keep: float) -> None:
    run = Run(inner, keep)
    run.train()
    assert run.live.count_nonzero(run.weights()) == round(keep * run.live.count_blocks(run.weights()))
    assert run.live.keep == keep


@pytest.mark.parametrize("metric", ["element", "block"])
@pytest.mark.parametrize("inner", [proxmo.GroupL2(0.5), proxmo.GroupLInf(0.5), proxmo.L1(0.5)], ids=str)
def test_target_is_met_in_the_metric_of_adam(inner: Any, metric: Any) -> None:
    """Nearly all blocks are gone before the ramp ends, when the strength becomes large enough for every step."""
    run = Run(inner, keep=0.25)
    run.optimizer = proxmo.ProxAdamW(proxmo.param_groups(run.model, run.penalty), lr=0.02, metric=metric)
    run.live = run.optimizer.param_groups[0]["penalty"]
    run.scheduler = KeepScheduler(run.optimizer, 0.25, run.horizon)
    run.train(range(29))
    blocks = run.live.count_blocks(run.weights())
    assert run.live.count_nonzero(run.weights()) < 0.3 * blocks
    run.train(range(29, run.horizon))
    assert run.live.count_nonzero(run.weights()) == round(0.25 * blocks)


def test_target_of_units_is_met_in_the_metric_of_adam() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    groups = proxmo.unit_groups(model, torch.zeros(1, 6), Trimmed(proxmo.GroupL2(0.5), 1.0))
    optimizer = proxmo.ProxAdamW(groups, lr=0.02)
    scheduler = KeepScheduler(optimizer, keep=0.25, horizon=40)
    for k in range(40):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.sparsity()[0].groups == 0.75


@pytest.mark.parametrize("horizon", [2, 3, 7])
@pytest.mark.parametrize("end", [0.5, 1.0])
def test_target_is_met_in_short_runs_and_at_the_very_end(horizon: int, end: float) -> None:
    run = Run(horizon=horizon, end=end)
    run.train()
    assert run.live.count_nonzero(run.weights()) == 5


def test_target_holds_for_each_parameter_with_scope_each() -> None:
    run = Run(scope="each")
    run.train()
    assert [int((w.abs().sum(1) > 0).sum()) for w in run.weights()] == [4, 1]


def test_ramp_is_cubic_and_strength_only_grows() -> None:
    run = Run(start=0.1, end=0.6)
    seen = run.train()
    keeps = [keep for keep, _ in seen]
    assert keeps[:7] == [1.0] * 7
    assert keeps[21] == pytest.approx(0.25 + 0.75 * (1 - 0.5) ** 3)
    assert set(keeps[36:]) == {0.25}
    strengths = [strength for _, strength in seen]
    assert strengths == sorted(strengths)
    assert 0 < strengths[10] < 10


def test_kept_blocks_are_not_shrunk_after_the_ramp() -> None:
    """With gradients of zero the blocks that stay do not move at all."""
    weight = nn.Parameter(torch.arange(1.0, 9.0).reshape(8, 1))
    optimizer = proxmo.ProxSGD([weight], lr=0.1, penalty=Trimmed(proxmo.GroupL2(0.0), 1.0))
    scheduler = KeepScheduler(optimizer, 0.25, 40)
    for _ in range(40):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        scheduler.step()
    assert weight.flatten().tolist() == [0, 0, 0, 0, 0, 0, 7, 8]


def test_resumed_run_equals_uninterrupted_one() -> None:
    whole, first = Run(), Run()
    whole.train()
    first.train(range(17))
    state = copy.deepcopy([part.state_dict() for part in (first.model, first.optimizer, first.scheduler)])
    second = Run()
    second.model.load_state_dict(state[0])
    second.optimizer.load_state_dict(state[1])
    second.scheduler.load_state_dict(state[2])
    second.train(range(17, 60))
    for found, expected in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="scheduler for 0 trimmed penalties into one for 1"):
        second.scheduler.load_state_dict({"last_step": 3, "strengths": []})


@pytest.mark.parametrize("added_after", [10, 50])
def test_penalty_of_a_group_added_later_joins_the_ramp(added_after: int) -> None:
    run = Run()
    run.train(range(added_after))
    late = nn.Parameter(torch.randn(40))
    run.optimizer.add_param_group({"params": [("late", late)], "penalty": Trimmed(proxmo.L1(0.0), 1.0)})
    penalty = run.optimizer.param_groups[-1]["penalty"]
    run.optimizer.register_step_pre_hook(lambda *_: setattr(late, "grad", 0.1 * torch.randn(40)))
    for k in range(added_after, run.horizon):
        run.train(range(k, k + 1))
        assert penalty.keep == run.live.keep
    assert late.count_nonzero() == 10
    assert run.live.count_nonzero(run.weights()) == 5
    resumed = KeepScheduler(run.optimizer, 0.25, run.horizon)
    resumed.load_state_dict(run.scheduler.state_dict())
    assert resumed.state_dict() == run.scheduler.state_dict()


def test_group_added_later_whose_strength_cannot_be_set_is_refused_before_anything_changes() -> None:
    run = Run()
    run.train(range(10))
    before = run.scheduler.state_dict(), run.live.keep, run.live.penalty.strength
    group = {"params": [("late", nn.Parameter(torch.randn(4)))], "penalty": Trimmed(proxmo.MCP(0.1), 1.0)}
    run.optimizer.add_param_group(group)
    with pytest.raises(ValueError, match="tune_strength knows the strengths of L1, GroupL2 and GroupLInf"):
        run.scheduler.step()
    assert (run.scheduler.state_dict(), run.live.keep, run.live.penalty.strength) == before


def test_strength_is_set_for_the_step_size_that_auto_prox_sgd_found() -> None:
    torch.manual_seed(0)
    x = nn.Parameter(torch.randn(400))
    optimizer = proxmo.AutoProxSGD([x], Trimmed(proxmo.L1(0.0), 1.0))
    scheduler = KeepScheduler(optimizer, keep=0.1, horizon=200)
    for _ in range(99):  # the ramp ends at 100
        x.grad = torch.randn(400)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["tuned_lr"] < 0.1
    assert 40 <= int(x.count_nonzero()) < 60


def test_own_strength_is_kept_and_too_small_a_one_is_reported() -> None:
    run = Run(proxmo.GroupL2(1e-6), tune_strength=False)
    with pytest.warns(UserWarning, match=r"of Trimmed.* not zero, 5 were to be kept: its strength is too small"):
        run.train()
    assert run.live.penalty == proxmo.GroupL2(1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(proxmo.GroupL2(5.0), tune_strength=False).train()


def test_missing_gradients_and_an_lr_of_zero_are_named() -> None:
    run = Run()
    run.model[2].weight.requires_grad_(False)
    run.train()  # frozen weights do not count
    assert run.live.count_nonzero([run.weights()[0]]) == 4

    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    for lr, reason in ((0.1, "some parameters got no gradient"), (0.0, "lr is 0")):
        optimizer = proxmo.ProxSGD(params, lr=lr, penalty=Trimmed(proxmo.L1(0.0), 1.0))
        scheduler = KeepScheduler(optimizer, 0.25, 10)
        with pytest.warns(UserWarning, match=reason):
            take_steps(optimizer, scheduler, params[0])


def take_steps(optimizer: proxmo.ProxSGD, scheduler: KeepScheduler, param: Tensor, gradient: float = 0.0) -> None:
    for _ in range(10):
        param.grad = torch.full_like(param, gradient)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, r"keep must be a share in \(0, 1\]"),
        ({"keep": 2}, r"keep must be a share in \(0, 1\], got 2"),
        ({"start": 0.6}, r"0 <= start < end <= 1, got start=0.6 and end=0.5"),
        ({"end": 1.2}, r"0 <= start < end <= 1, got start=0.05 and end=1.2"),
        ({"horizon": 1}, "horizon must be an integer >= 2, got 1"),
        ({"inner": proxmo.SparseGroup(0.1, 0.1)}, "tune_strength knows the strengths of L1, GroupL2 and GroupLInf"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(**arguments)


def test_optimizer_without_a_trimmed_penalty_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="optimizer must have a Trimmed penalty in one of its parameter groups"):
        KeepScheduler(proxmo.ProxSGD(params, penalty=proxmo.L1(0.1)), 0.5, 10)
    with pytest.raises(TypeError, match=r"optimizer must be a proxmo.ProxOptimizer, got SGD"):
        KeepScheduler(torch.optim.SGD(params), 0.5, 10)  # type: ignore[arg-type]


def test_trimmed_penalties_that_share_what_they_trim_are_refused() -> None:
    inner = proxmo.L1(0.1)
    groups = [{"params": [nn.Parameter(torch.ones(2))], "penalty": Trimmed(inner, keep)} for keep in (0.5, 1.0)]
    with pytest.raises(ValueError, match="must trim a penalty object of its own"):
        KeepScheduler(proxmo.ProxSGD(groups), 0.5, 10)


def test_weights_that_are_not_finite_are_named() -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = proxmo.ProxSGD([weight], penalty=Trimmed(proxmo.L1(0.0), 1.0))
    scheduler = KeepScheduler(optimizer, 0.25, 10)
    with pytest.warns(UserWarning, match="some weights are not finite"):
        take_steps(optimizer, scheduler, weight, math.nan)
