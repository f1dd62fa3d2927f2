"""`unit_groups` finds the tensors of each unit, and the units that cannot be removed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import proxmo
from compaction.models import CASES, make
from proxmo import GroupL2, ProxSGD, unit_groups


@pytest.mark.parametrize("name", list(CASES))
def test_every_parameter_is_listed_once_and_the_model_is_unchanged(name: str) -> None:
    model, example = make(name)
    before = copy.deepcopy(model.state_dict())
    groups = unit_groups(model, example, GroupL2(0.1))
    listed = [p for group in groups for _, p in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())
    ProxSGD(groups)


def shapes_of_units(groups: proxmo.ParamGroups) -> dict[str, tuple[int, ...]]:
    """Return the number of units and of weights per unit of each family, by its parameter names."""
    shapes = {}
    for group in groups:
        tensors = [p.detach() for _, p in group["params"]]
        for family in group.get("units", ()):
            names = " ".join(group["params"][part.position][0] for part in family)
            shapes[names] = tuple(proxmo.optim.units.joined(family, tensors).shape)
    return shapes


def test_unit_includes_bias_and_normalisation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    groups = unit_groups(model, torch.randn(1, 3, 5, 5), GroupL2(0.1))
    assert shapes_of_units(groups) == {"0.weight 0.bias 1.weight 1.bias": (8, 27 + 3)}
    assert groups.notes == ["8 units of 30 weights: 0", "not penalised: 3: it is an output of the model"]


def test_added_channels_form_one_unit() -> None:
    model, example = make("residual")
    assert shapes_of_units(unit_groups(model, example, GroupL2(0.1))) == {
        "embed.weight embed.bias down.weight down.bias": (8, 6 + 17),
        "up.weight up.bias": (16, 9),
    }


def test_concatenated_channels_share_the_normalisation() -> None:
    model, example = make("concatenated")
    assert shapes_of_units(unit_groups(model, example, GroupL2(0.1))) == {
        "first.weight first.bias norm.weight norm.bias": (6, 27 + 3),
        "second.weight second.bias norm.weight norm.bias": (4, 54 + 3),
        "third.weight third.bias": (5, 91),
    }


@pytest.mark.parametrize("separate", [False, True])
def test_attention_head_is_a_unit(separate: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, kdim=6 if separate else None, vdim=4 if separate else None)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.attention(q, k, v)[0]  # type: ignore[no-any-return]

    k, v = (6, 4) if separate else (8, 8)
    example = (torch.randn(3, 1, 8), torch.randn(5, 1, k), torch.randn(5, 1, v))
    groups = unit_groups(Attention(), example, GroupL2(0.1))
    expected = 4 * (8 + k + v) + 3 * 4
    assert list(shapes_of_units(groups).values()) == [(2, expected)]


def test_frozen_parameters_are_in_no_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    groups = unit_groups(model, torch.randn(2, 3), GroupL2(0.1))
    assert shapes_of_units(groups) == {"0.weight 0.bias": (4, 4)}


def test_layers_without_removable_units_are_reported() -> None:
    for name, note in (
        ("added to input", "not penalised: conv: add joins its channels with values of a fixed size"),
        ("called twice", "not penalised: layer: addmm joins its channels with values of a fixed size"),
    ):
        model, example = make(name)
        groups = unit_groups(model, example, GroupL2(0.1))
        assert note in groups.notes
        assert note in str(groups)
        assert [group["penalty"] for group in groups] == [None]


def test_handwritten_attention_projections_are_not_penalised() -> None:
    model, example = make("handwritten attention")
    groups = unit_groups(model, example, GroupL2(0.1))
    assert [note for note in groups.notes if note.startswith("not penalised: query: the pruned model does not run")]
    assert list(shapes_of_units(groups)) == ["embed.weight embed.bias"]


@pytest.mark.parametrize("penalty", [proxmo.L1(0.1), GroupL2(0.1, dim=1), proxmo.L2Ball(1.0), 0.1])
def test_penalties_other_than_group_penalties_with_dim_0_are_refused(penalty: Any) -> None:
    with pytest.raises(TypeError, match="penalty must be a group penalty with dim=0"):
        unit_groups(nn.Linear(2, 2), torch.ones(1, 2), penalty)


def test_unit_groups_zero_more_outputs_than_groups_of_weights() -> None:
    """With groups of weights, a BatchNorm shift keeps channels active whose weights are zero."""

    def zero_outputs(joint: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        inputs = torch.randn(256, 4)
        penalty = GroupL2(0.05)
        groups = unit_groups(model, inputs, penalty) if joint else proxmo.param_groups(model, penalty, exclude=["3"])
        optimizer = ProxSGD(groups, lr=0.1)
        for _ in range(300):
            optimizer.zero_grad()
            (model(inputs).squeeze(1) - inputs[:, 0].abs()).square().mean().backward()
            optimizer.step()
        hidden = model.eval()[:3](inputs)
        return int((hidden == 0).all(0).sum())

    assert zero_outputs(joint=True) > zero_outputs(joint=False)
