"""What an estimator is asked for: a penalty with a strength, or a share of inputs or weights to keep."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from proxmo import checks
from proxmo.layers import with_fields
from proxmo.penalties import L1, GroupL2, Penalty, Trimmed
from proxmo.penalties.trimmed import check_keep

NAMED = ("inputs", "l1")
STRENGTH = 1e-3  # of the named penalties


class Goal(NamedTuple):
    """A penalty on weights in the units of the data, or a count of blocks to keep."""

    penalty: Penalty | None
    """ψ; with ``keep`` the penalty whose blocks are counted."""
    keep: float | int | None
    first_only: bool
    """Whether it is about the first layer only, the one that reads the inputs."""

    @classmethod
    def of(cls, penalty: Any, strength: Any, keep: Any) -> Goal:
        """Check the arguments of an estimator."""
        if isinstance(penalty, str) and penalty not in NAMED:
            raise ValueError(f"penalty must be one of {NAMED}, a proxmo.Penalty or None, got {penalty!r}")
        if penalty is not None and not isinstance(penalty, (str, Penalty)):
            raise TypeError(f"penalty must be one of {NAMED}, a proxmo.Penalty or None, got {penalty!r}")
        if keep is not None:
            if strength is not None:
                raise ValueError(f"keep and strength exclude each other, got keep={keep!r} and strength={strength!r}")
            if not isinstance(penalty, str):
                raise ValueError(f"with keep, penalty must be one of {NAMED}, got {penalty!r}")
            return cls(_named(penalty, 1.0), check_keep("keep", keep), penalty == "inputs")
        if isinstance(penalty, str):
            number = STRENGTH if strength is None else checks.nonnegative("strength", strength)
            return cls(_named(penalty, number), None, penalty == "inputs")
        if strength is None:
            return cls(penalty, None, False)
        if penalty is None or not has_strength(penalty):
            raise ValueError(f"strength needs a penalty with a field of that name, got penalty={penalty!r}")
        return cls(with_fields(penalty, strength=checks.nonnegative("strength", strength)), None, False)

    def count_to_keep(self, blocks: int, inputs: int) -> int:
        """Return how many inputs or weights to keep, of ``blocks`` in a model with so many inputs."""
        assert self.keep is not None
        if isinstance(self.keep, int) and self.keep > blocks:
            counted = "inputs" if self.first_only else f"weights, {blocks}"
            raise ValueError(f"keep must be at most the number of {counted} (n_features={inputs}), got {self.keep}")
        return self.keep if isinstance(self.keep, int) else max(1, round(self.keep * blocks))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must stay the same during a stream: which weights are penalised, and what the prox needs."""
        return type(self.penalty), self.first_only, self.needs_one_scale

    @property
    def needs_one_scale(self) -> bool:
        """Whether the prox takes one step for all weights only."""
        return self.penalty is not None and not self.penalty.elementwise_step


def has_strength(penalty: Penalty) -> bool:
    """Whether a penalty, or the one that it trims, has a strength."""
    inner = penalty.penalty if isinstance(penalty, Trimmed) else penalty
    return "strength" in {field.name for field in dataclasses.fields(inner)}


def _named(name: str, strength: float) -> Penalty:
    return L1(strength) if name == "l1" else GroupL2(strength, dim=1)
