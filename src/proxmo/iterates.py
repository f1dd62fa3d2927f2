"""The random iterate that the theorems are about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from proxmo import checks, shards


class RandomIterate:
    """Keeps one of the iterates x₁, x₂, … seen so far, drawn with probability proportional to its weight.

    The guarantees of the theory hold at such an iterate, not at the last one. It costs one copy of the parameters and
    one random number per step, and needs no horizon: after each step the new iterate replaces the kept one with
    probability weight/(sum of weights), which leaves each with its share (reservoir sampling).

    The draws do not depend on the parameters, so processes that make the same calls and start from the same seed keep
    the same iterate. Where ψ has kinks, measure it with `criteria.gradient_mapping`: the certificates of steps do not
    follow it.

    Args:
        params: the parameters, as for an optimizer but without groups.
        generator: a CPU generator of the random numbers; by default a new one with seed 0, the same in every process.

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
        self._generator = torch.Generator().manual_seed(0) if generator is None else generator
        self._total = 0.0
        self._seen = 0
        self.index = 0
        """Which iterate is kept: 0 is the start, before any update."""

    @torch.no_grad()
    def update(self, weight: float = 1.0) -> None:
        """Offer the present parameters; call after each optimizer step.

        Args:
            weight: > 0, for example 1 or `IncreasingSchedule.weight`.
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
        """Write the kept iterate into ``params``, in the order given at the start."""
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
        """Within the block the parameters are the kept iterate, for evaluation; afterwards what they were.

        Args:
            model: needed after ``fully_shard``, which may go on with weights that it has gathered before; that is put
                right here, and with ``model.reshard()`` after `copy_to`.
        """
        present = [p.detach().clone() for p in self._params]
        shards.forget_gathered(model)
        self.copy_to(self._params)
        try:
            yield
        finally:
            shards.forget_gathered(model)
            with torch.no_grad():
                for param, value in zip(self._params, present, strict=True):
                    param.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from here with the same draws: tensors and plain numbers."""
        return {
            "kept": [kept.clone() for kept in self._kept],
            "index": self.index,
            "seen": self._seen,
            "total": self._total,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of `state_dict`."""
        shapes = [tuple(kept.shape) for kept in state["kept"]]
        if shapes != [tuple(kept.shape) for kept in self._kept]:
            raise ValueError(f"state must hold tensors of shapes {[tuple(k.shape) for k in self._kept]}, got {shapes}")
        index, seen, total, generator = (state[name] for name in ("index", "seen", "total", "generator"))
        self._generator.set_state(generator.cpu())
        self.index, self._seen, self._total = index, seen, total
        for kept, saved in zip(self._kept, state["kept"], strict=True):
            kept.copy_(saved)
