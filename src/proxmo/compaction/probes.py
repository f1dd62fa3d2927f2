"""Inputs of other sizes and with other numbers, to follow a model where its path depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from proxmo.compaction.errors import CompactionError
from proxmo.compaction.example_inputs import ModelInputs, output_tensors
from proxmo.compaction.labels import tensors_in
from proxmo.compaction.outputs import are_close

_MOST = 3
"""The largest number of other inputs that a model is followed on."""


@dataclass(frozen=True)
class Probes:
    """What a model is called with."""

    example: ModelInputs
    others: tuple[ModelInputs, ...]
    """Inputs of other sizes, and with other numbers."""
    compared: tuple[ModelInputs, ...]
    """Inputs that outputs are compared on: all of these, and the same with noise."""
    trains: bool
    """Whether the model runs on the example in training mode."""

    @classmethod
    def of(cls, model: nn.Module, example: ModelInputs) -> Probes:
        """Return the probes for a model in evaluation mode; raise if it does not run on the example."""
        try:
            outputs = example.output_tensors(model)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CompactionError(f"the model does not run on example_inputs: {reason}") from error
        if not outputs:
            raise CompactionError(
                "the model must return tensors, alone or in tuples, lists, dictionaries or dataclasses, got "
                f"{type(example.call(model)).__name__}"
            )
        if any(output.isnan().any() for output in outputs):
            own = (*model.named_parameters(), *model.named_buffers())
            broken = [name for name, tensor in own if tensor.isnan().any()]
            where = f"; {broken[0]!r} has NaN, too" if broken else ""
            raise CompactionError(f"the outputs on example_inputs have NaN, which would hide what changes{where}")
        if not are_close(example.output_tensors(model), outputs):
            raise CompactionError("the model is not deterministic in evaluation mode")
        others = (*other_sizes(model, example), *other_numbers(model, example))
        noisy = [inputs.with_noise() for inputs in (example, *others)]
        compared = (example, *others, *(inputs for inputs in noisy if _runs(model, inputs)))
        return cls(example, others, compared, runs_in_training(model, example))

    def to_trace(self) -> list[ModelInputs]:
        """Return the inputs that the model is followed on."""
        return [self.example, *self.others]

    def to_compare(self) -> list[ModelInputs]:
        """Return the inputs that outputs are compared on."""
        return list(self.compared)


@torch.no_grad()
def runs_in_training(model: nn.Module, inputs: ModelInputs) -> bool:
    """Return whether the model runs in training mode; it is as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        inputs.output_tensors(model.train())
    except Exception:
        return False
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in buffers:
            buffer.copy_(value)
    return True


def other_sizes(model: nn.Module, inputs: ModelInputs) -> list[ModelInputs]:
    """Return inputs with another batch size and with another length, as far as the model takes them.

    For each axis of the largest input, the axes of all inputs of that size are changed together: to a larger size, or a
    smaller one if the model does not take that.
    """
    tensors = tensors_in([inputs.args, inputs.kwargs])
    if not tensors:
        return []
    shape = max(tensors, key=lambda tensor: (tensor.dim(), tensor.numel())).shape
    found: list[ModelInputs] = []
    for axis, old in enumerate(shape):
        for new in (_larger(old), max(old - 1, 1)):
            if new == old or old in shape[:axis]:
                continue
            candidates = (_resized(inputs, axis, old, new), _resized(inputs, None, old, new))
            probe = next((candidate for candidate in candidates if _runs(model, candidate)), None)
            if probe is not None:
                found.append(probe)
                break
        if len(found) == _MOST:
            break
    return found


def other_numbers(model: nn.Module, inputs: ModelInputs) -> list[ModelInputs]:
    """Return inputs with other Python numbers, if there are any and the model takes others: zero is not a constant."""

    def change(x: Any) -> Any:
        return 2 * x + 0.5 if type(x) is float else x + 1 if type(x) is int else x

    changed = ModelInputs(*pytree.tree_map(change, (inputs.args, inputs.kwargs)))
    numbers = [x for x in pytree.tree_leaves((inputs.args, inputs.kwargs)) if type(x) in (int, float)]
    return [changed] if numbers and _runs(model, changed) else []


def _larger(size: int) -> int:
    """
    >>> _larger(2), _larger(8), _larger(224)
    (9, 17, 225)
    """
    return max(9, 2 * size + 1) if size <= 16 else size + 1


def _resized(inputs: ModelInputs, axis: int | None, old: int, new: int) -> ModelInputs:
    """Return inputs whose axes of a size have another: the given one where that has it, else all that have it."""

    def resize(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        at_axis = axis is not None and x.dim() > axis and x.shape[axis] == old
        for k in [axis or 0] if at_axis else [k for k, size in enumerate(x.shape) if size == old]:
            x = x.index_select(k, torch.arange(new, device=x.device) % old)
        return x

    return ModelInputs(*pytree.tree_map(resize, (inputs.args, inputs.kwargs)))


def _runs(model: nn.Module, inputs: ModelInputs) -> bool:
    try:
        with torch.no_grad():
            return bool(output_tensors(inputs.call(model)))
    except Exception:
        return False
