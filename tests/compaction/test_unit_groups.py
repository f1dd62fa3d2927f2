"""Unit groups: which tensors make a unit, and which units cannot be removed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import proxmo
from compaction.models import CASES, make
from proxmo import GroupL2, ProxSGD, unit_groups


@pytest.mark.parametrize("name", list(CASES))
def test_every_parameter_is_there_once_and_the_model_is_untouched(name: str) -> None:
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
    """For each family, named by its parameters, units and weights in each."""
    params = groups[0]["params"]
    tensors = [p.detach() for _, p in params]
    return {
        " ".join(params[part.position][0] for part in family): tuple(proxmo.optim.units.joined(family, tensors).shape)
        for family in groups[0]["units"]
    }


def test_a_channel_comes_with_its_bias_and_its_normalisation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    groups = unit_groups(model, torch.randn(1, 3, 5, 5), GroupL2(0.1))
    assert shapes_of_units(groups) == {"0.weight 0.bias 1.weight 1.bias": (8, 27 + 3)}
    assert groups.notes == ["8 units of 30 weights: 0", "not penalised: 3: it is an output of the model"]


def test_channels_that_are_added_are_one_unit() -> None:
    model, example = make("residual")
    assert shapes_of_units(unit_groups(model, example, GroupL2(0.1))) == {
        "embed.weight embed.bias down.weight down.bias": (8, 6 + 17),
        "up.weight up.bias": (16, 9),
    }


def test_channels_side_by_side_share_the_normalisation() -> None:
    model, example = make("concatenated")
    assert shapes_of_units(unit_groups(model, example, GroupL2(0.1))) == {
        "first.weight first.bias norm.weight norm.bias": (6, 27 + 3),
        "second.weight second.bias norm.weight norm.bias": (4, 54 + 3),
        "third.weight third.bias": (5, 91),
    }


@pytest.mark.parametrize("separate", [False, True])
def test_a_head_is_a_unit(separate: bool) -> None:
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


def test_layers_whose_units_cannot_be_removed_are_named() -> None:
    for name, note in (
        ("tied", "not penalised: hidden: a weight of 'head' is shared"),
        ("added to input", "not penalised: conv: 'head' does not see a constant"),
        ("used twice", "not penalised: layer: 'layer' is used 2 times"),
    ):
        model, example = make(name)
        groups = unit_groups(model, example, GroupL2(0.1))
        assert note in groups.notes
        assert note in str(groups)
        assert [group["penalty"] for group in groups] == [None]


def test_a_network_with_attention_by_hand_keeps_its_projections() -> None:
    model, example = make("own attention")
    groups = unit_groups(model, example, GroupL2(0.1))
    assert [note for note in groups.notes if "scaled_dot_product" in note and "mixes its channels" in note]
    assert list(shapes_of_units(groups)) == ["embed.weight embed.bias"]


@pytest.mark.parametrize("penalty", [proxmo.L1(0.1), GroupL2(0.1, dim=1), proxmo.L2Ball(1.0), 0.1])
def test_only_group_penalties_on_units_are_taken(penalty: Any) -> None:
    with pytest.raises(TypeError, match="penalty must be a group penalty with dim=0"):
        unit_groups(nn.Linear(2, 2), torch.ones(1, 2), penalty)


def test_training_with_joint_groups_removes_more_than_with_weights_alone() -> None:
    """A BatchNorm shift keeps a channel alive whose weights are zero; in one group with them it goes too."""

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
