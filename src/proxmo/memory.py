"""Large memory in pages of a size that suits it."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

import torch
from torch import Tensor

from proxmo.parts import is_ordinary

HUGE = 1 << 22  # bytes, from which on NumPy does so, too


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.empty_like`, of large tensors on a CPU in huge pages where the system has them.

    The first write to each page of new memory waits for the system to find and clear it. For a tensor in pages of 4 KiB
    that takes several times as long as all that a prox does. Later passes gain a little, too, with fewer pages to look
    up.
    """
    result = torch.empty_like(x, dtype=dtype)
    size = result.numel() * result.element_size()
    if size >= HUGE and is_ordinary(result) and (advise := _advise()) is not None:
        first = -(-result.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # pages that belong to the tensor alone
        last = (result.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(first, last - first, mmap.MADV_HUGEPAGE)  # advice only: if it is not taken nothing else changes
    return result


@functools.cache
def _advise() -> Any:
    """The system's call for advice about memory, if it knows of huge pages."""
    function = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
