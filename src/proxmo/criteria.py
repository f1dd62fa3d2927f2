"""Measures of stationarity, and a monitor that records them during a run.

For a smooth ψ the measure is ‖∇F‖². Where ψ has kinks, four others replace it: the distance of 0 to ∂F, ∇f plus the
subgradient of ψ that the last prox step certifies, the prox-gradient mapping, and the gradient of the Moreau envelope.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxmo import checks, shards
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.closure import gradient_of
from proxmo.optim.options import Group
from proxmo.optim.proximal_step import Certificate
from proxmo.optim.sparsity import count_groups
from proxmo.optim.units import seen_by_penalty, units_of, write_back
from proxmo.penalties.base import Penalty
from proxmo.secants import distance, square

MirrorStep = Callable[[Tensor, Tensor, float], Tensor]
"""(x, gradient, lr) ↦ argmin <gradient, u> + ψ(u) + D(u, x)/lr for a Bregman distance D."""


def gradient_norm(optimizer: ProxOptimizer) -> float:
    """Return ‖∇F(x)‖² at the current parameters, from the gradients of f in ``.grad``.

    Put the full gradient of f into ``.grad`` first (a backward over all data); otherwise the result includes the noise.
    If the optimizer has ``certify`` set, the gradient of ψ is the subgradient that the last step certified, valid for
    every convex ψ; otherwise it is autograd's, valid where ψ is differentiable.

    >>> import torch, proxmo
    >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
    >>> optimizer = proxmo.ProxSGD([x], penalty=proxmo.SquaredL2(2.0))
    >>> x.grad = torch.tensor([1.0, 1.0])
    >>> gradient_norm(optimizer)
    18.0
    """
    gradients: list[Tensor] = []
    for group in optimizer.param_groups:
        if group["maximize"]:
            raise ValueError("gradient_norm is for minimisation, got a parameter group with maximize=True")
        with_gradient = [p for p in group["params"] if p.grad is not None]
        of_penalty = _penalty_gradients(optimizer, group) if with_gradient else {}
        for p in with_gradient:
            gradient = gradient_of(p).detach().double()
            gradients.append(gradient + of_penalty[p].double() if p in of_penalty else gradient)
    return square(gradients)


@torch.no_grad()
def stationarity(optimizer: ProxOptimizer) -> float:
    """Return dist(0, ∂F(x))² at the current parameters, from the gradients of f in ``.grad``.

    This is the least ‖∇f(x) + s‖² over all subgradients s of ψ at x, so it is at most `gradient_norm`, whose
    subgradient is the one that the last step certified, and it needs no step. ψ must be convex, and its subdifferential
    known (``Penalty.nearest_subgradient``). Sharded parameters are gathered.

    >>> import torch, proxmo
    >>> x = torch.tensor([0.0, 0.0, 3.0], requires_grad=True)
    >>> optimizer = proxmo.ProxSGD([x], penalty=proxmo.L1(2.0))
    >>> x.grad = torch.tensor([1.5, -5.0, -1.0])
    >>> stationarity(optimizer)
    10.0
    """
    total = 0.0
    for group in optimizer.param_groups:
        if group["maximize"]:
            raise ValueError("stationarity is for minimisation, got a parameter group with maximize=True")
        params = [p for p in group["params"] if p.grad is not None]
        downhill = [-shards.full(gradient_of(p).detach()).double() for p in params]
        penalty: Penalty | None = group["penalty"]
        if penalty is None or not params:
            total += square(downhill)
            continue
        units = units_of(group, params)
        points = seen_by_penalty(units, [shards.full(p.detach()) for p in params])
        seen = list(seen_by_penalty(units, downhill))
        total += square([v - penalty.nearest_subgradient(x, v) for x, v in zip(points, seen, strict=True)])
        if units is not None:  # they may leave out weights
            for family, matrix in zip(units, seen, strict=True):
                write_back(family, torch.zeros_like(matrix), downhill)
            total += square(downhill)
    return total


def _penalty_gradients(optimizer: ProxOptimizer, group: Group) -> dict[Tensor, Tensor]:
    """Return the gradient of ψ for each parameter with ``.grad``; it may be missing where it is zero."""
    penalty: Penalty | None = group["penalty"]
    if penalty is None:
        return {}
    params: list[Tensor] = group["params"]
    if optimizer.certify:
        return {p: optimizer.certificate(p).subgradient for p in params if p.grad is not None}
    with torch.enable_grad():
        points = [p.detach().clone().requires_grad_() for p in params]
        value = penalty.total(list(seen_by_penalty(group["units"], points)))
        if not value.requires_grad:
            raise ValueError(f"{penalty} has no gradient; set certify = True on the optimizer before the step")
        found = torch.autograd.grad(value, points, allow_unused=True)  # units may leave out parameters
    return {p: gradient for p, gradient in zip(params, found, strict=True) if gradient is not None}


@torch.no_grad()
def gradient_mapping(
    x: Tensor, gradient: Tensor, penalty: Penalty | None, lr: float, *, mirror: MirrorStep | None = None
) -> Tensor:
    """Return (x − x⁺)/lr, x⁺ = prox_{lr·ψ}(x − lr·gradient): zero exactly where x is stationary, equal to ∇f if ψ = 0.

    Args:
        x: the point.
        gradient: ∇f(x).
        penalty: ψ, or ``None``.
        lr: 1/M > 0.
        mirror: a mirror step that computes x⁺ instead of the prox, such as `entropic_step` on the simplex.

    >>> import proxmo
    >>> gradient_mapping(torch.tensor([1.0]), torch.tensor([-0.5]), proxmo.L1(2.0), lr=0.1)
    tensor([1.5000])
    """
    lr = checks.more_than(0, "lr", lr)
    if mirror is not None:
        moved = mirror(x, gradient, lr)
    elif penalty is None:
        return gradient.clone()
    else:  # in float64: with a small step, x − x⁺ has few digits
        exact = x.double()
        return ((exact - penalty.prox(exact - lr * gradient.double(), lr)) / lr).to(x.dtype)
    return (x - moved) / lr


def entropic_step(x: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """Return the entropic mirror step on the simplex: x·exp(−lr·gradient), scaled to the sum of x.

    It minimises <gradient, u> + KL(u, x)/lr over u ≥ 0 with Σu = Σx, and needs no projection.

    >>> entropic_step(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]), lr=1.0)
    tensor([0.7311, 0.2689])
    """
    weights = x * torch.exp(lr * (gradient.min() - gradient))
    return weights * (x.sum() / weights.sum())


@torch.no_grad()
def moreau_gradient(
    x: Tensor,
    gradient: Callable[[Tensor], Tensor],
    penalty: Penalty | None,
    *,
    smoothness: float,
    smoothing: float | None = None,
    tolerance: float | None = None,
    max_steps: int = 10_000,
) -> Tensor:
    """Return (x − x̂)/λ, x̂ = argmin F(u) + ‖u − x‖²/(2λ): the gradient at x of the Moreau envelope of F = f + ψ.

    For convex ψ the subproblem is strongly convex if λ < 1/L; it is solved with proximal gradient steps.

    Args:
        x: the point.
        gradient: u ↦ ∇f(u).
        penalty: ψ, or ``None``.
        smoothness: L > 0 of f.
        smoothing: λ in (0, 1/L); 1/(2L) by default.
        tolerance: stop when a step moves u by less than this times 1 + ‖u‖; by default 1e-10, or 4 machine epsilons if
            that is more.
        max_steps: the number of steps after which to raise an error.

    >>> moreau_gradient(torch.tensor([3.0]), lambda u: u, None, smoothness=1.0)
    tensor([2.])
    """
    big_l = checks.more_than(0, "smoothness", smoothness)
    width = 0.5 / big_l if smoothing is None else checks.more_than(0, "smoothing", smoothing)
    if width >= 1 / big_l:
        raise ValueError(f"smoothing must be a number in (0, 1/smoothness = {1 / big_l:g}), got {smoothing!r}")
    tolerance = max(1e-10, 4 * torch.finfo(x.dtype).eps) if tolerance is None else tolerance
    lr = 1 / (big_l + 1 / width)
    u = x.clone()
    for _ in range(max_steps):
        moved = u - lr * (gradient(u) + (u - x) / width)
        moved = moved if penalty is None else penalty.prox(moved, lr)
        change = distance([moved], [u])
        u = moved
        if change <= tolerance * (1 + math.sqrt(square([u]))):
            return (x - u) / width
    raise RuntimeError(f"the subproblem was not solved to {tolerance:g} in {max_steps} steps; increase either")


class ScalarWriter(Protocol):
    """The part of TensorBoard's ``SummaryWriter`` that a monitor uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Store one value."""


class _Recorded(NamedTuple):
    """A parameter at a recorded point that no step has left yet."""

    param: Tensor
    point: Tensor
    gradient: Tensor
    certificate: Certificate | None


class Monitor:
    """Record the quantities of the theory during a run: F, ψ, ‖∇F‖², Δ, R, Φ and sparsity.

    Call `record` at each point x_k of interest, before the step that leaves it. The closure computes f and its full
    gradient there; the previous ``.grad`` is restored afterwards. Δ_k = ‖m_k − ∇f(x_k)‖² and R_k = ‖x_{k+1} − x_k‖² are
    recorded when that step is taken. ‖∇F‖² is that of `gradient_norm`; with a penalty it is NaN until a step has
    certified a subgradient.

    Args:
        optimizer: the optimizer of the run; its ``certify`` is set.
        closure: returns f(x) on all data, with its gradient in ``.grad`` (it may call ``zero_grad`` and ``backward``).
            With several ranks, ``loss``, ``objective`` and ``potential`` use the value that it returns on this rank.
        weight: α/L, the weight of Δ in Φ (``theory.REGIMES["convex"].alpha / smoothness``); 0 leaves Φ = F.
        writer: a TensorBoard ``SummaryWriter``, to plot the values during the run.

    >>> import proxmo
    >>> x = torch.tensor([4.0], requires_grad=True)
    >>> optimizer = proxmo.ProxSGD([x], lr=0.5, momentum=0.0, penalty=proxmo.L1(1.0))
    >>> def loss():
    ...     optimizer.zero_grad()
    ...     value = x.square().sum() / 2
    ...     value.backward()
    ...     return value
    >>> monitor = Monitor(optimizer, loss)
    >>> for _ in range(3):
    ...     monitor.record()
    ...     _ = loss()
    ...     optimizer.step()
    >>> monitor.arrays()["objective"]
    array([12.     ,  2.625  ,  0.28125])
    """

    def __init__(
        self,
        optimizer: ProxOptimizer,
        closure: Callable[[], Tensor | float],
        *,
        weight: float = 0.0,
        writer: ScalarWriter | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._closure = closure
        self._weight = checks.nonnegative("weight", weight)
        self._writer = writer
        self._columns: dict[str, list[float]] = {
            name: []
            for name in (
                *("step", "loss", "penalty", "objective", "gradient", "zeros", "kept"),
                *("variance", "movement", "potential"),
            )
        }
        self._steps = 0
        self._recorded: list[_Recorded] = []
        optimizer.certify = True
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def record(self) -> None:
        """Measure at the current point; call before the step that leaves it."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        held = [None if p.grad is None else p.grad.clone() for p in params]
        try:
            with torch.enable_grad():
                loss = float(torch.as_tensor(self._closure()).detach())
            gradient = self._gradient_norm()
            recorded = [
                _Recorded(p, p.detach().clone(), p.grad.clone(), self._optimizer.certificate_or_none(p))
                for p in params
                if p.grad is not None
            ]
        finally:
            for p, before in zip(params, held, strict=True):
                p.grad = before
        self._complete_last_record()
        penalty = float(self._optimizer.penalty_value())
        zero, groups = count_groups(self._optimizer.param_groups)
        self._add("loss", loss)
        self._add("penalty", penalty)
        self._add("objective", loss + penalty)
        self._add("gradient", gradient)
        self._add("zeros", shards.count_zeros(params) / max(sum(p.numel() for p in params), 1))
        self._add("kept", 1 - zero / groups if groups else float("nan"))
        self._columns["step"].append(self._steps)
        self._recorded = recorded

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return one array per quantity, with one element per call of `record`; NaN where a value is unknown.

        ``step`` is the number of steps taken since the monitor was created, ``loss`` f, ``penalty`` ψ, ``objective`` F,
        ``gradient`` ‖∇F‖², ``zeros`` the fraction of zeros, ``kept`` the fraction of the penalties' groups that are not
        zero, ``variance`` Δ, ``movement`` R and ``potential`` Φ.
        """
        length = len(self._columns["loss"])
        return {name: np.array(values + [np.nan] * (length - len(values))) for name, values in self._columns.items()}

    def _gradient_norm(self) -> float:
        for group in self._optimizer.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            if group["penalty"] is not None and not all(map(self._optimizer.certificate_or_none, used)):
                return float("nan")
        return gradient_norm(self._optimizer)

    def _after_step(self) -> None:
        """Count a step, and add Δ_k, R_k and Φ_k, known only after the step that leaves a recorded point."""
        self._steps += 1
        certified = [(old, self._optimizer.certificate_or_none(old.param)) for old in self._recorded]
        moved = [(old, new) for old, new in certified if new is not None and new is not old.certificate]
        if not moved:
            return
        variance = square([new.direction.double() - old.gradient.double() for old, new in moved])
        self._add("variance", variance)
        self._add("movement", distance([old.param for old, _ in moved], [old.point for old, _ in moved]) ** 2)
        self._add("potential", self._columns["objective"][-1] + self._weight * variance)
        self._recorded = []

    def _complete_last_record(self) -> None:
        """Add NaN for Δ, R and Φ of the last recorded point if no step has left it."""
        if self._recorded:
            for name in ("variance", "movement", "potential"):
                self._add(name, float("nan"))

    def _add(self, name: str, value: float) -> None:
        self._columns[name].append(value)
        if self._writer is not None:
            self._writer.add_scalar(f"proxmo/{name}", value, len(self._columns[name]) - 1)
