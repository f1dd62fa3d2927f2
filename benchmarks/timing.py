"""Times that can be compared: all candidates by turns in one run, so that whatever else the machine does meets each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block torch has this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_turns(candidates: Mapping[str, Callable[[], object]], repeats: int, most: float = 6.0) -> dict[str, float]:
    """The median seconds of each candidate.

    Each is called once before, which counts only if that alone takes longer than ``most`` seconds. One that is slow is
    measured fewer times, so that it takes little longer than ``most`` seconds in all, but three times at least.
    """
    first = {name: _seconds(call) for name, call in candidates.items()}
    taken: dict[str, list[float]] = {name: [value] if value > most else [] for name, value in first.items()}
    for _ in range(repeats):
        for name, call in candidates.items():
            if first[name] <= most and (sum(taken[name]) <= most or len(taken[name]) < 3):
                taken[name].append(_seconds(call))
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
