"""The step that all methods share: x ← prox_{lr·ψ}(x − lr·direction), for the parameters of one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from proxmo import shards
from proxmo.eager import is_eager_cpu
from proxmo.optim.options import Group, is_frozen
from proxmo.optim.units import Units, joined, seen_by_penalty, steps_of_units, units_of, write_back
from proxmo.penalties.axes import Step
from proxmo.penalties.base import Penalty, widen


class Certificate(NamedTuple):
    """What a step to x⁺ = prox(x − lr·direction) proves about x⁺."""

    subgradient: Tensor
    """(x − x⁺)/lr − direction, a subgradient of ψ at x⁺: with ∇f(x⁺) it makes a gradient of F, kinks or not."""
    direction: Tensor
    """The estimate of ∇f(x) that the step used."""
    version: int
    """The version counter of the parameter at x⁺."""


def proximal_step(
    group: Group, params: list[Tensor], directions: list[Tensor], certificates: dict[Tensor, Certificate] | None = None
) -> None:
    """Set params ← prox_{lr·ψ}(params − lr·directions) for parameters of one group."""
    lr, points = as_scalar(group["lr"]), params
    if group["penalty"] is not None:  # half precision rounds once, after the prox: two small moves may each be lost
        points, directions = [widen(p) for p in params], [widen(d) for d in directions]
    move(points, directions, lr if group["maximize"] else -lr, group["foreach"])
    apply_penalty(group, params, points, lr, directions, certificates)


def apply_penalty(
    group: Group,
    params: list[Tensor],
    points: list[Tensor],
    step: Step | list[Tensor],
    directions: list[Tensor],
    certificates: dict[Tensor, Certificate] | None,
) -> None:
    """Set params ← prox_{step·ψ}(points), where ``points`` are the moved parameters or wider copies of them."""
    penalty, units, others = group["penalty"], units_of(group, params), without_step(group, params)
    subgradients = None if certificates is None else _subgradients(penalty, units, points, step, others)
    if penalty is not None:
        apply_prox(penalty, units, points, step, others)
    for param, point in zip(params, points, strict=True):
        if point is not param:
            param.copy_(point)
    if certificates is not None and subgradients is not None:
        for param, subgradient, direction in zip(params, subgradients, directions, strict=True):
            certificates[param] = Certificate(subgradient, direction.clone(), param._version)


def move(points: list[Tensor], directions: list[Tensor], scale: float | Tensor, foreach: bool | None) -> None:
    """Set points ← points + scale·directions, each rank on its shards."""
    if shards.any_sharded(points):
        shards.mark_written(points)
        directions = [shards.local(shards.placed_like(d, p)) for d, p in zip(directions, points, strict=True)]
        points = list(map(shards.local, points))
    if use_foreach(foreach, points):
        if isinstance(scale, Tensor):
            torch._foreach_addcmul_(points, directions, [scale.to(point.device) for point in points])
        else:
            torch._foreach_add_(points, directions, alpha=scale)
    elif isinstance(scale, Tensor):
        for point, direction in zip(points, directions, strict=True):
            point.addcmul_(direction, scale.to(point.device))
    else:
        for point, direction in zip(points, directions, strict=True):
            point.add_(direction, alpha=scale)


def apply_prox(
    penalty: Penalty,
    units: Units | None,
    points: list[Tensor],
    step: Step | list[Tensor],
    others: Sequence[Tensor] = (),
) -> None:
    """Replace points by their prox, or by that of the units that they make up; one step for all, or one for each."""
    if units is None:
        penalty.prox_(points, step, others)
        return
    matrices = [joined(family, points) for family in units]
    penalty.prox_(matrices, steps_of_units(units, step, points) if isinstance(step, list) else step, others)
    for family, matrix in zip(units, matrices, strict=True):
        write_back(family, matrix, points)


def without_step(group: Group, params: list[Tensor]) -> list[Tensor]:
    """Return what a joint penalty ranks besides ``params``: trained parameters, or families of units, that stay."""
    if len(params) == len(group["params"]) or group["penalty"] is None or not group["penalty"].joint:
        return []
    stepped = set(map(id, params))
    rest = [p for p in group["params"] if id(p) not in stepped and not is_frozen(p)]
    if group["units"] is None:
        return rest
    positions = [position for position, p in enumerate(group["params"]) if id(p) in stepped]
    families = tuple(f for f in group["units"] if not any(part.position in positions for part in f))
    return list(seen_by_penalty(units_of({**group, "units": families}, rest), rest))


def _subgradients(
    penalty: Penalty | None,
    units: Units | None,
    points: list[Tensor],
    step: Step | list[Tensor],
    others: Sequence[Tensor],
) -> list[Tensor]:
    """Return (point − prox(point))/step, in float64 since small steps leave few digits in the difference."""
    if penalty is None:
        return [torch.zeros_like(point) for point in points]
    near = [point.to(torch.float64, copy=True) for point in points]
    apply_prox(penalty, units, near, step, others)
    steps = step if isinstance(step, list) else [step] * len(points)
    return [((point.double() - x) / s).to(point.dtype) for point, x, s in zip(points, near, steps, strict=True)]


def is_zero(lr: float | Tensor) -> bool:
    """Whether lr is known to be zero; one on a device is not read, which would synchronise with it."""
    return bool(lr == 0) if not isinstance(lr, Tensor) or is_eager_cpu(lr) else False


def as_scalar(option: float | Tensor) -> float | Tensor:
    """Return a one-element tensor, which is not read, as a 0-d one."""
    return option.reshape(()) if isinstance(option, Tensor) else option


def use_foreach(choice: bool | None, tensors: list[Tensor]) -> bool:
    """Whether to hand lists to torch's foreach kernels: by default for ordinary tensors, not for subclasses."""
    return set(map(type, tensors)) <= {Tensor, Parameter} if choice is None else choice
