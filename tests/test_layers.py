"""param_groups: every parameter once, the right ones with the right penalty, and notes on what is overlooked."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import proxmo
from proxmo import GroupL2, GroupLInf, param_groups


class Tied(nn.Module):
    """A model whose output layer shares the weight of its embedding."""

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


def test_on_takes_the_parameters_of_the_same_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = proxmo.param_groups(model, proxmo.GroupL2(0.1), exclude=["1"])
    groups[0]["lr"] = 0.7
    twin = copy.deepcopy(model)
    proxmo.ProxSGD(groups, lr=0.1)  # which moves the names to "param_names"
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


def test_weights_are_penalised_and_nothing_else() -> None:
    found = penalties(param_groups(network(), GroupLInf(0.1)))
    expected: dict[str, proxmo.Penalty | None] = dict.fromkeys(dict(network().named_parameters()))
    assert found == {**expected, "0.weight": GroupLInf(0.1), "4.weight": GroupLInf(0.1)}


def test_dim_0_stands_for_the_output_units_of_each_layer() -> None:
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
    assert counts == [(0, 3)] * 8  # each layer has three output units


def test_other_dims_are_used_as_they_are() -> None:
    found = penalties(param_groups(nn.Embedding(5, 3), GroupL2(0.1, dim=(0, 1))))
    assert found == {"weight": GroupL2(0.1, dim=(0, 1))}


def test_penalty_without_groups_is_used_as_it_is() -> None:
    assert penalties(param_groups(nn.Embedding(5, 3), proxmo.L1(0.1))) == {"weight": proxmo.L1(0.1)}


def test_every_parameter_appears_once() -> None:
    for model in (network(), Tied(), nn.TransformerEncoderLayer(8, 2, 16)):
        groups = param_groups(model, GroupL2(0.1))
        listed = [p for group in groups for _, p in group["params"]]
        assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))
        assert [name for group in proxmo.ProxSGD(groups).param_groups for name in group["param_names"]]


def test_tied_weight_is_penalised_once_as_in_its_first_layer() -> None:
    found = penalties(param_groups(Tied(), GroupL2(0.1)))
    assert found == {"embedding.weight": GroupL2(0.1, dim=1), "hidden.weight": GroupL2(0.1), "hidden.bias": None}
    excluded = penalties(param_groups(Tied(), GroupL2(0.1), exclude=["output"]))
    assert excluded["embedding.weight"] is None


def test_first_matching_pattern_sets_the_strength() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2), "third": nn.Linear(2, 2)})
    groups = param_groups(model, GroupL2(0.1), per_layer={"first": 0.5, "*ir*": 0.7})
    found = penalties(groups)
    assert [found[f"{name}.weight"].strength for name in model] == [0.5, 0.1, 0.7]  # type: ignore[union-attr]
    assert len(groups) == 4


def test_strength_is_set_by_the_name_of_a_parent_or_of_any_layer_with_the_same_weight() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    found = penalties(param_groups(model, GroupL2(0.1), per_layer={"body": 0.5}))
    weights = [name for name in found if name.endswith("weight")]
    assert [found[name].strength for name in weights] == [0.5, 0.5, 0.1]  # type: ignore[union-attr]
    tied = penalties(param_groups(Tied(), GroupL2(0.1), per_layer={"output": 0.5}))
    assert tied["embedding.weight"] == GroupL2(0.5, dim=1)


def test_modules_parameters_and_patterns_can_be_excluded() -> None:
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
def test_invalid_arguments_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2)})
    with pytest.raises(error, match=message):
        param_groups(**{"model": model, "penalty": GroupL2(0.1), **arguments})  # type: ignore[arg-type]


def test_lazy_layers_are_listed_before_their_shape_is_known() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    groups = param_groups(model, GroupL2(0.1))
    assert "not yet known" in str(groups)
    optimizer = proxmo.ProxSGD(groups, lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert optimizer.sparsity()[0].groups == 0.0


def test_training_zeroes_whole_neurons() -> None:
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


def test_table_says_that_frozen_weights_are_not_penalised_yet() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    groups = param_groups(model, proxmo.L1(0.1))
    assert str(groups).splitlines() == [
        "parameter  shape   penalty",
        "0.weight   (2, 2)  L1(strength=0.1), not applied while frozen",
        "1.weight   (3, 2)  L1(strength=0.1)",
        "0.bias     (2,)    none",
        "1.bias     (3,)    none",
    ]
    optimizer = proxmo.ProxSGD(groups, lr=1.0)
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    model[0].weight.requires_grad_(True)
    assert "frozen" not in str(groups)
    optimizer.zero_grad()
    (0 * model(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), proxmo.L1(0.1).prox(before, 1.0))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "compute_weight",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "parametrization", "old weight_norm", "old spectral_norm", "prune"],
)
def test_layers_whose_weight_is_computed_are_named(compute_weight: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.ModuleDict({"first": compute_weight(nn.Linear(2, 2)), "second": nn.Linear(2, 2)})
    state = copy.deepcopy(model.state_dict())
    note = "not penalised: first: its weight is computed from other parameters; remove its parametrization first"
    groups = param_groups(model, proxmo.L1(0.1))
    assert groups.notes == [note]
    assert str(groups).endswith(f"\n{note}")
    assert [name for name, penalty in penalties(groups).items() if penalty is not None] == ["second.weight"]
    assert param_groups(model, proxmo.L1(0.1), exclude=["first"]).notes == []
    for name, value in model.state_dict().items():  # spectral_norm iterates whenever the weight is read
        assert torch.equal(value, state[name])
    message = "model must have layers whose weight is a parameter, got only weights computed from other parameters"
    with pytest.raises(ValueError, match=message):
        param_groups(model["first"], proxmo.L1(0.1))
    with pytest.raises(ValueError, match=message):
        param_groups(model, proxmo.L1(0.1), exclude=["second"])
    assert param_groups(model, proxmo.L1(0.1), exclude=["*"]).notes == []


def test_weight_is_penalised_after_its_parametrization_is_removed() -> None:
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    parametrize.remove_parametrizations(layer, "weight")
    assert penalties(param_groups(layer, proxmo.L1(0.1)))["weight"] == proxmo.L1(0.1)


def test_training_with_weight_norm_stays_finite() -> None:
    """A penalty on the direction of weight_norm would end at 0/0."""
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    optimizer = proxmo.ProxSGD(param_groups(model, GroupL2(50.0)), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert torch.equal(model[1].weight, torch.zeros(2, 4))


OUTPUTS = 'penalised: head: its units may be outputs of the model, such as classes; exclude=["head"] leaves it alone'


@pytest.mark.parametrize(
    ("penalty", "notes"),
    [
        (GroupL2(0.1), [OUTPUTS]),
        (GroupLInf(0.1), [OUTPUTS]),
        (proxmo.SparseGroup(0.1, 0.1), [OUTPUTS]),
        (proxmo.L2Ball(1.0, dim=0), [OUTPUTS]),
        (GroupL2(0.1, dim=1), []),
        (GroupL2(0.1, dim=None), []),
        (proxmo.L1(0.1), []),
        (proxmo.Box(-1.0, 1.0), []),
        (proxmo.LInfBall(1.0, dim=0), []),
        (proxmo.Nuclear(0.1), []),
    ],
    ids=str,
)
def test_last_layer_is_named_if_its_output_units_are_groups(penalty: proxmo.Penalty, notes: list[str]) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    groups = param_groups(model, penalty)
    assert groups.notes == notes
    assert groups.on(copy.deepcopy(model)).notes == notes
    for exclude in (["head"], ["head.weight"], ["*"]):
        assert param_groups(model, penalty, exclude=exclude).notes == []
    assert param_groups(model, penalty, exclude=["body"]).notes == notes


def test_last_layer_is_not_named_if_its_groups_are_not_its_output_units() -> None:
    model = Tied()
    assert list(model._modules)[-1] == "output"
    assert param_groups(model, GroupL2(0.1)).notes == []  # groups are columns of the embedding
    assert param_groups(nn.Linear(2, 2), GroupL2(0.1)).notes == []  # a single layer has no name to exclude
    transposed = nn.Sequential(nn.ConvTranspose1d(2, 3, 2))
    assert len(param_groups(transposed, GroupL2(0.1), on=(nn.ConvTranspose1d,)).notes) == 1
