"""Trace what each value in a model depends on, operation by operation, through one call.

Every tensor gets an `Origin`, which records for each element whether it may change with the inputs and which unit it
belongs to. `propagation_rules` derives the origins of outputs from those of inputs. Operations without a rule are
assumed to mix all units and to depend on all inputs. A value that is found to be constant, or to belong to a single
unit, therefore is so for every input, not only for the traced one.
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
    """Return whether propagation rules apply: a torch.nn layer without a custom forward or hooks."""
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return False
    return any(runs_forward_of(module, layer_type) for layer_type in _STANDARD_LAYERS)


def runs_forward_of(module: nn.Module, layer_type: type[nn.Module]) -> bool:
    """Return whether the module runs the forward of ``layer_type``, even as a subclass, and has no hooks."""
    customised = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module).forward is layer_type.forward and not customised


@dataclass
class LayerInput:
    """The input of a layer, reduced to one number per input channel."""

    varies: Tensor
    """Whether any element may change with the inputs of the model."""
    unit: Tensor
    """Unit id, as in `Origin`."""
    minimum: Tensor
    maximum: Tensor

    @cached_property
    def constant(self) -> Tensor:
        """Mask of the channels that hold one value, up to rounding, for every input of the model."""
        tolerance = 4 * torch.finfo(self.minimum.dtype).eps * self.minimum.abs()
        return ~self.varies & (self.maximum - self.minimum <= tolerance)


@dataclass
class Dataflow:
    """Result of `trace_dataflow`."""

    layer_inputs: dict[nn.Module, LayerInput] = field(default_factory=dict)
    mixed_by: dict[int, str] = field(default_factory=dict)
    """For each unit mixed with others, the operation that does so."""
    units_in_outputs: set[int] = field(default_factory=set)
    """Units with elements in the outputs of the model."""
    call_counts: dict[nn.Module, int] = field(default_factory=dict)
    attention_weights_used: set[nn.Module] = field(default_factory=set)
    """Attention layers whose attention weights are used by the model."""


def trace_dataflow(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], channel_units: Mapping[nn.Module, Tensor]
) -> Dataflow:
    """Call the model and trace its dataflow.

    Args:
        model: the model, in evaluation mode.
        args, kwargs: arguments of the call.
        channel_units: unit ids of the output channels of layers.
    """
    tracer = _DataflowTracer(model, (args, kwargs), channel_units)
    with torch.no_grad(), tracer.hooks(), tracer:
        outputs = model(*args, **kwargs)
    tracer.record_outputs(outputs)
    return tracer.result


def uncalled_layers(model: nn.Module, dataflow: Dataflow) -> list[tuple[str, nn.Module]]:
    """Return the layers with parameters that were not called."""
    # nn.MultiheadAttention uses the parameters of its submodules without calling them
    never_called = {
        part for m in model.modules() if isinstance(m, nn.MultiheadAttention) for part in m.modules() if part is not m
    }
    layers = [(name, m) for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]
    return [(name, m) for name, m in layers if m not in dataflow.call_counts and m not in never_called]


class _DataflowTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that propagates origins through standard layers and through operations outside of them."""

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
        # before the call, which may write to its operands
        operands = [(t, self._origin(t)) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        out = func(*args, **kwargs)
        self._record_operation(func, args, kwargs, out, operands)
        return out

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Register hooks that count calls and treat each standard layer as one operation."""
        with ExitStack() as stack:
            for module in self._model.modules():
                for hook in self._hooks_for(module):
                    stack.callback(hook.remove)
            yield

    def record_outputs(self, outputs: Any) -> None:
        """Record which units and attention weights are outputs of the model."""
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
            self._layer_depth -= 1  # last, so that the operations of this hook are not traced

        def record_attention_weights(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]) -> None:
            if output[1] is not None:
                self._attention_weights[output[1]] = module

        is_standard = is_standard_layer(module)  # before the first hook is registered
        handles = [module.register_forward_pre_hook(count)]
        if is_standard:
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        if isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_hook(record_attention_weights))
        return handles

    def _origin(self, tensor: Tensor) -> Origin:
        """Return the origin of a tensor; one that was never seen may depend on the inputs."""
        known: Origin | None = self._origins.get(tensor)
        return Origin.without_unit(tensor, varies=True) if known is None else known

    def _record_input(self, module: nn.Module, x: Tensor, origin: Origin) -> None:
        axis = channel_axis(module)
        channels = x.detach().movedim(axis, -1).flatten(0, -2)
        varies = origin.varies.movedim(axis, -1).flatten(0, -2).any(0)
        unit = merge_units_along(origin.unit.movedim(axis, -1).flatten(0, -2), 0)
        if len(channels) == 0:
            minimum = maximum = channels.new_zeros(channels.shape[1])
        else:
            minimum, maximum = channels.amin(0), channels.amax(0)
        self.result.layer_inputs[module] = LayerInput(varies, unit, minimum, maximum)
        self._record_mixing([origin], unit, type(module).__name__)

    def _record_mixing(self, origins: list[Origin], result_units: Tensor, operation: str) -> None:
        if bool((result_units == MIXED).any()):
            for unit in unit_ids(origins):
                self.result.mixed_by.setdefault(unit, operation)

    def _record_operation(
        self, func: Any, args: Any, kwargs: Any, out: Any, operands: list[tuple[Tensor, Origin]]
    ) -> None:
        name = func._schema.name.removeprefix("aten::")
        for tensor, _ in operands:
            if tensor in self._attention_weights:
                self.result.attention_weights_used.add(self._attention_weights[tensor])
        origins = [origin for _, origin in operands]
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        propagated = propagate_operation(
            func, name.rstrip("_"), args, kwargs, results, {id(t): origin for t, origin in operands}, origins
        )
        for tensor, origin in zip(results, propagated, strict=True):
            self._origins[tensor] = origin
            self._record_mixing(origins, origin.unit, name)
        if func._schema.is_mutable:
            self._invalidate_aliases({id(t) for t in results}, [t for t, _ in operands])

    def _invalidate_aliases(self, result_ids: set[int], operands: list[Tensor]) -> None:
        """Mark tensors that share memory with an operand written in place as varying and mixed."""
        written = {t.untyped_storage().data_ptr() for t in operands if id(t) in result_ids}
        for tensor, origin in list(self._origins.items()):
            if id(tensor) not in result_ids and tensor.untyped_storage().data_ptr() in written:
                for unit in unit_ids([origin]):
                    self.result.mixed_by.setdefault(unit, "an in-place write to shared memory")
                self._origins[tensor] = Origin(torch.ones_like(origin.varies), torch.full_like(origin.unit, MIXED))
