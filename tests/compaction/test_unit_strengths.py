"""`unit_groups` leaves excluded layers alone, sets strengths by layer, and balances units of different sizes."""

from typing import Any

import pytest
import torch
from torch import nn

import proxmo
from compaction.models import make
from proxmo import GroupL2, GroupLInf, ProxSGD, SparseGroup, unit_groups


def network() -> nn.Sequential:
    body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
    return nn.Sequential(body, nn.Linear(6, 2))


INPUTS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
UNITS_OF_FIRST = ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"]
UNITS_OF_SECOND = ["0.3.weight", "0.3.bias"]


def strengths(groups: proxmo.ParamGroups) -> dict[str, float]:
    """Return the strength for each penalised parameter."""
    found = {name: group["penalty"] for group in groups for name, _ in group["params"]}
    return {name: penalty.strength for name, penalty in found.items() if penalty is not None}


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (["0.0"], UNITS_OF_SECOND),
        (["0.3.bias"], UNITS_OF_FIRST),
        (["0.1"], UNITS_OF_SECOND),  # the normalisation is part of the units of 0.0
        (["*.3"], UNITS_OF_FIRST),
        (["0"], []),
        (["1"], [*UNITS_OF_FIRST, *UNITS_OF_SECOND]),  # it only reads units
    ],
)
def test_units_with_an_excluded_part_are_not_penalised(exclude: list[str], left: list[str]) -> None:
    model = network()
    groups = unit_groups(model, INPUTS, GroupL2(0.1), exclude=exclude)
    assert strengths(groups) == dict.fromkeys(left, 0.1)
    listed = [p for group in groups for _, p in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))
    ProxSGD(groups)


def test_added_layers_are_excluded_together() -> None:
    model, example = make("residual")
    groups = unit_groups(model, example, GroupL2(0.1), exclude=["down"])
    assert list(strengths(groups)) == ["up.weight", "up.bias"]
    assert "not penalised: embed: exclude names down.weight, which is part of its units" in groups.notes


def test_excluded_layer_leaves_its_part_of_a_shared_normalisation_alone() -> None:
    model, example = make("concatenated")
    groups = unit_groups(model, example, GroupL2(1e3), exclude=["first"])
    assert "norm.weight" in strengths(groups)
    assert "first.weight" not in strengths(groups)
    optimizer = ProxSGD(groups, lr=0.1)
    (0 * model(example)).sum().backward()
    optimizer.step()
    assert [bool(x) for x in model.get_parameter("norm.weight")] == [True] * 6 + [False] * 4
    assert optimizer.sparsity()[0].families == (("second", 4, 4), ("third", 5, 5))


def test_per_layer_sets_the_strength_of_units() -> None:
    for per_layer, first, second in (
        ({"0.0": 0.5}, 0.5, 0.1),
        ({"0.1": 0.5}, 0.5, 0.1),  # any layer of a unit
        ({"0.3": 0.7, "0": 0.5}, 0.5, 0.7),  # the first match, here of a parent for the other
        ({"*": 0.2}, 0.2, 0.2),
    ):
        found = strengths(unit_groups(network(), INPUTS, GroupL2(0.1), per_layer=per_layer))
        assert found == dict.fromkeys(UNITS_OF_FIRST, first) | dict.fromkeys(UNITS_OF_SECOND, second)


def test_groups_of_equal_strength_are_one() -> None:
    penalty = GroupL2(0.1)
    groups = unit_groups(network(), INPUTS, penalty)
    assert [len(group.get("units", ())) for group in groups] == [2, 0]
    groups = unit_groups(network(), INPUTS, penalty, per_layer={"0.0": 0.2})
    assert [len(group.get("units", ())) for group in groups] == [1, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"exclude": ["nose"]}, ValueError, "exclude must match names of the model.*got 'nose'"),
        ({"exclude": "0"}, TypeError, "exclude must be a sequence of names, got '0'"),
        ({"per_layer": {"nose": 0.1}}, ValueError, "per_layer must match names of the model.*got 'nose'"),
        ({"per_layer": ["0"]}, TypeError, r"per_layer must be a dictionary from names to strengths, got \['0'\]"),
        ({"per_layer": {"1": 0.1}}, ValueError, r"layers with removable units, such as \['0.0', .*got '1'"),
        ({"per_layer": {"0.0": -1.0}}, ValueError, "strength must be a finite number >= 0, got -1.0"),
        ({"per_layer": {"0": 0.1}, "penalty": SparseGroup(0.1, 0.1)}, TypeError, "which SparseGroup"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        unit_groups(network(), INPUTS, **{"penalty": GroupL2(0.1), **arguments})


def test_layers_with_a_parameter_in_common_need_one_strength() -> None:
    model, example = make("concatenated")
    with pytest.raises(ValueError, match="per_layer must give 'first' and 'second' the same strength"):
        unit_groups(model, example, GroupL2(0.1), per_layer={"first": 0.5})
    groups = unit_groups(model, example, GroupL2(0.1), per_layer={"first": 0.5, "second": 0.5})
    assert [group["penalty"] for group in groups] == [GroupL2(0.5), GroupL2(0.1), None]


@pytest.mark.parametrize(
    ("penalty", "balanced"),
    [
        (GroupL2(0.1), GroupL2(0.3464)),  # √12
        (GroupLInf(0.1), GroupLInf(1.2)),
        (SparseGroup(0.1, 0.2), SparseGroup(0.1, 0.6928)),
        (proxmo.L2Ball(1.0, dim=0), proxmo.L2Ball(1.0, dim=0)),
    ],
    ids=str,
)
def test_strength_grows_with_the_rows_of_a_unit(penalty: Any, balanced: proxmo.Penalty) -> None:
    model, example = nn.TransformerEncoderLayer(8, 2, 16), torch.randn(3, 1, 8)
    groups = unit_groups(model, example, penalty)
    found = {name: group["penalty"] for group in groups for name, _ in group["params"]}
    assert found["linear1.weight"] == penalty
    assert found["self_attn.in_proj_weight"] == balanced
    assert "2 units of 108 weights in 12 rows: self_attn" in groups.notes
    assert str(balanced) in str(groups)
    equal = unit_groups(model, example, penalty, balance=False)
    assert [group["penalty"] for group in equal] == [penalty, None]


def test_strengths_by_layer_are_balanced_too() -> None:
    model, example = make("residual")
    found = strengths(unit_groups(model, example, GroupLInf(0.1), per_layer={"down": 0.5}))
    assert found["embed.weight"] == found["down.bias"] == 1.0  # two rows
    assert found["up.weight"] == 0.1


@pytest.mark.parametrize("kind", [GroupL2, GroupLInf])
def test_balanced_heads_and_neurons_vanish_at_about_the_same_time(kind: Any) -> None:
    """Without balance, all neurons are gone when no head is."""

    def last_steps(balance: bool) -> tuple[int, int]:
        torch.manual_seed(0)
        model, example = nn.TransformerEncoderLayer(16, 2, 32), torch.randn(3, 1, 16)
        optimizer = ProxSGD(unit_groups(model, example, kind(1.0), balance=balance), lr=0.02)
        alive = {"linear1": 0, "self_attn": 0}
        for step in range(1, 1000):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            for family in (family for part in optimizer.sparsity() for family in part.families):
                if family.zero < family.units:
                    alive[family.name] = step
            if alive["linear1"] < step > alive["self_attn"]:
                break
        return alive["linear1"], alive["self_attn"]

    neurons, heads = last_steps(balance=True)
    assert 1 / 3 < neurons / heads < 3
    neurons, heads = last_steps(balance=False)
    assert neurons < heads / 4
