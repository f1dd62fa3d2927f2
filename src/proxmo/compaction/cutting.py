"""Cutting a copy of a model, with a look at its outputs after each cut."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from proxmo.compaction.attention import has_plain_heads, silent_heads, without_heads
from proxmo.compaction.removable import Removable, add_constants, look, removable
from proxmo.compaction.tracing import Inputs, Traced

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@torch.no_grad()
def outputs_of(model: nn.Module, probes: list[Inputs]) -> list[list[Tensor]]:
    """For each probe the tensors that the model returns."""
    return [[x for x in pytree.tree_leaves(probe.call(model)) if isinstance(x, Tensor)] for probe in probes]


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of two outputs, NaN beside a number and different shapes are infinitely far."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return float("inf")
    differences = [
        torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a.double() - b.double()).abs()).nan_to_num(nan=torch.inf)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return max((float(difference.max()) for difference in differences if difference.numel()), default=0.0)


def tolerance_for(outputs: list[Tensor]) -> float:
    """What rounding may change: 1e-5 in float32, of numbers about 1."""
    floating = [x for x in outputs if x.is_floating_point()]
    tolerances = [_TOLERANCE.get(x.dtype, 8 * torch.finfo(x.dtype).eps) for x in floating]
    largest = [float(x[x.isfinite()].abs().max()) for x in floating if x.isfinite().any()]
    return max(tolerances, default=0.0) * max(1.0, *largest) if largest else 0.0


class Cutter:
    """Removes units from copies of a model, and only what leaves its outputs as they are.

    Args:
        model: the model, in evaluation mode.
        inputs: what it is called with.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model = model
        self.inputs = inputs
        self.probes = [inputs, inputs.shuffled()]
        self.expected = outputs_of(model, self.probes)
        self.refused: dict[str, str] = {}
        """Layers whose zero units must stay, with the reason."""
        self._kept: dict[str, list[str]] = {}
        self._numbers: dict[str, list[int]] = {}

    def run(self) -> nn.Module:
        """The smallest model: removing units may leave others that nobody reads, so it goes on until none is left."""
        self._cut_heads()
        while self.cut_units():
            pass
        return self.model

    def kept(self) -> list[str]:
        """A sentence for each layer with zero units that had to stay."""
        return [f"{name}: {sentence}" for name, sentences in self._kept.items() for sentence in sentences]

    def difference(self) -> float:
        """How far the outputs on the example are from those of the model at the start."""
        return largest_difference(outputs_of(self.model, self.probes[:1])[0], self.expected[0])

    def cut_units(self) -> bool:
        """Remove the units of all layers that can be, and tell whether there were any."""
        plan = {root: found for root, found in self.plan().items() if found.units}
        if not plan or self._try(plan) is None:
            return bool(plan)
        for root in plan:  # something among them must stay: one by one tells what
            problem = self._try({root: self.plan()[root]})
            if problem is not None:
                self.refused[root] = problem
        self.plan()
        return not plan.keys() <= self.refused.keys()

    def plan(self) -> dict[str, Removable]:
        """What can be removed from each layer, and what cannot, by all that its weights and the probes tell."""
        seen = look(self.model, self.probes)
        plan = {}
        for family in Traced(self.model, self.inputs).families():
            found = removable(family, seen)
            numbers = self._numbers.setdefault(family.root, list(range(family.size)))
            if family.root in self.refused:
                found = Removable([], {}, {self.refused[family.root]: found.units} if found.units else {})
            kept = {reason: [numbers[unit] for unit in units] for reason, units in found.kept.items()}
            self._kept[family.root] = [_stays("unit", units, reason) for reason, units in kept.items()]
            plan[family.root] = found
        return plan

    def _try(self, plan: dict[str, Removable]) -> str | None:
        """Carry out the plan on a copy, which takes the place of the model, or tell why it cannot."""
        candidate = copy.deepcopy(self.model)
        try:
            traced = Traced(candidate, self.inputs)
            families = {family.root: family for family in traced.families()}
            for found in plan.values():
                add_constants(candidate, found.constants)
            for root, found in plan.items():
                traced.cut(families[root], found.units)
        except Exception as error:
            return f"it cannot be cut: {type(error).__name__}: {error}"
        problem = self._problem(candidate)
        if problem is None:
            self.model = candidate
            for root, found in plan.items():
                gone = set(found.units)
                self._numbers[root] = [n for unit, n in enumerate(self._numbers[root]) if unit not in gone]
        return problem

    def _problem(self, candidate: nn.Module) -> str | None:
        """Why the candidate may not take the place of the model, if so."""
        try:
            found = outputs_of(candidate, self.probes)
        except Exception as error:
            return f"without them the model does not run: {type(error).__name__}: {error}"
        for ours, expected in zip(found, self.expected, strict=True):
            difference = largest_difference(ours, expected)
            if not difference <= tolerance_for(expected):
                return f"without them the outputs change by {difference:.1e}"
        return None

    def _cut_heads(self) -> None:
        layers = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.MultiheadAttention)]
        for name, layer in layers:
            heads = silent_heads(layer)
            self._kept[name] = []
            if heads and not has_plain_heads(layer):
                self._kept[name].append(_stays("head", heads, "the layer has more than its projections"))
                continue
            if len(heads) == layer.num_heads:
                self._kept[name].append(_stays("head", heads[:1], "all are zero"))
                heads = heads[1:]
            if not heads:
                continue
            candidate = copy.deepcopy(self.model)
            candidate.set_submodule(name, without_heads(layer, heads))
            problem = self._problem(candidate)
            if problem is None:
                self.model = candidate
            else:
                self._kept[name].append(_stays("head", heads, problem))


def _stays(noun: str, numbers: list[int], reason: str) -> str:
    """
    >>> _stays("unit", [3], "all are zero"), _stays("unit", [1, 4], "it is an output")
    ('unit 3 stays: all are zero', 'units 1, 4 stay: it is an output')
    """
    if len(numbers) == 1:
        return f"{noun} {numbers[0]} stays: {reason}"
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{noun}s {', '.join(map(str, numbers[:8]))}{more} stay: {reason}"
