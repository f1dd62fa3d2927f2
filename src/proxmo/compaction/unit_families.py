"""Find the removable units of a model, and the slices of its parameters that each of them has."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from proxmo.compaction.attention import head_removal_obstacle, head_rows
from proxmo.compaction.compacting import working_copy
from proxmo.compaction.dependency_graph import Family, Member, UnitGraph, output_axis, shared_parameters
from proxmo.compaction.example_inputs import ModelInputs
from proxmo.compaction.pruning import Pruner
from proxmo.compaction.removable_units import NumberedFamilies


class ParameterSlice(NamedTuple):
    """The slices of one parameter that belong to units."""

    parameter: str
    axis: int
    indices: tuple[tuple[int, ...], ...]
    """Indices along the axis, for each unit."""


class UniformUnits(NamedTuple):
    """Units of one family that all have the same number of weights in each parameter."""

    root: str
    slices: list[ParameterSlice]
    size: int
    """The number of weights in each unit."""
    rows: int
    """The number of rows of weights in each unit: 1 for a neuron, more for a head or where layers are added."""

    @property
    def number(self) -> int:
        """The number of units."""
        return len(self.slices[0].indices)

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that the units have slices of."""
        return [part.parameter for part in self.slices]


def find_units(model: nn.Module, inputs: ModelInputs) -> tuple[list[UniformUnits], dict[str, str]]:
    """Return the removable units, and for each other layer why its units are not."""
    traced = working_copy(model)
    families = UnitGraph(traced, inputs).families()
    dataflow = NumberedFamilies(families).find_obstacles(traced, inputs)
    obstacles = {family.root: family.obstacle for family in families}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    obstacles |= _try_removal(traced, inputs, [family for family in families if family.obstacle is None], trained)
    units: list[UniformUnits] = []
    for family in families:
        if obstacles[family.root] is None:
            units += _uniform_units(family, trained)
    for name, layer in traced.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            obstacles[name] = head_removal_obstacle(layer, dataflow, shared_parameters(traced))
            units += _head_units(name, layer, trained) if obstacles[name] is None else []
    return units, {root: reason for root, reason in obstacles.items() if reason is not None}


def _uniform_units(family: Family, trained: dict[str, nn.Parameter]) -> list[UniformUnits]:
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
    uniform: list[UniformUnits] = []
    for layout, units in units_by_layout.items():
        present = dict(layout)
        slices = [
            ParameterSlice(name, axis, tuple(tuple(channels[unit]) for unit in units))
            for name, axis, channels in by_parameter
            if name in present
        ]
        if slices:
            uniform.append(_measured(family.root, slices, trained))
    return uniform


def _head_units(name: str, layer: nn.MultiheadAttention, trained: dict[str, nn.Parameter]) -> list[UniformUnits]:
    slices = []
    for parameter_name, rows in head_rows(layer).items():
        full = f"{name}.{parameter_name}".lstrip(".")
        if full in trained:
            slices.append(ParameterSlice(full, 0, tuple(map(tuple, rows))))
    return [_measured(name, slices, trained)] if slices else []


def _measured(root: str, slices: list[ParameterSlice], trained: dict[str, nn.Parameter]) -> UniformUnits:
    channels = [(trained[name], axis, len(indices[0])) for name, axis, indices in slices]
    size = sum(p.numel() // p.shape[axis] * count for p, axis, count in channels)
    rows = sum(count for p, _, count in channels if p.dim() > 1)  # without biases and normalisations
    return UniformUnits(root, slices, size, max(rows, 1))


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
