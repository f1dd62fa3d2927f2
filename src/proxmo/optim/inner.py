"""The subproblem of a step whose prox is not known, and how to solve it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proxmo import checks
from proxmo.optim.evaluation import Closure, evaluate
from proxmo.secants import square


class InnerReport(NamedTuple):
    """What an inner solver did, and how good the point is at which it left the parameters."""

    steps: int
    """Steps taken."""
    gradient_norm: float
    """‖∇Ω‖² there, by the gradient of ψ that the closure gave: an estimate if that is stochastic."""
    bound: float
    """(M²/16)·‖x − x_k‖² + S, which theory asks it to be at most."""
    met: bool
    """Whether it is."""
    fell_back: bool
    """Whether Ω had become larger, so that the parameters are back at x_k."""


class Block(NamedTuple):
    """A parameter, where it was, the direction for it, and its M."""

    param: Tensor
    start: Tensor
    direction: Tensor
    M: float


class Look(NamedTuple):
    """Ω at one point: its gradient and squared norm, M²/16 times the squared way from x_k, and Ω − Ω's constant."""

    gradients: list[Tensor]
    gradient_norm: float
    moved: float
    value: float | None


class Subproblem:
    """Ω(x) = <m, x> + ψ(x) + (M/2)·‖x − x_k‖², with x the parameters as they are.

    Args:
        psi_closure: evaluates ψ.
        blocks: the parameters that may move.
        trained: all parameters that ψ may give a gradient.
    """

    def __init__(self, psi_closure: Closure, blocks: list[Block], trained: list[Tensor]) -> None:
        self.evaluations = 0
        self._closure, self._blocks, self._trained = psi_closure, blocks, trained

    def look(self) -> Look:
        """Evaluate ψ at the present point."""
        psi = evaluate("psi_closure", self._closure, self._trained)
        self.evaluations += 1
        ways = [b.param.detach() - b.start for b in self._blocks]
        gradients = [torch.add(b.direction, way, alpha=b.M) for b, way in zip(self._blocks, ways, strict=True)]
        for block, gradient in zip(self._blocks, gradients, strict=True):
            if block.param.grad is not None:
                gradient.add_(block.param.grad)
        norm = square(gradients)
        value = None if psi is None else float(torch.as_tensor(psi).detach()) + self._linear_and_quadratic(ways)
        if not math.isfinite(norm) or (value is not None and not math.isfinite(value)):
            raise FloatingPointError(
                f"psi_closure gave a value or gradient that is not finite in its call {self.evaluations} of this step; "
                "parameters and state are as they were"
            )
        moved = math.fsum(b.M**2 / 16 * square([way]) for b, way in zip(self._blocks, ways, strict=True))
        return Look(gradients, norm, moved, value)

    def descend(self, gradients: list[Tensor], lr: float) -> None:
        """x ← x − lr·gradient."""
        for block, gradient in zip(self._blocks, gradients, strict=True):
            block.param.sub_(gradient, alpha=lr)

    def return_to_start(self) -> None:
        """x ← x_k."""
        for block in self._blocks:
            block.param.copy_(block.start)

    def _linear_and_quadratic(self, ways: list[Tensor]) -> float:
        """<m, x − x_k> + (M/2)·‖x − x_k‖²."""
        return math.fsum(
            float((b.direction.double() * way.double()).sum()) + b.M / 2 * square([way])
            for b, way in zip(self._blocks, ways, strict=True)
        )


@dataclass(frozen=True)
class InnerSGD:
    """Stochastic gradient descent on the subproblem of `InexactProxSGD`: x ← x − lr·∇Ω_k(x), from x_k.

    With a fixed budget, ``steps`` are always taken (the proxy experiment of Gao, Rodomanov and Stich: 20 steps of
    0.01). With ``S``, it stops as soon as ‖∇Ω_k(x)‖² ≤ (M²/16)·‖x − x_k‖² + S, and ``steps`` is the most it takes.

    Args:
        steps: how many, ≥ 1.
        lr: the inner step size; below 2/(M + L_ψ), with M = 1/lr of the optimizer, or it diverges.
        S: the squared error that theory allows in each step, ``theory.inexactness_budget(target)``; ``None`` for a
            fixed budget.

    >>> InnerSGD(steps=20, lr=0.01)
    InnerSGD(steps=20, lr=0.01, S=None)
    """

    steps: int
    lr: float
    S: float | None = None

    def __post_init__(self) -> None:
        if checks.count("steps", self.steps) == 0:
            raise ValueError("steps must be an integer >= 1, got 0")
        checks.more_than(0, "lr", self.lr)
        if self.S is not None:
            checks.nonnegative("S", self.S)

    def check(self, M: float) -> None:
        """Raise if it would diverge on (M/2)·‖x − x_k‖² alone."""
        if self.lr * M >= 2:
            raise ValueError(
                f"lr of the inner SGD must be less than 2·lr of the optimizer = {2 / M:g}, or it diverges; "
                f"got {self.lr!r}"
            )

    def solve(self, subproblem: Subproblem) -> InnerReport:
        """Move the parameters from x_k towards the solution, and say how far that went."""
        S = self.S or 0.0
        first = now = subproblem.look()
        taken = 0
        while taken < self.steps and not (self.S is not None and now.gradient_norm <= now.moved + S):
            subproblem.descend(now.gradients, self.lr)
            taken += 1
            now = subproblem.look()
        fell_back = first.value is not None and now.value is not None and now.value > first.value
        if fell_back:
            subproblem.return_to_start()
            now = first
        bound = now.moved + S
        return InnerReport(taken, now.gradient_norm, bound, now.gradient_norm <= bound, fell_back)
