"""From constants of the problem to lr, momentum, horizon and guarantee."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

from proxmo import checks
from proxmo.theory.regimes import REGIMES, Regime, regime_named

Initial = Literal["gradient", "zero", "penalty"]
DEFAULT_HORIZON = 10_000


class Rates(NamedTuple):
    """The step size and the momentum of one step.

    >>> Rates(lr=0.1, momentum=0.9)
    Rates(lr=0.1, momentum=0.9)
    """

    lr: float
    momentum: float


@dataclass(frozen=True)
class Plan:
    """The lr and momentum to use, and what they guarantee; also a schedule of constant `Rates`.

    Attributes:
        regime: the name of the proof behind the guarantee.
        lr, momentum: for the optimizer; M = 1/lr and gamma = 1 − momentum.
        phi0: Φ₀, the potential at the start.
        horizon: K, the number of steps.
        guarantee: the bound on E‖∇F‖² at an iterate drawn uniformly from x₁ … x_K.
        variance_guarantee: the bound on E‖m − ∇f‖² at such an iterate, or at one from x₀ … x_{K−1}, if the regime has
            one.
        inexactness: the squared prox error S per step that the guarantee includes; ``None`` if it includes none.

    >>> found = plan(smoothness=1.0, noise_variance=25.0, initial_gap=10.0, horizon=1000)
    >>> round(found.momentum, 3), found(k=7) == Rates(found.lr, found.momentum)
    (0.958, True)
    """

    regime: str
    lr: float
    momentum: float
    M: float
    gamma: float
    phi0: float
    horizon: int
    guarantee: float
    variance_guarantee: float | None
    inexactness: float | None

    def __call__(self, k: int) -> Rates:
        """Return the rates of step ``k``: always the same."""
        return Rates(self.lr, self.momentum)


def initial_potential(
    regime: str = "convex",
    *,
    smoothness: float,
    noise_variance: float,
    initial_gap: float,
    initial: Initial = "gradient",
    batch: int = 1,
    penalty: object | None = None,
    gradient_norm: float | None = None,
) -> float:
    """Return Φ₀ = F₀ + (α/L)·E‖m₀ − ∇f(x₀)‖² for one of the three ways to start the average.

    Args:
        regime: a name in `REGIMES`, for its α.
        smoothness: L > 0.
        noise_variance: σ² ≥ 0.
        initial_gap: F₀ = F(x₀) − F* ≥ 0.
        initial: ``"gradient"`` for m₀ = g₀, the mean of ``batch`` samples, with error E‖m₀ − ∇f(x₀)‖² = σ²/batch;
            ``"zero"`` for m₀ = 0, with error ‖∇f(x₀)‖² ≤ 2L·F₀ if ψ = 0; ``"penalty"`` for m₀ = −∇ψ(x₀), with error
            ‖∇F(x₀)‖².
        batch: the number of samples in the first gradient.
        penalty: ψ, if any; must be ``None`` with ``initial="zero"``.
        gradient_norm: ‖∇F(x₀)‖², for ``initial="penalty"``.

    >>> initial_potential(smoothness=1.0, noise_variance=25.0, initial_gap=10.0)
    22.5
    """
    alpha = regime_named(regime).alpha
    big_l = checks.more_than(0, "smoothness", smoothness)
    variance = checks.nonnegative("noise_variance", noise_variance)
    gap = checks.nonnegative("initial_gap", initial_gap)
    if initial == "gradient":
        return gap + alpha / big_l * variance / checks.count("batch", batch, least=1)
    if initial == "zero":
        if penalty is not None:
            raise ValueError(
                "initial='zero' needs ψ = 0: its bound ‖∇f(x₀)‖² ≤ 2L·F₀ on the first momentum error assumes f = F "
                f"(Theorem 1, non-composite case); got penalty {penalty!r}"
            )
        return gap * (1 + 2 * alpha)
    if initial == "penalty":
        if gradient_norm is None:
            raise ValueError("initial='penalty' needs gradient_norm = ‖∇F(x₀)‖², got None")
        return gap + alpha / big_l * checks.nonnegative("gradient_norm", gradient_norm)
    raise ValueError(f"initial must be 'gradient', 'zero' or 'penalty', got {initial!r}")


def initial_batch(smoothness: float, noise_variance: float, initial_gap: float) -> int:
    """Return b₀ = ⌈σ²/(L·F₀)⌉, the size of a first mini-batch for which Φ₀ ≤ (1 + α)·F₀, whatever σ is.

    >>> initial_batch(smoothness=1.0, noise_variance=25.0, initial_gap=10.0)
    3
    """
    big_l = checks.more_than(0, "smoothness", smoothness)
    gap = checks.more_than(0, "initial_gap", initial_gap)
    batch = checks.nonnegative("noise_variance", noise_variance) / big_l / gap
    if math.isinf(batch):
        raise ValueError(f"noise_variance must be small enough for a finite batch, got {noise_variance!r}")
    return max(math.ceil(batch), 1)


def guarantee(
    M: float,
    regime: str = "convex",
    *,
    smoothness: float,
    noise_variance: float,
    phi0: float,
    horizon: int,
    inexactness: float = 0.0,
) -> float:
    """Return the bound on the mean of E‖∇F(x₁)‖² … E‖∇F(x_K)‖² for a constant M and the γ of the regime.

    It is (Φ₀/K + (α/L)·γ²σ²)/c + ratio·S, where S is the mean squared prox error if the regime allows one.

    Args:
        M: 1/lr, at least the regime's floor·L.
        regime: a name in `REGIMES`.
        smoothness: L > 0.
        noise_variance: σ² ≥ 0.
        phi0: Φ₀ ≥ 0, see `initial_potential`.
        horizon: K ≥ 1.
        inexactness: the mean of S over the steps.

    >>> guarantee(20.0, smoothness=1.0, noise_variance=25.0, phi0=10.0, horizon=100)
    9.0
    """
    row = regime_named(regime)
    big_l = checks.more_than(0, "smoothness", smoothness)
    variance = checks.nonnegative("noise_variance", noise_variance)
    start = checks.nonnegative("phi0", phi0) / steps(horizon)
    error = checks.nonnegative("inexactness", inexactness)
    if error and row.inexact_ratio is None:
        raise ValueError(f"inexactness must be 0 in regime {regime!r}, whose proof needs an exact prox; got {error!r}")
    return row.bound(checks.more_than(0, "M", M), big_l, variance, start, error)


def variance_guarantee(
    M: float, regime: str = "convex", *, smoothness: float, noise_variance: float, phi0: float, horizon: int
) -> float:
    """Return the bound on the mean of E‖m_k − ∇f(x_k)‖² over K steps: it falls at the rate of ‖∇F‖².

    It is (Φ₀/K + (α/L)·γ²σ²)·N/v, with v the regime's ``variance_descent``. Arguments as for `guarantee`, for the
    regimes that prove such a bound.

    >>> variance_guarantee(16.0, smoothness=1.0, noise_variance=16.0, phi0=10.0, horizon=160)
    6.0
    """
    row = _with_variance_bound(regime)
    M, big_l = checks.more_than(0, "M", M), checks.more_than(0, "smoothness", smoothness)
    start = checks.nonnegative("phi0", phi0) / steps(horizon)
    return row.variance_bound(M, big_l, checks.nonnegative("noise_variance", noise_variance), start)


def _with_variance_bound(regime: str) -> Regime:
    row = regime_named(regime)
    if row.variance_descent is None:
        proved = [name for name, other in REGIMES.items() if other.variance_descent is not None]
        raise ValueError(f"regime must be one of {proved}, which bound the variance; got {regime!r}")
    return row


def plan(
    regime: str = "convex",
    *,
    smoothness: float,
    noise_variance: float,
    initial_gap: float,
    horizon: int | None = None,
    target: float | None = None,
    target_variance: float | None = None,
    initial: Initial = "gradient",
    batch: int = 1,
    penalty: object | None = None,
    gradient_norm: float | None = None,
) -> Plan:
    """Return the lr and momentum that theory gives for a horizon or a target accuracy, and their guarantee.

    At the best M the guarantee is at most A·√(L·Φ₀·σ²/K) + B·L·Φ₀/K. For a target ε the horizon is the smallest K for
    which that is ≤ ε, or ≤ ε/2 in inexact regimes, where the other half allows for prox errors S = ε/(2·ratio). For a
    horizon the guarantee assumes an exact prox; in inexact regimes a mean error S adds ratio·S. The bound on the
    momentum error E‖m − ∇f‖² has the same form (Theorem 2), and can be the target in place of that on E‖∇F‖².

    Args:
        regime: a name in `REGIMES`.
        smoothness: L > 0, of f.
        noise_variance: σ² ≥ 0, the total variance of a gradient sample.
        initial_gap: F₀ = F(x₀) − F* ≥ 0, or a bound on it.
        horizon: K ≥ 1; 10 000 if neither this nor a target is given.
        target: ε > 0 for the mean of E‖∇F‖²; determines the horizon.
        target_variance: ε > 0 for the mean of E‖m − ∇f‖²; determines the horizon, for the regimes that bound it.
        initial: how the average starts; see `initial_potential`, also for ``batch``, ``penalty`` and ``gradient_norm``.

    >>> found = plan(smoothness=1.0, noise_variance=25.0, initial_gap=10.0, target=0.1)
    >>> found.horizon, round(found.lr, 6), round(found.momentum, 4), round(found.guarantee, 4)
    (1801800, 0.0005, 0.999, 0.1)
    """
    row = regime_named(regime)
    if regime.startswith("convex") and getattr(penalty, "convex", True) is False:
        raise ValueError(f"regime {regime!r} needs {row.needs} (proof in {row.source}); got penalty {penalty!r}")
    phi0 = initial_potential(
        regime,
        smoothness=smoothness,
        noise_variance=noise_variance,
        initial_gap=initial_gap,
        initial=initial,
        batch=batch,
        penalty=penalty,
        gradient_norm=gradient_norm,
    )
    given = {"horizon": horizon, "target": target, "target_variance": target_variance}
    if len(chosen := {name: value for name, value in given.items() if value is not None}) > 1:
        raise ValueError(f"give one of horizon, target and target_variance; got {chosen}")
    error = None
    scale = math.sqrt(smoothness * phi0 * noise_variance), smoothness * phi0
    if target is not None:
        epsilon = checks.more_than(0, "target", target)
        if row.inexact_ratio is not None:
            epsilon, error = epsilon / 2, inexactness_budget(epsilon, regime)
        horizon = _shortest("target", target, epsilon, row.rate * scale[0], row.remainder * scale[1])
    if target_variance is not None:
        epsilon, row = checks.more_than(0, "target_variance", target_variance), _with_variance_bound(regime)
        slow, fast = row.variance_rate * scale[0], row.variance_remainder * scale[1]
        horizon = _shortest("target_variance", target_variance, epsilon, slow, fast)
    if phi0 == 0 and noise_variance:
        raise ValueError("initial_gap must be > 0 where there is noise: with Φ₀ = 0 the best step size is 0; got 0")
    horizon = DEFAULT_HORIZON if horizon is None else steps(horizon)
    M = row.best_M(smoothness, noise_variance, phi0, horizon)
    gamma = row.gamma(M, smoothness)
    known = {"smoothness": smoothness, "noise_variance": noise_variance, "phi0": phi0}
    return Plan(
        regime,
        lr=1 / M,
        momentum=1 - gamma,
        M=M,
        gamma=gamma,
        phi0=phi0,
        horizon=horizon,
        guarantee=guarantee(M, regime, **known, horizon=horizon, inexactness=error or 0.0),
        variance_guarantee=(
            None if row.variance_descent is None else variance_guarantee(M, regime, **known, horizon=horizon)
        ),
        inexactness=error,
    )


def _shortest(name: str, given: float, epsilon: float, slow: float, fast: float) -> int:
    """Return the smallest K ≥ 1 with slow/√K + fast/K ≤ ε, for the argument ``name`` that was given."""
    half = slow / epsilon / 2
    root = half + math.hypot(half, math.sqrt(fast / epsilon))
    needed = root * root
    if not math.isfinite(needed):
        raise ValueError(f"{name} must be large enough for a finite horizon, got {given!r}")
    return max(math.ceil(needed * (1 - 1e-12)), 1)  # no extra step for a rounding error above an integer


def inexactness_budget(target: float, regime: str = "convex_inexact") -> float:
    """Return S = ε/(2·ratio), the squared prox error per step that uses up half of the target ε.

    >>> inexactness_budget(0.16, "paper_inexact")
    0.01
    """
    row = regime_named(regime)
    if row.inexact_ratio is None:
        allowed = [name for name, other in REGIMES.items() if other.inexact_ratio is not None]
        raise ValueError(f"regime must be one of {allowed}, which allow an inexact prox; got {regime!r}")
    return checks.more_than(0, "target", target) / (2 * row.inexact_ratio)


@dataclass(frozen=True)
class IncreasingSchedule:
    """The rates of Corollary 2: M_k grows with k, so that no horizon has to be fixed in advance.

    M_k = max(c·√((k+1)·L·σ²/Φ₀), 4L), γ_k = 3L/(M_k − L), and the iterate x_i is drawn with probability ∝ 1/M_{i−1}.

    Args:
        smoothness: L > 0.
        noise_variance: σ² ≥ 0.
        phi0: Φ₀ > 0 of the regime ``"paper"``.
        growth: c > 0; the paper has 1, the default 3^1.5/2 gives a smaller bound.

    >>> schedule = IncreasingSchedule(smoothness=1.0, noise_variance=25.0, phi0=10.0)
    >>> [round(1 / schedule(k).lr, 1) for k in (0, 9, 99)]
    [4.1, 13.0, 41.1]
    """

    smoothness: float
    noise_variance: float
    phi0: float
    growth: float = 3**1.5 / 2

    def __post_init__(self) -> None:
        for name, bound in (("smoothness", 0), ("phi0", 0), ("growth", 0)):
            checks.more_than(bound, name, getattr(self, name))
        checks.nonnegative("noise_variance", self.noise_variance)
        require_usable(self, self(0))

    def M(self, k: int) -> float:
        """Return M_k."""
        grown = self.growth * math.sqrt((k + 1) * self.smoothness * self.noise_variance / self.phi0)
        return max(grown, REGIMES["paper"].floor * self.smoothness)

    def __call__(self, k: int) -> Rates:
        """Return lr = 1/M_k and momentum = 1 − γ_k."""
        M = self.M(k)
        return Rates(1 / M, 1 - REGIMES["paper"].gamma(M, self.smoothness))

    def weight(self, i: int) -> float:
        """Return the weight 1/M_{i−1} with which the iterate x_i, i ≥ 1, is drawn."""
        if i < 1:
            raise ValueError(f"i must be an integer >= 1, the number of an iterate; got {i!r}")
        return 1 / self.M(i - 1)

    def guarantee(self, horizon: int) -> float:
        """Return the bound on E‖∇F‖² at the weighted random iterate: (48·Φ₀ + 324·L·σ²·Σ1/M_k²) / Σ1/M_k."""
        row = REGIMES["paper"]
        inverses = [1 / self.M(k) for k in range(steps(horizon))]
        noise = 2 * row.alpha * row.gain**2 * self.smoothness * self.noise_variance
        return (self.phi0 + noise * math.fsum(w * w for w in inverses)) / (row.descent * math.fsum(inverses))


def steps(horizon: int) -> int:
    """Return ``horizon``; raise if it is not an integer ≥ 1, or more than a float can count."""
    if checks.count("horizon", horizon, least=1) > sys.float_info.max:
        raise ValueError(f"horizon must be at most {sys.float_info.max:g}, got more")
    return horizon


def require_usable(schedule: object, first: Rates) -> None:
    """Raise if rounding has left nothing of the first rates of a schedule."""
    if not (0 < first.lr < math.inf and 0 <= first.momentum <= 1):
        raise ValueError(f"the arguments must give a first step with 0 < lr < inf, got {first} from {schedule}")
