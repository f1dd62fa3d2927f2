"""Sharded tensors (`DTensor`): the local shard of this rank, and sums over all ranks.

An ordinary tensor is its own and only shard, so that callers need not ask which kind they have. All ranks that hold a
shard must call whatever communicates, in the same order.
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
    """An axis of a tensor that is sharded over a process group."""

    axis: int
    process_group: ProcessGroup


def _as_dtensor(tensor: Tensor) -> DTensor | None:
    """Return the tensor if it is a `DTensor`. Before its module is loaded, which takes half a second, none can be."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold shards, or replicas, of the tensor."""
    return _as_dtensor(tensor) is not None


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors is sharded. Fast path: runs every step, on the few distinct types."""
    kinds = set(map(type, tensors)) - {Tensor, nn.Parameter}
    module = sys.modules.get("torch.distributed.tensor") if kinds else None
    return module is not None and any(issubclass(kind, module.DTensor) for kind in kinds)


def local(tensor: Tensor) -> Tensor:
    """Return the local shard, in the same memory; it may be empty."""
    return tensor if (sharded := _as_dtensor(tensor)) is None else sharded.to_local()


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank; this gathers all shards."""
    return tensor if (sharded := _as_dtensor(tensor)) is None else sharded.full_tensor()


def placed_like(tensor: Tensor, model: Tensor) -> Tensor:
    """Return the tensor with the placements of ``model``; gradients may have others, or not be summed yet."""
    sharded, wanted = _as_dtensor(tensor), _as_dtensor(model)
    if sharded is None or wanted is None or sharded.placements == wanted.placements:
        return tensor
    return sharded.redistribute(wanted.device_mesh, wanted.placements)


def shard_of(whole: Tensor, model: Tensor) -> Tensor:
    """Return the local shard of ``whole``, which all ranks have, under the placements of ``model``; sends nothing."""
    if (sharded := _as_dtensor(model)) is None:
        return whole
    from torch.distributed.tensor import Replicate

    mesh = sharded.device_mesh
    everywhere = type(sharded).from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, sharded.placements).to_local()


def like(shard: Tensor, model: Tensor) -> Tensor:
    """Return the tensor whose local shard is ``shard``, with the shape and the placements of ``model``."""
    if (sharded := _as_dtensor(model)) is None:
        return shard
    mesh, placements, stride = sharded.device_mesh, sharded.placements, sharded.stride()
    return type(sharded).from_local(shard, mesh, placements, run_check=False, shape=sharded.shape, stride=stride)


def zeros_reduced(model: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros of a shape that has size one along some axes of ``model``, sharded like it along the others."""
    if (sharded := _as_dtensor(model)) is None:
        return torch.zeros(shape, dtype=model.dtype, device=model.device)
    from torch.distributed.tensor import Replicate

    kept = [size == whole for size, whole in zip(shape, model.shape, strict=True)]
    placements = [p if p.is_replicate() or kept[p.dim] else Replicate() for p in sharded.placements]  # type: ignore[attr-defined]
    shard = sharded.to_local()
    local_shape = [size if whole else 1 for size, whole in zip(shard.shape, kept, strict=True)]
    zeros = torch.zeros(local_shape, dtype=shard.dtype, device=shard.device)
    stride = torch.empty(tuple(shape), device="meta").stride()
    mesh = sharded.device_mesh
    return type(sharded).from_local(zeros, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def local_step(step: Tensor, x: Tensor) -> Tensor:
    """Return the local shard of a step that broadcasts to ``x``, whether it is sharded or whole on every rank."""
    if _as_dtensor(x) is None:
        return step
    step = step.expand(x.shape)
    return shard_of(step, x) if _as_dtensor(step) is None else local(placed_like(step, x))


def splits(tensor: Tensor) -> tuple[Split, ...]:
    """Return the sharded axes, one for each dimension of the mesh that shards one."""
    if (sharded := _as_dtensor(tensor)) is None:
        return ()
    found = []
    for dimension, placement in enumerate(sharded.placements):
        if placement.is_partial():
            raise ValueError(f"a tensor whose shards are not summed has no values yet, got placement {placement}")
        if not placement.is_replicate():  # Shard, or the strided shard of parallelism in two ways
            axis: int = placement.dim  # type: ignore[attr-defined]
            found.append(Split(axis, sharded.device_mesh.get_group(dimension)))
    return tuple(found)


def sharded_alike(tensors: Sequence[Tensor], axes: Sequence[int]) -> bool:
    """Whether each tensor is sharded along its one of ``axes`` only, and in the same way, so that indices match."""
    layouts: set[tuple[DeviceMesh, tuple[bool, ...]]] = set()
    for tensor, axis in zip(tensors, axes, strict=True):
        sharded = _as_dtensor(tensor)
        if sharded is None or not all(p.is_replicate() or p.is_shard(axis) for p in sharded.placements):
            return False
        layouts.add((sharded.device_mesh, tuple(p.is_replicate() for p in sharded.placements)))
    return len(layouts) == 1


def rows_sharded_like(rows: Tensor, model: Tensor, axis: int) -> Tensor:
    """Return the matrix with local ``rows``, one for each local index along ``axis`` of ``model``."""
    sharded = _as_dtensor(model)
    assert sharded is not None
    from torch.distributed.tensor import Shard

    placements = [p if p.is_replicate() else Shard(0) for p in sharded.placements]
    shape, stride = torch.Size((sharded.shape[axis], rows.shape[1])), (rows.shape[1], 1)
    return type(sharded).from_local(rows, sharded.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def reshard_modules(model: nn.Module | None) -> None:
    """Have all modules that `fully_shard` was called on drop the weights that they may still hold gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if model is None or fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def was_replaced(p: Tensor) -> bool:
    """Whether `fully_shard` has put a sharded parameter in the place of ``p``, which then gets no more gradients.

    Older versions of torch, such as 2.9, leave no trace of it.
    """
    return hasattr(p, "_fsdp_orig_uid")


def mark_written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that local shards were written to, so that what it saved of these tensors is stale."""
    if any_sharded(tensors):
        torch.autograd.graph.increment_version([t for t in tensors if is_sharded(t)])


def sum_over_ranks(value: Tensor, process_groups: Iterable[ProcessGroup]) -> Tensor:
    """Return the sum of ``value`` over the ranks, the same on all of them."""
    for group in process_groups:
        value = value.contiguous().clone()
        distributed.all_reduce(value, group=group)
    return value


def max_over_ranks(value: Tensor, process_groups: Sequence[ProcessGroup]) -> Tensor:
    """Return the elementwise maximum of ``value`` over the ranks; NaN where one of them has NaN."""
    if not process_groups:
        return value
    # The maximum of collectives may lose NaN, so a flag travels along.
    numbers = value.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    both = torch.stack([numbers, value.isnan().to(value.dtype)])
    for group in process_groups:
        distributed.all_reduce(both, op=distributed.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, math.nan, both[0])


def sum_over_earlier_ranks(value: Tensor, process_groups: Iterable[ProcessGroup]) -> Tensor:
    """Return the sum of ``value`` over the ranks before this one, in an order that all agree on."""
    earlier = torch.zeros_like(value)
    for group in process_groups:
        row = value.new_zeros((group.size(), *value.shape))
        row[group.rank()] = value
        distributed.all_reduce(row, group=group)
        earlier = earlier + row[: group.rank()].sum(0)
        value = row.sum(0)
    return earlier


def total_over_shards(numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> float:
    """Return the sum of 0-d ``numbers``, one for the local shard of each tensor, over all shards.

    Sends one message for all tensors that are sharded over the same process groups.
    """
    by_groups: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for number, tensor in zip(numbers, tensors, strict=True):
        by_groups.setdefault(tuple(split.process_group for split in splits(tensor)), []).append(number)
    sums: list[float] = []
    for process_groups, found in by_groups.items():
        together = torch.stack([number.to(found[0].device) for number in found])  # read once, not one by one
        sums += sum_over_ranks(together, process_groups).tolist()
    return math.fsum(sums)


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return <a, b> in float64, where lists of tensors are one vector.

    >>> inner_product([torch.tensor([3.0]), torch.tensor([1.0])], [torch.tensor([2.0]), torch.tensor([4.0])])
    10.0
    """
    pairs = [(local(x.detach()), local(placed_like(y.detach(), x))) for x, y in zip(a, b, strict=True)]
    return total_over_shards([(x.double() * y.double()).sum() for x, y in pairs], a)


def count_zeros(tensors: Sequence[Tensor]) -> int:
    """Return how many elements are exactly zero."""
    return int(total_over_shards([(local(t) == 0).sum() for t in tensors], tensors))


def agree_on_max(level: int, tensors: Iterable[Tensor]) -> int:
    """Return the highest level of all ranks that share one of the tensors, so that they decide alike."""
    meshes = [sharded.device_mesh for sharded in map(_as_dtensor, tensors) if sharded is not None]
    groups = dict.fromkeys((mesh.get_group(d), mesh.device_type) for mesh in meshes for d in range(mesh.ndim))
    for group, device in groups:
        shared = torch.tensor(int(level), device=device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX, group=group)
        level = int(shared)
    return level
