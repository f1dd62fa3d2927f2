"""What gradients of the same sample at two points say about the smoothness of f; lists of tensors are one vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from proxmo import shards

PROBE = 1e-3  # how far a probing step goes, relative to 1 + ‖x‖


def square(vector: list[Tensor]) -> float:
    """‖·‖² in float64, over all processes that hold a part.

    >>> square([torch.tensor([3.0]), torch.tensor([4.0])])
    25.0
    """
    return shards.total([shards.local(t.detach()).double().square().sum() for t in vector], vector)


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """‖a − b‖ in float64.

    >>> distance([torch.tensor([3.0])], [torch.tensor([1.0])])
    2.0
    """
    return math.sqrt(square([x.detach().double() - y.detach().double() for x, y in zip(a, b, strict=True)]))


def probe_length(params: list[Tensor]) -> float:
    """How far to go for a secant: a little, but more than rounding in the dtype of the parameters swallows."""
    rounding = max(math.sqrt(torch.finfo(p.dtype).eps) for p in params)
    return max(PROBE, rounding) * (1 + math.sqrt(square(params)))


def mean_product(square_of_sum: float, sum_of_squares: float, count: int) -> float:
    """The mean inner product of two different ones of ``count`` secants; 0 if negative or there are no two.

    On different samples its expectation is ‖∇²f·v‖²: the noise of either cancels, which in ‖secant‖² it does not.

    >>> mean_product(square_of_sum=9.0, sum_of_squares=5.0, count=2)
    2.0
    """
    return max((square_of_sum - sum_of_squares) / (count * (count - 1)), 0.0) if count > 1 else 0.0
