"""Loops in one pass over memory, compiled by numba (`pip install 'proxmo[fast]'`).

`step` has the step of `ProxSGD(fused=True)` and the prox alone, `elementwise` the prox of an element and `rows` that of
a group for every penalty that has one, `compiled` what they share. All of it gives what the plain path gives, up to
rounding; what it cannot take is left to the plain path. numba is imported when something fused is first asked for.
"""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType

LOADED_BY = os.getpid()  # a forked child has none of the threads of its parent, and OpenMP would wait for them


@functools.cache
def loops() -> ModuleType | None:
    """`proxmo.kernels.step`, or ``None``, with one warning, where numba is not installed."""
    try:
        from proxmo.kernels import step
    except ImportError:
        warnings.warn("fused=True needs numba (pip install 'proxmo[fast]'): it is done the plain way", stacklevel=3)
        return None
    return step
