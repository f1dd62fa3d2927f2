"""ProxSGD with a step size and a momentum that tune themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo.optim.base import Group, ProxOptimizer
from proxmo.penalties.base import Penalty

SAMPLES = 8  # gradients at the start, to know the noise before the first move
WINDOW = 4  # steps in a row whose secants are taken together
PROBE = 1e-3  # length of the probing step at the start, relative to 1 + ‖x‖


class AutoProxSGD(ProxOptimizer):
    r"""`ProxSGD` without lr and momentum: both follow from running estimates of the noise and of the smoothness.

    With σ̂² the variance of a gradient, L̂ the smoothness of f and Δ̂ the error of the average m, each step weighs the
    new gradient against the average as a Kalman filter does, and moves by as much as the average then allows:

    .. math::
        D = (\sqrt{\hatΔ} + \hat L\,\|x_k - x_{k-1}\|)^2, \quad γ = \frac{D}{D + \hatσ^2}, \quad
        \hatΔ = \frac{D\,\hatσ^2}{D + \hatσ^2}, \quad M = \max(4\hat L, 2\hat L/γ)

    A heuristic without a proof; `benchmarks/auto.py` measures it against tuned grids. It suits problems whose gradient
    noise does not change much on the way and whose smoothness is felt along the path: regressions, small networks. On
    deep networks with normalization layers secants measure a curvature far above the useful one, and the steps become
    too short: tune `ProxSGD` there.

    ``step`` needs a closure. The first 8 calls only collect gradients, so that the average starts with an error that is
    known; they also evaluate their closure a second time, a small way off, for the secants that give L̂ (products of
    secants on different samples, so that noise cancels). Later this is repeated for 4 steps at steps 1, 8, 16, 32, …
    ``param_groups[0]["extra_gradients"]`` counts the second evaluations. All groups share one lr and one momentum.

    Args:
        params: parameters, named parameters or parameter groups.
        penalty: ψ, or ``None`` for ψ = 0.

    >>> import torch, proxmo
    >>> x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    >>> optimizer = proxmo.AutoProxSGD([x], penalty=proxmo.L1(1.0))
    >>> noise = torch.Generator().manual_seed(0)
    >>> for _ in range(4000):
    ...     shift = torch.tensor([3.0, 0.2]) + torch.randn(2, generator=noise)  # a sample, kept while it is evaluated
    ...     def closure():
    ...         optimizer.zero_grad()
    ...         loss = (x - shift).square().sum() / 2
    ...         loss.backward()
    ...         return loss.item()
    ...     _ = optimizer.step(closure)
    >>> (x.detach() - torch.tensor([2.0, 0.0])).abs().max() < 0.05
    tensor(True)
    """

    def __init__(self, params: ParamsT, penalty: Penalty | None = None) -> None:
        estimates: dict[str, Any] = {
            "samples": 0,
            "steps": 0,
            "extra_gradients": 0,
            "noise_variance": 0.0,
            "smoothness": 0.0,
            "momentum_error": 0.0,
            "movement": 0.0,
            "secants": 0,
            "secant_squares": 0.0,
            "next_secant": 1,
        }
        options = {"lr": 0.0, "momentum": 0.0, "penalty": penalty, "maximize": False, "foreach": None}
        super().__init__(params, {**options, **estimates})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float:  # type: ignore[override]  # needs a closure
        """Evaluate the closure and take a step, or, in the first calls, only learn from it.

        Args:
            closure: reevaluates the model on one sample, calls ``backward`` and returns the loss; it is called again at
                another point now and then, and must then use the same sample.
        """
        if closure is None:
            raise TypeError("AutoProxSGD.step needs a closure that evaluates the loss on one sample, got None")
        loss = _evaluate(closure)
        self._check_step()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [_gradient(p).clone() for p in params]
        if not math.isfinite(_square(gradients)):
            raise FloatingPointError("the gradient is not finite; parameters and state are as they were")
        if self._known("samples") < SAMPLES:
            self._learn_at_the_start(closure, params, gradients)
        else:
            self._tune(params, gradients)
            self._move(closure, params, gradients)
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        return loss

    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        return [self.state[p]["momentum_buffer"] for p in params]

    def _known(self, name: str) -> Any:
        return self.param_groups[0][name]

    def _note(self, **values: float) -> None:
        for group in self.param_groups:
            group.update(values)

    def _learn_at_the_start(self, closure: Callable[[], float], params: list[Tensor], gradients: list[Tensor]) -> None:
        """Mean and variance of the gradients at x₀ (Welford's way), and secants along the first gradient."""
        seen = self._known("samples") + 1
        averages = [self._buffer(p, "momentum_buffer") for p in params]
        deviations = [g - m for g, m in zip(gradients, averages, strict=True)]
        for average, deviation in zip(averages, deviations, strict=True):
            average.add_(deviation, alpha=1 / seen)
        scatter = self._known("noise_variance") + _square(deviations) * (seen - 1) / seen
        self._note(samples=seen, noise_variance=scatter)

        if seen == 1:
            length = math.sqrt(_square(gradients)) or 1.0
            for p, gradient in zip(params, gradients, strict=True):
                self.state[p]["probe"] = gradient / length
        here = [p.clone() for p in params]
        reach = PROBE * (1 + math.sqrt(_square(params)))
        for p in params:
            p.add_(self.state[p]["probe"], alpha=reach)
        try:
            _evaluate(closure)
            self._add_secant(params, gradients, reach)
        finally:
            for p, x in zip(params, here, strict=True):
                p.copy_(x)

        if seen == SAMPLES:
            self._close_window(params)
            variance = scatter / (SAMPLES - 1)
            smoothness = self._known("smoothness") or math.sqrt(_square(averages)) / (1 + math.sqrt(_square(params)))
            self._note(noise_variance=variance, momentum_error=variance / SAMPLES, smoothness=smoothness)
            for p in params:
                del self.state[p]["probe"]

    def _tune(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the estimates with a new gradient, average it in, and set lr."""
        averages = [self._buffer(p, "momentum_buffer") for p in params]
        surprise = _square([g - m for g, m in zip(gradients, averages, strict=True)])
        samples = self._known("samples") + 1
        variance = self._known("noise_variance") + (surprise - self._known("noise_variance")) / samples
        smoothness = self._known("smoothness")
        drifted = (math.sqrt(self._known("momentum_error")) + smoothness * self._known("movement")) ** 2
        gain = drifted / (drifted + variance) if variance else 1.0
        for average, gradient in zip(averages, gradients, strict=True):
            average.lerp_(gradient, gain)
        M = max(4 * smoothness, 2 * smoothness / gain) if gain else math.inf
        self._note(
            samples=samples,
            noise_variance=variance,
            momentum_error=gain * variance,
            momentum=1 - gain,
            lr=1 / M if M else 0.0,
        )

    def _move(self, closure: Callable[[], float], params: list[Tensor], gradients: list[Tensor]) -> None:
        """The step, and a secant along it when it is time for one."""
        here = [p.clone() for p in params]
        self._take_step()
        movement = math.sqrt(_square([p - x for p, x in zip(params, here, strict=True)]))
        steps = self._known("steps") + 1
        self._note(steps=steps, movement=movement)
        if steps > self._known("next_secant") and movement > 0:
            _evaluate(closure)
            self._add_secant(params, gradients, movement)
            if self._known("secants") == WINDOW:
                self._close_window(params)
                self._note(next_secant=max(2 * self._known("next_secant"), 2 * WINDOW))

    def _add_secant(self, params: list[Tensor], gradients: list[Tensor], distance: float) -> None:
        secants = [(_gradient(p) - g) / distance for p, g in zip(params, gradients, strict=True)]
        for p, secant in zip(params, secants, strict=True):
            self._buffer(p, "secant_sum").add_(secant)
        self._note(
            secants=self._known("secants") + 1,
            secant_squares=self._known("secant_squares") + _square(secants),
            extra_gradients=self._known("extra_gradients") + 1,
        )

    def _close_window(self, params: list[Tensor]) -> None:
        """L̂² is at least the mean product of two different secants, which estimates ‖∇²f·v‖² without bias."""
        count = self._known("secants")
        total = _square([self.state[p].pop("secant_sum") for p in params if "secant_sum" in self.state[p]])
        product = (total - self._known("secant_squares")) / (count * (count - 1))
        smoothness = max(self._known("smoothness"), math.sqrt(max(product, 0.0)))
        self._note(smoothness=smoothness, secants=0, secant_squares=0.0)

    def _buffer(self, p: Tensor, name: str) -> Tensor:
        state = self.state[p]
        if name not in state:
            state[name] = torch.zeros_like(p)
        buffer: Tensor = state[name]
        return buffer


def _evaluate(closure: Callable[[], float]) -> float:
    with torch.enable_grad():
        return closure()


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _square(tensors: list[Tensor]) -> float:
    """‖·‖² of the whole list as one vector, in float64."""
    return math.fsum(float(t.detach().double().square().sum()) for t in tensors)
