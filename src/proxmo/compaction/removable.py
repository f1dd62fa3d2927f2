"""Which units of a family can be removed without a change of the function, and what to put in their place.

A unit can be removed if nobody reads it, or if all that read it see a constant, whatever the input of the model. That
is shown twice: by the weights, which must be zero on every way to the reader, and by the example, on which the reader
must see one number. The constant then goes into the bias of the reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from proxmo.compaction.tracing import Family, Inputs, Member, output_axis


@dataclass
class Range:
    """The smallest and the largest number in each channel of an input."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, x: Tensor, axis: int) -> Range:
        channels = x.detach().movedim(axis, -1).flatten(0, -2)
        return cls(channels.amin(0), channels.amax(0))

    def joined(self, other: Range) -> Range:
        return Range(self.low.minimum(other.low), self.high.maximum(other.high))

    @cached_property
    def is_one_number(self) -> Tensor:
        """Up to rounding: vectorised kernels and those for the rest of an array may differ in the last digit."""
        slack = 16 * torch.finfo(self.low.dtype).eps
        return self.high - self.low <= slack * self.low.abs().clamp(min=1.0)


Seen = dict[nn.Module, Range]
"""What the layers that read others have seen."""


def look(model: nn.Module, probes: list[Inputs]) -> Seen:
    """Run the model on all probes, and note the range of each input channel of its linear layers and convolutions."""
    seen: Seen = {}
    with _watching(model, seen), torch.no_grad():
        for probe in probes:
            probe.call(model)
    return seen


@contextmanager
def _watching(model: nn.Module, seen: Seen) -> Iterator[None]:
    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        axis = -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1
        if args and args[0].numel():
            found = Range.of(args[0], axis)
            seen[module] = seen[module].joined(found) if module in seen else found

    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, _ConvNd))]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Removable:
    """What can go from a family, and what cannot though it is zero."""

    units: list[int]
    constants: dict[str, Tensor]
    """For each reader the constants in its input channels that are not zero, those of other channels as zero."""
    kept: dict[str, list[int]]
    """Units that emit a constant but stay, by reason."""


def removable(family: Family, seen: Seen) -> Removable:
    """What can be removed from a family, after a look at the model."""
    silent = _silent_units(family)
    if family.obstacle is not None:
        return Removable([], {}, {family.obstacle: sorted(silent)} if silent else {})
    readers = family.having("reads")
    unread = _unread_units(family)
    found = Removable([], {}, {})
    for unit in sorted(silent | unread):
        reason = None if unit in unread else _why_not(unit, readers, seen)
        if reason is None:
            found.units.append(unit)
        else:
            found.kept.setdefault(reason, []).append(unit)
    if len(found.units) == family.size:
        found.kept["all are zero"] = [found.units.pop(0)]
    for reader in readers:
        folded = [unit for unit in found.units if unit not in unread]
        channels = [channel for unit in folded for channel in reader.by_unit.get(unit, [])]
        if channels and seen[reader.module].low[channels].any():
            found.constants[reader.name] = torch.zeros_like(seen[reader.module].low)
            found.constants[reader.name][channels] = seen[reader.module].low[channels]
    return found


def _why_not(unit: int, readers: list[Member], seen: Seen) -> str | None:
    """Why a unit that emits a constant cannot be removed, if so."""
    if not readers:
        return "no layer reads it"
    for reader in readers:
        channels = reader.by_unit.get(unit, [])
        if reader.module not in seen:
            return f"{reader.name!r} has not been called"
        values = seen[reader.module]
        if not values.is_one_number[channels].all():
            return f"{reader.name!r} does not see a constant"
        if values.low[channels].any() and not _sees_no_border(reader.module):
            return f"{reader.name!r} pads the constant with zeros"
    return None


def _sees_no_border(module: nn.Module) -> bool:
    """Whether a constant input adds a constant to the output, at the border as well."""
    if isinstance(module, _ConvTransposeNd):
        return False
    if isinstance(module, _ConvNd):
        return module.padding_mode != "zeros" or not any(module._reversed_padding_repeated_twice)
    return True


def _silent_units(family: Family) -> set[int]:
    """The units whose weights are zero on every way to their readers, which so cannot see the input of the model."""
    readers = family.having("reads")
    members = {member.node: member for member in family.having("emits", "passes")}
    known: dict[object, set[int]] = {}

    def constant_at(member: Member) -> set[int]:
        if member.node not in known:
            known[member.node] = _constant_by_itself(member)
            sources = [members[node] for node in member.node.inputs if node in members]
            if member.role == "passes" and sources:
                present = [set(source.units) for source in sources]
                varies = [units - constant_at(source) for units, source in zip(present, sources, strict=True)]
                reached = set(member.units).intersection(unit for units in present for unit in units)
                known[member.node] |= reached.difference(*varies)
        return known[member.node]

    ends = [members[node] for reader in readers for node in reader.node.inputs if node in members]
    ends = ends or list(members.values())  # no reader: all must be silent to be worth a word
    varies = [set(end.units) - constant_at(end) for end in ends]
    return set(range(family.size)).difference(*varies)


def _constant_by_itself(member: Member) -> set[int]:
    """The units at which the output of the layer does not depend on its input."""
    module = member.module
    if isinstance(module, nn.Parameter):
        return set(member.units)
    if isinstance(module, (nn.Linear, _ConvNd, nn.Embedding)):
        rows = module.weight.detach().movedim(output_axis(module), 0).flatten(1)
        zero = (rows == 0).all(1)
    elif isinstance(module, (_BatchNorm, _InstanceNorm)) and module.weight is not None:
        zero = module.weight.detach() == 0
    else:
        return set()
    return {unit for unit, channels in member.by_unit.items() if bool(zero[channels].all())}


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
