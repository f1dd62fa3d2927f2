"""Which units of a family can be removed without a change of the function, and what to put in their place.

A unit can be removed if its channels stay apart from others all the way to the layers that read it, and if these
multiply it by zero, or see a constant whatever the input of the model. The constant goes into the bias of the reader.
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
    """Families whose units are numbered through, to follow them through a call of the model."""

    def __init__(self, families: list[Family]) -> None:
        self.families = families
        self._candidates = [family for family in families if family.obstacle is None]
        self.offsets: dict[str, int] = {}
        total = 0
        for family in families:
            self.offsets[family.root] = total
            total += family.size

    def channel_units(self) -> dict[nn.Module, Tensor]:
        """For each layer the numbers of the units of its output channels."""
        found: dict[nn.Module, Tensor] = {}
        for family in self._candidates:
            for member in family.members_with("producer"):
                if isinstance(member.module, nn.Module):
                    numbers = found.setdefault(member.module, torch.full((member.width,), NO_UNIT))
                    numbers[member.channels] = torch.tensor(member.units) + self.offsets[family.root]
        return found

    def find_obstacles(self, model: nn.Module, inputs: ModelInputs) -> Dataflow:
        """Follow the units through a call of the model, and note what stands against removing them."""
        dataflow = trace_dataflow(model, inputs.args, inputs.kwargs, self.channel_units())
        readers = {
            (member.module, channel): self.offsets[family.root] + unit
            for family in self._candidates
            for member in family.members_with("reader")
            for channel, unit in zip(member.channels, member.units, strict=True)
        }
        names = {module: name for name, module in model.named_modules()}
        uncalled = _uncalled_layer_sizes(model, dataflow)
        for family in self._candidates:
            family.obstacle = self._obstacle(family, dataflow, readers, names)
            if family.obstacle is None and family.size in uncalled:
                family.obstacle = f"{uncalled[family.size]!r}, which was not called on the example, may take part"
        return dataflow

    def _obstacle(
        self,
        family: Family,
        dataflow: Dataflow,
        readers: dict[tuple[nn.Module, int], int],
        names: dict[nn.Module, str],
    ) -> str | None:
        own = range(self.offsets[family.root], self.offsets[family.root] + family.size)
        for member in family.members:
            is_layer = member.name and member.role != "passthrough" and isinstance(member.module, nn.Module)
            if is_layer and not is_standard_layer(member.module):
                return f"{member.name!r} ({type(member.module).__name__}) is not a plain layer of torch"
            if member.role == "reader" and member.module not in dataflow.layer_inputs:
                return f"{member.name!r} was not called"
        for number in own:
            if number in dataflow.mixed_by:
                return f"{dataflow.mixed_by[number]} mixes its channels"
            if number in dataflow.units_in_outputs:
                return "it is an output of the model"
        for module, layer_input in dataflow.layer_inputs.items():
            for channel, number in enumerate(layer_input.unit.tolist()):
                if number in own and readers.get((module, channel)) != number:
                    return f"what {names[module]!r} reads of it could not be told"
        return None


def _uncalled_layer_sizes(model: nn.Module, dataflow: Dataflow) -> dict[int, str]:
    """The widths of layers that the example does not call: in another call they may read, or add to, what has them."""
    found: dict[int, str] = {}
    for name, module in uncalled_layers(model, dataflow):
        for p in module.parameters(recurse=False):
            found.update(dict.fromkeys(p.shape, name))
    return found


@dataclass
class RemovalPlan:
    """What can go from a family, and what cannot though it is zero."""

    units: list[int]
    constants: dict[str, Tensor]
    """For each reader the constants in its input channels that are not zero, those of other channels as zero."""
    kept: dict[str, list[int]]
    """Units that are zero but stay, by reason."""


def plan_removal(family: Family, dataflow: Dataflow) -> RemovalPlan:
    """What can be removed from a family, after a look at the model."""
    zero = _zero_units(family)
    if family.obstacle is not None:
        return RemovalPlan([], {}, {family.obstacle: sorted(zero)} if zero else {})
    readers = family.members_with("reader")
    unread = _unread_units(family)
    found = RemovalPlan([], {}, {})
    for unit in range(family.size):
        reason = None if unit in unread else _why_not_constant(unit, readers, dataflow)
        if reason is None:
            found.units.append(unit)
        elif unit in zero:
            found.kept.setdefault(reason, []).append(unit)
    if len(found.units) == family.size:
        found.kept["all are zero"] = [found.units.pop(0)]
    for reader in readers:
        folded = [unit for unit in found.units if unit not in unread]
        channels = [channel for unit in folded for channel in reader.channels_by_unit.get(unit, [])]
        minimum = dataflow.layer_inputs[reader.module].minimum
        if channels and minimum[channels].any():
            found.constants[reader.name] = torch.zeros_like(minimum)
            found.constants[reader.name][channels] = minimum[channels]
    return found


def _why_not_constant(unit: int, readers: list[Member], dataflow: Dataflow) -> str | None:
    """Why what a unit emits cannot be replaced by a constant, if so."""
    if not readers:
        return "no layer reads it"
    for reader in readers:
        channels = reader.channels_by_unit.get(unit, [])
        layer_input = dataflow.layer_inputs[reader.module]
        if not layer_input.constant[channels].all():
            return f"{reader.name!r} does not see a constant"
        if has_border_effects(reader.module) and layer_input.minimum[channels].any():
            return f"{reader.name!r} pads the constant with zeros"
    return None


def _zero_units(family: Family) -> set[int]:
    """The units all of whose weights, in all layers that emit them, are zero; biases and norms aside."""
    zero = set(range(family.size)) if family.members_with("producer") else set()
    for member in family.members_with("producer"):
        if max(member.channels) >= member.width:  # what torch-pruning makes of it cannot be
            return set()
        rows = (member.weight_rows() == 0).all(1)
        zero -= {unit for unit, channels in member.channels_by_unit.items() if not bool(rows[channels].all())}
    return zero


def _unread_units(family: Family) -> set[int]:
    """The units that every reader multiplies by zero."""
    readers = family.members_with("reader")
    unread = set(range(family.size)) if readers else set()
    for reader in readers:
        axis = 1 - output_axis(reader.module)
        zero = (reader.module.weight.detach().movedim(axis, 0).flatten(1) == 0).all(1)
        unread -= {unit for unit, channels in reader.channels_by_unit.items() if not bool(zero[channels].all())}
    return unread


@torch.no_grad()
def fold_constants(model: nn.Module, constants: dict[str, Tensor]) -> None:
    """Put what the readers get from removed units into their biases."""
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
