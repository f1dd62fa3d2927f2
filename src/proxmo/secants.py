"""Norms and distances, where a list of tensors stands for one vector, and the smoothness of f from secants.

A secant is the change of the gradient of one sample between two points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from proxmo import shards

PROBE = 1e-3  # length of a probing step, relative to 1 + ‖x‖


def square(vector: list[Tensor]) -> float:
    """Return ‖vector‖² in float64, summed over all ranks where tensors are sharded.

    >>> square([torch.tensor([3.0]), torch.tensor([4.0])])
    25.0
    """
    return shards.total_over_shards([shards.local(t.detach()).double().square().sum() for t in vector], vector)


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Return ‖a − b‖ in float64.

    >>> distance([torch.tensor([3.0])], [torch.tensor([1.0])])
    2.0
    """
    return math.sqrt(square([x.detach().double() - y.detach().double() for x, y in zip(a, b, strict=True)]))


def probe_length(params: list[Tensor]) -> float:
    """Return the distance between the two points of a secant: small, but well above the rounding of the dtype."""
    rounding = max(math.sqrt(torch.finfo(p.dtype).eps) for p in params)
    return max(PROBE, rounding) * (1 + math.sqrt(square(params)))


def mean_product(square_of_sum: float, sum_of_squares: float, count: int) -> float:
    """Return the mean inner product over pairs of distinct secants out of ``count``; 0 if negative or without pairs.

    For secants of different samples its expectation is ‖∇²f·v‖²: independent noise cancels in the product, but not in
    ‖secant‖².

    >>> mean_product(square_of_sum=9.0, sum_of_squares=5.0, count=2)
    2.0
    """
    return max((square_of_sum - sum_of_squares) / (count * (count - 1)), 0.0) if count > 1 else 0.0
