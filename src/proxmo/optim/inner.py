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
    """What an inner solver did, and how good the point that it reached is."""

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
    """A parameter in the subproblem: its start x_k and present point, its direction and M, and its part of ∇Ω."""

    gradient: Tensor

    def __init__(self, param: Tensor, direction: Tensor, M: float) -> None:
        self.param, self.direction, self.M = param, widen(direction), M
        # In half precision each of many small steps would be lost to rounding, so they are taken on a wider copy.
        self.point = widen(param.detach())
        self.start = self.point.clone()

    def move_to(self, point: Tensor) -> None:
        """Set x ← point."""
        self.point.copy_(point)
        if self.point.dtype != self.param.dtype:  # otherwise they share their memory
            self.param.copy_(self.point)


class Subproblem:
    """Ω(x) = <m, x> + ψ(x) + (M/2)·‖x − x_k‖², with x the parameters as they are; evaluate it at x_k first.

    ``blocks`` are the parameters that may move, ``params`` all of the optimizer.
    """

    def __init__(self, psi_closure: Closure, blocks: list[Block], params: list[Tensor]) -> None:
        self.blocks, self.evaluations = blocks, 0
        self._closure, self._params = psi_closure, params
        self._psi_at_start: float | None = None

    def evaluate(self, S: float) -> InnerReport:
        """Set the gradients of the blocks, and report on the present point; ``fell_back`` says whether Ω has grown."""
        returned = evaluate("psi_closure", self._closure, self._params)
        psi = None if returned is None else float(torch.as_tensor(returned).detach())
        if self.evaluations == 0:
            self._psi_at_start = psi
        self.evaluations += 1
        moved = change = 0.0  # (M²/16)·‖x − x_k‖², and the change of Ω − ψ
        for block in self.blocks:
            way = block.point - block.start
            block.gradient = torch.add(block.direction, way, alpha=block.M)
            if block.param.grad is not None:
                block.gradient.add_(block.param.grad)
            length = square([way])
            moved += block.M**2 / 16 * length
            change += shards.inner_product([way], [block.direction]) + block.M / 2 * length
        norm, bound = square([block.gradient for block in self.blocks]), moved + S
        bad = not (math.isfinite(norm) and math.isfinite(psi or 0.0))
        verdict = shards.agree_on_max(2 if bad else self._grew(psi, change), self._params)
        if verdict == 2:
            raise FloatingPointError(
                f"psi_closure gave a value or gradient that is not finite in its call {self.evaluations} of this step; "
                "parameters and state are as they were"
            )
        return InnerReport(self.evaluations - 1, norm, bound, norm <= bound, fell_back=verdict == 1)

    def _grew(self, psi: float | None, change: float) -> bool:
        """Whether Ω has grown by more than the rounding of ψ; ``False`` if values of ψ are not known."""
        if psi is None or self._psi_at_start is None:
            return False
        rounding = 8 * max(torch.finfo(b.point.dtype).eps for b in self.blocks)
        return psi - self._psi_at_start + change > rounding * (abs(psi) + abs(self._psi_at_start))


@dataclass(frozen=True)
class InnerSGD:
    """Stochastic gradient descent on the subproblem of `InexactProxSGD`: x ← x − lr·∇Ω_k(x), from x_k.

    Without ``S``, it always takes ``steps`` steps (in the proxy experiment of Gao, Rodomanov and Stich: 20 steps of
    0.01). With ``S``, it stops as soon as ‖∇Ω_k(x)‖² ≤ (M²/16)·‖x − x_k‖² + S, and after ``steps`` steps at the latest.

    Args:
        steps: the number of steps, ≥ 1.
        lr: the inner step size. It must be below 2/(M + L_ψ), with M = 1/lr of the optimizer, or the inner steps
            diverge. It is capped at the lr of the optimizer, which a scheduler may lower.
        S: the squared error that the theory allows in each step, ``theory.inexactness_budget(target)``; ``None`` for a
            fixed number of steps.

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
        first = report = subproblem.evaluate(self.S or 0.0)
        while report.steps < self.steps and not (self.S is not None and report.met):
            for block in subproblem.blocks:
                # 1/M is the step to the minimum of (M/2)·‖x − x_k‖² alone.
                block.move_to(torch.sub(block.point, block.gradient, alpha=min(self.lr, 1 / block.M)))
            report = subproblem.evaluate(self.S or 0.0)
        if report.fell_back:
            for block in subproblem.blocks:
                block.move_to(block.start)
            report = first._replace(steps=report.steps, fell_back=True)
        return report
