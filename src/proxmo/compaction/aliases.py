"""What tensors of a call are known by, and views of one memory: what is written to one is seen in all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from proxmo.compaction.calls import operator_name
from proxmo.compaction.labels import Facts, Labels, Operand, Operation, Values, without_units
from proxmo.compaction.movement_rules import permuted, reshaped
from proxmo.compaction.splits import Splits


@dataclass
class View:
    """How a tensor shows another."""

    base: Entry
    func: Any
    arguments: dict[str, Any]
    position: int
    """Which of the results of the operator it is."""
    start: int
    """Where it begins, for one of several parts."""
    derive: Callable[[Facts], Facts]
    """Returns its facts, given those of the other."""
    version: int
    """The version of the other that its facts are of."""


@dataclass
class Entry:
    """What is known of a tensor."""

    tensor: Tensor = field(repr=False)  # kept alive, so that no other tensor gets its id
    facts: Facts
    source: int
    """The operation that it comes from, or -1."""
    name: str | None = None
    """What it is called, if it is a parameter, buffer or input."""
    position: int = 0
    """Which of the results of the operation it is."""
    view: View | None = None
    version: int = 0

    def as_operand(self) -> Operand:
        leaf = None if self.source >= 0 else self.name or self.tensor
        return Operand(self.facts.labels, self.source, self.position, leaf)

    def refresh(self) -> Entry:
        """Take over what was written to the memory through other views."""
        if self.view is not None:
            base = self.view.base.refresh()
            if base.version != self.view.version:
                self.facts = self.view.derive(base.facts)
                self.source, self.position, self.view.version = base.source, base.position, base.version
                self.version += 1
        return self

    def write(self, facts: Facts, source: int, operation: Operation, splits: Splits) -> None:
        """Record that the tensor was overwritten in place, here and in what it shows."""
        self.facts, self.source, self.position = facts, source, 0
        self.version += 1
        if self.view is not None:
            base = self.view.base
            base.write(_written_back(base.facts, facts, self.view, operation, splits), source, operation, splits)
            self.view.version = base.version


def _written_back(base: Facts, part: Facts, view: View, operation: Operation, splits: Splits) -> Facts:
    """Return the facts of a tensor after a view of it was overwritten."""
    name, arguments = operator_name(view.func), view.arguments
    if name in ("alias", "detach", "view_as"):
        return part
    if name in ("view", "_unsafe_view", "unsqueeze", "squeeze", "reshape", "_reshape_alias"):
        return reshaped(part, base.shape, operation, splits)
    axes = len(base.labels)
    if name in ("transpose", "t", "permute"):
        order = [d % axes for d in arguments["dims"]] if name == "permute" else list(range(axes))
        if name != "permute" and axes:
            i, j = arguments.get("dim0", 0), arguments.get("dim1", axes - 1)
            order[i], order[j] = order[j], order[i]
        return permuted(part, list(np.argsort(order)))
    if name in ("slice", "split", "split_with_sizes", "narrow"):
        axis = arguments["dim"] % axes
        if name == "slice":
            places = np.arange(len(base.labels[axis]))[arguments["start"] : arguments["end"] : arguments["step"]]
        else:
            places = np.arange(view.start, view.start + len(part.labels[axis]))
        return _written_part(base, part, axis, places, operation)
    if name in ("select", "unbind"):
        axis = arguments["dim"] % axes
        index = arguments["index"] if name == "select" else view.position
        labels, known = list(part.labels), list(part.constants)
        labels.insert(axis, base.labels[axis][[index]])
        known.insert(axis, None)
        raised = Facts(tuple(labels), tuple(known), part.varies, part.uniform)
        places = np.array([index % len(base.labels[axis])])
        return _written_part(base, raised, axis, places, operation)
    for labels_of_axis in (*base.labels, *part.labels):
        operation.block(labels_of_axis, f"{operation.name} writes to shared memory")
    return without_units(base.shape, varies=True)


def _written_part(base: Facts, part: Facts, axis: int, places: Labels, operation: Operation) -> Facts:
    whole = len(places) == len(base.labels[axis])
    labels, constants = [], []
    for k, own in enumerate(base.labels):
        values: Values = base.constant(k).copy()
        if k == axis:
            new = own.copy()
            new[places] = operation.join(part.labels[k], own[places])
            values[places] = part.constant(k)
            labels.append(new)
        else:
            labels.append(operation.join(own, part.labels[k]))
            values = part.constant(k) if whole else np.where(values == part.constant(k), values, np.nan)
        constants.append(values)
    return Facts(tuple(labels), tuple(constants), base.varies or part.varies)
