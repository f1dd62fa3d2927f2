"""What theory says about lr and momentum: pure functions that map constants of a problem to guarantees.

As in the paper, M = 1/lr and γ = 1 − momentum; L is the smoothness of f, σ² the total variance E‖g − ∇f‖² of its
gradients, F₀ = F(x₀) − F*. A regime is a proof that each step lowers a potential Φ = F − F* + (α/L)·E‖m − ∇f‖²:

    Φ⁺ ≤ Φ − c·E‖∇F(x⁺)‖² + (α/L)·γ²σ²  (+ an error where the prox is inexact).

Everything else follows from its constants: summed over K steps, the mean of E‖∇F‖² is at most (Φ₀/K + (α/L)·γ²σ²)/c.
`docs/theory.md` has the table of regimes, sketches of the proofs and the errata of the paper; the tests prove the table
with computer algebra.
"""

from proxmo.theory.inner import InnerSchedule, inner_steps
from proxmo.theory.plans import (
    IncreasingSchedule,
    Initial,
    Plan,
    Rates,
    guarantee,
    inexactness_budget,
    initial_batch,
    initial_potential,
    plan,
    variance_guarantee,
)
from proxmo.theory.quadratic import Moments, quadratic_floor, quadratic_moments
from proxmo.theory.reduction import HybridPlan, SpiderBoostPlan, StormSchedule, hybrid_plan, spiderboost_plan
from proxmo.theory.regimes import REGIMES, Regime

__all__ = [
    "REGIMES",
    "HybridPlan",
    "IncreasingSchedule",
    "Initial",
    "InnerSchedule",
    "Moments",
    "Plan",
    "Rates",
    "Regime",
    "SpiderBoostPlan",
    "StormSchedule",
    "guarantee",
    "hybrid_plan",
    "inexactness_budget",
    "initial_batch",
    "initial_potential",
    "inner_steps",
    "plan",
    "quadratic_floor",
    "quadratic_moments",
    "spiderboost_plan",
    "variance_guarantee",
]
