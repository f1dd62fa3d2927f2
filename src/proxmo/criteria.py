"""How stationary is this point, and what happens during a run.

For a smooth ψ the measure is ‖∇F‖². Where ψ has kinks, three replace it: the gradient made of ∇f and the subgradient
that the last prox step certifies, the prox-gradient mapping, and the gradient of the Moreau envelope.
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
from proxmo.optim.base import Certificate, ProxOptimizer
from proxmo.optim.closure import gradient_of
from proxmo.optim.options import Group
from proxmo.optim.units import seen_by_penalty
from proxmo.penalties.base import Penalty
from proxmo.secants import distance, square

MirrorStep = Callable[[Tensor, Tensor, float], Tensor]
"""(x, gradient, lr) ↦ argmin <gradient, u> + ψ(u) + D(u, x)/lr for a Bregman distance D."""


def gradient_norm(optimizer: ProxOptimizer) -> float:
    """‖∇F(x)‖² at the present point, from the gradients of f that the parameters hold.

    Put the full gradient of f into ``.grad`` first (a backward over all data), or it measures the noise as well. The
    gradient of ψ is the one that the last step certified if the optimizer has ``certify`` set, which is right for every
    convex ψ; otherwise autograd's, which is right where ψ is differentiable.

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


def _penalty_gradients(optimizer: ProxOptimizer, group: Group) -> dict[Tensor, Tensor]:
    """The gradient of ψ for the parameters of a group that have a gradient; none where it is zero."""
    penalty: Penalty | None = group["penalty"]
    if penalty is None:
        return {}
    params: list[Tensor] = group["params"]
    if optimizer.certify:
        return {p: optimizer.certificate(p).subgradient for p in params if p.grad is not None}
    with torch.enable_grad():
        points = [p.detach().clone().requires_grad_() for p in params]
        values = [penalty.value(x) for x in seen_by_penalty(group["units"], points)]
        if not all(value.requires_grad for value in values):
            raise ValueError(f"{penalty} has no gradient; set certify = True on the optimizer before the step")
        found = torch.autograd.grad(values, points, allow_unused=True)  # units need not reach all parameters
    return {p: gradient for p, gradient in zip(params, found, strict=True) if gradient is not None}


@torch.no_grad()
def gradient_mapping(
    x: Tensor, gradient: Tensor, penalty: Penalty | None, lr: float, *, mirror: MirrorStep | None = None
) -> Tensor:
    """(x − x⁺)/lr with x⁺ = prox_{lr·ψ}(x − lr·gradient): zero exactly where x is stationary, equal to ∇f if ψ = 0.

    Args:
        x: the point.
        gradient: ∇f(x).
        penalty: ψ, or ``None``.
        lr: 1/M > 0.
        mirror: another way to make x⁺, such as `entropic_step` on the simplex, in place of the prox.

    >>> import proxmo
    >>> gradient_mapping(torch.tensor([1.0]), torch.tensor([-0.5]), proxmo.L1(2.0), lr=0.1)
    tensor([1.5000])
    """
    lr = checks.more_than(0, "lr", lr)
    if mirror is not None:
        moved = mirror(x, gradient, lr)
    elif penalty is None:
        return gradient.clone()
    else:  # in float64, since a small step leaves few digits in the difference
        exact = x.double()
        return ((exact - penalty.prox(exact - lr * gradient.double(), lr)) / lr).to(x.dtype)
    return (x - moved) / lr


def entropic_step(x: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """The mirror step of the entropy on the simplex: x·exp(−lr·gradient), scaled to the sum of x.

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
    """(x − x̂)/λ with x̂ = argmin F(u) + ‖u − x‖²/(2λ): the gradient of the Moreau envelope of F = f + ψ at x.

    For convex ψ the subproblem is strongly convex if λ < 1/L; it is solved by proximal gradient steps.

    Args:
        x: the point.
        gradient: u ↦ ∇f(u).
        penalty: ψ, or ``None``.
        smoothness: L > 0 of f.
        smoothing: λ in (0, 1/L); 1/(2L) by default.
        tolerance: stop when a step moves by less than this, relative to the point; by default 1e-10, or what the dtype
            can resolve.
        max_steps: raise if that does not happen within so many.

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
    raise RuntimeError(f"the subproblem was not solved to {tolerance:g} in {max_steps} steps; raise one of them")


class ScalarWriter(Protocol):
    """What a monitor needs of a TensorBoard ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Store one number."""


class _Left(NamedTuple):
    """A parameter as it was when a monitor recorded it."""

    param: Tensor
    point: Tensor
    gradient: Tensor
    certificate: Certificate | None


class Monitor:
    """Records what the theory speaks of during a run: F, ψ, ‖∇F‖², Δ, R, Φ and sparsity.

    Call `record` at each point x_k of interest, before the step that leaves it. The closure gives f and its full
    gradient there; the gradients that the parameters hold are put back afterwards. Δ_k = ‖m_k − ∇f(x_k)‖² and
    R_k = ‖x_{k+1} − x_k‖² are added by that step. ‖∇F‖² is that of `gradient_norm`; with a penalty it is NaN at the
    start, before a step has certified a subgradient.

    Args:
        optimizer: the optimizer of the run; its ``certify`` is set.
        closure: returns f(x) on all data, with its gradient in ``.grad`` (it may call ``zero_grad`` and ``backward``).
            On many processes ``loss``, ``objective`` and ``potential`` have the value that it returns on each.
        weight: α/L, the weight of Δ in Φ (``theory.REGIMES["convex"].alpha / smoothness``); 0 leaves Φ = F.
        writer: a TensorBoard ``SummaryWriter``, for curves to look at while it runs.

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
            for name in ("loss", "penalty", "objective", "gradient", "zeros", "variance", "movement", "potential")
        }
        self._left: list[_Left] = []
        optimizer.certify = True
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def record(self) -> None:
        """Measure at the present point; call before the step that leaves it."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        held = [None if p.grad is None else p.grad.clone() for p in params]
        try:
            with torch.enable_grad():
                loss = float(torch.as_tensor(self._closure()).detach())
            gradient = self._gradient_norm()
            left = [
                _Left(p, p.detach().clone(), p.grad.clone(), self._optimizer.certificate_or_none(p))
                for p in params
                if p.grad is not None
            ]
        finally:
            for p, before in zip(params, held, strict=True):
                p.grad = before
        self._fill_up()
        penalty = float(self._optimizer.penalty_value())
        self._add("loss", loss)
        self._add("penalty", penalty)
        self._add("objective", loss + penalty)
        self._add("gradient", gradient)
        self._add("zeros", shards.count_zeros(params) / max(sum(p.numel() for p in params), 1))
        self._left = left

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """All that was recorded: one array per quantity, one element per record; NaN for what is not known.

        ``loss`` is f, ``penalty`` ψ, ``objective`` F, ``gradient`` ‖∇F‖², ``zeros`` the share of zeros, ``variance`` Δ,
        ``movement`` R and ``potential`` Φ.
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
        """Add what is known only after the step that leaves a recorded point: Δ_k, R_k and Φ_k."""
        new = [(left, self._optimizer.certificate_or_none(left.param)) for left in self._left]
        moved = [(left, made) for left, made in new if made is not None and made is not left.certificate]
        if not moved:
            return
        variance = square([made.direction.double() - left.gradient.double() for left, made in moved])
        self._add("variance", variance)
        self._add("movement", distance([left.param for left, _ in moved], [left.point for left, _ in moved]) ** 2)
        self._add("potential", self._columns["objective"][-1] + self._weight * variance)
        self._left = []

    def _fill_up(self) -> None:
        """A point that no step has left has no Δ, R and Φ."""
        if self._left:
            for name in ("variance", "movement", "potential"):
                self._add(name, float("nan"))

    def _add(self, name: str, value: float) -> None:
        self._columns[name].append(value)
        if self._writer is not None:
            self._writer.add_scalar(f"proxmo/{name}", value, len(self._columns[name]) - 1)
