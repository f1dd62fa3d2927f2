"""Tensors of which each process holds a part (`DTensor`): its part, where the others are, and sums over all of them.

An ordinary tensor is its own and only part, so that callers need not ask which kind they have. Whatever communicates
must be called by all processes that hold a part, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, distributed

if TYPE_CHECKING or distributed.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
else:  # a torch built without distributed: no tensor is one of those

    class DTensor:
        """Stands for a class that this build of torch does not have."""


class Split(NamedTuple):
    """An axis of a tensor that is divided among processes."""

    axis: int
    processes: ProcessGroup


def local(tensor: Tensor) -> Tensor:
    """The part that this process holds, in the same memory; it may be empty."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every process; this gathers all parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def laid_out_like(tensor: Tensor, model: Tensor) -> Tensor:
    """The tensor with its elements where those of ``model`` are; gradients may be elsewhere, or not yet added up."""
    if isinstance(tensor, DTensor) and isinstance(model, DTensor) and tensor.placements != model.placements:
        return tensor.redistribute(model.device_mesh, model.placements)
    return tensor


def from_local(part: Tensor, model: Tensor) -> Tensor:
    """The tensor of which this process holds ``part``, and each of the others its own, as they do of ``model``."""
    if not isinstance(model, DTensor):
        return part
    return DTensor.from_local(
        part, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def part_of(whole: Tensor, model: Tensor) -> Tensor:
    """What this process holds of ``whole``, which all have, when it is divided as ``model``; nothing is sent."""
    if not isinstance(model, DTensor):
        return whole
    mesh = model.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, model.placements).to_local()


def splits(tensor: Tensor) -> tuple[Split, ...]:
    """The axes that are divided among processes, one for each dimension of the mesh that divides one."""
    if not isinstance(tensor, DTensor):
        return ()
    found = []
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise ValueError(f"a tensor whose parts are not added up has no values yet, got placement {placement}")
        if not isinstance(placement, Replicate):  # Shard, or the strided one of parallelism in two ways
            axis: int = placement.dim  # type: ignore[attr-defined]
            found.append(Split(axis, tensor.device_mesh.get_group(dimension)))
    return tuple(found)


def is_divided(tensor: Tensor) -> bool:
    """Whether processes hold parts, or copies, of the tensor."""
    return isinstance(tensor, DTensor)


def divided_alike(tensors: Sequence[Tensor], axes: Sequence[int]) -> bool:
    """Whether each tensor is divided along its one of ``axes`` only, in the same way, so that indices stay together."""
    layouts = set()
    for tensor, axis in zip(tensors, axes, strict=True):
        if not isinstance(tensor, DTensor) or any(p not in (Shard(axis), Replicate()) for p in tensor.placements):
            return False
        layouts.add((tensor.device_mesh, tuple(isinstance(p, Shard) for p in tensor.placements)))
    return len(layouts) == 1


def rows_divided_like(rows: Tensor, model: Tensor, axis: int) -> Tensor:
    """The matrix of which this process holds ``rows``, one for each index that it holds of ``axis`` of ``model``."""
    assert isinstance(model, DTensor)
    placements = [Shard(0) if isinstance(p, Shard) else p for p in model.placements]
    shape, stride = (model.shape[axis], rows.shape[1]), (rows.shape[1], 1)
    return DTensor.from_local(
        rows, model.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


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


def all_agree(flag: bool, tensors: Iterable[Tensor]) -> bool:
    """Whether the flag holds on all processes that share one of the tensors, so that they go the same way."""
    meshes = [t.device_mesh for t in tensors if isinstance(t, DTensor)]
    groups = dict.fromkeys((mesh.get_group(d), mesh.device_type) for mesh in meshes for d in range(mesh.ndim))
    for group, device in groups:
        shared = torch.tensor(int(flag), device=device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MIN, group=group)
        flag = bool(shared)
    return flag
