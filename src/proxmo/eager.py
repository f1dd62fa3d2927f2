"""Eager CPU tensors: what counts as one, and how a large one is cut into row chunks that fit in cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

# Elements per row chunk. A prox makes a few passes and temporaries, which then stay in cache; smaller chunks would be
# mostly call overhead.
ROW_CHUNK = 1 << 19


def is_eager_cpu(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary CPU tensor whose values may be read outside torch and used in branches.

    False wherever operations are recorded (`torch.compile`, `torch.jit.trace`, `make_fx`, autograd) or transformed
    (`torch.vmap`, forward-mode AD): what is computed outside torch would be lost there.
    """
    return (
        type(x) in (Tensor, Parameter)
        and x.is_cpu
        and not torch.compiler.is_compiling()
        and not (x.requires_grad and torch.is_grad_enabled())
        and torch._C._get_tracing_state() is None
        and not is_transformed(x)
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
        and forward_ad._current_level < 0
    )


def is_transformed(x: Tensor) -> bool:
    """Whether ``x`` stands for other tensors inside `torch.vmap` or `torch.func.grad`."""
    return not torch.compiler.is_compiling() and bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def row_chunks(x: Tensor, elements: int | None = None) -> int:
    """Return the number of row chunks of about so many elements to cut ``x`` into, for `Tensor.chunk`."""
    elements = elements or ROW_CHUNK
    if x.numel() < 2 * elements or not is_eager_cpu(x) or x.stride(0) == 0:
        return 1
    return min(x.numel() // elements, x.shape[0])
