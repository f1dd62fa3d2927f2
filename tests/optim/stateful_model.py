"""The model of long random runs: penalties by independent formulas, parameters, groups and samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import proxmo
from penalties.references import groups as group_indices
from penalties.references import soft

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Psi:
    """A penalty in the model: its name, its fields and independent formulas in numpy."""

    kind: str
    fields: dict[str, Any]
    axes: int = 0

    def __str__(self) -> str:
        return f"{self.kind}-dim={self.fields['dim']}" if "dim" in self.fields else self.kind

    def build(self) -> proxmo.Penalty:
        return getattr(proxmo, self.kind)(**self.fields)

    @property
    def coupled(self) -> bool:
        """Whether the prox of an entry depends on the other entries of its group."""
        return self.kind in ("GroupL2", "GroupLInf", "L2Ball")

    def prox(self, y: Array, step: float) -> tuple[Array, Array]:
        """Return the prox and, for each entry that is zero, how far ``y`` can move before it no longer is."""
        result, margin = y.copy(), np.zeros_like(y)
        if step > 0 and y.size:
            for index in self.indices(y):
                result[index], margin[index] = self._prox_of_group(y[index], step)
        return result, margin

    def spread(self, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask of entries that depend on a bad one."""
        result = bad.copy()
        if self.coupled and bad.size:
            for index in self.indices(bad):
                result[index] = bad[index].any()
        return result

    def indices(self, y: NDArray[Any]) -> Any:
        return group_indices(y, self.fields.get("dim"))

    def _prox_of_group(self, y: Array, step: float) -> tuple[Any, Any]:
        if self.kind == "Box":
            return np.minimum(np.maximum(y, self.fields["low"]), self.fields["high"]), np.abs(y)
        norm = math.hypot(*y.ravel())
        if self.kind == "L2Ball":
            radius = self.fields["radius"]
            return (y if norm <= radius else y / norm * radius), (norm if radius == 0 else 0.0)
        t = step * self.fields["strength"]
        if self.kind == "L1":
            return soft(y, t), np.abs(np.abs(y) - t)
        if self.kind == "SquaredL2":
            return y / (1 + t), 0.0
        if self.kind == "GroupL2":
            return (y * (1 - t / norm) if norm > t else 0 * y), abs(norm - t)
        # GroupLInf: every number of clipped entries gives a lower bound on the level, and the right number the level
        sums = np.cumsum(np.sort(np.abs(y).ravel())[::-1])
        level = max(((sums - t) / np.arange(1, sums.size + 1)).max(), 0.0)
        return np.clip(y, -level, level), abs(sums[-1] - t)


NONE = Psi("None", {})
PENALTIES = [
    NONE,
    Psi("L1", {"strength": 0.3}),
    Psi("SquaredL2", {"strength": 0.7}),
    Psi("GroupL2", {"strength": 0.4, "dim": 0}, axes=1),
    Psi("GroupL2", {"strength": 0.4, "dim": 1}, axes=2),
    Psi("GroupLInf", {"strength": 0.5, "dim": 0}, axes=1),
    Psi("GroupLInf", {"strength": 0.5, "dim": 1}, axes=2),
    Psi("Box", {"low": -0.5, "high": 0.75}),  # exact in float32: other bounds would be rounded
    Psi("L2Ball", {"radius": 1.0, "dim": None}),
    Psi("L2Ball", {"radius": 0.5, "dim": 0}, axes=1),
]
OTHER_FIELDS: dict[str, list[dict[str, float]]] = {
    "strength": [{"strength": 0.0}, {"strength": 1e-3}, {"strength": 0.2}, {"strength": 3.0}],
    "radius": [{"radius": 0.0}, {"radius": 0.25}, {"radius": 10.0}],
    "high": [{"low": 0.0, "high": 0.25}, {"low": -1.0, "high": 1.0}, {"low": -0.5, "high": 0.0}],
}
SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 3, 2, 2), (0, 3)]
RATES = [0.0, 1e-12, 1e-3, 0.1, 1.0, 1e6]


@dataclass
class Tracked:
    """A parameter of the optimizer, and the values that the model expects it to have."""

    param: Tensor
    x: Array
    state: dict[str, Array] = field(default_factory=dict)
    grad: Tensor | None = None


@dataclass
class Group:
    tracked: list[Tracked]
    penalty: Psi
    options: dict[str, Any]
    tensor_lr: bool

    def lr(self) -> float | Tensor:
        return torch.tensor(self.options["lr"], dtype=torch.float64) if self.tensor_lr else self.options["lr"]

    def arguments(self) -> dict[str, Any]:
        """Return the parameter group as the optimizer takes it."""
        penalty = None if self.penalty is NONE else self.penalty.build()
        return {**self.options, "params": [k.param for k in self.tracked], "penalty": penalty, "lr": self.lr()}


class Sample:
    """A closure that sets random gradients and records the points and gradients of each call."""

    def __init__(
        self, tracked: list[Tracked], seed: int, scale: float = 1.0, missing: float = 0.0, bad: float | None = None
    ) -> None:
        self._tracked, self._rng = tracked, np.random.default_rng(seed)
        self._scale, self._missing, self.bad = scale, missing, bad
        self.points: list[list[Tensor]] = []
        self.gradients: list[list[Tensor | None]] = []

    def __call__(self) -> float:
        self.points.append([k.param.detach().clone() for k in self._tracked])
        gradients = [self._gradient(k.param) for k in self._tracked]
        entries = [g for g in gradients if g is not None and g.numel()]
        if self.bad is not None and entries:
            flat = entries[self._rng.integers(len(entries))].view(-1)
            flat[self._rng.integers(len(flat))] = self.bad
        for tracked, gradient in zip(self._tracked, gradients, strict=True):
            if gradient is not None and tracked.param.grad is not None and self._rng.random() < 0.5:
                tracked.param.grad.copy_(gradient)  # into the old tensor, as after zero_grad(set_to_none=False)
            else:
                tracked.param.grad = gradient
        self.gradients.append([None if g is None else g.clone() for g in gradients])
        return 1.5

    def _gradient(self, p: Tensor) -> Tensor | None:
        if not p.requires_grad or self._rng.random() < self._missing:
            return None
        return torch.as_tensor(self._scale * self._rng.standard_normal(p.shape), dtype=p.dtype)


class ClosureError(Exception):
    """Raised on purpose in a closure."""


def finite_part(gradient: Tensor | None) -> tuple[Array, NDArray[np.bool_]]:
    """Return the gradient with 0 in place of non-finite entries, and the mask of these entries."""
    assert gradient is not None
    values = array(gradient)
    bad = np.asarray(~np.isfinite(values))
    return np.where(bad, 0.0, values), bad


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy().copy()


def same_bits(one: Any, other: Any) -> bool:
    """Return whether nested data are bitwise equal, including NaN and the sign of zero."""
    if isinstance(one, Tensor):
        bits = [t.detach().numpy().tobytes() for t in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and bits[0] == bits[1]
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return type(one) is type(other) and bool(one == other)
