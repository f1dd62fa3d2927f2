"""Parameter groups by layer: every parameter once, the right ones with the right penalty."""

import copy

import pytest
import torch
from torch import nn

import proxmo
from proxmo import GroupL2, GroupLInf, param_groups


class Tied(nn.Module):
    """Input and output share their embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 4)
        self.output = nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 2), nn.Flatten(), nn.Linear(6, 2), nn.PReLU()
    )


def penalties(groups: proxmo.ParamGroups) -> dict[str, proxmo.Penalty | None]:
    return {name: group["penalty"] for group in groups for name, _ in group["params"]}


def test_groups_go_over_to_other_parameters_of_the_same_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = proxmo.param_groups(model, proxmo.GroupL2(0.1), exclude=["1"])
    groups[0]["lr"] = 0.7
    twin = copy.deepcopy(model)
    proxmo.ProxSGD(groups, lr=0.1)  # which puts names and parameters apart
    moved = groups.on(twin)
    assert [[name for name, _ in group["params"]] for group in moved] == [
        ["0.weight"],
        ["0.bias", "1.weight", "1.bias"],
    ]
    assert all(p is twin.get_parameter(name) for group in moved for name, p in group["params"])
    assert moved[0]["lr"] == 0.7
    assert moved[0]["penalty"] is groups[0]["penalty"]
    assert str(moved) == str(groups)
    proxmo.ProxSGD(moved, lr=0.1)
    with pytest.raises(ValueError, match=r"model must have a parameter of shape \(4, 3\) '0.weight', got one of shape"):
        groups.on(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"model must have a parameter of shape \(2, 4\) '1.weight', got none"):
        groups.on(nn.Sequential(nn.Linear(3, 4)))


def test_weights_have_the_penalty_and_all_else_has_none() -> None:
    found = penalties(param_groups(network(), GroupLInf(0.1)))
    expected: dict[str, proxmo.Penalty | None] = dict.fromkeys(dict(network().named_parameters()))
    assert found == {**expected, "0.weight": GroupLInf(0.1), "4.weight": GroupLInf(0.1)}


def test_groups_are_the_output_units_of_each_kind_of_layer() -> None:
    model = nn.ModuleList(
        [nn.Linear(5, 3), nn.Conv1d(5, 3, 2), nn.Conv2d(5, 3, 2), nn.Conv3d(5, 3, 2), nn.Embedding(5, 3)]
    )
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    model.extend(layer(5, 3, 2) for layer in transposed)
    groups = param_groups(model, GroupL2(0.1), on=(*proxmo.layers.PENALISED, *transposed))
    optimizer = proxmo.ProxSGD(groups)
    counts = [
        group["penalty"].zero_groups(p) for group in optimizer.param_groups if group["penalty"] for p in group["params"]
    ]
    assert counts == [(0, 3)] * 8  # each has three outputs


def test_another_dim_is_taken_as_it_is() -> None:
    found = penalties(param_groups(nn.Embedding(5, 3), GroupL2(0.1, dim=(0, 1))))
    assert found == {"weight": GroupL2(0.1, dim=(0, 1))}


def test_penalties_without_groups_fit_as_they_are() -> None:
    assert penalties(param_groups(nn.Embedding(5, 3), proxmo.L1(0.1))) == {"weight": proxmo.L1(0.1)}


def test_every_parameter_is_there_once() -> None:
    for model in (network(), Tied(), nn.TransformerEncoderLayer(8, 2, 16)):
        groups = param_groups(model, GroupL2(0.1))
        listed = [p for group in groups for _, p in group["params"]]
        assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))
        assert [name for group in proxmo.ProxSGD(groups).param_groups for name in group["param_names"]]


def test_tied_weights_are_penalised_once_as_in_their_first_layer() -> None:
    found = penalties(param_groups(Tied(), GroupL2(0.1)))
    assert found == {"embedding.weight": GroupL2(0.1, dim=1), "hidden.weight": GroupL2(0.1), "hidden.bias": None}
    excluded = penalties(param_groups(Tied(), GroupL2(0.1), exclude=["output"]))
    assert excluded["embedding.weight"] is None


def test_strength_by_name_the_first_pattern_wins() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2), "third": nn.Linear(2, 2)})
    groups = param_groups(model, GroupL2(0.1), per_layer={"first": 0.5, "*ir*": 0.7})
    found = penalties(groups)
    assert [found[f"{name}.weight"].strength for name in model] == [0.5, 0.1, 0.7]  # type: ignore[union-attr]
    assert len(groups) == 4


def test_strength_by_the_name_of_what_a_layer_is_in_or_of_another_that_shares_its_weight() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    found = penalties(param_groups(model, GroupL2(0.1), per_layer={"body": 0.5}))
    weights = [name for name in found if name.endswith("weight")]
    assert [found[name].strength for name in weights] == [0.5, 0.5, 0.1]  # type: ignore[union-attr]
    tied = penalties(param_groups(Tied(), GroupL2(0.1), per_layer={"output": 0.5}))
    assert tied["embedding.weight"] == GroupL2(0.5, dim=1)


def test_exclusion_by_layer_parameter_and_pattern() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    for exclude, left in (
        (["body"], ["head.weight"]),
        (["body.0.weight", "head"], ["body.1.weight"]),
        (["*.1"], ["body.0.weight", "head.weight"]),
        (["*"], []),
    ):
        found = penalties(param_groups(model, GroupL2(0.1), exclude=exclude))
        assert [name for name, penalty in found.items() if penalty is not None] == left


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"exclude": ["haed"]}, ValueError, r"exclude must match names of the model, such as \['head'.*got 'haed'"),
        ({"per_layer": {"nose": 0.1}}, ValueError, "per_layer must match names of the model.*got 'nose'"),
        ({"exclude": "head"}, TypeError, "exclude must be a sequence of names, got 'head'"),
        ({"exclude": [5]}, TypeError, r"exclude must be a sequence of names, got \[5\]"),
        ({"per_layer": ["head"]}, TypeError, r"per_layer must be a dictionary from names to strengths, got \['head'\]"),
        ({"on": nn.Linear}, TypeError, "on must be a tuple of classes of layers"),
        ({"on": (nn.Conv2d,)}, ValueError, r"on must name classes of layers that the model has, got \('Conv2d',\)"),
        ({"model": 5}, TypeError, "model must be an nn.Module, got int"),
        ({"per_layer": {"head": -1.0}}, ValueError, "strength must be a finite number >= 0, got -1.0"),
        ({"penalty": 0.1}, TypeError, "penalty must be a proxmo.Penalty, got 0.1"),
        ({"penalty": proxmo.SparseGroup(0.1, 0.1), "per_layer": {"head": 0.1}}, TypeError, "which SparseGroup"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2)})
    with pytest.raises(error, match=message):
        param_groups(**{"model": model, "penalty": GroupL2(0.1), **arguments})  # type: ignore[arg-type]


def test_lazy_layers_can_be_listed_before_their_shape_is_known() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    groups = param_groups(model, GroupL2(0.1))
    assert "not yet known" in str(groups)
    optimizer = proxmo.ProxSGD(groups, lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert optimizer.sparsity()[0].groups == 0.0


def test_training_makes_whole_neurons_zero() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
    inputs = torch.randn(200, 5)
    optimizer = proxmo.ProxSGD(param_groups(model, GroupL2(0.1), exclude=["2"]), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        (model(inputs).squeeze(1) - inputs[:, 0]).square().mean().backward()
        optimizer.step()
    zeros = (model[0].weight == 0).all(1).sum()
    assert optimizer.sparsity()[0].groups == float(zeros) / 20 > 0.3
