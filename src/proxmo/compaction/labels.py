"""Labels of axes, which tell what belongs together, and what operations say about them.

Every index along every axis of a parameter or buffer is an atom, a number ≥ 0. Each axis of each tensor in a call of
the model carries an array of labels, one per index: the atom that it stems from, or `FIXED` if nothing may be removed
there, as along the axes of the inputs, or `WILD` if anything may, as after an expansion. Operations join atoms, block
atoms, and read them. What is joined can only be removed together: it is a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Labels: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]

FIXED = -1
WILD = -2


@dataclass(frozen=True)
class Facts:
    """What is known of a tensor, for any inputs of the model."""

    labels: tuple[Labels, ...]
    """For each axis the label of each index."""
    constants: tuple[Values | None, ...]
    """For each axis and index the number that all elements there are equal to; NaN, or ``None`` for all, if none is."""
    varies: bool
    """Whether the tensor may change with the inputs."""
    uniform: float | None = None
    """The number that all elements are equal to, if there is one."""
    grid: tuple[tuple[int, ...], Values] | None = None
    """Some axes that were one, and the constants of all elements along them: more than those along each axis."""
    squared: bool = False
    """Whether the elements are squares, whose mean a root mean square norm takes."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.labels))

    @property
    def is_fixed(self) -> bool:
        """Whether nothing may be removed along any axis."""
        return all((labels == FIXED).all() for labels in self.labels)

    def constant(self, axis: int) -> Values:
        """Return the constants along an axis, NaN where there is none."""
        if self.uniform is not None:
            return np.full(len(self.labels[axis]), self.uniform)
        known = self.constants[axis]
        return np.full(len(self.labels[axis]), np.nan) if known is None else known

    def with_axes(self, labels: Sequence[Labels], constants: Sequence[Values | None]) -> Facts:
        return Facts(tuple(labels), tuple(constants), self.varies, self.uniform)


def same_everywhere(size: int, label: int) -> Labels:
    """Return the labels of an axis whose indices all have one label."""
    return np.full(size, label, dtype=np.int64)


def without_units(shape: Sequence[int], *, varies: bool, label: int = FIXED, uniform: float | None = None) -> Facts:
    """Return the facts of a tensor with one label everywhere."""
    labels = tuple(same_everywhere(size, label) for size in shape)
    return Facts(labels, (None,) * len(labels), varies, uniform)


def atoms_in(labels: Labels) -> Labels:
    """Return the atoms among labels."""
    return labels[labels >= 0]


class Operand(NamedTuple):
    """A tensor that an operation takes."""

    labels: tuple[Labels, ...]
    source: int
    """The operation that it comes from, or -1."""
    position: int
    """Which of the results of that operation it is."""
    leaf: str | Tensor | None
    """If it comes from none: the name of a parameter, buffer or input, or the tensor itself."""


@dataclass
class Operation:
    """What one operation says about atoms."""

    name: str
    module: str
    operands: list[Operand]
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)
    """Its arguments that are not tensors."""
    joins: list[tuple[Labels, Labels]] = field(default_factory=list)
    blocks: list[tuple[Labels, str]] = field(default_factory=list)
    """Atoms that cannot be removed, with the reason."""
    reads: list[tuple[Labels, str]] = field(default_factory=list)
    """Atoms that cannot be removed since they are read while not zero, with the reason."""
    folds: list[tuple[str, Labels, Labels, Values]] = field(default_factory=list)
    """Layer, atoms, indices of its inputs, constants: what can be added to its bias instead of being read."""
    norms: list[tuple[Labels, torch.dtype]] = field(default_factory=list)
    """Labels of axes of squares whose mean was taken, and its precision."""
    made: list[Labels] = field(default_factory=list)
    """Atoms of parameters that units are made by: rows of weights, biases, scales."""
    weights: list[Labels] = field(default_factory=list)
    """Atoms of parameters that read units: columns of weights."""
    results: list[tuple[Labels, ...]] = field(default_factory=list)
    """The labels of all axes of all results."""
    decides: bool = False
    """Whether its result decides what Python does next."""

    def join(self, a: Labels, b: Labels) -> Labels:
        """Join the labels of two axes index by index, and return those of the result."""
        if a is b or np.array_equal(a, b):
            return a
        both = (a >= 0) & (b >= 0)
        if both.any():
            self.joins.append((a[both], b[both]))
        for atoms, other in ((a, b), (b, a)):
            fixed = (atoms >= 0) & (other == FIXED)
            if fixed.any():
                self.block(atoms[fixed], f"{self.name} joins its channels with values of a fixed size")
        return np.where((a == FIXED) | (b == FIXED), FIXED, np.where(a >= 0, a, b))

    def join_all(self, labels: Labels) -> None:
        """Join all atoms among the labels with each other."""
        atoms = np.unique(atoms_in(labels))
        if len(atoms) > 1:
            self.joins.append((atoms[:-1], atoms[1:]))

    def block(self, labels: Labels, reason: str) -> None:
        atoms = np.unique(atoms_in(labels))
        if len(atoms):
            self.blocks.append((atoms, reason))

    def mix(self, labels: Labels) -> None:
        self.block(labels, f"{self.name} mixes its channels")


class Components:
    """Which atoms are joined, from pairs of arrays of atoms."""

    def __init__(self, size: int, joins: Sequence[tuple[Labels, Labels]]) -> None:
        self.root: Labels = np.arange(size, dtype=np.int64)
        if not joins:
            return
        a, b = (np.concatenate([pair[side] for pair in joins]) for side in (0, 1))
        while True:
            # hook every tree to the smallest one next to it, then flatten: the number of trees falls geometrically
            first, second = self.root[a], self.root[b]
            apart = first != second
            if not apart.any():
                return
            a, b, first, second = a[apart], b[apart], first[apart], second[apart]
            np.minimum.at(self.root, np.maximum(first, second), np.minimum(first, second))
            while not np.array_equal(flat := self.root[self.root], self.root):
                self.root = flat


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in the arguments of an operation: alone, or in lists and tuples."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in tensors_in(item)]
    return []
