"""What all compiled loops share: typed views of memory, a table of tensors, and threads to go through it.

Loops are compiled by numba when they are first needed, for the types that they are needed for, which takes about a
second; numbers that a scheduler changes are arguments. They release Python's lock, so that threads share the work: as
many as `torch.get_num_threads()`, from a pool that sleeps in between.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

Loop = Callable[..., None]
CHUNK = 1 << 16  # elements to a task: in cache, and few enough tasks to be dealt out quickly
# Sums may be taken in any order, so that they are vectorised; NaN, infinities and signed zeros are as ever.
REORDERED = {"reassoc", "contract"}
_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_pools.clear)  # a child does not have the threads of its parent


@intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to numbers of the type of ``like``."""
    signature = types.CPointer(like)(address, like)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


@njit(inline="always")
def view(address: int, start: int, length: int, like: Any) -> Any:
    """``length`` numbers of the type of ``like``, from number ``start`` on."""
    return carray(_pointer(address, like), start + length)[start:]  # type: ignore[call-arg]


def addresses(*columns: Sequence[Tensor]) -> NDArray[np.int64]:
    """A row for each tensor of the first column, with where it and its companions begin in memory."""
    table: NDArray[np.int64] = np.array([[t.data_ptr() for t in row] for row in zip(*columns, strict=True)], np.int64)
    return table


def tasks(sizes: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.int64]:
    """(index, start) for all parts of ``step`` or less of things of these sizes."""
    counts = -(-sizes // step)
    index = np.repeat(np.arange(len(sizes)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([index, (np.arange(len(index)) - before) * step[index]], axis=1)


def share_out(loop: Loop, work: NDArray[np.int64], *arguments: Any) -> None:
    """Call ``loop(work, *arguments)`` on parts of the work, in threads."""
    threads = min(torch.get_num_threads(), len(work))
    if threads <= 1:
        loop(work, *arguments)
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="proxmo")
    mine, *others = np.array_split(work, threads)
    running = [pool.submit(loop, part, *arguments) for part in others]
    loop(mine, *arguments)
    for future in running:
        future.result()
