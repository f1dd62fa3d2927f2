"""Find the units of a model: what belongs together, what can be removed, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from proxmo.compaction.attention import KEEPS_WIDTH, attention_obstacles
from proxmo.compaction.errors import CompactionError
from proxmo.compaction.example_inputs import ModelInputs
from proxmo.compaction.labels import Components, Labels, Operation, Values
from proxmo.compaction.splits import Site, Splits
from proxmo.compaction.tracer import ModelAtoms, Trace, Tracer


@dataclass
class Part:
    """The slices of one parameter or buffer along one axis that belong to the units of a family."""

    name: str
    axis: int
    indices: Labels
    """For each unit, a row with its indices along the axis."""
    made: bool
    """Whether it makes the units, as rows of weights, biases and scales do, rather than reads them."""


@dataclass
class Family:
    """Units that have the same parts."""

    root: str
    """The layer that they start at."""
    atoms: Labels
    """One atom of each unit, the smallest."""
    parts: list[Part] = field(repr=False)
    obstacle: str | None
    """Why no unit can be removed, or ``None``."""

    @property
    def size(self) -> int:
        """The number of units."""
        return len(self.atoms)

    def numbers(self) -> list[int]:
        """Return what the units are called: the index of a neuron or channel, the number of a head."""
        first = next(part for part in self.parts if part.made)
        single = first.indices.shape[1] == 1
        return [int(k) for k in (first.indices[:, 0] if single else range(self.size))]


@dataclass
class Fold:
    """A constant that moves to the bias of a layer when the units that make it are removed."""

    layer: str
    atoms: Labels
    """The units, by their smallest atom."""
    indices: Labels
    """Which of the inputs of the layer they are."""
    values: Values


class Analysis:
    """What calls of a model say about its units.

    Args:
        model: a copy of the model, in evaluation mode.
        probes: arguments for calls; what holds in all of them counts.
        choices: which axes carry units, from an earlier analysis.
        values: whether to find out which units are zero.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: Sequence[ModelInputs],
        choices: dict[Site, int | None] | None = None,
        *,
        values: bool = True,
    ) -> None:
        self.model = model
        self.atoms = ModelAtoms(model)
        if self.atoms.size == 0:
            raise CompactionError("no output depends on its parameters: the model has none")
        constants = {name: constants_of(tensor) for name, tensor in self.atoms.tensors.items()} if values else {}
        labels = self.atoms.labels()
        if choices is None:
            survey = Splits(self.atoms.size, self.atoms.size)
            choices = survey.choose(Tracer(model, labels, survey, {}).run(probes[0]).live_operations())
        self.choices = choices
        self.traces: list[Trace] = []
        total = self.atoms.size
        for probe in probes:
            splits = Splits(self.atoms.size, total, choices)
            keep = values and not self.traces  # the first call is what a smaller model is compared with
            self.traces.append(Tracer(model, labels, splits, constants, keep_outputs=keep).run(probe))
            total = splits.atoms
        every = [operation for trace in self.traces for operation in trace.operations]
        self.root = Components(total, [pair for operation in every for pair in operation.joins]).root
        live = [operation for trace in self.traces for operation in trace.live_operations()]
        self.blocked = self._reasons([item for operation in live for item in operation.blocks])
        self.read = self._reasons([item for operation in live for item in operation.reads])
        self.folds = self._folds(live)
        self._made = self._made_atoms(every)
        used = {name for trace in self.traces for name in trace.used}
        self.unused = sorted(self.atoms.tensors.keys() - used)
        self.families = self._families()

    def removable(self, family: Family) -> npt.NDArray[np.bool_]:
        """Return which units of a family can be removed as they are: nothing reads them, or only zeros or constants."""
        if family.obstacle is not None:
            return np.zeros(family.size, dtype=bool)
        return np.array([int(atom) not in self.read for atom in family.atoms])

    def zero(self, family: Family) -> npt.NDArray[np.bool_]:
        """Return which units have only zeros in the weights that make them; biases and scales do not count."""
        zero = np.ones(family.size, dtype=bool)
        weights = [part for part in family.parts if part.made and self.atoms.tensors[part.name].dim() > 1]
        for part in weights:
            rows = self.atoms.tensors[part.name].detach().movedim(part.axis, 0).flatten(1)
            zero &= (rows == 0).all(1).cpu().numpy()[part.indices].all(1)
        return zero if weights else ~zero

    def value_branches(self) -> list[str]:
        """Return the modules in which Python looked at a number that depends on the inputs."""
        return sorted({op.module for trace in self.traces for op in trace.operations if op.decides})

    def _reasons(self, found: list[tuple[Labels, str]]) -> dict[int, str]:
        """Return the first reason for each unit."""
        first = np.full(len(self.root), len(found))
        for k in range(len(found) - 1, -1, -1):
            first[self.root[found[k][0]]] = k
        atoms = np.flatnonzero(first < len(found))
        return {int(atom): found[first[atom]][1] for atom in atoms}

    def _folds(self, operations: list[Operation]) -> list[Fold]:
        merged: dict[tuple[str, int], tuple[int, float]] = {}
        for operation in operations:
            for layer, atoms, indices, values in operation.folds:
                for atom, index, value in zip(
                    self.root[atoms].tolist(), indices.tolist(), values.tolist(), strict=True
                ):
                    _, value_before = merged.setdefault((layer, index), (atom, value))
                    if value_before != value:
                        self.read.setdefault(atom, f"{layer!r} reads a varying value")
        by_layer: dict[str, list[tuple[int, int, float]]] = {}
        for (layer, index), (atom, value) in merged.items():
            by_layer.setdefault(layer, []).append((atom, index, value))
        calls = [Counter(trace.called) for trace in self.traces]
        folds = []
        for layer, rows in by_layer.items():
            atoms, indices, constants = map(np.array, zip(*rows, strict=True))
            if max(count[layer] for count in calls) > 1:  # another call may read other values
                for atom in atoms.tolist():
                    self.read.setdefault(atom, f"{layer!r} reads a constant in one of several calls")
            folds.append(Fold(layer, atoms, indices, constants))
        return folds

    def _made_atoms(self, operations: list[Operation]) -> npt.NDArray[np.bool_]:
        made = np.zeros(len(self.root), dtype=bool)
        for operation in operations:
            reads = np.concatenate([*operation.weights, np.empty(0, dtype=np.int64)])
            for atoms in operation.made:
                made[np.setdiff1d(atoms, reads)] = True
        return made

    def _families(self) -> list[Family]:
        """Group units by their parts."""
        parameters = dict(self.model.named_parameters())
        axes = list(self.atoms.starts)
        ends = np.array([self.atoms.starts[key] for key in axes[1:]] + [self.atoms.size])
        order = np.argsort(self.root[: self.atoms.size], kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(self.root[order]) != 0])
        made = np.logical_or.reduceat(self._made[order], starts)
        places = np.searchsorted(ends, order, side="right")
        grouped: dict[tuple[bytes, str | None], list[Labels]] = {}
        for start, end in zip(starts[made], np.r_[starts[1:], len(order)][made], strict=True):
            reason = self.blocked.get(int(order[start]))
            grouped.setdefault((places[start:end].tobytes(), reason), []).append(order[start:end])
        families = []
        for (layout, reason), units in grouped.items():
            table = np.stack(units)
            parts = []
            for place in dict.fromkeys(np.frombuffer(layout, dtype=places.dtype).tolist()):
                name, axis = axes[place]
                indices = table[:, np.frombuffer(layout, dtype=places.dtype) == place]
                is_made = name in parameters and bool(self._made[indices].any())
                parts.append(Part(name, axis, indices - self.atoms.starts[name, axis], is_made))
            root = _root(parts, parameters)
            if root is not None:
                families.append(Family(root, table[:, 0].copy(), parts, reason))
        obstacles = attention_obstacles(self.model) | _scripted_parameters(self.model)
        for family in families:
            found = [obstacles[p.name, p.axis] for p in family.parts if (p.name, p.axis) in obstacles]
            if found and (family.obstacle is None or found[0] != KEEPS_WIDTH):
                family.obstacle = found[0]
        self._forbid_sizes_of_unused(families)
        first = {name: k for k, name in enumerate(parameters)}
        return sorted(families, key=lambda f: min(first[part.name] for part in f.parts if part.made))

    def _forbid_sizes_of_unused(self, families: list[Family]) -> None:
        """Leave units alone that a layer which was not called may use in another call, since it has the same size."""
        sizes: dict[int, str] = {}
        for name in self.unused:
            tensor = self.atoms.tensors[name]
            if isinstance(tensor, nn.Parameter):
                sizes.update(dict.fromkeys(tensor.shape, name.rpartition(".")[0] or name))
        for family in families:
            widths = {self.atoms.tensors[p.name].shape[p.axis] for p in family.parts if p.indices.shape[1] == 1}
            found = [sizes[width] for width in widths if width in sizes]
            if family.obstacle is None and found:
                family.obstacle = f"{found[0]!r}, not called on the example inputs, may use its channels"


def _scripted_parameters(model: nn.Module) -> dict[tuple[str, int], str]:
    """Return for each axis of the parameters in scripted modules that their sizes cannot be changed."""
    return {
        (f"{name}.{parameter_name}".lstrip("."), axis): f"{name!r} is scripted"
        for name, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
        for parameter_name, p in (*module.named_parameters(), *module.named_buffers())
        for axis in range(p.dim())
    }


def _root(parts: list[Part], parameters: dict[str, nn.Parameter]) -> str | None:
    """Return the layer that units start at: the first with weights that make them."""
    made = [part for part in parts if part.made]
    if not made:
        return None
    weights = [part for part in made if parameters[part.name].dim() > 1] or made
    return weights[0].name.rpartition(".")[0] or weights[0].name


def constants_of(tensor: Tensor) -> tuple[Values | None, ...]:
    """Return for each axis of a tensor the number that all elements at an index are equal to, or NaN."""
    values = tensor.detach()
    if values.dtype == torch.bool or values.is_complex():
        return (None,) * tensor.dim()
    found: list[Values | None] = []
    for axis in range(tensor.dim()):
        rows = values.movedim(axis, 0).reshape(values.shape[axis], -1)
        if rows.numel() == 0:
            found.append(None)
            continue
        same = rows.amin(1) == rows.amax(1)
        constants = torch.where(same, rows[:, 0].double(), torch.nan).cpu().numpy()
        found.append(None if np.isnan(constants).all() else constants)
    return tuple(found)
