"""The random iterate that the theorems are about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from proxmo import checks, shards

_STREAM = 0x9E3779B9  # XORed into torch's seed, so that the draws are unrelated to torch's own random numbers


class RandomIterate:
    """Keep one of the iterates x₁, x₂, … seen so far, drawn with probability proportional to its weight.

    The guarantees of the theory hold at such a random iterate, not at the last one. This costs one copy of the
    parameters and one random number per step, and needs no horizon: after each step, the new iterate replaces the kept
    one with probability weight/(sum of weights) (reservoir sampling).

    By default the draws are seeded from ``torch.initial_seed()``: runs with different ``torch.manual_seed`` draw
    independently, and torch's default generator is not advanced. Instances created under the same seed make the same
    draws; for independent runs under one seed, pass each a ``generator``. The draws do not depend on the parameters, so
    ranks that start from one seed and make the same calls keep the same iterate.

    At the kept iterate, measure stationarity with `criteria.gradient_mapping` if ψ is not differentiable, because the
    certificates of the optimizer hold only at the last iterate.

    Args:
        params: the parameters, as for an optimizer but without groups.
        generator: a CPU generator to draw from, seeded alike on all ranks. By default a new one, seeded from torch's
            seed. If ``torch.distributed`` is initialized, that is the seed of rank 0, which it broadcasts: all ranks
            must then create the instance.

    >>> x = torch.zeros(1)
    >>> kept = RandomIterate([x], generator=torch.Generator().manual_seed(1))
    >>> for k in range(1, 101):
    ...     _ = x.fill_(k)  # an optimizer step
    ...     kept.update()
    >>> with kept.swapped_in():
    ...     print(int(x), kept.index)
    81 81
    >>> int(x)
    100
    """

    def __init__(self, params: Iterable[Tensor], generator: torch.Generator | None = None) -> None:
        self._params = list(params)
        self._kept = [p.detach().clone() for p in self._params]
        self._generator = torch.Generator().manual_seed(_default_seed()) if generator is None else generator
        self._total = 0.0
        self._seen = 0
        self.index = 0
        """The number of the kept iterate; 0 is the starting point, before any update."""

    @torch.no_grad()
    def update(self, weight: float = 1.0) -> None:
        """Draw whether to keep the current parameters; call after each optimizer step.

        Args:
            weight: a number > 0, such as 1 or `IncreasingSchedule.weight`.
        """
        weight = checks.more_than(0, "weight", weight)
        self._seen += 1
        self._total += weight
        draw = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        if draw * self._total < weight:
            self.index = self._seen
            for kept, param in zip(self._kept, self._params, strict=True):
                kept.copy_(param)

    @torch.no_grad()
    def copy_to(self, params: Iterable[Tensor]) -> None:
        """Copy the kept iterate into ``params``, which are in the order of those given to the constructor."""
        targets = list(params)
        if [t.shape for t in targets] != [k.shape for k in self._kept]:
            raise ValueError(
                f"params must have the shapes {[tuple(k.shape) for k in self._kept]}, "
                f"got {[tuple(t.shape) for t in targets]}"
            )
        for target, kept in zip(targets, self._kept, strict=True):
            target.copy_(kept)

    @contextmanager
    def swapped_in(self, model: nn.Module | None = None) -> Iterator[None]:
        """Set the parameters to the kept iterate within the block, for evaluation, and restore them afterwards.

        Args:
            model: the model, needed after ``fully_shard``: it may still hold weights gathered before, which are dropped
                here. After `copy_to`, call ``model.reshard()`` to drop them.
        """
        current = [p.detach().clone() for p in self._params]
        shards.reshard_modules(model)
        self.copy_to(self._params)
        try:
            yield
        finally:
            shards.reshard_modules(model)
            with torch.no_grad():
                for param, value in zip(self._params, current, strict=True):
                    param.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain numbers; a run resumed from it makes the same draws."""
        return {
            "kept": [kept.clone() for kept in self._kept],
            "index": self.index,
            "seen": self._seen,
            "total": self._total,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned."""
        shapes = [tuple(kept.shape) for kept in state["kept"]]
        if shapes != [tuple(kept.shape) for kept in self._kept]:
            raise ValueError(f"state must hold tensors of shapes {[tuple(k.shape) for k in self._kept]}, got {shapes}")
        index, seen, total, generator = (state[name] for name in ("index", "seen", "total", "generator"))
        self._generator.set_state(generator.cpu())
        self.index, self._seen, self._total = index, seen, total
        for kept, saved in zip(self._kept, state["kept"], strict=True):
            kept.copy_(saved)


def _default_seed() -> int:
    """Return a seed made from torch's seed, that of rank 0 on all ranks, without advancing torch's generator."""
    seeds = [torch.initial_seed()]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(seeds, src=0)  # of objects: seeds exceed int64, and NCCL sends no CPU tensors
    return seeds[0] ^ _STREAM
