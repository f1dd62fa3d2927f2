"""Remove units and heads from copies of a model, and check the outputs after each removal."""

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
_NOT_CALLED = "not called on the example inputs, left unchanged"
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def largest_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest absolute difference of two lists of outputs.

    It is infinite if shapes differ, or where only one of two elements is NaN.
    """
    if [x.shape for x in actual] != [x.shape for x in expected]:
        return float("inf")
    return max((_difference(a, b) for a, b in zip(actual, expected, strict=True)), default=0.0)


def are_close(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether outputs differ by rounding only: by 1e-5 · max(1, largest element of the tensor) in float32."""
    if [x.shape for x in actual] != [x.shape for x in expected]:
        return False
    return all(_difference(a, b) <= _tolerance(b) for a, b in zip(actual, expected, strict=True))


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
    """Removes units and heads from copies of a model, as long as its outputs stay the same.

    Args:
        model: the model, in evaluation mode.
        inputs: arguments to call it with.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs) -> None:
        self.model = model
        self.inputs = inputs
        self.probes = [inputs, inputs.shuffled()]
        self.expected = [self._reference_outputs(probe) for probe in self.probes]
        self.refused: dict[str, str] = {}
        """Roots of families whose removal failed, with the reason."""
        self._original_runs_in_training = self._runs_in_training(model)
        self._dataflow = trace_dataflow(model, inputs.args, inputs.kwargs, {})
        uncalled = uncalled_layers(model, self._dataflow)
        self._kept: dict[str, list[str]] = {name: [_NOT_CALLED] for name, _ in uncalled}
        self._original_indices: dict[str, list[int]] = {}

    def run(self) -> nn.Module:
        """Remove heads, then units until no more can be removed, and return the pruned model."""
        self._remove_heads()
        while self.remove_units():  # removing a unit may leave others without readers
            pass
        return self.model

    def kept_notes(self) -> list[str]:
        """Return a line for each layer and reason that zero units or heads were kept."""
        return [f"{name}: {note}" for name, notes in self._kept.items() for note in notes]

    def output_difference(self) -> float:
        """Return the largest difference to the outputs of the original model on the example inputs."""
        return largest_difference(self.inputs.output_tensors(self.model), self.expected[0])

    def remove_units(self) -> bool:
        """Remove all removable units; return whether another round may remove more."""
        plans = {root: plan for root, plan in self.plan_removals().items() if plan.units}
        if not plans or self._try_plans(plans) is None:
            return bool(plans)
        for root in plans:  # try the families one by one to find those that fail
            problem = self._try_plans({root: self.plan_removals()[root]})
            if problem is not None:
                self.refused[root] = problem
        self.plan_removals()  # to update the notes
        return not plans.keys() <= self.refused.keys()

    def plan_removals(self) -> dict[str, RemovalPlan]:
        """Return a removal plan for each family, by root, and update the notes on kept units."""
        numbered = NumberedFamilies(UnitGraph(self.model, self.inputs).families())
        dataflow = numbered.find_obstacles(self.model, self.inputs)
        plans = {}
        for family in numbered.families:
            plan = plan_removal(family, dataflow)
            indices = self._original_indices.setdefault(family.root, list(range(family.size)))
            if family.root in self.refused:
                plan = RemovalPlan([], {}, {self.refused[family.root]: plan.units} if plan.units else {})
            kept = {reason: [indices[unit] for unit in units] for reason, units in plan.kept.items()}
            self._kept[family.root] = [_stay_message("unit", units, reason) for reason, units in kept.items()]
            plans[family.root] = plan
        self._note_untraced_layers(numbered.families)
        return plans

    def _note_untraced_layers(self, families: list[Family]) -> None:
        """Note the zero units of layers that belong to no family."""
        traced = {member.module for family in families for member in family.members_with("producer", "passthrough")}
        inside = {part for m in self.model.modules() if isinstance(m, _ATTENTION) for part in m.modules()}
        for name, layer in self.model.named_modules():
            if isinstance(layer, _LAYERS) and layer not in traced | inside and name not in self._kept:
                rows = layer.weight.detach().movedim(output_axis(layer), 0).flatten(1)
                zero = (rows == 0).all(1).nonzero().flatten().tolist()
                self._kept[name] = [_stay_message("unit", zero, "its uses cannot be traced")] if zero else []

    def _try_plans(self, plans: dict[str, RemovalPlan]) -> str | None:
        """Prune a copy and adopt it as the model, or return why that fails."""
        candidate = copy.deepcopy(self.model)
        try:
            graph = UnitGraph(candidate, self.inputs)
            families = {family.root: family for family in graph.families()}
            for plan in plans.values():
                fold_constants(candidate, plan.constants)
            for root, plan in plans.items():
                graph.prune(families[root], plan.units)
        except Exception as error:
            return f"it cannot be pruned: {type(error).__name__}: {error}"
        problem = self._why_rejected(candidate)
        if problem is None:
            self.model = candidate
            for root, plan in plans.items():
                removed, indices = set(plan.units), self._original_indices[root]
                self._original_indices[root] = [index for unit, index in enumerate(indices) if unit not in removed]
        return problem

    def _reference_outputs(self, probe: ModelInputs) -> list[Tensor]:
        try:
            outputs = probe.output_tensors(self.model)
        except Exception as error:
            raise CompactionError(
                f"the model does not run on example_inputs: {type(error).__name__}: {error}"
            ) from error
        if not are_close(probe.output_tensors(self.model), outputs):
            raise CompactionError("the model is not deterministic in evaluation mode")
        return outputs

    def _runs_in_training(self, model: nn.Module) -> bool:
        try:
            self.inputs.output_tensors(copy.deepcopy(model).train())
        except Exception:
            return False
        return True

    def _why_rejected(self, candidate: nn.Module) -> str | None:
        """Return why the candidate is not equivalent to the model, or ``None`` if it is."""
        try:
            outputs = [probe.output_tensors(candidate) for probe in self.probes]
        except Exception as error:
            return f"the pruned model does not run: {type(error).__name__}: {error}"
        for actual, expected in zip(outputs, self.expected, strict=True):
            if not are_close(actual, expected):
                return f"removal changes the outputs by {largest_difference(actual, expected):.1e}"
        if self._original_runs_in_training and not self._runs_in_training(candidate):
            return "the pruned model does not run in training mode"
        return None

    def _remove_heads(self) -> None:
        shared = shared_parameters(self.model)
        layers = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.MultiheadAttention)]
        reasons = {layer: head_removal_obstacle(layer, self._dataflow, shared) for _, layer in layers}
        for name, layer in layers:
            heads, biased = zero_heads(layer)
            self._kept[name] = [_stay_message("head", biased, "its value projection has a bias")] if biased else []
            if len(heads) == layer.num_heads and reasons[layer] is None:
                self._kept[name].append(_stay_message("head", heads[:1], "one must remain"))
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


def _stay_message(noun: str, indices: list[int], reason: str) -> str:
    """
    >>> _stay_message("unit", [3], "one must remain"), _stay_message("unit", [1, 4], "it is an output")
    ('unit 3 stays: one must remain', 'units 1, 4 stay: it is an output')
    """
    if len(indices) == 1:
        return f"{noun} {indices[0]} stays: {reason}"
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"{noun}s {', '.join(map(str, indices[:8]))}{more} stay: {reason}"
