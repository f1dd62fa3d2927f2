"""Cutting a copy of a model, with a look at its outputs after each cut."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from proxmo.compaction.attention import (
    PrunedMultiheadAttention,
    head_removal_obstacle,
    remove_heads,
    replace_attention,
    zero_heads,
)
from proxmo.compaction.dataflow import trace_dataflow, uncalled_layers
from proxmo.compaction.dependency_graph import Family, UnitGraph, output_axis, shared_parameters
from proxmo.compaction.errors import CompactionError
from proxmo.compaction.example_inputs import ModelInputs
from proxmo.compaction.removable_units import NumberedFamilies, RemovalPlan, fold_constants, plan_removal

_LAYERS = (nn.Linear, _ConvNd, nn.Embedding, nn.EmbeddingBag)
_ATTENTION = (nn.MultiheadAttention, PrunedMultiheadAttention)
_NOT_CALLED = "was not called on the example, and is left as it is"
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of two outputs, NaN beside a number and different shapes are infinitely far."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return float("inf")
    return max((_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def are_close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether outputs differ by rounding only: 1e-5 in float32, of the largest number of a tensor if above 1."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return False
    return all(_difference(a, b) <= _tolerance(b) for a, b in zip(ours, theirs, strict=True))


def _difference(a: Tensor, b: Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    distance = torch.where(same, 0.0, (a.double() - b.double()).abs()).nan_to_num(nan=torch.inf)
    return float(distance.max()) if distance.numel() else 0.0


def _tolerance(tensor: Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    finite = tensor[tensor.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return _TOLERANCE.get(tensor.dtype, 8 * torch.finfo(tensor.dtype).eps) * max(1.0, largest)


class Pruner:
    """Removes units from copies of a model, and only what leaves its outputs as they are.

    Args:
        model: the model, in evaluation mode.
        inputs: what it is called with.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs) -> None:
        self.model = model
        self.inputs = inputs
        self.probes = [inputs, inputs.shuffled()]
        self.expected = [self._reference_outputs(probe) for probe in self.probes]
        self.refused: dict[str, str] = {}
        """Layers whose zero units must stay, with the reason."""
        self._trainable = self._runs_in_training(model)
        self._dataflow = trace_dataflow(model, inputs.args, inputs.kwargs, {})
        uncalled = uncalled_layers(model, self._dataflow)
        self._kept: dict[str, list[str]] = {name: [_NOT_CALLED] for name, _ in uncalled}
        self._original_indices: dict[str, list[int]] = {}

    def run(self) -> nn.Module:
        """The smallest model: removing units may leave others that nobody reads, so it goes on until none is left."""
        self._remove_heads()
        while self.remove_units():
            pass
        return self.model

    def kept_notes(self) -> list[str]:
        """A sentence for each layer with zero units that had to stay."""
        return [f"{name}: {sentence}" for name, sentences in self._kept.items() for sentence in sentences]

    def output_difference(self) -> float:
        """How far the outputs on the example are from those of the model at the start."""
        return largest_difference(self.inputs.output_tensors(self.model), self.expected[0])

    def remove_units(self) -> bool:
        """Remove the units of all layers that can be, and tell whether there were any."""
        plan = {root: found for root, found in self.plan().items() if found.units}
        if not plan or self._try_plan(plan) is None:
            return bool(plan)
        for root in plan:  # something among them must stay: one by one tells what
            problem = self._try_plan({root: self.plan()[root]})
            if problem is not None:
                self.refused[root] = problem
        self.plan()
        return not plan.keys() <= self.refused.keys()

    def plan(self) -> dict[str, RemovalPlan]:
        """What can be removed from each layer, and what is zero but cannot."""
        numbered = NumberedFamilies(UnitGraph(self.model, self.inputs).families())
        dataflow = numbered.find_obstacles(self.model, self.inputs)
        plan = {}
        for family in numbered.families:
            found = plan_removal(family, dataflow)
            numbers = self._original_indices.setdefault(family.root, list(range(family.size)))
            if family.root in self.refused:
                found = RemovalPlan([], {}, {self.refused[family.root]: found.units} if found.units else {})
            kept = {reason: [numbers[unit] for unit in units] for reason, units in found.kept.items()}
            self._kept[family.root] = [_stay_message("unit", units, reason) for reason, units in kept.items()]
            plan[family.root] = found
        self._note_untraced_layers(numbered.families)
        return plan

    def _note_untraced_layers(self, families: list[Family]) -> None:
        """Tell of zero units of layers that belong to no family."""
        traced = {member.module for family in families for member in family.members_with("producer", "passthrough")}
        inside = {part for m in self.model.modules() if isinstance(m, _ATTENTION) for part in m.modules()}
        for name, layer in self.model.named_modules():
            if isinstance(layer, _LAYERS) and layer not in traced | inside and name not in self._kept:
                rows = layer.weight.detach().movedim(output_axis(layer), 0).flatten(1)
                zero = (rows == 0).all(1).nonzero().flatten().tolist()
                self._kept[name] = (
                    [_stay_message("unit", zero, "what becomes of it could not be followed")] if zero else []
                )

    def _try_plan(self, plan: dict[str, RemovalPlan]) -> str | None:
        """Carry out the plan on a copy, which takes the place of the model, or tell why it cannot."""
        candidate = copy.deepcopy(self.model)
        try:
            graph = UnitGraph(candidate, self.inputs)
            families = {family.root: family for family in graph.families()}
            for found in plan.values():
                fold_constants(candidate, found.constants)
            for root, found in plan.items():
                graph.prune(families[root], found.units)
        except Exception as error:
            return f"it cannot be cut: {type(error).__name__}: {error}"
        problem = self._why_rejected(candidate)
        if problem is None:
            self.model = candidate
            for root, found in plan.items():
                gone = set(found.units)
                self._original_indices[root] = [
                    n for unit, n in enumerate(self._original_indices[root]) if unit not in gone
                ]
        return problem

    def _reference_outputs(self, probe: ModelInputs) -> list[Tensor]:
        try:
            outputs = probe.output_tensors(self.model)
        except Exception as error:
            raise CompactionError(
                f"the model does not run on example_inputs: {type(error).__name__}: {error}"
            ) from error
        if not are_close(probe.output_tensors(self.model), outputs):
            raise CompactionError("the model gives other outputs each time, in evaluation mode too")
        return outputs

    def _runs_in_training(self, model: nn.Module) -> bool:
        try:
            self.inputs.output_tensors(copy.deepcopy(model).train())
        except Exception:
            return False
        return True

    def _why_rejected(self, candidate: nn.Module) -> str | None:
        """Why the candidate may not take the place of the model, if so."""
        try:
            found = [probe.output_tensors(candidate) for probe in self.probes]
        except Exception as error:
            return f"cut, the model does not run: {type(error).__name__}: {error}"
        for ours, expected in zip(found, self.expected, strict=True):
            if not are_close(ours, expected):
                return f"cut, the outputs change by {largest_difference(ours, expected):.1e}"
        if self._trainable and not self._runs_in_training(candidate):
            return "cut, the model does not run in training mode"
        return None

    def _remove_heads(self) -> None:
        shared = shared_parameters(self.model)
        layers = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.MultiheadAttention)]
        reasons = {layer: head_removal_obstacle(layer, self._dataflow, shared) for _, layer in layers}
        for name, layer in layers:
            heads, biased = zero_heads(layer)
            self._kept[name] = [_stay_message("head", biased, "its values have a bias")] if biased else []
            if len(heads) == layer.num_heads and reasons[layer] is None:
                self._kept[name].append(_stay_message("head", heads[:1], "all are zero"))
                heads = heads[1:]
            if not heads:
                continue
            problem = reasons[layer]
            if problem is None:
                candidate = copy.deepcopy(self.model)
                replace_attention(candidate, name, remove_heads(layer, heads))
                problem = self._why_rejected(candidate)
            if problem is None:
                self.model = candidate
            else:
                self._kept[name].append(_stay_message("head", heads, problem))


def _stay_message(noun: str, numbers: list[int], reason: str) -> str:
    """
    >>> _stay_message("unit", [3], "all are zero"), _stay_message("unit", [1, 4], "it is an output")
    ('unit 3 stays: all are zero', 'units 1, 4 stay: it is an output')
    """
    if len(numbers) == 1:
        return f"{noun} {numbers[0]} stays: {reason}"
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{noun}s {', '.join(map(str, numbers[:8]))}{more} stay: {reason}"
