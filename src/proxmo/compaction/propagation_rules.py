"""Origins of tensor elements, and the rules by which layers and operations propagate them.

An operation without a rule is assumed to mix all units and to depend on all its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

NO_UNIT = -1
MIXED = 2**31

_IDENTITY_OPS = frozenset({"alias", "clone", "detach", "_to_copy", "lift_fresh"})
_MOVEMENT_OPS = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "cat"),
        *("stack", "repeat", "slice", "select", "narrow", "split", "split_with_sizes", "unbind", "constant_pad_nd"),
    }
)
_SLICING_OPS = frozenset({"slice", "select", "narrow", "split", "split_with_sizes", "unbind"})
_REDUCTION_OPS = frozenset({"mean", "sum", "amax", "amin"})
_ARITHMETIC_OPS = frozenset({"add", "sub", "rsub", "mul", "div", "pow"})


@dataclass
class Origin:
    """What each element of a tensor depends on."""

    varies: Tensor
    """Whether the element may change with the inputs of the model."""
    unit: Tensor
    """Id of the unit that the element belongs to (≥ 0), ``NO_UNIT``, or ``MIXED`` for several units."""

    @classmethod
    def without_unit(cls, like: Tensor, *, varies: bool) -> Origin:
        return cls(_full_mask(like, varies), torch.full(like.shape, NO_UNIT, device=like.device))

    def map(self, transform: Callable[[Tensor], Tensor]) -> Origin:
        """Apply a function that only moves elements."""
        return Origin(transform(self.varies), transform(self.unit))


def channel_axis(module: nn.Module) -> int:
    """Return the channel axis of the layer's inputs and outputs, as a negative index."""
    return -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1


def propagate_operation(
    func: Any, name: str, args: Any, kwargs: Any, results: list[Tensor], known: dict[int, Origin], origins: list[Origin]
) -> list[Origin]:
    """Return the origins of the results of an operation.

    Args:
        func: the operator, as seen by ``__torch_dispatch__``.
        name: its name, without namespace and trailing underscore.
        args, kwargs: its arguments.
        results: the tensors that it returned.
        known: origins of the tensor arguments, by ``id``.
        origins: the same origins, in the order of the arguments.
    """
    if not origins:
        # a factory function may use the input size: only a uniform, non-random result is constant
        random = torch.Tag.nondeterministic_seeded in func.tags
        return [Origin.without_unit(t, varies=random or not _is_uniform(t)) for t in results]
    if name in _IDENTITY_OPS and len(results) == 1 and results[0].shape == origins[0].varies.shape:
        return [origins[0]]
    if name in _MOVEMENT_OPS:
        return _propagate_movement(func, name, args, kwargs, results, known, origins)
    if (torch.Tag.pointwise in func.tags or name == "_prelu_kernel") and len(results) == 1:
        return [_propagate_pointwise(name, args, results[0], known, origins)]
    if name in _REDUCTION_OPS and len(args) > 1 and len(origins) == 1:
        return [_propagate_reduction(name, args, results[0], origins[0])]
    if re.search(r"(pool|upsample).*[123]d", name) and len(origins) == 1:
        return [_propagate_pooling(name, args, t, origins[0]) for t in results]
    varies = any(bool(origin.varies.any()) for origin in origins)
    unit = MIXED if unit_ids(origins) else NO_UNIT
    return [Origin(_full_mask(t, varies), torch.full(t.shape, unit, device=t.device)) for t in results]


def _propagate_movement(
    func: Any, name: str, args: Any, kwargs: Any, results: list[Tensor], known: dict[int, Origin], origins: list[Origin]
) -> list[Origin]:
    """Propagate through an operation that only moves elements, by applying it to the origins."""

    def apply(field: Callable[[Origin], Tensor], fill: int) -> list[Tensor]:
        if name in ("view", "_unsafe_view", "reshape"):  # the strides of origins may not allow a view
            return [field(origins[0]).reshape(results[0].shape)]
        replaced = pytree.tree_map(lambda x: field(known[id(x)]) if isinstance(x, Tensor) else x, (args, kwargs))
        if name == "constant_pad_nd":
            replaced = ((*replaced[0][:2], fill), {})
        return [t for t in pytree.tree_leaves(func(*replaced[0], **replaced[1])) if isinstance(t, Tensor)]

    varies, units = apply(lambda origin: origin.varies.long(), 0), apply(lambda origin: origin.unit, NO_UNIT)
    moved = [Origin(v.bool(), u) for v, u in zip(varies, units, strict=True)]
    if name in _SLICING_OPS and not unit_ids(origins) and not _is_uniform(args[0]):
        # which slice of a parameter is taken may depend on the input size
        moved = [Origin(torch.ones_like(origin.varies), origin.unit) for origin in moved]
    return moved


def _propagate_pointwise(
    name: str, args: Any, result: Tensor, known: dict[int, Origin], origins: list[Origin]
) -> Origin:
    shape = result.shape
    varies = _full_mask(result, False)
    unit = torch.full(shape, NO_UNIT, device=result.device)
    for origin in origins:
        varies = varies | origin.varies.broadcast_to(shape)
        unit = _merge_units(unit, origin.unit.broadcast_to(shape))
    if name in _ARITHMETIC_OPS and any(isinstance(x, (int, float)) for x in args[:2]):
        varies = varies | (result != 0)  # the number may come from the input or its size
    if name == "mul":
        for factor in args[:2]:
            if isinstance(factor, Tensor):
                zero = ~known[id(factor)].varies & (factor == 0)  # a constant zero times anything is constant
                varies = varies & ~zero.broadcast_to(shape)
    return Origin(varies, unit)


def _propagate_reduction(name: str, args: Any, result: Tensor, origin: Origin) -> Origin:
    dims = args[1] if isinstance(args[1], (list, tuple)) and args[1] else list(range(origin.varies.dim()))
    dims = sorted(dim % origin.varies.dim() for dim in dims)
    rest = [dim for dim in range(origin.varies.dim()) if dim not in dims]
    shape = [origin.varies.shape[dim] for dim in rest]
    varies = origin.varies.permute(*rest, *dims).reshape(*shape, -1).any(-1).reshape(result.shape)
    unit = merge_units_along(origin.unit.permute(*rest, *dims).reshape(*shape, -1), -1).reshape(result.shape)
    if name == "sum":
        varies = varies | (result != 0)  # the sum of a constant depends on the number of elements
    return Origin(varies, unit)


def _propagate_pooling(name: str, args: Any, result: Tensor, origin: Origin) -> Origin:
    """Propagate through pooling or upsampling, which act on each channel over the last one to three axes."""
    axes = next(n for n in (1, 2, 3) if f"{n}d" in name)
    lead = origin.varies.shape[:-axes]
    varies = _broadcast_leading(origin.varies.reshape(*lead, -1).any(-1), result)
    unit = _broadcast_leading(merge_units_along(origin.unit.reshape(*lead, -1), -1), result)
    pads = name.startswith("avg_pool") and len(args) > 3 and any(args[3])
    if pads or "bicubic" in name:
        varies = varies | (result != 0)  # a constant may change at the border
    return Origin(varies, unit)


def propagate_layer(
    module: nn.Module, x: Tensor, origin: Origin, output: Tensor, channel_units: Tensor | None
) -> Origin:
    """Return the origin of the output of a standard layer."""
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return _propagate_norm(module, origin, output)
    if isinstance(module, nn.Embedding):
        uniform = (module.weight == module.weight[:1]).all(0)
        varies = origin.varies.unsqueeze(-1) & ~uniform
        return Origin(varies, _broadcast_channels(channel_units, output, -1))
    assert isinstance(module, (nn.Linear, _ConvNd))
    axis = channel_axis(module)
    if isinstance(module, nn.Linear):
        reached = origin.varies.double() @ (module.weight != 0).double().T
        return Origin(reached > 0, _broadcast_channels(channel_units, output, axis))
    changes = origin.varies | ((x != 0) & has_border_effects(module))
    by_channel = changes.flatten(axis + 1).any(-1)
    reached = by_channel.double() @ _connected_channels(module).double()
    varies = _broadcast_leading(reached > 0, output)
    if is_depthwise(module):
        return Origin(varies, _broadcast_leading(merge_units_along(origin.unit.flatten(axis + 1), -1), output))
    return Origin(varies, _broadcast_channels(channel_units, output, axis))


def _propagate_norm(module: _BatchNorm | _InstanceNorm, origin: Origin, output: Tensor) -> Origin:
    axis = 0 if isinstance(module, _InstanceNorm) and output.dim() == module._get_no_batch_dim() else 1  # type: ignore[no-untyped-call]
    if isinstance(module, _InstanceNorm) or module.running_mean is None:
        # statistics over the whole channel enter each of its elements
        others = [dim for dim in range(output.dim()) if dim != axis]
        channels = origin.map(lambda t: t.permute(axis, *others).flatten(1))
        varies, unit = channels.varies.any(1), merge_units_along(channels.unit, 1)
        origin = Origin(_broadcast_channels(varies, output, axis).bool(), _broadcast_channels(unit, output, axis))
    if module.weight is None:
        return origin
    live = _broadcast_channels(module.weight != 0, output, axis).bool()
    return Origin(origin.varies & live, origin.unit)


def _connected_channels(module: _ConvNd) -> Tensor:
    """Return a mask of the input channels (rows) that affect each output channel (columns)."""
    nonzero = (module.weight != 0).flatten(2).any(2)
    nonzero = nonzero if isinstance(module, _ConvTransposeNd) else nonzero.T
    if is_depthwise(module):
        return torch.diag(nonzero.flatten())
    if module.groups > 1:
        return torch.ones(module.in_channels, module.out_channels, dtype=torch.bool, device=nonzero.device)
    return nonzero


def is_depthwise(module: _ConvNd) -> bool:
    return module.groups > 1 and module.groups == module.out_channels == module.in_channels


def has_border_effects(module: nn.Module) -> bool:
    """Return whether a constant input may give different outputs at the border and inside."""
    if isinstance(module, _ConvTransposeNd):
        return True
    if isinstance(module, _ConvNd):
        return module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice)
    return False


def _broadcast_leading(values: Tensor, like: Tensor) -> Tensor:
    """Broadcast values to the shape of ``like``, aligned with its leading axes."""
    return values.reshape(*values.shape, *(1,) * (like.dim() - values.dim())).expand(like.shape)


def _broadcast_channels(values: Tensor | None, like: Tensor, axis: int) -> Tensor:
    """Broadcast one value per channel to the shape of ``like``; without values, return ``NO_UNIT`` everywhere."""
    if values is None:
        return torch.full(like.shape, NO_UNIT, device=like.device)
    shape = [1] * like.dim()
    shape[axis] = -1
    return values.to(like.device).long().reshape(shape).expand(like.shape)


def _merge_units(a: Tensor, b: Tensor) -> Tensor:
    """Return the unit of elements computed from elements of units ``a`` and ``b``."""
    return torch.where((a == b) | (b == NO_UNIT), a, torch.where(a == NO_UNIT, b, MIXED))


def merge_units_along(units: Tensor, axis: int) -> Tensor:
    """Return the unit of elements computed from all elements along an axis."""
    if units.shape[axis] == 0:
        return torch.full_like(units.sum(axis), NO_UNIT)
    largest = units.amax(axis)
    smallest = torch.where(units == NO_UNIT, MIXED, units).amin(axis)
    return torch.where((largest == NO_UNIT) | (smallest == largest), largest, MIXED)


def unit_ids(origins: list[Origin]) -> set[int]:
    """Return the ids of all units in the origins, without ``NO_UNIT`` and ``MIXED``."""
    units = {unit for origin in origins for unit in torch.unique(origin.unit).tolist()}
    return units - {NO_UNIT, MIXED}


def _full_mask(like: Tensor, value: bool) -> Tensor:
    return torch.full(like.shape, value, dtype=torch.bool, device=like.device)


def _is_uniform(tensor: Tensor) -> bool:
    flat = tensor.detach().flatten()
    return len(flat) == 0 or bool((flat == flat[0]).all())
