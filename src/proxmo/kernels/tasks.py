"""What all compiled loops share: typed views of memory, a table of tasks, and threads that take tasks from it.

numba compiles a loop on first use for one dtype, which takes one to three seconds; numbers that a scheduler changes are
arguments. There are `torch.get_num_threads()` threads, and they are torch's own where possible: its OpenMP keeps them
spinning after each operation, so that other threads would find no free core.
"""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import floordiv
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from proxmo.kernels import IMPORTING_PROCESS

Loop = Callable[..., None]
CHUNK = 1 << 16  # elements per task: they fit in cache, and tasks are few enough to hand out quickly
FOR_ONE_THREAD = 1 << 15  # elements, as in torch
BLOCK = 512  # elements of a row that are summed at once
CONSTANTS = 6  # the most that a kernel may have
ARRAYS = 4  # tensors that a loop reads or writes
NUMBERS_OF_LOOP = 8 + CONSTANTS
NUMBERS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
# Sums may be reordered, so that LLVM vectorises them; NaN, infinities and signed zeros are kept. Everything is inlined:
# short rows would be mostly calls otherwise.
reordered = njit(error_model="numpy", fastmath={"reassoc", "contract"}, forceinline=True)
inlined = njit(inline="always", error_model="numpy")


@njit(error_model="numpy", forceinline=True)
def write(target: Any, source: Any, prox: Any, c: Any) -> None:
    """Write prox(source, c) to ``target``. Two loops: LLVM vectorises neither if the arrays may overlap."""
    if target.ctypes.data == source.ctypes.data:
        for i in range(len(target)):
            target[i] = prox(target[i], c)
    else:
        for i in range(len(target)):
            target[i] = prox(source[i], c)


@inlined
def keep(x: Any, c: Any) -> Any:
    """Return ``x``: the prox of no penalty."""
    return x


@intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    """Turn an address into a pointer to numbers of the type of ``like``."""
    signature = types.CPointer(like)(address, like)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


def _instructions(result_types: dict[Any, Any], emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a numba function of one number that is made of LLVM instructions, given its type for each argument's."""

    @intrinsic
    def function(typing_context: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, arguments[0], context.get_value_type(signature.return_type))

        return result_types[number](number), generate

    return function


def _flip_if_negative(builder: Any, bits: Any) -> Any:
    """Flip all bits but the sign of negative numbers, so that they are in order, too."""
    sign = builder.ashr(bits, bits.type(bits.type.width - 1))
    return builder.xor(bits, builder.lshr(sign, bits.type(1)))


def _increment(builder: Any, address: Any, to: Any) -> Any:
    """Return the number at the address and increment it, atomically."""
    return builder.atomic_rmw("add", builder.inttoptr(address, to.as_pointer()), to(1), "monotonic")


_take_number = _instructions({types.int64: types.int64}, _increment)
# Map a float to an integer of the same order, with NaN above infinity, and back: LLVM vectorises the maximum of
# integers, but not that of floats.
_INTEGERS = {types.float32: types.int32, types.float64: types.int64}
_FLOATS = {integer: x for x, integer in _INTEGERS.items()}
ordered = _instructions(_INTEGERS, lambda builder, x, to: _flip_if_negative(builder, builder.bitcast(x, to)))
from_ordered = _instructions(_FLOATS, lambda builder, bits, to: builder.bitcast(_flip_if_negative(builder, bits), to))


@njit(inline="always")
def view(address: int, length: int, like: Any) -> Any:
    """Return an array of ``length`` numbers of the type of ``like`` at an address."""
    return carray(_pointer(address, like), length)  # type: ignore[call-arg]


def run(
    loop: Loop,
    dtype: torch.dtype,
    addresses: list[list[int]],
    rows: list[int],
    elements: list[int],
    numbers: list[float],
) -> None:
    """Call ``loop(addresses, rows, width, numbers)`` for all rows of all tensors, in threads.

    Args:
        loop: takes up to four addresses of some rows: of a parameter, and of what belongs to it (0 for nothing).
        dtype: the dtype of the elements.
        addresses: a list for the parameters, and one for each other kind of tensors, in the same memory layout.
        rows: the number of rows of each parameter.
        elements: the number of elements of each parameter.
        numbers: up to `NUMBERS_OF_LOOP` numbers for the loop; it gets zeros for the rest.
    """
    absent = [0] * len(rows) * (ARRAYS - len(addresses))
    table = array("q", [*(a for column in addresses for a in column), *absent, *rows, *map(floordiv, elements, rows)])
    room = array("d", numbers)
    room.extend([0.0] * (NUMBERS_OF_LOOP - len(numbers)))
    header = array("q", [0, len(rows), table.buffer_info()[0], room.buffer_info()[0]])
    function, argument = _task_taker(loop, NUMBERS[dtype]), header.buffer_info()[0]
    total = sum(elements)
    tasks = min(sum(rows), max(len(rows), -(-total // CHUNK)))  # a few more if rows do not fill a chunk
    threads = min(torch.get_num_threads(), tasks, -(-total // FOR_ONE_THREAD))
    if threads <= 1:
        function.ctypes(argument)
    elif (parallel := _openmp()) is not None and os.getpid() == IMPORTING_PROCESS:
        parallel(function.address, argument, threads, 0)
    else:
        pool = _pool(os.getpid(), threads - 1)
        others = [pool.submit(function.ctypes, argument) for _ in range(threads - 1)]
        function.ctypes(argument)
        for other in others:
            other.result()


@functools.cache
def _task_taker(loop: Loop, number: Any) -> Any:
    """Compile what each thread calls, with the address of a header: it takes tasks of some rows until none is left."""
    whole, real, size = np.int64(0), np.float64(0), np.dtype(number).itemsize

    @inlined
    def moved(address: Any, skip: Any) -> Any:
        return address + skip if address != 0 else 0

    @cfunc(types.void(types.int64), error_model="numpy")
    def take_tasks(address: Any) -> None:
        header = view(address, 4, whole)
        tensors, table = header[1], view(header[2], (ARRAYS + 2) * header[1], whole)
        values = view(header[3], NUMBERS_OF_LOOP, real).astype(number)
        numbers: Any = to_fixed_tuple(values, NUMBERS_OF_LOOP)  # type: ignore[call-arg]  # numba supplies the context
        tensor, rows, width, most, before, after = -1, 0, 1, 1, 0, 0
        while True:
            task: Any = _take_number(address)
            while task >= after:  # task numbers only grow, so this tensor is done
                tensor += 1
                if tensor == tensors:
                    return
                rows, width = table[ARRAYS * tensors + tensor], table[(ARRAYS + 1) * tensors + tensor]
                most = max(CHUNK // width, 1)
                before, after = after, after - (-rows // most)
            first = (task - before) * most
            skip = first * width * size
            places = (
                moved(table[tensor], skip),
                moved(table[tensors + tensor], skip),
                moved(table[2 * tensors + tensor], skip),
                moved(table[3 * tensors + tensor], skip),
            )
            loop(places, min(most, rows - first), width, numbers)

    return take_tasks


@functools.cache
def _openmp() -> Any:
    """Return the function by which gcc's OpenMP starts threads; ``None`` if torch has loaded another OpenMP."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if os.name == "posix" else None
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
    return function


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="proxmo")
