"""Inner steps (Proposition 2): the criterion of an inexact prox holds after as many steps as theory says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from proxmo.theory import InnerSchedule, inner_steps

PROBLEMS = [(0.0, 1.0), (9.0, 1.0), (60.0, 3.0), (3.0, 100.0)]  # L_ψ and M


@pytest.mark.parametrize(("smoothness", "M"), PROBLEMS)
def test_exact_inner_steps_satisfy_the_criterion(smoothness: float, M: float) -> None:
    """ψ = h/2·u² with the extreme curvatures; Ω' = (h + M)·u − 1 from u = x = 0."""
    steps = inner_steps(smoothness, M)
    for curvature in (0.0, smoothness / 100, smoothness):
        u = 0.0
        for _ in range(steps):
            u -= ((curvature + M) * u - 1) / (smoothness + M)
        assert ((curvature + M) * u - 1) ** 2 <= M**2 / 16 * u**2 * (1 + 1e-9)


def test_exact_inner_steps_cannot_be_fewer_than_kappa() -> None:
    """The slowest mode, ψ = 0 while L_ψ is not, needs κ·ln 5 steps; κ·ln(1 + 4κ) is for all ψ."""
    smoothness, M = 60.0, 3.0
    u = 0.0
    for _ in range(int(1 + smoothness / M)):
        u -= (M * u - 1) / (smoothness + M)
    assert (M * u - 1) ** 2 > M**2 / 16 * u**2


def quadratic(schedule: InnerSchedule, curvature: float, distance: float, share: float = 1.0) -> tuple[float, float]:
    """Return E‖∇Ω(u)‖² and E‖u − x‖² exactly, for ψ = h/2·u² and the solution at this distance from x.

    ``share`` of the steps are taken.
    """
    slope, beta = curvature + schedule.M, schedule.penalty_smoothness + schedule.M
    assert schedule(0) * beta <= 1 + 1e-12
    mean, variance = distance, 0.0  # of u_t − u*
    gradient = moved = total = 0.0
    for t in range(int(share * schedule.steps) + 1):
        w = schedule.weight(t)
        gradient += w * slope**2 * (mean**2 + variance)
        moved += w * ((distance - mean) ** 2 + variance)
        total += w
        shrink = 1 - schedule(t) * slope
        mean, variance = shrink * mean, shrink**2 * variance + schedule(t) ** 2 * schedule.noise_variance
    return gradient / total, moved / total


@pytest.mark.parametrize(("smoothness", "M"), PROBLEMS)
@pytest.mark.parametrize("ratio", [0.01, 1.0, 30.0])
def test_noisy_inner_steps_satisfy_the_criterion_on_quadratics(smoothness: float, M: float, ratio: float) -> None:
    schedule = InnerSchedule(smoothness, M, noise_variance=2.0 * ratio, inexactness=2.0)
    for curvature in (0.0, smoothness / 3, smoothness):
        for distance in (0.0, 1.0, 1000.0):
            gradient, moved = quadratic(schedule, curvature, distance)
            assert gradient <= M**2 / 16 * moved + schedule.inexactness
    # a start at the solution, all noise along the largest curvature
    tight, _ = quadratic(schedule, smoothness, 0.0)
    if ratio == 30:
        assert tight > schedule.inexactness / 8


def test_an_eighth_of_the_noisy_inner_steps_is_not_enough() -> None:
    schedule = InnerSchedule(9.0, 1.0, noise_variance=60.0, inexactness=2.0)
    gradient, moved = quadratic(schedule, 9.0, 0.0, share=1 / 8)
    assert gradient > moved / 16 + 2.0


def test_noisy_inner_steps_satisfy_the_criterion_by_monte_carlo() -> None:
    """A ψ that is not quadratic: Huber's function in three dimensions, with noise in its gradients."""
    smoothness, M, runs = 9.0, 1.0, 400
    schedule = InnerSchedule(smoothness, M, noise_variance=3.0, inexactness=1.0)
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([2.0, -1.0, 0.1], dtype=torch.float64)
    m = torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64)

    def gradient(u: Tensor) -> Tensor:
        return m + smoothness * u.clamp(-1, 1) + M * (u - x)

    u, found = x.repeat(runs, 1), torch.zeros(3, dtype=torch.float64)
    for t in range(schedule.steps + 1):
        w = schedule.weight(t)
        sums = gradient(u).square().sum(1).mean(), (u - x).square().sum(1).mean(), torch.tensor(1.0)
        found += w * torch.stack([one.double() for one in sums])
        noise = torch.randn(u.shape, generator=generator, dtype=u.dtype)
        u = u - schedule(t) * (gradient(u) + noise)  # total variance 3
    assert found[0] <= M**2 / 16 * found[1] + schedule.inexactness * found[2]


def test_number_of_noisy_inner_steps_is_that_of_the_proposition() -> None:
    """O(κ·ln κ + κ·σ²/S): linear in σ²/S and in κ for much noise, κ·ln κ for little."""
    for kappa in (2.0, 50.0):
        for ratio in (1e3, 1e5):
            found = inner_steps(kappa - 1, 1.0, noise_variance=ratio, inexactness=1.0)
            assert 16 * kappa * ratio < found < 19 * kappa * ratio
        little = inner_steps(kappa - 1, 1.0, noise_variance=1e-9, inexactness=1.0)
        assert inner_steps(kappa - 1, 1.0) < little < 6 * inner_steps(kappa - 1, 1.0)


def test_noise_needs_an_allowed_error() -> None:
    with pytest.raises(ValueError, match="inexactness must be > 0 where there is noise"):
        inner_steps(1.0, 1.0, noise_variance=1.0)
    with pytest.raises(ValueError, match=r"noise_variance must be a finite number >= 0, got -1.0"):
        inner_steps(1.0, 1.0, noise_variance=-1.0, inexactness=1.0)


@pytest.mark.parametrize(("M", "noise", "inexactness"), [(1.0, 1e200, 1e-200), (1.0, 1e150, 1e-50), (1e-320, 1.0, 1.0)])
def test_numbers_of_steps_beyond_all_numbers_are_refused(M: float, noise: float, inexactness: float) -> None:
    with pytest.raises(ValueError, match="the number of inner steps must be finite, got InnerSchedule"):
        InnerSchedule(90.0, M, noise, inexactness)
