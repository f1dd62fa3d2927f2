"""Compare the outputs of two models."""

from __future__ import annotations

import torch
from torch import Tensor

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def largest_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest absolute difference of two lists of outputs.

    It is infinite if shapes differ, or where only one of two elements is NaN.
    """
    if [x.shape for x in actual] != [x.shape for x in expected]:
        return float("inf")
    return max((_difference(a, b) for a, b in zip(actual, expected, strict=True)), default=0.0)


def are_close(actual: list[Tensor], expected: list[Tensor], coarsest: torch.dtype | None = None) -> bool:
    """Return whether outputs differ by rounding only: by 1e-5 · max(1, largest element of the tensor) in float32.

    ``coarsest`` is a precision that numbers are rounded to inside of the model, if that is below that of its outputs.
    """
    if [x.shape for x in actual] != [x.shape for x in expected]:
        return False
    return all(_difference(a, b) <= _tolerance(b, coarsest) for a, b in zip(actual, expected, strict=True))


def _difference(a: Tensor, b: Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    distance = torch.where(same, 0.0, (a.double() - b.double()).abs()).nan_to_num(nan=torch.inf)
    return float(distance.max()) if distance.numel() else 0.0


def _tolerance(tensor: Tensor, coarsest: torch.dtype | None) -> float:
    if not tensor.is_floating_point():
        return 0.0
    finite = tensor[tensor.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    relative = max(_relative_tolerance(dtype) for dtype in (tensor.dtype, coarsest or tensor.dtype))
    return relative * max(1.0, largest)


def _relative_tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 8 * torch.finfo(dtype).eps)
