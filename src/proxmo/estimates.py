"""Estimates of the constants of a problem, from a model and its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, overload

import torch
from torch import Tensor, nn

from proxmo import checks, shards
from proxmo.penalties.base import Penalty
from proxmo.secants import distance, mean_product, probe_length, square

DIRECTIONS = 5


@dataclass(frozen=True)
class Estimates(Mapping[str, float]):
    """The constants that `theory.plan` needs, as a mapping: ``plan(**estimates, horizon=…)``. Prints as a table.

    >>> print(Estimates(smoothness=1.5, noise_variance=4.0, noise_interval=(3.0, 5.0), initial_gap=2.0, samples=16))
    smoothness L         1.5
    noise variance σ²    4     (95%: 3 to 5)
    initial gap F₀       2
    """

    smoothness: float
    """L, the largest ‖∇²f·v‖ over the unit directions tried."""
    noise_variance: float
    """σ², the variance of a gradient sample."""
    noise_interval: tuple[float, float]
    """A 95% confidence interval for σ²."""
    initial_gap: float
    """F(x₀) minus the lower bound given for F*."""
    samples: int
    """The number of samples used."""

    _KEYS = ("smoothness", "noise_variance", "initial_gap")

    def __getitem__(self, key: str) -> float:
        if key not in self._KEYS:
            raise KeyError(key)
        value: float = getattr(self, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._KEYS)

    def __len__(self) -> int:
        return len(self._KEYS)

    def __str__(self) -> str:
        low, high = self.noise_interval
        return (
            f"smoothness L         {self.smoothness:.3g}\n"
            f"noise variance σ²    {self.noise_variance:<5.3g} (95%: {low:.3g} to {high:.3g})\n"
            f"initial gap F₀       {self.initial_gap:.3g}"
        )


@overload
def estimate_constants(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    loader: Iterable[tuple[Any, Any]],
    /,
    *,
    penalty: Penalty | None = None,
    lower_bound: float = 0.0,
    samples: int = 16,
) -> Estimates: ...


@overload
def estimate_constants(
    closure: Callable[[int], Tensor],
    params: Iterable[Tensor],
    /,
    *,
    penalty: Penalty | None = None,
    lower_bound: float = 0.0,
    samples: int = 16,
) -> Estimates: ...


def estimate_constants(
    source: Any,
    second: Any,
    third: Any = None,
    /,
    *,
    penalty: Penalty | None = None,
    lower_bound: float = 0.0,
    samples: int = 16,
) -> Estimates:
    """Estimate L, σ² and F₀ at the current parameters: ``estimate_constants(model, loss, loader)``, or with a closure.

    σ² is the unbiased sample variance of mini-batch gradients. L is the largest ‖∇²f·v‖ that
    a power iteration finds with secants (differences of the gradient of one mini-batch at two points); products of
    secants of different mini-batches cancel the noise. Parameters, ``.grad`` and buffers are left unchanged.

    Args:
        source: the model; the second and third arguments are then ``loss``, as in ``loss(model(inputs), targets)``, and
            a loader of pairs (inputs, targets). Or a closure k ↦ loss on sample k; the second argument is then the
            parameters.
        penalty: ψ on all parameters, for F₀.
        lower_bound: a lower bound on F*, 0 for ordinary losses.
        samples: the number of mini-batches to use, at least 2; fewer if the loader has fewer.

    >>> import proxmo
    >>> noise = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> x = torch.full((3,), 2.0, requires_grad=True)
    >>> found = estimate_constants(lambda k: 5 * x.square().sum() / 2 + (noise[k] * x).sum(), [x], samples=64)
    >>> round(found.smoothness, 2), 2 < found.noise_variance < 4, round(proxmo.theory.plan(**found).M / 10) > 0
    (5.0, True, True)
    """
    checks.count("samples", samples, least=2)
    if isinstance(source, nn.Module):
        batches = list(islice(third, samples))
        if len(batches) < 2:
            raise ValueError(f"loader must yield at least two batches, got {len(batches)}")
        samples = len(batches)
        model, loss = source, second
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        try:
            params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
            return _estimate(lambda k: loss(model(batches[k][0]), batches[k][1]), params, penalty, lower_bound, samples)
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
    return _estimate(source, list(second), penalty, lower_bound, samples)


def _estimate(
    closure: Callable[[int], Tensor], params: list[Tensor], penalty: Penalty | None, lower_bound: float, samples: int
) -> Estimates:
    if shards.any_sharded(params):
        raise ValueError("estimate_constants needs an unsharded model, got sharded parameters (DTensor)")
    losses, gradients = zip(*(_evaluate(closure, k, params) for k in range(samples)), strict=True)
    mean = _mean(gradients)
    squares = [square([g - m for g, m in zip(gs, mean, strict=True)]) for gs in gradients]
    variance = math.fsum(squares) / (samples - 1)
    spread = math.sqrt(math.fsum((s * samples / (samples - 1) - variance) ** 2 for s in squares) / (samples - 1))
    margin = 1.96 * spread / math.sqrt(samples)
    objective = math.fsum(losses) / samples
    if penalty is not None:
        objective += float(penalty.total([p.detach() for p in params]))
    return Estimates(
        smoothness=_smoothness(closure, params, gradients, mean),
        noise_variance=variance,
        noise_interval=(max(variance - margin, 0.0), variance + margin),
        initial_gap=objective - lower_bound,
        samples=samples,
    )


def _smoothness(
    closure: Callable[[int], Tensor], params: list[Tensor], gradients: tuple[list[Tensor], ...], mean: list[Tensor]
) -> float:
    """Return the largest ‖∇²f·v‖ over a few unit directions v of a power iteration."""
    start = [p.detach().clone() for p in params]
    length = probe_length(start)
    used = range(min(len(gradients), 8))
    largest = 0.0
    # Start half along the gradient, half at random: from the gradient alone, a power iteration may never leave a
    # subspace of small curvature.
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(p.shape, generator=generator).to(p) for p in start]
    share = math.sqrt(square(mean) / max(square(random), 1e-300)) or 1.0
    direction = [m + share * r for m, r in zip(mean, random, strict=True)]
    for _ in range(DIRECTIONS):
        norm = math.sqrt(square(direction))
        if norm == 0:
            break
        try:
            with torch.no_grad():
                for p, d in zip(params, direction, strict=True):
                    p.add_(d, alpha=length / norm)
            moved_by = distance(params, start)
            moved = [_evaluate(closure, k, params)[1] for k in used]
        finally:
            with torch.no_grad():
                for p, x in zip(params, start, strict=True):
                    p.copy_(x)
        secants = [[(b - a) / (moved_by or 1.0) for a, b in zip(gradients[k], moved[k], strict=True)] for k in used]
        direction = _mean(secants)
        total = len(used) ** 2 * square(direction)
        largest = max(largest, math.sqrt(mean_product(total, math.fsum(map(square, secants)), len(used))))
    return largest


def _evaluate(closure: Callable[[int], Tensor], k: int, params: list[Tensor]) -> tuple[float, list[Tensor]]:
    with torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(k)  # the same dropout at both ends of a secant
        loss = closure(k)
        gradients = torch.autograd.grad(loss, params, allow_unused=True)
    if not bool(loss.isfinite()):
        raise FloatingPointError(f"the loss on sample {k} is not finite: {float(loss.detach())}")
    return float(loss.detach()), [
        torch.zeros_like(p) if g is None else g for p, g in zip(params, gradients, strict=True)
    ]


def _mean(vectors: Iterable[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(parts).mean(0) for parts in zip(*vectors, strict=True)]
