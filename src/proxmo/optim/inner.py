"""The subproblem of a step whose prox is not known, and how to solve it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proxmo import checks, shards
from proxmo.optim.evaluation import Closure, evaluate
from proxmo.penalties.base import widen
from proxmo.secants import square


class InnerReport(NamedTuple):
    """What an inner solver did, and how good the point is that it reached."""

    steps: int
    """Steps taken."""
    gradient_norm: float
    """‖∇Ω‖² there, by the gradient of ψ that the closure gave: an estimate if that is stochastic."""
    bound: float
    """(M²/16)·‖x − x_k‖² + S, the largest ‖∇Ω‖² that theory allows."""
    met: bool
    """Whether ``gradient_norm`` is at most ``bound``."""
    fell_back: bool
    """Whether Ω had grown (by more than rounding), so that the parameters are back at x_k."""


class Block:
    """A parameter in the subproblem: its start and present point, its direction, and its M."""

    def __init__(self, param: Tensor, direction: Tensor, M: float) -> None:
        self.param, self.direction, self.M = param, widen(direction), M
        # In half precision each of many small steps would be lost to rounding, so they are taken on a wider copy.
        self.point = widen(param.detach())
        self.start = self.point.clone()

    def displacement(self) -> Tensor:
        """Return x − x_k."""
        return self.point - self.start

    def descend(self, gradient: Tensor, lr: float) -> None:
        """Set x ← x − lr·gradient, with lr at most 1/M, the step to the minimum of (M/2)·‖x − x_k‖² alone."""
        self.point.sub_(gradient, alpha=min(lr, 1 / self.M))
        self._round()

    def return_to_start(self) -> None:
        """Set x ← x_k."""
        self.point.copy_(self.start)
        self._round()

    def _round(self) -> None:
        if self.point.dtype != self.param.dtype:  # otherwise they share their memory
            self.param.copy_(self.point)


class Evaluation(NamedTuple):
    """The subproblem at one point: ∇Ω, ‖∇Ω‖², (M²/16)·‖x − x_k‖², ψ, and Ω − ψ − <m, x_k>."""

    gradients: list[Tensor]
    gradient_norm: float
    moved: float
    psi: float | None
    rest: float

    def is_worse_than(self, other: Evaluation, rounding: float) -> bool:
        """Whether Ω is larger here by more than the rounding of ψ; ``False`` if values of ψ are not known."""
        if self.psi is None or other.psi is None:
            return False
        return self.psi - other.psi + self.rest - other.rest > rounding * (abs(self.psi) + abs(other.psi))


class Subproblem:
    """Ω(x) = <m, x> + ψ(x) + (M/2)·‖x − x_k‖², with x the parameters as they are.

    Args:
        psi_closure: evaluates ψ.
        blocks: the parameters that may move.
        params: all parameters of the optimizer.
    """

    def __init__(self, psi_closure: Closure, blocks: list[Block], params: list[Tensor]) -> None:
        self.evaluations = 0
        self.rounding = 8 * max(torch.finfo(b.point.dtype).eps for b in blocks)
        self._closure, self._blocks, self._params = psi_closure, blocks, params

    def evaluate(self) -> Evaluation:
        """Evaluate the subproblem at the present point."""
        returned = evaluate("psi_closure", self._closure, self._params)
        self.evaluations += 1
        psi = None if returned is None else float(torch.as_tensor(returned).detach())
        gradients: list[Tensor] = []
        moved = rest = 0.0
        for block in self._blocks:
            way = block.displacement()
            gradient = torch.add(block.direction, way, alpha=block.M)
            gradients.append(gradient if block.param.grad is None else gradient.add_(block.param.grad))
            length = square([way])
            moved += block.M**2 / 16 * length
            rest += shards.inner_product([way], [block.direction]) + block.M / 2 * length
        norm = square(gradients)
        bad = not (math.isfinite(norm) and math.isfinite(psi or 0.0))
        if shards.agree_on_max(bad, self._params):
            raise FloatingPointError(
                f"psi_closure gave a value or gradient that is not finite in its call {self.evaluations} of this step; "
                "parameters and state are as they were"
            )
        return Evaluation(gradients, norm, moved, psi, rest)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on one of the ranks that share the parameters; the same answer on all of them."""
        return bool(shards.agree_on_max(flag, self._params))

    def descend(self, gradients: list[Tensor], lr: float) -> None:
        """Take a step of gradient descent."""
        for block, gradient in zip(self._blocks, gradients, strict=True):
            block.descend(gradient, lr)

    def return_to_start(self) -> None:
        """Set x ← x_k."""
        for block in self._blocks:
            block.return_to_start()


@dataclass(frozen=True)
class InnerSGD:
    """Stochastic gradient descent on the subproblem of `InexactProxSGD`: x ← x − lr·∇Ω_k(x), from x_k.

    With a fixed budget, ``steps`` are always taken (the proxy experiment of Gao, Rodomanov and Stich: 20 steps of
    0.01). With ``S``, it stops as soon as ‖∇Ω_k(x)‖² ≤ (M²/16)·‖x − x_k‖² + S, and ``steps`` is the most it takes.

    Args:
        steps: how many, ≥ 1.
        lr: the inner step size, below 2/(M + L_ψ) with M = 1/lr of the optimizer, or it diverges; at most lr of the
            optimizer is taken, as a scheduler may lower that.
        S: the squared error that theory allows in each step, ``theory.inexactness_budget(target)``; ``None`` for a
            fixed budget.

    >>> InnerSGD(steps=20, lr=0.01)
    InnerSGD(steps=20, lr=0.01, S=None)
    """

    steps: int
    lr: float
    S: float | None = None

    def __post_init__(self) -> None:
        checks.count("steps", self.steps, least=1)
        checks.more_than(0, "lr", self.lr)
        if self.S is not None:
            checks.nonnegative("S", self.S)

    def solve(self, subproblem: Subproblem) -> InnerReport:
        """Move the parameters from x_k towards the solution, and report how far that went."""
        S = self.S or 0.0
        first = now = subproblem.evaluate()
        taken = 0
        while taken < self.steps and not (self.S is not None and now.gradient_norm <= now.moved + S):
            subproblem.descend(now.gradients, self.lr)
            taken += 1
            now = subproblem.evaluate()
        fell_back = subproblem.any_rank(now.is_worse_than(first, subproblem.rounding))
        if fell_back:
            subproblem.return_to_start()
            now = first
        bound = now.moved + S
        return InnerReport(taken, now.gradient_norm, bound, now.gradient_norm <= bound, fell_back)
