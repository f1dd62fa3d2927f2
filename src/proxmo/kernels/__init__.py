"""Fused steps and proxes: one pass over memory, in loops that numba compiles (`pip install 'proxmo[fast]'`).

A penalty says how its prox is fused by a `Kernel`. `step` runs it, alone or with the averaging and the gradient step of
`ProxSGD(fused=True)`; `adam` runs it with the moments of `ProxAdamW(fused=True)`; `tasks` shares the work among
threads. Results equal those of the eager path up to rounding; whatever a loop cannot take is left to the eager path.
numba is imported on first use.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from proxmo.kernels.moves import AdamNumbers, Moves, takes, which_fit

if TYPE_CHECKING:
    from proxmo.kernels.adam import advance_adam
    from proxmo.kernels.step import advance, prox

# A forked child has none of its parent's threads, and OpenMP would wait for them.
IMPORTING_PROCESS = os.getpid()

_NEED_NUMBA = {"advance": "step", "prox": "step", "advance_adam": "adam"}  # by module
__all__ = [
    "IMPORTING_PROCESS",
    "AdamNumbers",
    "Kernel",
    "Moves",
    "advance",
    "advance_adam",
    "available",
    "prox",
    "takes",
    "which_fit",
]


class Kernel(NamedTuple):
    """A compiled prox.

    >>> import torch
    >>> from numba import njit
    >>> from proxmo.kernels import prox
    >>> @njit(inline="always")
    ... def scale(x, c):
    ...     return x * c[0]
    >>> x = torch.tensor([2.0, 4.0])
    >>> prox(x, Kernel(scale, (0.5,)), out=x)
    >>> x
    tensor([1., 2.])
    """

    function: Any
    """Compiled by numba, once per process, not anew in every step. Per element: (x, c) ↦ prox. Per row or tensor:
    (target, source, c, peaks) writes the prox of ``source``, one-dimensional, to ``target``, which may be the same;
    ``peaks`` is scratch memory."""
    constants: tuple[float, ...]
    """c: up to six numbers, as they follow from the fields of a penalty and the step."""
    per: Literal["element", "row", "tensor"] = "element"
    """What the function takes: an element, a row along the first axis, or a whole tensor."""


@functools.cache
def available() -> bool:
    """Whether numba is installed; warns once if it is not."""
    try:
        importlib.import_module("proxmo.kernels.step")
    except ImportError:
        warnings.warn("fused=True needs numba (pip install 'proxmo[fast]'): using the eager path", stacklevel=3)
        return False
    return True


def __getattr__(name: str) -> Any:
    """Import the functions that need numba on first use."""
    if name in _NEED_NUMBA:
        return getattr(importlib.import_module(f"proxmo.kernels.{_NEED_NUMBA[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
