"""ProxSGD with a step size and a momentum that tune themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo.optim.closure import ClosureOptimizer, all_params, gradient_of, refuse_nonfinite, require_gradients
from proxmo.optim.evaluation import Closure, Sample
from proxmo.optim.options import Group
from proxmo.penalties.base import Penalty
from proxmo.secants import distance, mean_product, probe_length, square

SAMPLES = 8  # gradients at the start, to estimate the noise before the first move
WINDOW = 4  # consecutive steps whose secants are averaged


class AutoProxSGD(ClosureOptimizer):
    r"""`ProxSGD` without lr and momentum: both follow from running estimates of the noise and of the smoothness.

    With σ̂² the variance of a gradient, L̂ the smoothness of f and Δ̂ the error of the average m, each step weighs the
    new gradient against the average as a Kalman filter does, and moves by as much as the average then allows:

    .. math::
        D = (\sqrt{\hatΔ} + \hat L\,\|x_k - x_{k-1}\|)^2, \quad γ = \frac{D}{D + \hatσ^2}, \quad
        \hatΔ = \frac{D\,\hatσ^2}{D + \hatσ^2}, \quad M = \max(4\hat L, 2\hat L/γ)

    A heuristic without a proof; `docs/theory.md` has what was measured. It suits problems whose gradient noise does not
    change much on the way and whose smoothness is felt along the path: regressions, small models. On deep networks with
    normalization layers secants measure a curvature far above the useful one, and the steps become too short: tune
    `ProxSGD` there.

    ``step`` needs a closure, which it calls again at another point now and then, with the same random numbers of torch
    and without a trace in running statistics. The first 8 calls only collect gradients, so that the average starts with
    an error that is known; they also evaluate their closure a second time, a small way off, for the secants that give L̂
    (products of secants on different samples, so that noise cancels); should these show no curvature yet, it goes on
    collecting. Later this is repeated for 4 steps in a row, at intervals that double.
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

    state_keys = frozenset({"momentum_buffer", "secant_sum", "probe"})

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
            "tuned_lr": 0.0,
        }
        super().__init__(params, {"lr": 0.0, "momentum": 0.0, "penalty": penalty, **estimates})

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, as for every torch optimizer; one with an lr or momentum of its own is refused."""
        for name in ("lr", "momentum"):
            if name in param_group and param_group[name] != 0:
                raise ValueError(f"{name} is tuned by AutoProxSGD, the same for all groups, got {param_group[name]!r}")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if any("samples" not in group for group in state["param_groups"]):
            raise ValueError("cannot load the checkpoint of another optimizer into AutoProxSGD: it lacks the estimates")
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Evaluate the closure and take a step; the first calls only collect gradients.

        If the closure raises, at either point, parameters and state are as they were.

        Args:
            closure: reevaluates the model on one sample, calls ``backward`` and returns the loss; it is called again at
                another point now and then, and must then use the same sample.
        """
        if closure is None:
            self._step_without_closure()
            return None
        self._check_groups()
        for group in self.param_groups:
            if group["lr"] != group["tuned_lr"]:
                raise RuntimeError(f"lr is tuned by AutoProxSGD, got lr={group['lr']!r}, set by a scheduler or by hand")
        sample = Sample("closure", closure, all_params(self))
        require_gradients(all_params(self))
        self._check_step()
        params = [p for p in all_params(self) if p.grad is not None]
        gradients = [gradient_of(p) for p in params]
        if not math.isfinite(square(gradients)):
            raise FloatingPointError("the gradient is not finite; parameters and state are as they were")
        learning = self._known("steps") == 0 and not self._ready()
        # only a second evaluation can fail once parameters or state have changed
        undo = self._snapshot(params) if learning or self._secant_is_due() else None
        try:
            if learning:
                self._learn(sample, params, gradients)
            else:
                self._tune(params, gradients)
                self._move(sample, params)
        except BaseException:
            if undo is not None:
                undo()
            raise
        loss: float = sample.loss
        return loss

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        refuse_nonfinite("AutoProxSGD", group)

    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        return [self.state[p]["momentum_buffer"] for p in params]

    def _buffers(self, p: Tensor) -> dict[str, Tensor]:
        """Return the average, the sum of the secants in the present window, and the direction of the first ones."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state.update({name: torch.zeros_like(p) for name in ("momentum_buffer", "secant_sum", "probe")})
        return state

    def _known(self, name: str) -> Any:
        return self.param_groups[0][name]

    def _snapshot(self, params: list[Tensor]) -> Callable[[], None]:
        """Return a function that restores parameters, buffers and estimates."""
        tensors = [t for p in params for t in (p, *self._buffers(p).values())]
        copies = [t.clone() for t in tensors]
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

        def undo() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
            for group, values in zip(self.param_groups, numbers, strict=True):
                group.update(values)

        return undo

    def _ready(self) -> bool:
        return bool(self._known("samples") >= SAMPLES and self._known("smoothness") > 0)

    def _secant_is_due(self) -> bool:
        return bool(self._known("steps") >= self._known("next_secant"))

    def _learn(self, sample: Sample, params: list[Tensor], gradients: list[Tensor]) -> None:
        """Update mean and variance of the gradients at x₀ (Welford), and take a secant along the first gradient."""
        seen = self._known("samples") + 1
        averages = [self._buffers(p)["momentum_buffer"] for p in params]
        deviations = [g - m for g, m in zip(gradients, averages, strict=True)]
        for average, deviation in zip(averages, deviations, strict=True):
            average.add_(deviation, alpha=1 / seen)
        scatter = self._known("noise_variance") + square(deviations) * (seen - 1) / seen
        self._note(samples=seen, noise_variance=scatter)

        probes = [self._buffers(p)["probe"] for p in params]
        if square(probes) == 0:
            length = math.sqrt(square(gradients)) or 1.0
            for probe, gradient in zip(probes, gradients, strict=True):
                probe.copy_(gradient / length)
        reach = probe_length(params)
        there = {p: p.add(probe, alpha=reach) for p, probe in zip(params, probes, strict=True)}
        changes = self._changes(sample, params, there)
        self._add_secant(params, changes, distance(params, [there[p] for p in params]))

        if seen >= SAMPLES and self._curvature(params) > 0:
            self._close_window(params)
            variance = scatter / (seen - 1)
            self._note(noise_variance=variance, momentum_error=variance / seen)

    def _tune(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the estimates with a new gradient, average it in, and set lr."""
        averages = [self._buffers(p)["momentum_buffer"] for p in params]
        surprise = square([g - m for g, m in zip(gradients, averages, strict=True)])
        samples = self._known("samples") + 1
        variance = self._known("noise_variance") + (surprise - self._known("noise_variance")) / samples
        smoothness = self._known("smoothness")
        drifted = (math.sqrt(self._known("momentum_error")) + smoothness * self._known("movement")) ** 2
        gain = drifted / (drifted + variance) if variance else 1.0
        for average, gradient in zip(averages, gradients, strict=True):
            average.lerp_(gradient, gain)
        lr = min(1 / (4 * smoothness), gain / (2 * smoothness))
        self._note(samples=samples, noise_variance=variance, momentum_error=gain * variance)
        self._note(momentum=1 - gain, lr=lr, tuned_lr=lr)

    def _move(self, sample: Sample, params: list[Tensor]) -> None:
        """Take the step, and a secant along it when one is due."""
        here = [p.clone() for p in params]
        self._take_step()
        movement = distance(params, here)
        due = self._secant_is_due()
        self._note(steps=self._known("steps") + 1, movement=movement)
        if due and movement > 0:
            self._add_secant(params, self._changes(sample, params, {}), movement)
            if self._known("secants") == WINDOW:
                self._close_window(params)
                self._note(next_secant=max(2 * self._known("next_secant"), 2 * WINDOW))

    def _changes(self, sample: Sample, params: list[Tensor], points: dict[Tensor, Tensor]) -> list[Tensor]:
        """Return the change of the gradients of the sample with some parameters at other points."""
        every = all_params(self)
        there = dict(zip(every, sample.gradients_at([points.get(p, p.detach()) for p in every]), strict=True))
        found = [(there[p], gradient_of(p)) for p in params]
        return [torch.zeros_like(old) if new is None else new - old for new, old in found]

    def _add_secant(self, params: list[Tensor], changes: list[Tensor], length: float) -> None:
        if length == 0:
            return
        secants = [change / length for change in changes]
        for p, secant in zip(params, secants, strict=True):
            self._buffers(p)["secant_sum"].add_(secant)
        self._note(
            secants=self._known("secants") + 1,
            secant_squares=self._known("secant_squares") + square(secants),
            extra_gradients=self._known("extra_gradients") + 1,
        )

    def _curvature(self, params: list[Tensor]) -> float:
        """Return an unbiased estimate of ‖∇²f·v‖²; 0 if there is none yet."""
        total = square([self._buffers(p)["secant_sum"] for p in params])
        return mean_product(total, self._known("secant_squares"), self._known("secants"))

    def _close_window(self, params: list[Tensor]) -> None:
        smoothness = max(self._known("smoothness"), math.sqrt(self._curvature(params)))
        for p in params:
            self._buffers(p)["secant_sum"].zero_()
        self._note(smoothness=smoothness, secants=0, secant_squares=0.0)
