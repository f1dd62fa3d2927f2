"""What a fused step is made of, and which tensors it can take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter


class Move(NamedTuple):
    """A parameter, the direction to move it in, and the gradient to average into the direction first, if any."""

    param: Tensor
    direction: Tensor
    gradient: Tensor | None


def fits(move: Move) -> bool:
    """Whether compiled loops can take it: ordinary dense tensors of full precision, alike in memory."""
    x, direction, gradient = move
    tensors = (x, direction) if gradient is None else (x, direction, gradient)
    contiguous = True
    for t in tensors:  # asked of every tensor in every step, so in the order of cost
        if type(t) not in (Parameter, Tensor) or not t.is_cpu or t.dtype != x.dtype or t.is_neg():
            return False
        contiguous = contiguous and t.is_contiguous()
    if x.dtype not in (torch.float32, torch.float64) or x.numel() == 0:
        return False
    # in any order, if it is the same and the rows along the first axis lie one after the other
    return contiguous or (_has_rows(x) and all(t.stride() == x.stride() for t in tensors))


def _has_rows(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
