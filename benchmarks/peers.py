"""Other libraries' prox of ℓ∞,1 by rows, as one calls them: (matrix, threshold) ↦ matrix. Nothing installs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

RowProx = Callable[[Tensor, float], Tensor]


def by_sorting(x: Tensor, threshold: float) -> Tensor:
    """The textbook way: sort each row and find its level among the cumulated sums."""
    magnitudes = x.abs()
    descending = magnitudes.sort(dim=1, descending=True).values
    ranks = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
    levels = (descending.cumsum(1) - threshold) / ranks
    active = (descending > levels).sum(1, keepdim=True).clamp(min=1)
    level = levels.gather(1, active - 1).clamp(min=0)
    vanishes = magnitudes.sum(1, keepdim=True) <= threshold
    return torch.where(vanishes, 0.0, torch.minimum(torch.maximum(x, -level), level))


def _proximal_gradient(module: Any) -> RowProx:
    from proximal_gradient.proximalGradient import linf1

    def call(x: Tensor, threshold: float) -> Tensor:
        y = x.clone()
        linf1(y, reg=threshold, lr=1.0)
        return y

    return call


def _proxop(module: Any) -> RowProx:
    return lambda x, threshold: torch.from_numpy(np.asarray(module.Linf1().prox(x.numpy(), threshold)))


def _jaxopt(module: Any) -> RowProx:
    import jax

    rows = jax.jit(jax.vmap(lambda row, t: row - module.projection.projection_l1_ball(row, t), in_axes=(0, None)))
    return lambda x, threshold: torch.from_numpy(np.array(rows(x.numpy(), threshold)))


def _pyproximal(module: Any) -> RowProx:
    def call(x: Tensor, threshold: float) -> Tensor:
        ball = module.L1Ball(x.shape[1], threshold, maxiter=200, xtol=1e-12)
        return torch.from_numpy(np.stack([row - ball.prox(row, 1.0) for row in x.numpy()]))

    return call


PEERS: dict[str, Callable[[Any], RowProx]] = {
    "proximal_gradient": _proximal_gradient,
    "proxop": _proxop,
    "jaxopt": _jaxopt,
    "pyproximal": _pyproximal,
}


def installed() -> Iterator[tuple[str, RowProx | str]]:
    """For each peer its prox, or why there is none."""
    for name, make in PEERS.items():
        try:
            yield name, make(importlib.import_module(name))
        except Exception as error:  # peers break in ways of their own
            yield name, f"{type(error).__name__}: {error}"
