"""Test problems with known constants. Points hold many independent runs along their first axis."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from proxmo import L1, GroupLInf, Penalty, SquaredL2
from proxmo.criteria import gradient_mapping

DOUBLE = torch.float64


class Problem(Protocol):
    """A composite problem: stochastic gradients of f, a penalty ψ, and an error that is 0 at stationary points."""

    name: str
    smoothness: float
    penalty: Penalty | None

    def start(self, runs: int) -> Tensor:
        """Return x₀ for each run."""

    def sample(self, runs: int, generator: torch.Generator) -> Tensor:
        """Draw one sample per run; a sample can be used for gradients at several points."""

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """Return the stochastic gradient of f on a sample."""

    def full_gradient(self, x: Tensor) -> Tensor:
        """Return ∇f."""

    def error(self, x: Tensor) -> Tensor:
        """Return the squared norm of the gradient (mapping) of F, per run."""


class Quadratic:
    """f = ½·Σ h·x² − <b, x> with additive Gaussian noise of total variance σ², ψ = a/2·‖x‖²; starts at 0.

    >>> problem = Quadratic("plain", curvatures=[1.0, 1.0], shift=2.0, strength=0.0, sigma=1.0)
    >>> problem.error(problem.start(runs=1))
    tensor([8.], dtype=torch.float64)
    """

    def __init__(self, name: str, curvatures: list[float], shift: float, strength: float, sigma: float) -> None:
        self.name = name
        self.smoothness = max(curvatures)
        self.penalty = SquaredL2(strength)
        self._curvatures = torch.tensor(curvatures, dtype=DOUBLE)
        self._shift = shift
        self._deviation = sigma / math.sqrt(len(curvatures))

    def start(self, runs: int) -> Tensor:
        return torch.zeros(runs, len(self._curvatures), dtype=DOUBLE)

    def sample(self, runs: int, generator: torch.Generator) -> Tensor:
        return torch.randn(runs, len(self._curvatures), generator=generator, dtype=DOUBLE) * self._deviation

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        return self.full_gradient(x) + sample

    def full_gradient(self, x: Tensor) -> Tensor:
        return self._curvatures * x - self._shift

    def error(self, x: Tensor) -> Tensor:
        return (self.full_gradient(x) + self.penalty.strength * x).square().sum(-1)


class RobustRegression:
    """f = mean φ(aᵢᵀx − yᵢ) with the non-convex φ(r) = 2r²/(4 + r²), and ψ = ℓ1 or ℓ∞,1.

    A tenth of the yᵢ are outliers. The 20 weights form 4 groups of 5; 6 of the true weights are not zero.

    |φ''| ≤ 1, so L is the largest eigenvalue of AᵀA/n, and the mean-square smoothness over single samples is the square
    root of the largest eigenvalue of Σ‖aᵢ‖²aᵢaᵢᵀ/n. φ ≥ 0 and |φ'| ≤ 3√3/8, so F ≥ 0 and the variance of a gradient on
    ``batch`` samples is at most (27/64)·mean‖aᵢ‖²/batch.

    >>> problem = RobustRegression("lasso", "l1", batch=8)
    >>> problem.error(problem.start(runs=3)).shape
    torch.Size([3])
    """

    SAMPLES = 500

    def __init__(self, name: str, kind: str, batch: int, strength: float = 0.05) -> None:
        self.name = name
        self.penalty: Penalty = L1(strength) if kind == "l1" else GroupLInf(strength, dim=(0, 1))
        self.batch = batch
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(self.SAMPLES, 20, generator=generator, dtype=DOUBLE)
        weights = torch.randn(20, generator=generator, dtype=DOUBLE) * (torch.arange(20) < 6)
        noise = torch.randn(self.SAMPLES, generator=generator, dtype=DOUBLE)
        outliers = torch.rand(self.SAMPLES, generator=generator) < 0.1
        self._targets = self._inputs @ weights + torch.where(outliers, 10.0, 0.5) * noise
        self.smoothness = float(torch.linalg.eigvalsh(self._inputs.mT @ self._inputs / self.SAMPLES)[-1])
        weighted = self._inputs * self._inputs.square().sum(1, keepdim=True)
        self.mean_square_smoothness = math.sqrt(
            float(torch.linalg.eigvalsh(self._inputs.mT @ weighted / self.SAMPLES)[-1])
        )
        self.noise_variance = 27 / 64 * float(self._inputs.square().sum(1).mean()) / batch

    def start(self, runs: int) -> Tensor:
        return torch.zeros(runs, 4, 5, dtype=DOUBLE)

    def sample(self, runs: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.SAMPLES, (runs, self.batch), generator=generator)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        inputs = self._inputs[sample]
        slopes = _slope((inputs @ x.flatten(1).unsqueeze(-1)).squeeze(-1) - self._targets[sample])
        return (slopes.unsqueeze(-1) * inputs).mean(-2).reshape(x.shape)

    def full_gradient(self, x: Tensor) -> Tensor:
        slopes = _slope(x.flatten(1) @ self._inputs.mT - self._targets)
        return (slopes @ self._inputs / self.SAMPLES).reshape(x.shape)

    def error(self, x: Tensor) -> Tensor:
        return self.mapping_norm(x, 1 / self.smoothness)

    def mapping_norm(self, x: Tensor, lr: float) -> Tensor:
        """Return the squared norm of the prox-gradient mapping with step size ``lr``, per run."""
        return gradient_mapping(x, self.full_gradient(x), self.penalty, lr).square().flatten(1).sum(-1)

    def objective(self, x: Tensor) -> Tensor:
        """Return F(x) for a point that holds a single run."""
        residuals = x.flatten(1) @ self._inputs.mT - self._targets
        return (2 * residuals.square() / (4 + residuals.square())).mean() + self.penalty.value(x)


def _slope(residuals: Tensor) -> Tensor:
    return residuals / (1 + residuals.square() / 4).square()
