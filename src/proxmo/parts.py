"""Large tensors on a CPU in parts, so that each pass of a computation finds in cache what the one before left there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

PART = 1 << 19  # elements: measured, with the few buffers of a prox; smaller parts are all overhead of calls


def rows_to_a_part(x: Tensor) -> int | None:
    """How many indices of the first axis make a part, for `torch.split`; ``None`` where ``x`` is best left whole."""
    if x.numel() < 2 * PART or type(x) not in (Tensor, Parameter) or not x.is_cpu or torch.compiler.is_compiling():
        return None
    rows = max(PART * x.shape[0] // x.numel(), 1)
    return rows if rows < x.shape[0] else None
