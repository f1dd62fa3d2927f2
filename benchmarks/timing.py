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


def by_turns(candidates: Mapping[str, Callable[[], object]], repeats: int, most: float = 20.0) -> dict[str, float]:
    """The median seconds of each candidate.

    Each is called once before, unmeasured. One that is slow is measured fewer times, so that it takes no longer than
    ``most`` seconds in all, but three times at least.
    """
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    for _ in range(repeats):
        for name, call in candidates.items():
            if sum(taken[name]) > most and len(taken[name]) >= 3:
                continue
            begin = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
