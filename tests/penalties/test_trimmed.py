"""Trimmed penalties over several tensors: joint ranking, exact targets, ties and errors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import proxmo
from penalties.cases import noise
from proxmo import Trimmed
from proxmo.penalties.selection import Ranking, masks_of_largest


def tensors(seed: int = 0) -> list[Tensor]:
    return [noise((3, 2), seed=seed), noise((2, 2), seed=seed + 1), noise((1, 2), seed=seed + 2)]


def objective(penalty: proxmo.Penalty, u: list[Tensor], x: list[Tensor], steps: list[Tensor]) -> float:
    gaps = [((a - b).square() / (2 * step)).sum() for a, b, step in zip(u, x, steps, strict=True)]
    return float(penalty.total(u)) + float(sum(gaps))


@pytest.mark.parametrize("in_metric", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 0.5])
@pytest.mark.parametrize("inner", [proxmo.GroupL2(0.7), proxmo.GroupLInf(0.6), proxmo.SparseGroup(0.2, 0.5)], ids=str)
def test_joint_prox_is_the_best_of_all_choices(inner: proxmo.GroupL2, keep: float | int, in_metric: bool) -> None:
    """Each choice of rows to leave alone gives a point; the prox is no worse than any of them."""
    x = tensors()
    steps = [noise(tuple(t.shape), seed=9 + k).exp() if in_metric else torch.full_like(t, 0.8) for k, t in enumerate(x)]
    penalty = Trimmed(inner, keep)
    found = [t.clone() for t in x]
    penalty.prox_(found, steps if in_metric else 0.8)
    rows = [(k, row) for k, t in enumerate(x) for row in range(len(t))]
    best = math.inf
    for kept in itertools.combinations(rows, penalty.count_to_keep(len(rows))):
        u = [inner.prox(t, step) for t, step in zip(x, steps, strict=True)]
        for k, row in kept:
            u[k][row] = x[k][row]
        best = min(best, objective(penalty, u, x, steps))
    assert objective(penalty, found, x, steps) == pytest.approx(best, rel=1e-12)


def test_scope_each_ranks_every_tensor_alone() -> None:
    x = tensors()
    each = [t.clone() for t in x]
    Trimmed(proxmo.GroupL2(100.0), 1, "each").prox_(each, 1.0)
    assert [int((t.abs().sum(1) > 0).sum()) for t in each] == [1, 1, 1]
    together = [t.clone() for t in x]
    Trimmed(proxmo.GroupL2(100.0), 2).prox_(together, 1.0)
    assert sum(int((t.abs().sum(1) > 0).sum()) for t in together) == 2


@pytest.mark.parametrize("count", [1, 3, 7])
def test_ties_leave_exactly_the_count_alone(count: int) -> None:
    x = [torch.ones(3), -torch.ones(5)]
    Trimmed(proxmo.L1(10.0), count).prox_(x, 1.0)
    assert sum(int((t != 0).sum()) for t in x) == count
    assert all(set(t.abs().tolist()) <= {0.0, 1.0} for t in x)


@pytest.mark.parametrize("size", [1000, 1 << 20])
@pytest.mark.parametrize("kind", ["normal", "ties", "half zero", "heavy tail"])
def test_selection_of_the_largest_equals_a_sort(kind: str, size: int) -> None:
    scores = noise((size,), torch.float32).abs()
    scores = {
        "normal": scores,
        "ties": (scores * 3).round(),
        "half zero": scores * (noise((size,), seed=1) > 0),
        "heavy tail": scores**9,
    }[kind]
    for k in (1, size // 50, size // 2, size - 1, size):
        (mask,) = masks_of_largest([Ranking(scores, ())], k)
        assert int(mask.sum()) == k
        assert torch.equal(scores[mask].sort().values, scores.sort().values[size - k :])


def test_nan_counts_as_largest_and_is_not_hidden() -> None:
    x = torch.tensor([0.1, math.nan, 3.0, 2.0])
    penalty = Trimmed(proxmo.L1(10.0), 2)
    result = penalty.prox(x, 1.0)
    assert result[1].isnan()
    assert result[[0, 2, 3]].tolist() == [0.0, 3.0, 0.0]
    assert penalty.value(x).isnan()


def test_value_is_exactly_zero_where_only_kept_blocks_are_left() -> None:
    assert Trimmed(proxmo.L1(1e10), 2).total([torch.tensor([0.3, 0.0]), torch.tensor([0.0, -7.1])]) == 0.0


def test_gradient_of_the_value_leaves_out_what_is_kept() -> None:
    x = torch.tensor([3.0, -1.0, 0.5], requires_grad=True)
    Trimmed(proxmo.L1(2.0), 1).value(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, -2.0, 2.0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Trimmed(proxmo.Nuclear(0.1), 0.5), ValueError, "penalty must be a penalty that is a sum over"),
        (lambda: Trimmed(proxmo.Box(0, 1), 0.5), ValueError, "penalty must be a penalty that is a sum over"),
        (lambda: Trimmed(0.1, 0.5), TypeError, "penalty must be a penalty that is a sum over"),
        (lambda: Trimmed(proxmo.L1(0.1), 0.0), ValueError, r"keep must be a share in \(0, 1\]"),
        (lambda: Trimmed(proxmo.L1(0.1), 1.5), ValueError, r"keep must be a share in \(0, 1\].*got 1.5"),
        (lambda: Trimmed(proxmo.L1(0.1), 0), ValueError, "count >= 1 as an integer, got 0"),
        (lambda: Trimmed(proxmo.L1(0.1), True), TypeError, "keep must be a share"),
        (lambda: Trimmed(proxmo.L1(0.1), 0.5, "both"), ValueError, "scope must be one of"),
        (lambda: proxmo.TopK(3, dim=0, scope="all"), ValueError, "dim must be None with scope='all', got 0"),
        (lambda: proxmo.NM(5, 4), ValueError, "n must be at most m = 4, got 5"),
        (lambda: proxmo.NM(0, 0), ValueError, "m must be an integer >= 1, got 0"),
        (lambda: proxmo.NM(2, 4).prox(torch.zeros(3, 6), 1.0), ValueError, "multiple of m = 4, got"),
    ],
)
def test_bad_arguments_are_refused(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


def test_optimizer_refuses_to_keep_more_blocks_than_there_are() -> None:
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="keep must be at most the number of elements or groups, 5, got 6"):
        proxmo.ProxSGD(params, penalty=Trimmed(proxmo.GroupL2(0.1), 6))
    proxmo.ProxSGD(params, penalty=Trimmed(proxmo.GroupL2(0.1), 5))


@pytest.mark.parametrize("fused", [False, True])
def test_joint_steps_equal_the_prox_of_the_joined_vector(fused: bool) -> None:
    """The optimizer hands all tensors over at once, large ones too, whatever their order and batches."""
    values = [noise(shape, torch.float32, seed) for seed, shape in enumerate([(700, 800), (3, 5), (40,), (900, 600)])]
    for penalty in (Trimmed(proxmo.L1(3.0), 0.3), proxmo.TopK(200_000, scope="all")):
        params = [nn.Parameter(v.clone()) for v in values]
        for p in params:
            p.grad = torch.ones_like(p)
        proxmo.ProxSGD(params, lr=0.1, momentum=0.9, penalty=penalty, fused=fused).step()
        moved = torch.cat([v.flatten() for v in values]) - 0.1
        torch.testing.assert_close(torch.cat([p.detach().flatten() for p in params]), penalty.prox(moved, 0.1))


def test_steps_with_units_rank_all_families() -> None:
    weight, bias, other = (nn.Parameter(noise(shape)) for shape in [(4, 3), (4,), (5, 2)])
    units = (((0, 0, None), (1, 0, None)), ((2, 0, None),))
    group = {"params": [weight, bias, other], "penalty": Trimmed(proxmo.GroupL2(1e3), 3), "units": units}
    optimizer = proxmo.ProxSGD([group], lr=1.0)
    for p in group["params"]:
        p.grad = torch.zeros_like(p)
    norms = torch.cat([torch.cat([weight, bias[:, None]], 1).norm(dim=1), other.norm(dim=1)]).detach()
    optimizer.step()
    left = torch.cat([torch.cat([weight, bias[:, None]], 1).norm(dim=1), other.norm(dim=1)]).detach()
    assert torch.equal(left > 0, norms >= norms.sort().values[-3])
    assert optimizer.penalty_value() == 0.0
    with pytest.raises(ValueError, match="keep must be at most the number of elements or groups, 9, got 10"):
        proxmo.ProxSGD([{**group, "penalty": Trimmed(proxmo.GroupL2(1e3), 10)}])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("penalty", [Trimmed(proxmo.L1(1e9), 0.5), proxmo.TopK(10, scope="all")], ids=str)
def test_parameters_without_gradient_keep_their_place_in_the_ranking(penalty: proxmo.Penalty, fused: bool) -> None:
    with_gradient, without = nn.Parameter(torch.arange(1.0, 11.0)), nn.Parameter(torch.arange(5.5, 15.5))
    with_gradient.grad = torch.zeros(10)
    before = without.detach().clone()
    proxmo.ProxSGD([with_gradient, without], lr=0.1, penalty=penalty, fused=fused).step()
    assert torch.equal(without, before)
    assert int((with_gradient != 0).sum()) == int((torch.arange(1.0, 11.0) > 7.5).sum())


def test_families_without_gradient_keep_their_place_in_the_ranking() -> None:
    first, second = nn.Parameter(torch.arange(1.0, 5.0)[:, None]), nn.Parameter(torch.arange(2.5, 6.5)[:, None])
    first.grad = torch.zeros_like(first)
    units = (((0, 0, None),), ((1, 0, None),))
    group = {"params": [first, second], "penalty": Trimmed(proxmo.GroupL2(1e9), 4), "units": units}
    proxmo.ProxSGD([group], lr=0.1).step()
    assert first.flatten().tolist() == [0.0, 0.0, 0.0, 4.0]


def test_units_of_each_family_must_be_as_many_as_are_kept() -> None:
    weights = [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(6, 2))]
    units = (((0, 0, None),), ((1, 0, None),))
    group = {"params": weights, "penalty": Trimmed(proxmo.GroupL2(1.0), 5, "each"), "units": units}
    with pytest.raises(ValueError, match="keep must be at most the number of elements or groups, 4, got 5"):
        proxmo.ProxSGD([group])


def test_certificate_agrees_with_the_step_at_near_ties() -> None:
    row = noise((12,), torch.float32)
    rows = torch.stack([row[torch.randperm(12, generator=torch.Generator().manual_seed(k))] for k in range(8)])
    weight = nn.Parameter(rows.clone())
    optimizer = proxmo.ProxSGD([weight], lr=0.1, penalty=Trimmed(proxmo.GroupL2(3.0), 4))
    optimizer.certify = True
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    expected = rows - 0.1 * optimizer.certificate(weight).subgradient
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-5)


def test_a_subclass_is_ranked_by_its_own_envelopes() -> None:
    @dataclasses.dataclass
    class Hinge(proxmo.L1):  # penalises negative numbers ten times as much
        def _element_values(self, x: Tensor) -> Tensor:
            return self.strength * torch.where(x < 0, -10 * x, x)

        def _prox(self, x: Tensor, step: Any, out: Any) -> Tensor:
            return torch.where(x < 0, (x + 10 * step * self.strength).clamp(max=0), (x - step * self.strength).relu())

    result = Trimmed(Hinge(0.1), 1).prox(torch.tensor([3.0, -2.0], dtype=torch.float64), 1.0)
    assert result.tolist() == [2.9, -2.0]


def test_integers_of_numpy_are_counts() -> None:
    assert Trimmed(proxmo.L1(0.1), np.int64(1)).keep == 1
    assert isinstance(Trimmed(proxmo.L1(0.1), np.int64(1)).keep, int)


def test_strength_scheduler_reaches_what_is_trimmed() -> None:
    optimizer = proxmo.ProxSGD([nn.Parameter(torch.ones(2))], penalty=Trimmed(proxmo.L1(0.4), 0.5))
    proxmo.StrengthScheduler(optimizer, lambda k: 0.5)
    assert optimizer.param_groups[0]["penalty"].penalty == proxmo.L1(0.2)


def test_checkpoint_updates_the_penalty_inside() -> None:
    def make(keep: float, strength: float) -> proxmo.ProxSGD:
        return proxmo.ProxSGD([nn.Parameter(torch.ones(4))], penalty=Trimmed(proxmo.L1(strength), keep))

    saved, loaded = make(0.5, 2.0), make(1.0, 0.1)
    inner = loaded.param_groups[0]["penalty"].penalty
    state = saved.state_dict()
    assert state["param_groups"][0]["penalty"] == {
        "Trimmed": {"penalty": {"L1": {"strength": 2.0}}, "keep": 0.5, "scope": "all"}
    }
    loaded.load_state_dict(state)
    assert loaded.param_groups[0]["penalty"] == Trimmed(proxmo.L1(2.0), 0.5)
    assert loaded.param_groups[0]["penalty"].penalty is inner
    other = proxmo.ProxSGD([nn.Parameter(torch.ones(4))], penalty=Trimmed(proxmo.L0(0.1), 0.5))
    with pytest.raises(ValueError, match="penalty L1 into one with penalty L0"):
        other.load_state_dict(state)


def test_param_groups_fit_the_axis_of_what_is_trimmed() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    groups = proxmo.param_groups(model, Trimmed(proxmo.GroupL2(0.1), 0.5), exclude=["1"])
    assert groups[0]["penalty"] == Trimmed(proxmo.GroupL2(0.1, dim=1), 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8,), (3, 4), (2, 3, 8)])
def test_nm_keeps_the_largest_of_each_run(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, penalty = noise(shape, dtype), proxmo.NM(2, 4)
    result = penalty.prox(x, 0.5)
    for run, kept in zip(x.reshape(-1, 4), result.reshape(-1, 4), strict=True):
        assert int((kept != 0).sum()) == 2
        assert set(kept[kept != 0].tolist()) == set(run[run.abs().argsort()[2:]].tolist())
    assert penalty.value(result) == 0
    assert penalty.value(x) == math.inf
    assert torch.equal(penalty.prox(x, 0.0), x)


def test_nm_in_a_metric_keeps_what_costs_most_to_remove() -> None:
    x, step = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.01, 1.0, 1.0, 100.0])
    assert proxmo.NM(2, 4).prox(x, step).tolist() == [1.0, 0.0, 3.0, 0.0]


def test_nm_step_on_a_large_matrix_equals_the_prox() -> None:
    weight = nn.Parameter(noise((1500, 1000), torch.float32))
    weight.grad = torch.ones_like(weight)
    expected = proxmo.NM(2, 4).prox(weight.detach() - 0.1, 0.1)
    proxmo.ProxSGD([weight], lr=0.1, penalty=proxmo.NM(2, 4)).step()
    torch.testing.assert_close(weight.detach(), expected)
