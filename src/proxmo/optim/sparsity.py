"""How much of a parameter group is exactly zero, in elements, in groups of the penalty, and by family of units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxmo import shards
from proxmo.optim.options import Group, is_flattened, is_frozen
from proxmo.optim.units import Family, Units, seen_by_penalty, units_of
from proxmo.penalties.base import Penalty


class FamilySparsity(NamedTuple):
    """How many units of a family, such as the neurons of one layer, are entirely zero.

    >>> FamilySparsity(name="encoder.0", zero=48, units=64)
    FamilySparsity(name='encoder.0', zero=48, units=64)
    """

    name: str
    """The layer that the units start with; the position of its parameter in the group if that has no names."""
    zero: int
    """The number of units that are zero."""
    units: int
    """The number of units."""


class Sparsity(NamedTuple):
    """How much of a parameter group is exactly zero. With families it prints as a table.

    >>> print(Sparsity(0.5, 0.75, (FamilySparsity("encoder.0", zero=48, units=64),)))
    zeros 50.0%, groups 75.0%
               zero units  of
    encoder.0          48  64
    """

    zeros: float
    """The share of elements that are zero."""
    groups: float | None
    """The share of the penalty's groups that are entirely zero; ``None`` if the penalty has no groups."""
    families: tuple[FamilySparsity, ...] = ()
    """The same by family, for a parameter group with units, as from `unit_groups`; empty for others."""

    def __repr__(self) -> str:
        families = f", families={self.families!r}" if self.families else ""
        return f"Sparsity(zeros={self.zeros!r}, groups={self.groups!r}{families})"

    def __str__(self) -> str:
        if not self.families or self.groups is None:
            return repr(self)
        rows = [("", "zero units", "of"), *((name, str(zero), str(units)) for name, zero, units in self.families)]
        first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
        table = [f"{a:{first}}  {b:>{second}}  {c:>{third}}" for a, b, c in rows]
        return "\n".join([f"zeros {self.zeros:.1%}, groups {self.groups:.1%}", *table])


def trained(group: Group) -> tuple[Units | None, list[Tensor]]:
    """Return the units and the parameters of a group without frozen ones."""
    params = [p for p in group["params"] if not is_frozen(p)]
    if group["penalty"] is not None and any(map(is_flattened, params)):
        raise RuntimeError(
            "FullyShardedDataParallel has flattened the parameters, so that each rank would count its own shards only; "
            "shard the model with torch.distributed.fsdp.fully_shard instead"
        )
    return units_of(group, params), params


def measure_sparsity(group: Group) -> Sparsity:
    """Count the zeros of a parameter group; with sharded parameters a collective operation."""
    penalty, (units, params) = group["penalty"], trained(group)
    zeros, elements = shards.count_zeros(params), sum(p.numel() for p in params)
    counts = _counts(penalty, units, params)
    groups = sum(total for _, total in counts)
    share = sum(zero for zero, _ in counts) / groups if groups else None
    families: tuple[FamilySparsity, ...] = ()
    if units is not None and counts:
        names = _family_names(group, units)
        families = tuple(FamilySparsity(name, *count) for name, count in zip(names, counts, strict=True))
    return Sparsity(zeros / max(elements, 1), share, families)


@torch.no_grad()
def count_groups(groups: Sequence[Group]) -> tuple[int, int]:
    """Count the penalties' groups that are zero, and all of them; with sharded parameters a collective operation."""
    counts = [count for group in groups for count in _counts(group["penalty"], *trained(group))]
    return sum(zero for zero, _ in counts), sum(total for _, total in counts)


def _counts(penalty: Penalty | None, units: Units | None, params: list[Tensor]) -> list[tuple[int, int]]:
    """Return for each tensor that the penalty sees how many of its groups are zero, and how many there are."""
    seen = [] if penalty is None else seen_by_penalty(units, params)
    return [counted for x in seen if penalty and (counted := penalty.zero_groups(x)) is not None]


def _family_names(group: Group, units: Sequence[Family]) -> list[str]:
    """Return for each family the layer of its first parameter that is trained."""
    names = group.get("param_names", [f"parameter {position}" for position in range(len(group["params"]))])
    of_trained = [name for name, p in zip(names, group["params"], strict=True) if not is_frozen(p)]
    first = [of_trained[family[0].position] for family in units]
    return [name.rpartition(".")[0] or name for name in first]  # a parameter of the model itself keeps its name
