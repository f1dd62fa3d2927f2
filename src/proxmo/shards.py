"""Tensors of which each process holds a part (`DTensor`): its part, where the others are, and sums over all of them.

An ordinary tensor is its own and only part, so that callers need not ask which kind they have. Whatever communicates
must be called by all processes that hold a part, in the same order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, distributed, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Split(NamedTuple):
    """An axis of a tensor that is divided among processes."""

    axis: int
    processes: ProcessGroup


def _divided(tensor: Tensor) -> DTensor | None:
    """The tensor, if it is a `DTensor`. There is none before its module is loaded, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def is_divided(tensor: Tensor) -> bool:
    """Whether processes hold parts, or copies, of the tensor."""
    return _divided(tensor) is not None


def any_divided(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is; at once where none can be, and soon where they are many of few types."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in {type(t) for t in tensors})


def local(tensor: Tensor) -> Tensor:
    """The part that this process holds, in the same memory; it may be empty."""
    return tensor if (divided := _divided(tensor)) is None else divided.to_local()


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every process; this gathers all parts."""
    return tensor if (divided := _divided(tensor)) is None else divided.full_tensor()


def laid_out_like(tensor: Tensor, model: Tensor) -> Tensor:
    """The tensor with its elements where those of ``model`` are; gradients may be elsewhere, or not yet added up."""
    divided, wanted = _divided(tensor), _divided(model)
    if divided is None or wanted is None or divided.placements == wanted.placements:
        return tensor
    return divided.redistribute(wanted.device_mesh, wanted.placements)


def from_local(part: Tensor, model: Tensor) -> Tensor:
    """The tensor of which this process holds ``part``, and each of the others its own, as they do of ``model``."""
    if (divided := _divided(model)) is None:
        return part
    mesh, placements = divided.device_mesh, divided.placements
    return type(divided).from_local(
        part, mesh, placements, run_check=False, shape=divided.shape, stride=divided.stride()
    )


def part_of(whole: Tensor, model: Tensor) -> Tensor:
    """What this process holds of ``whole``, which all have, when it is divided as ``model``; nothing is sent."""
    if (divided := _divided(model)) is None:
        return whole
    from torch.distributed.tensor import Replicate

    mesh = divided.device_mesh
    everywhere = type(divided).from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, divided.placements).to_local()


def local_step(step: Tensor, x: Tensor) -> Tensor:
    """Return the local shard of a step that broadcasts to ``x``, whether it is sharded or whole on every rank."""
    if _divided(x) is None:
        return step
    step = step.expand(x.shape)
    return part_of(step, x) if _divided(step) is None else local(laid_out_like(step, x))


def splits(tensor: Tensor) -> tuple[Split, ...]:
    """The axes that are divided among processes, one for each dimension of the mesh that divides one."""
    if (divided := _divided(tensor)) is None:
        return ()
    found = []
    for dimension, placement in enumerate(divided.placements):
        if placement.is_partial():
            raise ValueError(f"a tensor whose parts are not added up has no values yet, got placement {placement}")
        if not placement.is_replicate():  # Shard, or the strided one of parallelism in two ways
            axis: int = placement.dim  # type: ignore[attr-defined]
            found.append(Split(axis, divided.device_mesh.get_group(dimension)))
    return tuple(found)


def divided_alike(tensors: Sequence[Tensor], axes: Sequence[int]) -> bool:
    """Whether each tensor is divided along its one of ``axes`` only, in the same way, so that indices stay together."""
    layouts: set[tuple[DeviceMesh, tuple[bool, ...]]] = set()
    for tensor, axis in zip(tensors, axes, strict=True):
        divided = _divided(tensor)
        if divided is None or not all(p.is_replicate() or p.is_shard(axis) for p in divided.placements):
            return False
        layouts.add((divided.device_mesh, tuple(p.is_replicate() for p in divided.placements)))
    return len(layouts) == 1


def rows_divided_like(rows: Tensor, model: Tensor, axis: int) -> Tensor:
    """The matrix of which this process holds ``rows``, one for each index that it holds of ``axis`` of ``model``."""
    divided = _divided(model)
    assert divided is not None
    from torch.distributed.tensor import Shard

    placements = [p if p.is_replicate() else Shard(0) for p in divided.placements]
    shape, stride = torch.Size((divided.shape[axis], rows.shape[1])), (rows.shape[1], 1)
    return type(divided).from_local(rows, divided.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def forget_gathered(model: nn.Module | None) -> None:
    """Have all modules that `fully_shard` was called on drop the weights that they may still hold gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if model is None or fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def note_written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that parts were written to: what it has saved of these tensors does not hold any more."""
    if any_divided(tensors):
        torch.autograd.graph.increment_version([t for t in tensors if is_divided(t)])


def add_up(part: Tensor, processes: Iterable[ProcessGroup]) -> Tensor:
    """The sum of ``part`` over the processes, the same on all of them."""
    for group in processes:
        part = part.contiguous().clone()
        distributed.all_reduce(part, group=group)
    return part


def largest(part: Tensor, processes: Sequence[ProcessGroup]) -> Tensor:
    """The elementwise maximum of ``part`` over the processes; NaN where one of them has NaN."""
    if not processes:
        return part
    # The maximum of collectives may lose NaN, so whether there is one travels along.
    both = torch.stack([part.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), part.isnan().to(part.dtype)])
    for group in processes:
        distributed.all_reduce(both, op=distributed.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, math.nan, both[0])


def before(part: Tensor, processes: Iterable[ProcessGroup]) -> Tensor:
    """The sum of ``part`` over the processes that come before this one, in an order that all agree on."""
    earlier = torch.zeros_like(part)
    for group in processes:
        row = part.new_zeros((group.size(), *part.shape))
        row[group.rank()] = part
        distributed.all_reduce(row, group=group)
        earlier = earlier + row[: group.rank()].sum(0)
        part = row.sum(0)
    return earlier


def total(numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> float:
    """The sum of 0-d ``numbers``, each of which belongs to this process's part of one of the tensors, over all parts.

    One message for all tensors that are divided among the same processes.
    """
    divided: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for number, tensor in zip(numbers, tensors, strict=True):
        divided.setdefault(tuple(split.processes for split in splits(tensor)), []).append(number)
    sums: list[float] = []
    for processes, found in divided.items():
        sums += add_up(torch.stack(found), processes).tolist() if processes else map(float, found)
    return math.fsum(sums)


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """<a, b> in float64, where lists of tensors are one vector.

    >>> inner_product([torch.tensor([3.0]), torch.tensor([1.0])], [torch.tensor([2.0]), torch.tensor([4.0])])
    10.0
    """
    pairs = [(local(x.detach()), local(laid_out_like(y.detach(), x))) for x, y in zip(a, b, strict=True)]
    return total([(x.double() * y.double()).sum() for x, y in pairs], a)


def count_zeros(tensors: Sequence[Tensor]) -> int:
    """How many elements are exactly zero."""
    return int(total([(local(t) == 0).sum() for t in tensors], tensors))


def highest(level: int, tensors: Iterable[Tensor]) -> int:
    """The highest level of all processes that share one of the tensors, so that they decide alike."""
    meshes = [divided.device_mesh for divided in map(_divided, tensors) if divided is not None]
    groups = dict.fromkeys((mesh.get_group(d), mesh.device_type) for mesh in meshes for d in range(mesh.ndim))
    for group, device in groups:
        shared = torch.tensor(int(level), device=device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX, group=group)
        level = int(shared)
    return level
