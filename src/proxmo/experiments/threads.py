"""How many threads an experiment uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run a block, or a decorated function, on one thread, the usual number afterwards.

    Experiments on small tensors gain nothing from more, and lose much where another process competes for the cores.

    >>> usual = torch.get_num_threads()
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == usual
    True
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
