"""Find the removable units of a model, and the slices of its parameters that each of them has."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from proxmo.compaction.analysis import Analysis, Family, Part
from proxmo.compaction.compacting import working_copy
from proxmo.compaction.example_inputs import ModelInputs
from proxmo.compaction.labels import Labels
from proxmo.compaction.probes import Probes
from proxmo.compaction.pruning import Pruner, value_branch_notes


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


class FoundUnits(NamedTuple):
    """Result of `find_units`."""

    units: list[UniformUnits]
    obstacles: dict[str, str]
    """For each layer whose units cannot be removed, the reason."""
    notes: list[str]


def find_units(model: nn.Module, inputs: ModelInputs) -> FoundUnits:
    """Return the removable units, and for each other layer why its units are not."""
    traced = working_copy(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = dict(traced.named_parameters())
    trial = _Trial(traced, inputs, set(trained))
    obstacles: dict[str, tuple[int, str]] = {}
    units: list[UniformUnits] = []
    axes: dict[str, tuple[int, str]] = {}
    for family in trial.families:
        reason = trial.obstacle(family)
        parts = _trained_parts(family, set(trained))
        for part in parts:
            axis, owner = axes.get(part.name, (part.axis, ""))
            if reason is None and axis != part.axis:
                reason = f"its weights in {part.name!r} belong to the units of {owner!r}"
        if reason is None and parts:
            axes |= {part.name: (part.axis, family.root) for part in parts}
            units.append(_uniform_units(family.root, parts, trained))
        elif reason is not None:  # that of most weights counts
            weights = sum(part.indices.size * _row_size(named, part) for part in family.parts if part.made)
            obstacles[family.root] = max(
                obstacles.get(family.root, (0, "")), (weights, reason), key=lambda item: item[0]
            )
    with_units = {unit.root for unit in units}
    return FoundUnits(
        units,
        {root: reason for root, (_, reason) in obstacles.items() if root not in with_units},
        value_branch_notes(trial.analysis),
    )


class _Trial:
    """Tries, on a copy, to remove every second unit of all families.

    Args:
        model: a copy of the model, in evaluation mode.
        inputs: arguments to call it with.
        trained: names of the parameters that are trained, and so may become zero.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs, trained: set[str]) -> None:
        probes = Probes.of(model, inputs)
        self.analysis = Analysis(model, probes.to_trace(), values=False)
        self.families = self.analysis.families
        self._tried: dict[int, Family] = {}
        zeroed = copy.deepcopy(model)
        for family in self.families:
            parts = _trained_parts(family, trained)
            if family.obstacle is None and parts and family.size > 1:
                _set_zero(zeroed, parts, _every_second(family))
                self._tried[int(family.atoms[0])] = family
        self._after = Pruner(zeroed, probes, self.analysis.choices)
        self._after.run(once=True)

    def obstacle(self, family: Family) -> str | None:
        """Return why no unit of the family can be removed, or ``None``."""
        key = int(family.atoms[0])
        if family.obstacle is not None:
            return family.obstacle
        if family.size == 1:
            return "one must remain"
        if key in self._after.refused:
            return self._after.refused[key]
        chosen = family.atoms[_every_second(family)].tolist()
        return next((self._after.analysis.read[atom] for atom in chosen if atom in self._after.analysis.read), None)


def _row_size(named: dict[str, nn.Parameter], part: Part) -> int:
    p = named[part.name]
    return p.numel() // p.shape[part.axis]


def _every_second(family: Family) -> Labels:
    return np.arange(0, family.size, 2)[: family.size - 1]


@torch.no_grad()
def _set_zero(model: nn.Module, parts: list[Part], units: Labels) -> None:
    named = dict(model.named_parameters())
    for part in parts:
        p = named[part.name]
        p.index_fill_(part.axis, torch.from_numpy(part.indices[units].reshape(-1)).to(p.device), 0.0)


def _trained_parts(family: Family, trained: set[str]) -> list[Part]:
    return [part for part in family.parts if part.made and part.name in trained]


def _uniform_units(root: str, parts: list[Part], trained: dict[str, nn.Parameter]) -> UniformUnits:
    slices = [ParameterSlice(part.name, part.axis, tuple(map(tuple, part.indices.tolist()))) for part in parts]
    channels = [(trained[part.name], part.axis, part.indices.shape[1]) for part in parts]
    size = sum(p.numel() // p.shape[axis] * count for p, axis, count in channels)
    rows = sum(count for p, _, count in channels if p.dim() > 1)  # without biases and normalisations
    return UniformUnits(root, slices, size, max(rows, 1))
