"""The seven descent proofs: their assumptions, and the constants from which everything else follows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Regime:
    """The constants of one proof; see `REGIMES`. N is M − L in the regimes of the paper and M in the others.

    >>> REGIMES["convex"].gamma(M=4.0, smoothness=1.0)
    0.5
    """

    name: str
    source: str
    """Where the proof is."""
    needs: str
    """What it assumes about ψ and the prox."""
    floor: float
    """M ≥ floor·L; γ is about 1 there."""
    gain: float
    """γ = gain·L/N."""
    alpha: float
    """The weight of the momentum error in Φ is α/L."""
    descent: float
    """c ≥ descent/M."""
    slope: float
    """The best M grows as slope·√(K·L·σ²/Φ₀)."""
    remainder: float
    """B in the rate A·√(L·Φ₀·σ²/K) + B·L·Φ₀/K."""
    shifted: bool
    """Whether N = M − L."""
    variance_descent: float | None = None
    """Φ falls by variance_descent/N·E‖m − ∇f‖² in place of c·E‖∇F‖²; ``None`` where that is not proved."""
    inexact_ratio: float | None = None
    """The factor of the mean squared prox error in the bound on E‖∇F‖²; ``None`` if the prox must be exact."""

    @property
    def rate(self) -> float:
        """A in the rate A·√(L·Φ₀·σ²/K) + B·L·Φ₀/K."""
        return 2 * self.slope / self.descent

    @property
    def _known_variance_descent(self) -> float:
        if self.variance_descent is None:
            raise ValueError(f"{self.source} has no bound on the momentum error")
        return self.variance_descent

    @property
    def variance_rate(self) -> float:
        """The same A for the mean of E‖m − ∇f‖²; only where that has a bound."""
        return (self.slope + self.alpha * self.gain**2 / self.slope) / self._known_variance_descent

    @property
    def variance_remainder(self) -> float:
        """The same B for the mean of E‖m − ∇f‖²."""
        return self.scale(self.floor, 1.0) / self._known_variance_descent

    def gamma(self, M: float, smoothness: float) -> float:
        """Return γ for this M; raise if M is below the floor."""
        lowest = self.floor * smoothness
        if lowest * (1 - 1e-12) > M:  # allow for a rounding error
            raise ValueError(
                f"M must be at least {self.floor:g}·smoothness = {lowest:g}, or "
                f"the descent of {self.source} is not proved; got M = {M!r}"
            )
        return min(self.gain * smoothness / self.scale(M, smoothness), 1.0)

    def decrease(self, M: float, smoothness: float) -> float:
        """Return c: a step lowers Φ by c·E‖∇F‖²."""
        if self.shifted:
            ratio = smoothness / M
            return 2 * self.descent * (1 - ratio) / (M * (1 + ratio**2))
        return self.descent / M

    def noise(self, M: float, smoothness: float, noise_variance: float) -> float:
        """Return (α/L)·γ²σ²: the noise raises Φ by this in a step."""
        return self.alpha / smoothness * self.gamma(M, smoothness) ** 2 * noise_variance

    def bound(
        self, M: float, smoothness: float, noise_variance: float, start: float, inexactness: float = 0.0
    ) -> float:
        """Return the bound on the mean of E‖∇F‖²; ``start`` is Φ₀/K."""
        fall = start + self.noise(M, smoothness, noise_variance)
        return fall / self.decrease(M, smoothness) + (self.inexact_ratio or 0.0) * inexactness

    def variance_bound(self, M: float, smoothness: float, noise_variance: float, start: float) -> float:
        """Return the bound on the mean of E‖m − ∇f‖², for the regimes that have one."""
        fall = start + self.noise(M, smoothness, noise_variance)
        return fall * self.scale(M, smoothness) / self._known_variance_descent

    def best_M(self, smoothness: float, noise_variance: float, phi0: float, horizon: int) -> float:
        """Return the M of the guarantee, which balances the initial error, ∝ M/K, against the noise, ∝ 1/M."""
        lowest = self.floor * smoothness
        grown = self.slope * math.sqrt(horizon * smoothness * noise_variance / phi0) if phi0 else 0.0
        return lowest + grown if self.shifted else max(lowest, grown)

    def scale(self, M: float, smoothness: float) -> float:
        """Return N."""
        return M - smoothness if self.shifted else M


def _of_paper(name: str, source: str, needs: str, **constants: Any) -> Regime:
    return Regime(name, source, needs, shifted=True, **constants)


def _sharpened(name: str, needs: str, *, floor: float, alpha: float, descent: float, **extra: Any) -> Regime:
    # γ = floor·L/M is 1 at the smallest M. With c = descent/M the bound is (M·Φ₀/K + α·gain²·L·σ²/M)/descent, smallest
    # at M = √α·gain·√(K·L·σ²/Φ₀); without noise floor·L·Φ₀/(descent·K) remains.
    slope = math.sqrt(alpha) * floor
    constants = {"floor": floor, "gain": floor, "alpha": alpha, "descent": descent, "slope": slope}
    return Regime(name, "docs/theory.md", needs, remainder=floor / descent, shifted=False, **constants, **extra)


_ROOT2 = math.sqrt(2)
REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        _of_paper(
            "paper", "Corollary 1", "a prox step that does not raise its subproblem",
            floor=4, gain=3, alpha=3 / 8, descent=1 / 48, slope=3**1.5 / 2, remainder=192, variance_descent=1 / 8,
        ),
        _of_paper(
            "paper_refined", "Theorem 2", "a prox step that does not raise its subproblem",
            floor=1 + 3 * _ROOT2, gain=3 * _ROOT2, alpha=3 * _ROOT2 / 8, descent=1 / 48, slope=3**1.5 / 2**0.75,
            remainder=144 * _ROOT2, variance_descent=9 / 8,
        ),
        _of_paper(
            "paper_inexact", "Theorem 3", "an inexact prox step that does not raise its subproblem",
            floor=4, gain=math.sqrt(152 / 17), alpha=math.sqrt(19 / 136), descent=1 / 68, slope=math.sqrt(8),
            remainder=272, inexact_ratio=8,
        ),
        _sharpened("convex", "ψ convex", floor=2, alpha=1 / 2, descent=1 / 2, variance_descent=1 / 2),
        _sharpened("monotone", "a prox step that does not raise its subproblem", floor=3, alpha=1 / 4, descent=3 / 8),
        _sharpened(
            "convex_inexact", "ψ convex, an inexact prox step", floor=2, alpha=1 / 2, descent=1 / 4, inexact_ratio=4
        ),
        _sharpened(
            "monotone_inexact", "an inexact prox step that does not raise its subproblem",
            floor=4, alpha=1 / 4, descent=1 / 8, inexact_ratio=2,
        ),
    )
}  # fmt: skip
"""The seven descent proofs by name: three of the paper, with its errors corrected, and four with sharper constants."""


def regime_named(name: str) -> Regime:
    """Return the regime of that name; raise an error that lists all names if there is none."""
    if name not in REGIMES:
        raise ValueError(f"regime must be one of {list(REGIMES)}, got {name!r}")
    return REGIMES[name]
