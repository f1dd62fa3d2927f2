"""Small tensors of one shape, whose prox is taken of all of them at once: in a stack along a new first axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_SMALL = 1 << 14  # elements up to which copying tensors into a stack costs less than the calls that it saves


def small_and_alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of small tensors, in lists of two or more with one shape, dtype and device."""
    if len(tensors) < 2 or torch.compiler.is_compiling():
        return []
    alike: dict[Any, list[int]] = {}
    for k, x in enumerate(tensors):
        if 0 < x.numel() <= _SMALL and type(x) in (Tensor, Parameter):
            alike.setdefault((x.shape, x.dtype, x.device), []).append(k)
    return [indices for indices in alike.values() if len(indices) > 1]


def stack_steps(steps: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Return the steps of tensors of one shape as a step for their stack."""
    if len({step.shape for step in steps}) > 1:
        return torch.stack([step.expand(x.shape) for step, x in zip(steps, tensors, strict=True)])
    axes = tensors[0].dim() - steps[0].dim()  # not expanded, so that one step per group is still seen to be one
    return torch.stack([step.reshape((1,) * axes + step.shape) for step in steps])
