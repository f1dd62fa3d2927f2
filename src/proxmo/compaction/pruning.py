"""Remove the units of a model that can be removed, and check the outputs."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from proxmo.compaction.analysis import Analysis, Family
from proxmo.compaction.attributes import AttributeSearch, Setting
from proxmo.compaction.cutting import Removal, silenced, without_units
from proxmo.compaction.equivalence import Equivalence
from proxmo.compaction.example_inputs import tensors_in_objects
from proxmo.compaction.labels import Labels
from proxmo.compaction.outputs import are_close, largest_difference
from proxmo.compaction.probes import Probes, runs_in_training
from proxmo.compaction.splits import Site


class Plan(NamedTuple):
    """What to remove."""

    quiet: nn.Module
    """A copy of the model in which the units to remove are silent."""
    analysis: Analysis
    """What is known of a model with the same operations as this copy."""
    removals: list[Removal]


class Pruner:
    """Removes units from copies of a model, as long as its outputs stay the same.

    Args:
        model: the model, in evaluation mode.
        probes: what to call it with.
        choices: which axes carry units, from an earlier analysis of the same model.
    """

    def __init__(self, model: nn.Module, probes: Probes, choices: dict[Site, int | None] | None = None) -> None:
        self.model, self.probes = model, probes
        self.expected = [(inputs, inputs.output_tensors(model)) for inputs in probes.to_compare()]
        self.analysis = Analysis(model, probes.to_trace(), choices)
        self.refused: dict[int, str] = {}
        """For families whose removal failed, by their first atom, the reason."""
        self.attributes: dict[Setting, tuple[float, float]] = {}
        self.precision: torch.dtype | None = None
        """The coarsest precision of norms that were rescaled."""
        self._one_stays: set[int] = set()

    def run(self, *, once: bool = False) -> nn.Module:
        """Remove all that can be removed, and return the smaller model.

        Args:
            once: whether to leave units that nothing reads only since others were removed.
        """
        while True:
            plan = self._plan(once)
            small = self._attempt(plan, plan.removals)
            if isinstance(small, nn.Module):
                return small
            self._find_failing(plan, small)

    def _plan(self, once: bool) -> Plan:
        """Decide what to remove."""
        quiet, analysis = self.model, self.analysis
        removed: dict[int, Labels] = {}
        self._one_stays = set()
        while True:
            new = []
            for family in analysis.families:
                key = int(family.atoms[0])
                gone = removed.get(key, np.empty(0, dtype=np.int64))
                units = np.setdiff1d(np.flatnonzero(analysis.removable(family)), gone)
                if key in self.refused or not len(units):
                    continue
                if len(gone) + len(units) == family.size:
                    self._one_stays.add(int(family.atoms[units[0]]))
                    units = units[1:]
                if len(units):
                    new.append(Removal(family, units))
                    removed[key] = np.union1d(gone, units)
            if new:
                quiet = silenced(quiet, new, analysis.folds)  # may leave others that nothing reads
                if not once or _tensor_names(quiet) != _tensor_names(analysis.model):
                    analysis = Analysis(quiet, self.probes.to_trace(), self.analysis.choices)
            if once or not new:
                families = {int(family.atoms[0]): family for family in self.analysis.families}
                return Plan(quiet, analysis, [Removal(families[key], units) for key, units in removed.items()])

    def _attempt(self, plan: Plan, removals: list[Removal]) -> nn.Module | str:
        """Return the model without the units, or why there is none."""
        if not removals:
            self.attributes, self.precision = {}, None
            return copy.deepcopy(plan.quiet)
        small = without_units(plan.quiet, removals)
        search = AttributeSearch(small, self.analysis, removals, self.probes.example)
        problem = (
            search.run()
            or self._why_rejected(small, search.precision)
            or Equivalence(plan.analysis, removals).why_different(small, self.probes.to_trace())
        )
        if problem is not None:
            return problem
        self.attributes, self.precision = search.changes, search.precision
        return small

    def _find_failing(self, plan: Plan, problem: str) -> None:
        """Refuse the families whose removal fails, by halves."""
        accepted: list[Removal] = []

        def add(group: list[Removal], problem: str) -> None:
            if len(group) == 1:
                self.refused[int(group[0].family.atoms[0])] = problem
                return
            for half in (group[: len(group) // 2], group[len(group) // 2 :]):
                outcome = self._attempt(plan, [*accepted, *half])
                if isinstance(outcome, str):
                    add(half, outcome)
                else:
                    accepted.extend(half)

        add(plan.removals, problem)

    def _why_rejected(self, candidate: nn.Module, precision: torch.dtype | None) -> str | None:
        """Return why the candidate is not equivalent to the model, or ``None`` if it is."""
        for probe, expected in self.expected:
            try:
                actual = probe.output_tensors(candidate)
            except Exception as error:
                return f"the pruned model does not run: {type(error).__name__}: {error}"
            if not are_close(actual, expected, precision):
                return f"removal changes the outputs by {largest_difference(actual, expected):.1e}"
        if self.probes.trains and not runs_in_training(candidate, self.probes.example):
            return "the pruned model does not run in training mode"
        return None

    def output_difference(self, small: nn.Module) -> float:
        """Return the largest difference to the outputs of the original model on the example inputs."""
        return largest_difference(self.probes.example.output_tensors(small), self.expected[0][1])

    def object_notes(self, small: nn.Module) -> list[str]:
        """Return a line for each kind of object in the outputs with tensors that changed: these do not count."""
        with torch.no_grad():
            before, after = (tensors_in_objects(self.probes.example.call(model)) for model in (self.model, small))
        return [
            f"the model: also returns a {name}, whose tensors differ from those of the original; this is expected for "
            "caches, and only tensors in tuples, lists, dictionaries and dataclasses were compared"
            for name, tensors in before.items()
            if not are_close(after.get(name, []), tensors, self.precision)
        ]

    def kept_notes(self) -> list[str]:
        """Return a line for each layer and reason that zero units were kept, and for all that was not followed."""
        notes = [f"{name}: not called on the example inputs, left unchanged" for name in self._unused_layers()]
        if not any(
            self.analysis.zero(family).any() or self._without_effect(family).any() for family in self.analysis.families
        ):
            notes.append("no unit is zero, so nothing was removed")
        for family in self.analysis.families:
            reasons: dict[str, list[int]] = {}
            zero, removable = self.analysis.zero(family), self._without_effect(family)
            for unit, number in enumerate(family.numbers()):
                reason = self._why_kept(family, unit, bool(zero[unit]), bool(removable[unit]))
                if reason is not None:
                    reasons.setdefault(reason, []).append(number)
            layer = dict(self.model.named_modules()).get(family.root)
            is_head = isinstance(layer, nn.MultiheadAttention) and layer.num_heads == family.size
            noun = "head" if is_head else "unit"
            notes += [f"{family.root}: {_stay_message(noun, units, reason)}" for reason, units in reasons.items()]
        return notes + value_branch_notes(self.analysis)

    def _without_effect(self, family: Family) -> Labels:
        """Return which units nothing reads, whether or not they can be removed."""
        has_readers = any(not part.made for part in family.parts)
        return np.array([has_readers and int(atom) not in self.analysis.read for atom in family.atoms])

    def _why_kept(self, family: Family, unit: int, zero: bool, without_effect: bool) -> str | None:
        """Return why a unit stays that is zero or has no effect; ``None`` for others, and for those that went."""
        atom = int(family.atoms[unit])
        key = int(family.atoms[0])
        if family.obstacle is not None:
            return family.obstacle if zero or without_effect else None
        if key in self.refused:
            return self.refused[key] if without_effect else None
        if atom in self._one_stays:
            return "one must remain"
        return self.analysis.read.get(atom) if zero else None

    def _unused_layers(self) -> list[str]:
        parameters = dict(self.model.named_parameters())
        layers = (name.rpartition(".")[0] or name for name in self.analysis.unused if name in parameters)
        return list(dict.fromkeys(layers))


def _tensor_names(model: nn.Module) -> set[str]:
    return {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


def value_branch_notes(analysis: Analysis) -> list[str]:
    """Return a line for each module in which Python looked at a value that depends on the inputs."""
    return [
        f"{name or 'the model'}: its code branches on values of the inputs, as with .item() or bool(); only the branch "
        "that the example inputs take was followed"
        for name in analysis.value_branches()
    ]


def _stay_message(noun: str, indices: list[int], reason: str) -> str:
    """
    >>> _stay_message("unit", [3], "one must remain"), _stay_message("unit", [1, 4], "it is an output")
    ('unit 3 stays: one must remain', 'units 1, 4 stay: it is an output')
    """
    if len(indices) == 1:
        return f"{noun} {indices[0]} stays: {reason}"
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"{noun}s {', '.join(map(str, indices[:8]))}{more} stay: {reason}"
