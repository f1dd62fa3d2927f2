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
    x = move.param
    if x.dtype not in (torch.float32, torch.float64) or x.device.type != "cpu" or x.numel() == 0:
        return False
    tensors = [t for t in move if t is not None]
    if not all(type(t) in (Tensor, Parameter) and t.dtype == x.dtype and not t.is_neg() for t in tensors):
        return False
    if all(t.is_contiguous() for t in tensors):
        return True
    # in any order, if it is the same and the rows along the first axis lie one after the other
    return _has_rows(x) and all(t.device == x.device and t.stride() == x.stride() for t in tensors)


def _has_rows(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
