"""Comparable timings: candidates take turns in one process, so that other load on the machine affects all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

TURN = 1e-3  # minimum seconds of a candidate's turn


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use ``count`` threads in torch and in the BLAS of NumPy and SciPy within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(count, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def by_turns(
    candidates: Mapping[str, Callable[[], object]], repeats: int, max_seconds: float = 6.0
) -> dict[str, float]:
    """Return the median seconds per call of each candidate.

    Every candidate is first called once to warm up; this call counts only if it takes more than ``max_seconds``. A slow
    candidate gets fewer turns: at least three, and no more once they add up to ``max_seconds``. A candidate that takes
    less than a millisecond is called several times per turn, as in a loop; a single call would mostly measure the
    refilling of caches that other candidates have evicted.
    """
    first = {name: _seconds(call, 1) for name, call in candidates.items()}
    calls = dict.fromkeys(candidates, 1)
    turns: dict[str, list[float]] = {name: [value] if value > max_seconds else [] for name, value in first.items()}
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)  # the previous candidate affects caches and threads
        for name in order:
            call = candidates[name]
            if first[name] <= max_seconds and (sum(turns[name]) <= max_seconds or len(turns[name]) < 3):
                seconds = _seconds(call, calls[name])
                calls[name] = max(1, round(TURN / seconds))
                turns[name].append(seconds)
    return {name: statistics.median(times) for name, times in turns.items()}


def _seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
