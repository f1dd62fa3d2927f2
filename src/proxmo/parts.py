"""Large tensors on a CPU in parts, so that each pass of a computation finds in cache what the one before left there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

# Elements of a part, at least: measured, with the few buffers of a prox; smaller parts are all overhead of calls.
PART = 1 << 19


def is_at_hand(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor in the memory of the CPU, and its numbers are all that is asked for."""
    return is_ordinary(x) and not (x.requires_grad and torch.is_grad_enabled())


def is_ordinary(x: Tensor) -> bool:
    """The same outside autograd.

    Where operations are recorded (`torch.compile`, `torch.jit.trace`, `make_fx`, autograd) or stand for others
    (`torch.vmap`, dual numbers), what is done beside torch would be lost.
    """
    return (
        type(x) in (Tensor, Parameter)
        and x.is_cpu
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
        and forward_ad._current_level < 0
    )


def number_of_parts(x: Tensor) -> int:
    """In how many parts along the first axis to take ``x``, for `Tensor.chunk`; 1 where it is best left whole."""
    if x.numel() < 2 * PART or not is_at_hand(x) or x.stride(0) == 0:
        return 1
    return min(x.numel() // PART, x.shape[0])
