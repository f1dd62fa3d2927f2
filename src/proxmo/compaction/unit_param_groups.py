"""Parameter groups in which a penalty acts on whole units: what zeros of it can be removed as one."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from proxmo.compaction.attention import head_removal_obstacle, head_rows
from proxmo.compaction.compacting import working_copy
from proxmo.compaction.dependency_graph import Family, Member, UnitGraph, output_axis, shared_parameters
from proxmo.compaction.example_inputs import ExampleInputs, ModelInputs, isolated_torch_state
from proxmo.compaction.pruning import Pruner
from proxmo.compaction.removable_units import NumberedFamilies
from proxmo.layers import ParamGroups
from proxmo.optim.units import Slice
from proxmo.penalties.base import Grouped


class _ParameterSlice(NamedTuple):
    """A part of a parameter, by name, that belongs to units."""

    parameter: str
    axis: int
    indices: tuple[tuple[int, ...], ...]
    """For each unit its indices along the axis."""


class _UniformUnits(NamedTuple):
    """Units that begin at one layer and have as many weights in each of their parameters."""

    root: str
    pieces: list[_ParameterSlice]


@isolated_torch_state()
def unit_groups(model: nn.Module, example_inputs: ExampleInputs, penalty: Grouped) -> ParamGroups:
    """Parameter groups in which each group of the penalty is all that makes a unit of the model removable.

    A unit is an output channel of a convolution with its bias and its scale and shift in the normalisation behind it, a
    neuron of a linear layer, a head of `nn.MultiheadAttention`; where layers are added, as in residual networks, the
    same channel of all of them. A unit that has become zero adds nothing to the outputs, and `compact` removes it: that
    is tried, on a copy, for every layer. Layers of which units cannot be removed exactly (they are outputs, or behind
    them is a normalisation over channels) are without a penalty, and named with the reason below the table. Needs
    ``pip install 'proxmo[compact]'``.

    Args:
        model: the model.
        example_inputs: a tensor, a tuple of arguments or a dictionary of named ones, to call the model with.
        penalty: a group penalty with ``dim=0``: here that stands for the units.

    >>> import proxmo, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> groups = unit_groups(model, torch.randn(2, 3, 3, 3), proxmo.GroupL2(0.1))
    >>> groups
    parameter  shape         penalty
    0.weight   (8, 3, 3, 3)  GroupL2(strength=0.1, dim=0)
    0.bias     (8,)          GroupL2(strength=0.1, dim=0)
    1.weight   (8,)          GroupL2(strength=0.1, dim=0)
    1.bias     (8,)          GroupL2(strength=0.1, dim=0)
    4.weight   (2, 8)        none
    4.bias     (2,)          none
    8 units of 30 weights: 0
    not penalised: 4: it is an output of the model
    >>> optimizer = proxmo.ProxSGD(groups, lr=0.1)
    """
    if not isinstance(penalty, Grouped) or penalty.dim != 0:
        raise TypeError(f"penalty must be a group penalty with dim=0, such as GroupL2(0.1), got {penalty!r}")
    inputs = ModelInputs.from_example(example_inputs)
    traced = working_copy(model)
    families = UnitGraph(traced, inputs).families()
    dataflow = NumberedFamilies(families).find_obstacles(traced, inputs)
    obstacles = {family.root: family.obstacle for family in families}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    obstacles |= _trial_removal(traced, inputs, [family for family in families if family.obstacle is None], trained)
    found: list[_UniformUnits] = []
    for family in families:
        if obstacles[family.root] is None:
            found += _uniform_units(family, trained)
    for name, layer in traced.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            obstacles[name] = head_removal_obstacle(layer, dataflow, shared_parameters(traced))
            found += _head_units(name, layer, trained) if obstacles[name] is None else []
    notes = [f"not penalised: {root}: {reason}" for root, reason in obstacles.items() if reason is not None]
    return _param_groups(model, penalty, found, notes)


def _param_groups(model: nn.Module, penalty: Grouped, found: list[_UniformUnits], notes: list[str]) -> ParamGroups:
    named = dict(model.named_parameters())
    in_units = list(dict.fromkeys(piece.parameter for like in found for piece in like.pieces))
    positions = {name: position for position, name in enumerate(in_units)}
    units = tuple(tuple(_slice(piece, positions, named) for piece in like.pieces) for like in found)
    groups: list[dict[str, Any]] = []
    if units:
        groups.append({"params": [(name, named[name]) for name in in_units], "penalty": penalty, "units": units})
    rest = [(name, p) for name, p in named.items() if name not in positions]
    if rest:
        groups.append({"params": rest, "penalty": None})
    return ParamGroups(groups, [*(_describe(like, named) for like in found), *notes])


def _slice(piece: _ParameterSlice, positions: dict[str, int], named: dict[str, nn.Parameter]) -> Slice:
    in_order = tuple((index,) for index in range(named[piece.parameter].shape[piece.axis]))
    return Slice(positions[piece.parameter], piece.axis, None if piece.indices == in_order else piece.indices)


def _describe(like: _UniformUnits, named: dict[str, nn.Parameter]) -> str:
    weights = 0
    for name, axis, indices in like.pieces:
        weights += named[name].numel() // named[name].shape[axis] * len(indices[0])
    return f"{len(like.pieces[0].indices)} units of {weights} weights: {like.root}"


def _uniform_units(family: Family, trained: dict[str, nn.Parameter]) -> list[_UniformUnits]:
    """The units of a family: where layers are joined side by side, not all need be alike."""
    by_parameter = [
        (name, axis, member.channels_by_unit)
        for member in family.members_with("producer", "passthrough")
        for name, axis in _output_parameters(member)
        if name in trained
    ]
    kinds: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for unit in range(family.size):
        kind = tuple((name, len(channels[unit])) for name, _, channels in by_parameter if unit in channels)
        kinds.setdefault(kind, []).append(unit)
    found = []
    for kind, units in kinds.items():
        present = dict(kind)
        pieces = [
            _ParameterSlice(name, axis, tuple(tuple(channels[unit]) for unit in units))
            for name, axis, channels in by_parameter
            if name in present
        ]
        found.append(_UniformUnits(family.root, pieces))
    return [like for like in found if like.pieces]


def _head_units(name: str, layer: nn.MultiheadAttention, trained: dict[str, nn.Parameter]) -> list[_UniformUnits]:
    rows = {f"{name}.{own}".lstrip("."): of_heads for own, of_heads in head_rows(layer).items()}
    pieces = [
        _ParameterSlice(full, 0, tuple(map(tuple, of_heads))) for full, of_heads in rows.items() if full in trained
    ]
    return [_UniformUnits(name, pieces)] if pieces else []


def _output_parameters(member: Member) -> list[tuple[str, int]]:
    """The parameters of a layer that make its output channels, with the axes that run over them."""
    module = member.module
    if isinstance(module, nn.Parameter):
        return [(member.name, member.node.pruning_dim)]
    if not isinstance(module, (nn.Linear, _ConvNd, nn.Embedding, _BatchNorm, _InstanceNorm)):
        return []
    axes = {"weight": output_axis(module), "bias": 0}
    return [(f"{member.name}.{own}".lstrip("."), axes[own]) for own, _ in module.named_parameters(recurse=False)]


@torch.no_grad()
def _trial_removal(
    model: nn.Module, inputs: ModelInputs, families: list[Family], trained: dict[str, nn.Parameter]
) -> dict[str, str | None]:
    """For each family why its units cannot be removed, if so: tried on a copy in which the first of each is zero."""
    zeroed = copy.deepcopy(model)
    for family in families:
        for member in family.members_with("producer", "passthrough"):
            for name, axis in _output_parameters(member):
                if name not in trained:
                    continue
                p = zeroed.get_parameter(name)
                p.index_fill_(
                    axis, torch.tensor(member.channels_by_unit.get(0, []), device=p.device, dtype=torch.long), 0.0
                )
    pruner = Pruner(zeroed, inputs)
    found = pruner.plan()
    pruner.remove_units()
    reasons: dict[str, str | None] = {}
    for family in families:
        of_family = found[family.root]
        kept = [reason for reason, units in of_family.kept.items() if 0 in units]
        if not kept and 0 not in of_family.units:
            kept = ["with all that is trained of it at zero, a unit still depends on the input"]
        reasons[family.root] = kept[0] if kept else pruner.refused.get(family.root)
    return reasons
