"""What the numbers of a model depend on: one call of it, followed operation by operation.

Every tensor on the way gets an `Origin`, which says for each element whether it may change with the inputs, and of
which unit's channel it is. Rules say how layers and operations hand that on; whatever has no rule is taken to mix all
and to depend on all, so that what is found constant, or apart from other channels, is so for every input and not only
for those of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from proxmo.compaction.propagation_rules import (
    MIXED,
    Origin,
    channel_axis,
    is_depthwise,
    merge_units_along,
    propagate_layer,
    propagate_operation,
    unit_ids,
)

_STANDARD_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.Embedding,
)


def is_standard_layer(module: nn.Module) -> bool:
    """Whether a layer does what its class says: no forward of its own, no hooks."""
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return False
    return any(runs_forward_of(module, known) for known in _STANDARD_LAYERS)


def runs_forward_of(module: nn.Module, known: type[nn.Module]) -> bool:
    """Whether a layer computes what that class does, though it may be of another."""
    own = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module).forward is known.forward and not own


@dataclass
class LayerInput:
    """What a layer has read, by input channels."""

    varies: Tensor
    unit: Tensor
    minimum: Tensor
    maximum: Tensor

    @cached_property
    def constant(self) -> Tensor:
        """The channels with one number at all places, up to its last digits, whatever the input of the model."""
        slack = 4 * torch.finfo(self.minimum.dtype).eps * self.minimum.abs()
        return ~self.varies & (self.maximum - self.minimum <= slack)


@dataclass
class Dataflow:
    """What was found out about a model."""

    layer_inputs: dict[nn.Module, LayerInput] = field(default_factory=dict)
    mixed_by: dict[int, str] = field(default_factory=dict)
    """Units whose channels were not kept apart from others, with the operation."""
    units_in_outputs: set[int] = field(default_factory=set)
    """Units that are among the outputs."""
    call_counts: dict[nn.Module, int] = field(default_factory=dict)
    attention_weights_used: set[nn.Module] = field(default_factory=set)
    """Attention layers whose weights are used, beside their outputs."""


def trace_dataflow(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], channel_units: Mapping[nn.Module, Tensor]
) -> Dataflow:
    """Call the model, and follow it.

    Args:
        model: in evaluation mode.
        args, kwargs: of the call.
        channel_units: for layers the number of the unit of each output channel.
    """
    tracer = _DataflowTracer(model, (args, kwargs), channel_units)
    with torch.no_grad(), tracer.hooks(), tracer:
        outputs = model(*args, **kwargs)
    tracer.record_outputs(outputs)
    return tracer.result


def uncalled_layers(model: nn.Module, dataflow: Dataflow) -> list[tuple[str, nn.Module]]:
    """The layers with parameters that were not called; attention of torch never calls what is inside it."""
    inside = {
        part for m in model.modules() if isinstance(m, nn.MultiheadAttention) for part in m.modules() if part is not m
    }
    own = [(name, m) for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]
    return [(name, module) for name, module in own if module not in dataflow.call_counts and module not in inside]


class _DataflowTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module, inputs: Any, channel_units: Mapping[nn.Module, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = Dataflow()
        self._model, self._channel_units = model, channel_units
        self._origins: Any = WeakTensorKeyDictionary()
        self._attention_weights: Any = WeakTensorKeyDictionary()
        self._layer_depth = 0
        for tensor in (*model.parameters(), *model.buffers()):
            self._origins[tensor] = Origin.without_unit(tensor, varies=False)
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                self._origins[tensor] = Origin.without_unit(tensor, varies=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._layer_depth:
            return func(*args, **kwargs)
        before = [(t, self._origin(t)) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        out = func(*args, **kwargs)
        self._record_operation(func, args, kwargs, out, before)
        return out

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """See the layers that are known as a whole, and how often each is called."""
        with ExitStack() as stack:
            for module in self._model.modules():
                for hook in self._hooks_for(module):
                    stack.callback(hook.remove)
            yield

    def record_outputs(self, outputs: Any) -> None:
        """Look at the outputs."""
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self.result.units_in_outputs |= unit_ids([self._origin(tensor)])
                if tensor in self._attention_weights:
                    self.result.attention_weights_used.add(self._attention_weights[tensor])

    def _hooks_for(self, module: nn.Module) -> list[Any]:
        def count(module: nn.Module, *_: Any) -> None:
            self.result.call_counts[module] = self.result.call_counts.get(module, 0) + 1

        def enter(module: nn.Module, *_: Any) -> None:
            self._layer_depth += 1

        def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            origin = self._origin(inputs[0])
            if isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and not is_depthwise(module)):
                self._record_input(module, inputs[0], origin)
            self._origins[output] = propagate_layer(module, inputs[0], origin, output, self._channel_units.get(module))
            self._layer_depth -= 1  # at last: what is done here is not to be followed

        def record_attention_weights(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]) -> None:
            if output[1] is not None:
                self._attention_weights[output[1]] = module

        known = is_standard_layer(module)
        made = [module.register_forward_pre_hook(count)]
        if known:
            made += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        if isinstance(module, nn.MultiheadAttention):
            made.append(module.register_forward_hook(record_attention_weights))
        return made

    def _origin(self, tensor: Tensor) -> Origin:
        """What is known of a tensor; one that came from nowhere may be anything."""
        known: Origin | None = self._origins.get(tensor)
        return Origin.without_unit(tensor, varies=True) if known is None else known

    def _record_input(self, module: nn.Module, x: Tensor, origin: Origin) -> None:
        axis = channel_axis(module)
        channels = x.detach().movedim(axis, -1).flatten(0, -2)
        varies = origin.varies.movedim(axis, -1).flatten(0, -2).any(0)
        unit = merge_units_along(origin.unit.movedim(axis, -1).flatten(0, -2), 0)
        empty = len(channels) == 0
        minimum, maximum = (
            (channels.new_zeros(channels.shape[1]),) * 2 if empty else (channels.amin(0), channels.amax(0))
        )
        self.result.layer_inputs[module] = LayerInput(varies, unit, minimum, maximum)
        self._record_mixing([origin], unit, type(module).__name__)

    def _record_mixing(self, operands: list[Origin], result: Tensor, operation: str) -> None:
        if bool((result == MIXED).any()):
            for number in unit_ids(operands):
                self.result.mixed_by.setdefault(number, operation)

    def _record_operation(
        self, func: Any, args: Any, kwargs: Any, out: Any, before: list[tuple[Tensor, Origin]]
    ) -> None:
        name = func._schema.name.removeprefix("aten::")
        for tensor, _ in before:
            if tensor in self._attention_weights:
                self.result.attention_weights_used.add(self._attention_weights[tensor])
        origins = [origin for _, origin in before]
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        made = propagate_operation(
            func, name.rstrip("_"), args, kwargs, results, {id(t): origin for t, origin in before}, origins
        )
        for tensor, origin in zip(results, made, strict=True):
            self._origins[tensor] = origin
            self._record_mixing(origins, origin.unit, name)
        if func._schema.is_mutable:
            self._invalidate_aliases({id(t) for t in results}, [t for t, _ in before])

    def _invalidate_aliases(self, known: set[int], written: list[Tensor]) -> None:
        """After writing to a tensor, others that share its memory may be anything."""
        memory = {t.untyped_storage().data_ptr() for t in written if id(t) in known}
        for tensor, origin in list(self._origins.items()):
            if id(tensor) not in known and tensor.untyped_storage().data_ptr() in memory:
                for number in unit_ids([origin]):
                    self.result.mixed_by.setdefault(number, "writing to a part of a tensor")
                self._origins[tensor] = Origin(torch.ones_like(origin.varies), torch.full_like(origin.unit, MIXED))
