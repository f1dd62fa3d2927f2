"""How stationary is this point, and what happens during a run.

For a smooth ψ the measure is ‖∇F‖². Where ψ has kinks, three replace it: the gradient made of ∇f and the subgradient
that the last prox step certifies, the prox-gradient mapping, and the gradient of the Moreau envelope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxmo import checks
from proxmo.optim.base import ProxOptimizer
from proxmo.penalties.base import Penalty

MirrorStep = Callable[[Tensor, Tensor, float], Tensor]
"""(x, gradient, lr) ↦ argmin <gradient, u> + ψ(u) + D(u, x)/lr for a Bregman distance D."""


def gradient_norm(optimizer: ProxOptimizer) -> Tensor:
    """‖∇F(x)‖² at the present point, from the gradients of f that the parameters hold.

    Put the full gradient of f into ``.grad`` first (a backward over all data), or it measures the noise as well. The
    gradient of ψ is the one that the last step certified if the optimizer has ``certify`` set, which is right for every
    convex ψ; otherwise autograd's, which is right where ψ is differentiable.

    >>> import torch, proxmo
    >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
    >>> optimizer = proxmo.ProxSGD([x], penalty=proxmo.SquaredL2(2.0))
    >>> x.grad = torch.tensor([1.0, 1.0])
    >>> gradient_norm(optimizer)
    tensor(18.)
    """
    total = torch.zeros(())
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                gradient = p.grad.detach() + _penalty_gradient(optimizer, group["penalty"], p)
                total = total + gradient.square().sum().to(total.device)
    return total


def _penalty_gradient(optimizer: ProxOptimizer, penalty: Penalty | None, p: Tensor) -> Tensor:
    if penalty is None:
        return torch.zeros_like(p)
    if optimizer.certify:
        return optimizer.certificate(p).subgradient
    with torch.enable_grad():
        point = p.detach().clone().requires_grad_()
        value = penalty.value(point)
        if not value.requires_grad:
            raise ValueError(f"{penalty} has no gradient; set certify = True on the optimizer before the step")
        return torch.autograd.grad(value, point)[0]


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
    else:
        moved = penalty.prox(x - lr * gradient, lr)
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
    tolerance: float = 1e-10,
    max_steps: int = 10_000,
) -> Tensor:
    """(x − x̂)/λ with x̂ = argmin F(u) + ‖u − x‖²/(2λ): the gradient of the Moreau envelope of F = f + ψ at x.

    The subproblem is strongly convex for λ < 1/L and is solved by proximal gradient steps.

    Args:
        x: the point.
        gradient: u ↦ ∇f(u).
        penalty: ψ, or ``None``.
        smoothness: L > 0 of f.
        smoothing: λ in (0, 1/L); 1/(2L) by default.
        tolerance: stop when a step moves by less than this, relative to the point.
        max_steps: raise if that does not happen within so many.

    >>> moreau_gradient(torch.tensor([3.0]), lambda u: u, None, smoothness=1.0)
    tensor([2.])
    """
    big_l = checks.more_than(0, "smoothness", smoothness)
    width = 0.5 / big_l if smoothing is None else checks.more_than(0, "smoothing", smoothing)
    if width >= 1 / big_l:
        raise ValueError(f"smoothing must be a number in (0, 1/smoothness = {1 / big_l:g}), got {smoothing!r}")
    lr = 1 / (big_l + 1 / width)
    u = x.clone()
    for _ in range(max_steps):
        moved = u - lr * (gradient(u) + (u - x) / width)
        moved = moved if penalty is None else penalty.prox(moved, lr)
        change = (moved - u).norm()
        u = moved
        if change <= tolerance * (1 + u.norm()):
            return (x - u) / width
    raise RuntimeError(f"the subproblem was not solved to {tolerance:g} in {max_steps} steps; raise one of them")


class ScalarWriter(Protocol):
    """What a monitor needs of a TensorBoard ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Store one number."""


class Monitor:
    """Records what the theory speaks of during a run: F, ψ, ‖∇F‖², Δ, R, Φ and sparsity.

    Call `record` at each point x_k of interest, before the step that leaves it. The closure gives f and its full
    gradient there; the gradients that the parameters hold are put back afterwards. Δ_k = ‖m_k − ∇f(x_k)‖² and
    R_k = ‖x_{k+1} − x_k‖² are known only after the step, so the next `record` (or `arrays`) adds them. ‖∇F‖² is that of
    `gradient_norm`; with a penalty it is NaN at the start, before a step has certified a subgradient.

    Args:
        optimizer: the optimizer of the run; its ``certify`` is set.
        closure: returns f(x) on all data, with its gradient in ``.grad`` (it may call ``zero_grad`` and ``backward``).
        weight: α/L, the weight of Δ in Φ; 0 leaves Φ = F.
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
        self._left: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, x_k and ∇f(x_k) of the last record
        optimizer.certify = True

    def record(self) -> None:
        """Measure at the present point; call before the step that leaves it."""
        self._complete()
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        held = [None if p.grad is None else p.grad.clone() for p in params]
        with torch.enable_grad():
            loss = float(torch.as_tensor(self._closure()).detach())
        penalty = float(self._optimizer.penalty_value())
        elements = sum(p.numel() for p in params)
        self._add("loss", loss)
        self._add("penalty", penalty)
        self._add("objective", loss + penalty)
        self._add("gradient", self._gradient_norm())
        self._add("zeros", sum(int((p == 0).sum()) for p in params) / max(elements, 1))
        self._left = [(p, p.detach().clone(), p.grad.clone()) for p in params if p.grad is not None]
        for p, gradient in zip(params, held, strict=True):
            p.grad = gradient

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """All that was recorded: one array per quantity, one element per record (for Δ, R and Φ per step)."""
        self._complete()
        return {name: np.array(values) for name, values in self._columns.items()}

    def _gradient_norm(self) -> float:
        for group in self._optimizer.param_groups:
            if group["penalty"] is not None and not self._optimizer.has_certificate(group["params"]):
                return float("nan")
        return float(gradient_norm(self._optimizer))

    def _complete(self) -> None:
        """Add what is known only after the step: Δ_k, R_k and Φ_k of the last record."""
        if not self._left or all(torch.equal(p, x) for p, x, _ in self._left):
            return  # no step since
        variance = sum(
            float((self._optimizer.certificate(p).direction - gradient).square().sum()) for p, _, gradient in self._left
        )
        self._left, left = [], self._left
        self._add("variance", variance)
        self._add("movement", sum(float((p.detach() - x).square().sum()) for p, x, _ in left))
        self._add("potential", self._columns["objective"][-1] + self._weight * variance)

    def _add(self, name: str, value: float) -> None:
        self._columns[name].append(value)
        if self._writer is not None:
            self._writer.add_scalar(f"proxmo/{name}", value, len(self._columns[name]) - 1)
