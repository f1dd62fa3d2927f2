"""Build parameter groups in which a penalty acts on whole removable units."""

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
    """The slices of one parameter that belong to units."""

    parameter: str
    axis: int
    indices: tuple[tuple[int, ...], ...]
    """Indices along the axis, for each unit."""


class _UniformUnits(NamedTuple):
    """Units of one family that all have the same number of weights in each parameter."""

    root: str
    slices: list[_ParameterSlice]


@isolated_torch_state()
def unit_groups(model: nn.Module, example_inputs: ExampleInputs, penalty: Grouped) -> ParamGroups:
    """Return parameter groups in which each group of the penalty is one removable unit of the model.

    A unit is a neuron of a linear layer, an output channel of a convolution, or a head of `nn.MultiheadAttention`,
    together with its bias and its scale and shift in the normalisation that follows. Where layers are added, as in
    residual networks, a unit is the same channel of all of them. A unit that is zero adds nothing to the outputs, and
    `compact` removes it. This is tried for every layer, on a copy of the model. Layers whose units cannot be removed
    exactly, such as outputs or layers followed by a normalisation over channels, get no penalty; they are listed with
    the reason below the table. Requires ``pip install 'proxmo[compact]'``.

    Args:
        model: the model.
        example_inputs: a tensor, a tuple of arguments or a dictionary of keyword arguments to call the model with.
        penalty: a group penalty with ``dim=0``, which stands for the units.

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
    obstacles |= _try_removal(traced, inputs, [family for family in families if family.obstacle is None], trained)
    units: list[_UniformUnits] = []
    for family in families:
        if obstacles[family.root] is None:
            units += _uniform_units(family, trained)
    for name, layer in traced.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            obstacles[name] = head_removal_obstacle(layer, dataflow, shared_parameters(traced))
            units += _head_units(name, layer, trained) if obstacles[name] is None else []
    notes = [f"not penalised: {root}: {reason}" for root, reason in obstacles.items() if reason is not None]
    return _param_groups(model, penalty, units, notes)


def _param_groups(model: nn.Module, penalty: Grouped, families: list[_UniformUnits], notes: list[str]) -> ParamGroups:
    named = dict(model.named_parameters())
    in_units = list(dict.fromkeys(part.parameter for family in families for part in family.slices))
    positions = {name: position for position, name in enumerate(in_units)}
    units = tuple(tuple(_slice(part, positions, named) for part in family.slices) for family in families)
    groups: list[dict[str, Any]] = []
    if units:
        groups.append({"params": [(name, named[name]) for name in in_units], "penalty": penalty, "units": units})
    rest = [(name, p) for name, p in named.items() if name not in positions]
    if rest:
        groups.append({"params": rest, "penalty": None})
    return ParamGroups(groups, [*(_describe(family, named) for family in families), *notes])


def _slice(part: _ParameterSlice, positions: dict[str, int], named: dict[str, nn.Parameter]) -> Slice:
    in_order = tuple((index,) for index in range(named[part.parameter].shape[part.axis]))
    return Slice(positions[part.parameter], part.axis, None if part.indices == in_order else part.indices)


def _describe(units: _UniformUnits, named: dict[str, nn.Parameter]) -> str:
    weights = 0
    for name, axis, indices in units.slices:
        weights += named[name].numel() // named[name].shape[axis] * len(indices[0])
    return f"{len(units.slices[0].indices)} units of {weights} weights: {units.root}"


def _uniform_units(family: Family, trained: dict[str, nn.Parameter]) -> list[_UniformUnits]:
    """Split a family into uniform units; after a concatenation, units may differ in the parameters they have."""
    by_parameter = [
        (name, axis, member.channels_by_unit)
        for member in family.members_with("producer", "passthrough")
        for name, axis in _output_parameters(member)
        if name in trained
    ]
    units_by_layout: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for unit in range(family.size):
        layout = tuple((name, len(channels[unit])) for name, _, channels in by_parameter if unit in channels)
        units_by_layout.setdefault(layout, []).append(unit)
    uniform = []
    for layout, units in units_by_layout.items():
        present = dict(layout)
        slices = [
            _ParameterSlice(name, axis, tuple(tuple(channels[unit]) for unit in units))
            for name, axis, channels in by_parameter
            if name in present
        ]
        uniform.append(_UniformUnits(family.root, slices))
    return [part for part in uniform if part.slices]


def _head_units(name: str, layer: nn.MultiheadAttention, trained: dict[str, nn.Parameter]) -> list[_UniformUnits]:
    slices = []
    for parameter_name, rows in head_rows(layer).items():
        full = f"{name}.{parameter_name}".lstrip(".")
        if full in trained:
            slices.append(_ParameterSlice(full, 0, tuple(map(tuple, rows))))
    return [_UniformUnits(name, slices)] if slices else []


def _output_parameters(member: Member) -> list[tuple[str, int]]:
    """Return the parameters of a layer that determine its output channels, each with its channel axis."""
    module = member.module
    if isinstance(module, nn.Parameter):
        return [(member.name, member.node.pruning_dim)]
    if not isinstance(module, (nn.Linear, _ConvNd, nn.Embedding, _BatchNorm, _InstanceNorm)):
        return []
    axes = {"weight": output_axis(module), "bias": 0}
    return [(f"{member.name}.{name}".lstrip("."), axes[name]) for name, _ in module.named_parameters(recurse=False)]


@torch.no_grad()
def _try_removal(
    model: nn.Module, inputs: ModelInputs, families: list[Family], trained: dict[str, nn.Parameter]
) -> dict[str, str | None]:
    """Remove the first unit of each family from a copy where it is zero; return why that fails, or ``None``."""
    zeroed = copy.deepcopy(model)
    for family in families:
        for member in family.members_with("producer", "passthrough"):
            for name, axis in _output_parameters(member):
                if name not in trained:
                    continue
                p = zeroed.get_parameter(name)
                channels = torch.tensor(member.channels_by_unit.get(0, []), device=p.device, dtype=torch.long)
                p.index_fill_(axis, channels, 0.0)
    pruner = Pruner(zeroed, inputs)
    plans = pruner.plan_removals()
    pruner.remove_units()
    reasons: dict[str, str | None] = {}
    for family in families:
        plan = plans[family.root]
        kept = [reason for reason, units in plan.kept.items() if 0 in units]
        if not kept and 0 not in plan.units:
            kept = ["a unit whose trained parameters are zero still depends on the input"]
        reasons[family.root] = kept[0] if kept else pruner.refused.get(family.root)
    return reasons
