"""How many inner steps solve the subproblem of an inexact prox well enough (Proposition 2).

The subproblem Ω(u) = <m, u> + ψ(u) + (M/2)‖u − x‖² is M-strongly convex and β-smooth, β = L_ψ + M, if ψ is convex and
L_ψ-smooth. Its solution may be inexact: E‖∇Ω(u)‖² ≤ (M²/16)·E‖u − x‖² + S. `docs/theory.md` has the proof of the number
of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxmo import checks


@dataclass(frozen=True)
class InnerSchedule:
    """The step sizes of SGD on the subproblem, and how to draw the point u out of its iterates u₀ = x, u₁, … .

    The first ``contracting`` steps have size 1/β and bring the iterates close to the solution. Then they decrease,
    4/(M·(4κ + j)), κ = β/M, and u is one of the iterates with number t ≥ ``contracting``, drawn with probability
    proportional to ``weight(t)``. Without noise u is the last iterate.

    Args:
        penalty_smoothness: L_ψ ≥ 0.
        M: 1/lr > 0 of the outer step.
        noise_variance: σ_ψ² ≥ 0, the total variance of a gradient sample of ψ.
        inexactness: S ≥ 0, see `inexactness_budget`; must be > 0 if there is noise.

    >>> schedule = InnerSchedule(penalty_smoothness=90.0, M=10.0, noise_variance=1.0, inexactness=0.5)
    >>> schedule.contracting, schedule.steps, schedule(0), round(schedule(200), 5)
    (17, 291, 0.01, 0.00179)
    """

    penalty_smoothness: float
    M: float
    noise_variance: float = 0.0
    inexactness: float = 0.0

    def __post_init__(self) -> None:
        checks.nonnegative("penalty_smoothness", self.penalty_smoothness)
        checks.more_than(0, "M", self.M)
        checks.nonnegative("inexactness", self.inexactness)
        if checks.nonnegative("noise_variance", self.noise_variance) and not self.inexactness:
            raise ValueError("inexactness must be > 0 where there is noise: no number of steps removes it; got 0")
        try:
            self.steps  # noqa: B018  raises if it is beyond all numbers
        except (OverflowError, ValueError) as error:
            raise ValueError(f"the number of inner steps must be finite, got {self}") from error

    @property
    def kappa(self) -> float:
        """κ = (L_ψ + M)/M, the condition number of the subproblem."""
        return (self.penalty_smoothness + self.M) / self.M

    @property
    def drawn_from(self) -> int:
        """J, the number of iterates that u is drawn from: O(κ·σ_ψ²/S)."""
        if not self.noise_variance:
            return 1
        first = 4 * self.kappa - 1
        ratio = 17 / 16 * self.noise_variance / self.inexactness
        # the smallest J with ratio·(a(a−1)/J + 16κ)/(J + 2a − 1) ≤ 1, a = 4κ − 1
        linear = 2 * first - 1 - 16 * self.kappa * ratio
        return max(math.ceil((math.sqrt(linear**2 + 4 * ratio * first * (first - 1)) - linear) / 2), 1)

    @property
    def contracting(self) -> int:
        """The number of steps before the first iterate that u may be: O(κ·ln κ)."""
        kappa, drawn = self.kappa, self.drawn_from
        if not self.noise_variance:
            return math.ceil(kappa * math.log(1 + 4 * kappa))
        first = 4 * kappa - 1
        far = 34 * kappa * first * (first - 1) / (drawn * (drawn + 2 * first - 1))
        return max(math.ceil(kappa * math.log(far)), 0)

    @property
    def steps(self) -> int:
        """T, the number of steps in all."""
        return self.contracting + self.drawn_from - 1

    def __call__(self, t: int) -> float:
        """Return the size of step t."""
        return 4 / (self.M * (4 * self.kappa + max(t - self.contracting, 0)))

    def weight(self, t: int) -> float:
        """Return the weight with which u is the iterate u_t, t = 0 … T."""
        return 0.0 if t < self.contracting else t - self.contracting + 4 * self.kappa - 1


def inner_steps(penalty_smoothness: float, M: float, *, noise_variance: float = 0.0, inexactness: float = 0.0) -> int:
    """Return the number of inner steps after which E‖∇Ω(u)‖² ≤ (M²/16)·E‖u − x‖² + S, for a convex smooth ψ.

    With exact gradients of ψ it is ⌈κ·ln(1 + 4κ)⌉, κ = (L_ψ + M)/M, for any S; with noise O(κ·ln κ + κ·σ_ψ²/S), if the
    steps are those of `InnerSchedule`. Arguments as there.

    >>> inner_steps(penalty_smoothness=90.0, M=10.0)
    38
    >>> inner_steps(penalty_smoothness=90.0, M=10.0, noise_variance=1.0, inexactness=0.05)
    3332
    """
    return InnerSchedule(penalty_smoothness, M, noise_variance, inexactness).steps
