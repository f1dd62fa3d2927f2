"""Decide which units can be removed without changing the function of the model.

A unit can be removed if no operation between its producers and its readers mixes it with other units, and if every
reader either multiplies it by zero or reads a constant, for any input of the model. The constant is folded into the
bias of the reader.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from proxmo.compaction.dataflow import Dataflow, is_standard_layer, trace_dataflow, uncalled_layers
from proxmo.compaction.dependency_graph import Family, Member, output_axis
from proxmo.compaction.example_inputs import ModelInputs
from proxmo.compaction.propagation_rules import NO_UNIT, has_border_effects


class NumberedFamilies:
    """Families whose units have ids that are unique in the model, for `trace_dataflow`."""

    def __init__(self, families: list[Family]) -> None:
        self.families = families
        self._candidates = [family for family in families if family.obstacle is None]
        self.offsets: dict[str, int] = {}
        total = 0
        for family in families:
            self.offsets[family.root] = total
            total += family.size

    def channel_units(self) -> dict[nn.Module, Tensor]:
        """Return the unit ids of the output channels of each producer."""
        unit_ids: dict[nn.Module, Tensor] = {}
        for family in self._candidates:
            for member in family.members_with("producer"):
                if isinstance(member.module, nn.Module):
                    ids = unit_ids.setdefault(member.module, torch.full((member.width,), NO_UNIT))
                    ids[member.channels] = torch.tensor(member.units) + self.offsets[family.root]
        return unit_ids

    def find_obstacles(self, model: nn.Module, inputs: ModelInputs) -> Dataflow:
        """Trace the units through a call of the model, and set the obstacle of each family that cannot be pruned."""
        dataflow = trace_dataflow(model, inputs.args, inputs.kwargs, self.channel_units())
        expected_units = {
            (member.module, channel): self.offsets[family.root] + unit
            for family in self._candidates
            for member in family.members_with("reader")
            for channel, unit in zip(member.channels, member.units, strict=True)
        }
        names = {module: name for name, module in model.named_modules()}
        uncalled = _uncalled_layer_sizes(model, dataflow)
        for family in self._candidates:
            family.obstacle = self._obstacle(family, dataflow, expected_units, names)
            if family.obstacle is None and family.size in uncalled:
                family.obstacle = f"{uncalled[family.size]!r}, not called on the example inputs, may use its channels"
        return dataflow

    def _obstacle(
        self,
        family: Family,
        dataflow: Dataflow,
        expected_units: dict[tuple[nn.Module, int], int],
        names: dict[nn.Module, str],
    ) -> str | None:
        ids = range(self.offsets[family.root], self.offsets[family.root] + family.size)
        for member in family.members:
            is_layer = member.name and member.role != "passthrough" and isinstance(member.module, nn.Module)
            if is_layer and not is_standard_layer(member.module):
                return f"{member.name!r} ({type(member.module).__name__}) is not a standard torch.nn layer"
            if member.role == "reader" and member.module not in dataflow.layer_inputs:
                return f"{member.name!r} was not called"
        for unit in ids:
            if unit in dataflow.mixed_by:
                return f"{dataflow.mixed_by[unit]} mixes its channels"
            if unit in dataflow.units_in_outputs:
                return "it is an output of the model"
        for module, layer_input in dataflow.layer_inputs.items():
            for channel, unit in enumerate(layer_input.unit.tolist()):
                if unit in ids and expected_units.get((module, channel)) != unit:
                    return f"torch-pruning maps the input channels of {names[module]!r} to other units"
        return None


def _uncalled_layer_sizes(model: nn.Module, dataflow: Dataflow) -> dict[int, str]:
    """Return the sizes of layers that were not called, with a layer name each.

    In another call, such a layer may read or add to any unit in a family of the same size.
    """
    names_by_size: dict[int, str] = {}
    for name, module in uncalled_layers(model, dataflow):
        for p in module.parameters(recurse=False):
            names_by_size.update(dict.fromkeys(p.shape, name))
    return names_by_size


@dataclass
class RemovalPlan:
    """Which units of a family to remove, and which zero units to keep."""

    units: list[int]
    """Units to remove."""
    constants: dict[str, Tensor]
    """For each reader, the constant to fold in per input channel, where any is nonzero."""
    kept: dict[str, list[int]]
    """Zero units that must stay, by reason."""


def plan_removal(family: Family, dataflow: Dataflow) -> RemovalPlan:
    """Plan what to remove from a family whose obstacle has been determined."""
    zero = _zero_units(family)
    if family.obstacle is not None:
        return RemovalPlan([], {}, {family.obstacle: sorted(zero)} if zero else {})
    readers = family.members_with("reader")
    unread = _unread_units(family)
    plan = RemovalPlan([], {}, {})
    for unit in range(family.size):
        reason = None if unit in unread else _why_not_constant(unit, readers, dataflow)
        if reason is None:
            plan.units.append(unit)
        elif unit in zero:
            plan.kept.setdefault(reason, []).append(unit)
    if len(plan.units) == family.size:
        plan.kept["one must remain"] = [plan.units.pop(0)]
    for reader in readers:
        folded = [unit for unit in plan.units if unit not in unread]
        channels = [channel for unit in folded for channel in reader.channels_by_unit.get(unit, [])]
        minimum = dataflow.layer_inputs[reader.module].minimum
        if channels and minimum[channels].any():
            plan.constants[reader.name] = torch.zeros_like(minimum)
            plan.constants[reader.name][channels] = minimum[channels]
    return plan


def _why_not_constant(unit: int, readers: list[Member], dataflow: Dataflow) -> str | None:
    """Return why the unit cannot be replaced by a constant, or ``None`` if it can."""
    if not readers:
        return "no layer reads it"
    for reader in readers:
        channels = reader.channels_by_unit.get(unit, [])
        layer_input = dataflow.layer_inputs[reader.module]
        if not layer_input.constant[channels].all():
            return f"{reader.name!r} reads a varying value"
        if has_border_effects(reader.module) and layer_input.minimum[channels].any():
            return f"{reader.name!r} pads the constant with zeros"
    return None


def _zero_units(family: Family) -> set[int]:
    """Return the units whose weights are zero in all producers; biases and norms do not count."""
    zero = set(range(family.size)) if family.members_with("producer") else set()
    for member in family.members_with("producer"):
        if max(member.channels) >= member.width:  # torch-pruning found channels that do not exist
            return set()
        rows = (member.weight_rows() == 0).all(1)
        zero -= {unit for unit, channels in member.channels_by_unit.items() if not bool(rows[channels].all())}
    return zero


def _unread_units(family: Family) -> set[int]:
    """Return the units that every reader multiplies by zero."""
    readers = family.members_with("reader")
    unread = set(range(family.size)) if readers else set()
    for reader in readers:
        axis = 1 - output_axis(reader.module)
        zero = (reader.module.weight.detach().movedim(axis, 0).flatten(1) == 0).all(1)
        unread -= {unit for unit, channels in reader.channels_by_unit.items() if not bool(zero[channels].all())}
    return unread


@torch.no_grad()
def fold_constants(model: nn.Module, constants: dict[str, Tensor]) -> None:
    """Add the contribution of constant inputs to the biases of the readers."""
    for name, values in constants.items():
        reader = model.get_submodule(name)
        assert isinstance(reader, (nn.Linear, _ConvNd))
        weight = reader.weight.double()
        kernel_sums = weight.flatten(2).sum(2) if weight.dim() > 2 else weight
        shift = (kernel_sums @ values.double()).to(reader.weight.dtype)
        if reader.bias is None:
            reader.bias = nn.Parameter(shift)
        else:
            reader.bias += shift
