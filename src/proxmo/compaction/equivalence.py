"""Prove that a smaller model does the same as the one it was cut from: follow both, and compare operation by operation.

The labels of the smaller model start as those of the larger one without the removed units, so that an axis of any
tensor must have the labels that the larger one has there, without the removed. If every operation takes the same
operands with the same labels, then by induction every tensor is what it was, without the removed units. The numbers in
the inputs play no part in that: an example of zeros, or of a single token, proves as much as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from proxmo.compaction.analysis import Analysis
from proxmo.compaction.attention import PrunedMultiheadAttention
from proxmo.compaction.cutting import Removal, removed_atoms
from proxmo.compaction.errors import CompactionError
from proxmo.compaction.example_inputs import ModelInputs
from proxmo.compaction.labels import WILD, Labels, Mask, Operand, Operation, same_everywhere
from proxmo.compaction.norms import rescaled_norms
from proxmo.compaction.splits import Splits
from proxmo.compaction.tracer import Trace, Tracer

_LAYOUT = frozenset(
    {
        *("view", "unsafe_view", "reshape", "reshape_alias", "unsqueeze", "squeeze", "expand", "transpose", "t"),
        *("permute", "swapaxes", "alias", "clone", "detach", "lift_fresh", "lift", "contiguous"),
    }
)
"""Operations that show the same elements in another layout. Torch leaves some out where an axis has the size 1."""
_SUMS = {"addmm": "mm", "baddbmm": "bmm"}
"""Operations that are a product and a sum."""
_POSITIONS = frozenset({"slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "narrow"})
"""Operations whose numbers are positions."""
_SIZES = {
    "convolution": {"groups"},
    "native_group_norm": {"N", "C", "HxW", "group"},
    "native_layer_norm": {"normalized_shape"},
    **{prefix + name: {"size"} for prefix in ("", "new_") for name in ("zeros", "ones", "full", "empty")},
    **{prefix + "empty_strided": {"size", "stride"} for prefix in ("", "new_")},
}
"""Arguments that follow from the sizes of tensors."""


def _labels_left(analysis: Analysis, small: nn.Module, removed: Mask) -> dict[str, tuple[Labels, ...]]:
    """Return the labels of the larger model that are left in the tensors of the smaller one."""
    before, left = analysis.atoms.labels(), {}
    for name, tensor in (*small.named_parameters(), *small.named_buffers()):
        left[name] = tuple(labels[~removed[labels]] for labels in before.get(name, ()))
        if tuple(map(len, left[name])) != tensor.shape:  # in a layer that replaces another
            left[name] = tuple(same_everywhere(size, WILD) for size in tensor.shape)
    return left


class _SizesFollow(Splits):
    """Splits as in the larger model; new tensors have the size that others need."""

    def new_atoms(self, size: int) -> Labels:
        return same_everywhere(size, WILD)


class Equivalence:
    """Compares a smaller model with the one it was cut from.

    Args:
        analysis: what is known of the larger model.
        removals: what was cut.
    """

    def __init__(self, analysis: Analysis, removals: list[Removal]) -> None:
        self.analysis = analysis
        self.removed = removed_atoms(analysis, removals)
        self.rescaled = rescaled_norms(analysis, self.removed)

    def why_different(self, small: nn.Module, probes: Sequence[ModelInputs]) -> str | None:
        """Return where the smaller model does something else, or ``None`` if it is proven to do the same."""
        replaced = [name for name, m in small.named_modules() if isinstance(m, PrunedMultiheadAttention)]
        labels = _labels_left(self.analysis, small, self.removed)
        for probe, before in zip(probes, self.analysis.traces, strict=True):
            splits = _SizesFollow(self.analysis.atoms.size, len(self.removed), self.analysis.choices)
            try:
                after = Tracer(small, labels, splits, {}).run(probe)
            except CompactionError as error:
                return str(error)
            problem = self._first_difference(_Steps(before, replaced), _Steps(after, replaced))
            if problem is not None:
                return problem
        return None

    def _first_difference(self, before: _Steps, after: _Steps) -> str | None:
        for old, new in zip(before, after, strict=False):
            where = f"in {old.module!r} " if old.module else ""
            if old.name != new.name or len(old.sources) != len(new.sources):
                return f"{where}the pruned model computes {new.name} in place of {old.name}"
            for a, b in zip(old.sources, new.sources, strict=True):
                if not _same_origin(a.origin, b.origin):
                    return f"{where}{old.name} of the pruned model takes another tensor"
                if a.labels is not None and b.labels is not None and not self._match(a.labels, b.labels):
                    return f"{where}{old.name} of the pruned model takes other channels"
            if not self._same_arguments(old, new):
                return f"{where}{old.name} of the pruned model takes other numbers"
        if len(before) != len(after):
            return "the pruned model computes something else"
        return None

    def _match(self, before: tuple[Labels, ...], after: tuple[Labels, ...]) -> bool:
        """Return whether the axes of a tensor are those of another without the removed units."""
        old, new = [self._left(labels) for labels in before], list(after)
        if len(old) != len(new):  # torch leaves out some axes of size 1
            old, new = ([labels for labels in axes if len(labels) != 1] for axes in (old, new))
        return len(old) == len(new) and all(map(self._same_labels, old, new))

    def _same_labels(self, old: Labels, new: Labels) -> bool:
        if (old == WILD).all():  # expanded to whatever size is needed
            return True
        if len(old) != len(new):
            return False
        if (old == old[:1]).all():  # a single unit, whose axis may be merged with another or not
            return True
        return self._equal(old, new)

    def _equal(self, old: Labels, new: Labels) -> bool:
        free = (old == WILD) | (new == WILD) | (old >= self.analysis.atoms.size)
        return bool((free | (old == new)).all())

    def _left(self, labels: Labels) -> Labels:
        return labels[~self._is_removed(labels)]

    def _is_removed(self, labels: Labels) -> Mask:
        return (labels >= 0) & self.removed[np.maximum(labels, 0)]

    def _takes_removed(self, step: _Step) -> bool:
        """Return whether an operation by positions acts on an axis with removed units."""
        (source,) = step.sources
        return source.labels is not None and bool(self._is_removed(source.labels[step.arguments["dim"]]).any())

    def _takes_same_parts(self, old: _Step, new: _Step) -> bool:
        """Return whether operations by positions, which may differ, take the same units of an axis."""
        dim = old.arguments["dim"]
        if dim != new.arguments["dim"] or len(old.results) != len(new.results):
            return False
        pairs = [(self._left(a[dim]), b[dim]) for a, b in zip(old.results, new.results, strict=True)]
        return all(len(a) == len(b) and self._equal(a, b) for a, b in pairs)

    def _same_arguments(self, old: _Step, new: _Step) -> bool:
        if old.arguments.keys() != new.arguments.keys():
            return False
        if old.module in self.rescaled:
            return True
        if old.name in _POSITIONS and self._takes_removed(old):
            return self._takes_same_parts(old, new)
        sizes = _SIZES.get(old.name, set())
        return all(value == new.arguments[key] for key, value in old.arguments.items() if key not in sizes)


class _Source(NamedTuple):
    """What a step takes."""

    origin: Any
    """Which result of which step, or the name of an attention layer, parameter, buffer or input, or a tensor."""
    labels: tuple[Labels, ...] | None
    """``None`` for what the step before has just computed."""


class _Step(NamedTuple):
    """An operation that computes something."""

    name: str
    module: str
    sources: list[_Source]
    arguments: dict[str, Any]
    results: list[tuple[Labels, ...]]
    """The labels of all axes of all results; empty for what the next step takes over."""


class _Steps(list[_Step]):
    """The operations of a trace that compute something.

    Args:
        trace: the trace.
        replaced: attention layers that are replaced by others, and so are not looked into.
    """

    def __init__(self, trace: Trace, replaced: list[str]) -> None:
        super().__init__()
        self._trace = trace
        self._replaced = replaced
        self._numbers: dict[int, int] = {}
        for k, (operation, live) in enumerate(zip(trace.operations, trace.live, strict=True)):
            if live and operation.name not in _LAYOUT and self._owner(operation) is None:
                self._add(operation)
                self._numbers[k] = len(self) - 1

    def _add(self, operation: Operation) -> None:
        name, arguments = operation.name, operation.arguments
        sources = [_Source(self._origin(operand), operand.labels) for operand in operation.operands]
        if name in _SUMS and arguments["alpha"] == arguments["beta"] == 1:  # which torch takes depends on the layout
            self.append(_Step(_SUMS[name], operation.module, sources[1:], {}, []))
            name, arguments = "add", {"alpha": 1}
            sources = [_Source((len(self) - 1, 0), None), sources[0]]
        self.append(_Step(name, operation.module, sources, arguments, operation.results))

    def _owner(self, operation: Operation) -> str | None:
        return next((name for name in self._replaced if f"{operation.module}.".startswith(f"{name}.")), None)

    def _origin(self, operand: Operand) -> Any:
        while operand.source >= 0:
            if operand.source in self._numbers:
                return self._numbers[operand.source], operand.position
            operation = self._trace.operations[operand.source]
            owner = self._owner(operation)
            if owner is not None:
                return owner
            operand = operation.operands[0]
        return operand.leaf


def _same_origin(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old.shape == new.shape and bool(torch.equal(old, new))
    return type(old) is type(new) and bool(old == new)
