"""Which units of a family can be removed without a change of the function, and what to put in their place.

A unit can be removed if its channels stay apart from others all the way to the layers that read it, and if these
multiply it by zero, or see a constant whatever the input of the model. The constant goes into the bias of the reader.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from proxmo.compaction.attention import uncalled_layers
from proxmo.compaction.dataflow import Followed, follow, is_known
from proxmo.compaction.dependency_graph import Family, Member, output_axis
from proxmo.compaction.example_inputs import Inputs
from proxmo.compaction.propagation_rules import NONE, has_border


class Numbered:
    """Families whose units are numbered through, to follow them through a call of the model."""

    def __init__(self, families: list[Family]) -> None:
        self.families = families
        self._open = [family for family in families if family.obstacle is None]
        self.offsets: dict[str, int] = {}
        total = 0
        for family in families:
            self.offsets[family.root] = total
            total += family.size

    def emitted(self) -> dict[nn.Module, Tensor]:
        """For each layer the numbers of the units of its output channels."""
        found: dict[nn.Module, Tensor] = {}
        for family in self._open:
            for member in family.having("emits"):
                if isinstance(member.module, nn.Module):
                    numbers = found.setdefault(member.module, torch.full((member.width,), NONE))
                    numbers[member.channels] = torch.tensor(member.units) + self.offsets[family.root]
        return found

    def look(self, model: nn.Module, inputs: Inputs) -> Followed:
        """Follow the units through a call of the model, and note what stands against removing them."""
        followed = follow(model, inputs.args, inputs.kwargs, self.emitted())
        readers = {
            (member.module, channel): self.offsets[family.root] + unit
            for family in self._open
            for member in family.having("reads")
            for channel, unit in zip(member.channels, member.units, strict=True)
        }
        names = {module: name for name, module in model.named_modules()}
        uncalled = _widths_of_uncalled(model, followed)
        for family in self._open:
            family.obstacle = self._obstacle(family, followed, readers, names)
            if family.obstacle is None and family.size in uncalled:
                family.obstacle = f"{uncalled[family.size]!r}, which was not called on the example, may take part"
        return followed

    def _obstacle(
        self,
        family: Family,
        followed: Followed,
        readers: dict[tuple[nn.Module, int], int],
        names: dict[nn.Module, str],
    ) -> str | None:
        own = range(self.offsets[family.root], self.offsets[family.root] + family.size)
        for member in family.members:
            is_layer = member.name and member.role != "passes" and isinstance(member.module, nn.Module)
            if is_layer and not is_known(member.module):
                return f"{member.name!r} ({type(member.module).__name__}) is not a plain layer of torch"
            if member.role == "reads" and member.module not in followed.readings:
                return f"{member.name!r} was not called"
        for number in own:
            if number in followed.mixed:
                return f"{followed.mixed[number]} mixes its channels"
            if number in followed.outputs:
                return "it is an output of the model"
        for module, reading in followed.readings.items():
            for channel, number in enumerate(reading.unit.tolist()):
                if number in own and readers.get((module, channel)) != number:
                    return f"what {names[module]!r} reads of it could not be told"
        return None


def _widths_of_uncalled(model: nn.Module, followed: Followed) -> dict[int, str]:
    """The widths of layers that the example does not call: in another call they may read, or add to, what has them."""
    found: dict[int, str] = {}
    for name, module in uncalled_layers(model, followed):
        for p in module.parameters(recurse=False):
            found.update(dict.fromkeys(p.shape, name))
    return found


@dataclass
class Removable:
    """What can go from a family, and what cannot though it is zero."""

    units: list[int]
    constants: dict[str, Tensor]
    """For each reader the constants in its input channels that are not zero, those of other channels as zero."""
    kept: dict[str, list[int]]
    """Units that are zero but stay, by reason."""


def removable(family: Family, followed: Followed) -> Removable:
    """What can be removed from a family, after a look at the model."""
    zero = _zero_units(family)
    if family.obstacle is not None:
        return Removable([], {}, {family.obstacle: sorted(zero)} if zero else {})
    readers = family.having("reads")
    unread = _unread_units(family)
    found = Removable([], {}, {})
    for unit in range(family.size):
        reason = None if unit in unread else _why_not(unit, readers, followed)
        if reason is None:
            found.units.append(unit)
        elif unit in zero:
            found.kept.setdefault(reason, []).append(unit)
    if len(found.units) == family.size:
        found.kept["all are zero"] = [found.units.pop(0)]
    for reader in readers:
        folded = [unit for unit in found.units if unit not in unread]
        channels = [channel for unit in folded for channel in reader.by_unit.get(unit, [])]
        low = followed.readings[reader.module].low
        if channels and low[channels].any():
            found.constants[reader.name] = torch.zeros_like(low)
            found.constants[reader.name][channels] = low[channels]
    return found


def _why_not(unit: int, readers: list[Member], followed: Followed) -> str | None:
    """Why what a unit emits cannot be replaced by a constant, if so."""
    if not readers:
        return "no layer reads it"
    for reader in readers:
        channels = reader.by_unit.get(unit, [])
        reading = followed.readings[reader.module]
        if not reading.constant[channels].all():
            return f"{reader.name!r} does not see a constant"
        if has_border(reader.module) and reading.low[channels].any():
            return f"{reader.name!r} pads the constant with zeros"
    return None


def _zero_units(family: Family) -> set[int]:
    """The units all of whose weights, in all layers that emit them, are zero; biases and norms aside."""
    zero = set(range(family.size)) if family.having("emits") else set()
    for member in family.having("emits"):
        if max(member.channels) >= member.width:  # what torch-pruning makes of it cannot be
            return set()
        rows = (member.rows() == 0).all(1)
        zero -= {unit for unit, channels in member.by_unit.items() if not bool(rows[channels].all())}
    return zero


def _unread_units(family: Family) -> set[int]:
    """The units that every reader multiplies by zero."""
    readers = family.having("reads")
    unread = set(range(family.size)) if readers else set()
    for reader in readers:
        axis = 1 - output_axis(reader.module)
        zero = (reader.module.weight.detach().movedim(axis, 0).flatten(1) == 0).all(1)
        unread -= {unit for unit, channels in reader.by_unit.items() if not bool(zero[channels].all())}
    return unread


@torch.no_grad()
def add_constants(model: nn.Module, constants: dict[str, Tensor]) -> None:
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
