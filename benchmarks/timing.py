"""Times that can be compared: all candidates by turns in one run, so that whatever else the machine does meets each."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

TURN = 1e-3  # seconds that a turn of one candidate takes at least


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block torch has this many threads, and so has the BLAS of NumPy and SciPy."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(count, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def by_turns(candidates: Mapping[str, Callable[[], object]], repeats: int, most: float = 6.0) -> dict[str, float]:
    """The median seconds of each candidate.

    Each is called once before, which counts only if that alone takes longer than ``most`` seconds. One that is slow is
    measured fewer times, so that it takes little longer than ``most`` seconds in all, but three times at least. One
    that takes less than a millisecond is called several times in each turn, as in a loop: else it would be measured how
    long it takes to fetch it into a cache that others have filled.
    """
    first = {name: _seconds(call, 1) for name, call in candidates.items()}
    calls = dict.fromkeys(candidates, 1)
    taken: dict[str, list[float]] = {name: [value] if value > most else [] for name, value in first.items()}
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)  # a candidate also pays for what the one before has left in caches and threads
        for name in order:
            call = candidates[name]
            if first[name] <= most and (sum(taken[name]) <= most or len(taken[name]) < 3):
                seconds = _seconds(call, calls[name])
                calls[name] = max(1, round(TURN / seconds))
                taken[name].append(seconds)
    return {name: statistics.median(times) for name, times in taken.items()}


def _seconds(call: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times
